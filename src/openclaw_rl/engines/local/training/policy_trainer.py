"""The primitives of training one policy: gradients, the optimiser, snapshots and checkpoints."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from openclaw_rl.engines.base import PassResult, SpanLogprobs, StepLost, StepRefused
from openclaw_rl.engines.local.model.decoder import Decoder, write_tensors
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.model.policy_slots import BadPolicy
from openclaw_rl.engines.local.process.worker_messages import LearnerOptions
from openclaw_rl.engines.local.training.full_weights import FullWeights
from openclaw_rl.engines.local.training.lora import LoraWeights, choose_modules
from openclaw_rl.engines.local.training.ranks import OneRank, Ranks, whole
from openclaw_rl.engines.local.training.trainer import TrainedWeights, Trainer
from openclaw_rl.losses.custom_loss import LossFailed, load_loss
from openclaw_rl.losses.policy import Loss, PolicyLoss
from openclaw_rl.types import TrainingSequence

if TYPE_CHECKING:  # it imports PyTorch's distributed package
    from openclaw_rl.engines.local.training.sharded import ShardedDecoder, ShardedFullWeights, Sharding

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The optimiser's file is a safetensors file under another name: some programs load every .safetensors in a folder.
OPTIMIZER = "learner.optimizer"
STATE = "learner.json"
#: How often a step makes its micro-batches smaller because they do not fit into memory. The last time, each
#: sequence has its own: siblings may exceed the size of a micro-batch, also after it was halved.
MAX_HALVINGS = 3
#: Part of torch's message when a CPU has no memory left.
CPU_OUT_OF_MEMORY = "allocate memory"
DOES_NOT_FIT = "the step does not fit into memory"


class Parked(NamedTuple):
    """The policy in training of a line, while the trainer works for another one."""

    weights: TrainedWeights
    trainer: Trainer
    optimizer: torch.optim.AdamW


class Snapshot(NamedTuple):
    """Everything that a step changes."""

    name: str
    weights: list[Tensor]
    moments: dict[str, Tensor]
    micro_batches: int


class PolicyTrainer:
    """The primitives that `TransactionalLearner` makes steps of, for a policy in this process.

    - A pass that does not fit into memory is repeated with smaller micro-batches. After `MAX_HALVINGS` it is refused.
      The next snapshot begins with micro-batches of the full size again.
    - A custom loss that fails refuses the pass.
    - `optim_step` refuses a loss or gradient that is not finite before it touches the weights.
    - `restore` and `load` bring back weights, optimiser state and the source of dropout bit for bit.
    - The newest snapshot is kept, and no other. It is dropped when another line is selected.
    - Each line has weights, an optimiser's state and a source of dropout of its own, on the same base weights.
    - Several ranks that make the same calls have the same policy and raise the same errors. The first one writes files.
    """

    def __init__(
        self,
        decoder: "LanguageModel | ShardedDecoder",
        options: LearnerOptions,
        ranks: Ranks | None = None,
        sharding: "Sharding | None" = None,
    ) -> None:
        """`sharding` is how the decoder is sharded, if it is."""
        self.decoder = decoder
        self.options = options
        self.ranks = ranks or OneRank()
        self._sharding = sharding
        self._sharded: ShardedFullWeights | None = None
        """All weights, if they are trained and sharded: their memory is used again for every policy."""
        settings = PolicyLoss(**asdict(options.training.loss))
        self.loss: Loss = load_loss(options.custom_loss, settings) if options.custom_loss else settings
        self._snapshot: Snapshot | None = None
        self._loss_of_gradient: float | None = None
        """Of the pass whose gradient is waiting to be applied."""
        self._halvings = 0
        self._line = ""
        """The line that is being trained; empty where there are no lines."""
        self._parked: dict[str, Parked] = {}
        self.weights: TrainedWeights
        self.trainer: Trainer
        self.optimizer: torch.optim.AdamW
        self.reset()

    def select(self, line: str) -> None:
        """Go on with the policy of a line as it was left. A new one begins from the base model."""
        if line == self._line:
            return
        self._drop_gradient()
        if self._line:
            self._parked[self._line] = Parked(self.weights, self.trainer, self.optimizer)
        self._line = line
        parked = self._parked.pop(line, None)
        if parked is None:
            self.reset()
            return
        self.weights, self.trainer, self.optimizer = parked
        self._snapshot = None

    def drop(self, line: str) -> None:
        """Forget the policy in training of a line."""
        self._parked.pop(line, None)
        if line == self._line:
            self._line = ""

    def reset(self) -> None:
        options = self.options
        base = self.decoder
        if options.rank:
            settings = (options.rank, options.alpha, options.modules, options.dropout, options.training.seed)
            self._take(LoraWeights.create(base.shape, *settings, self.device, experts=options.experts))
        elif isinstance(base, Decoder):
            self._take(FullWeights.create(base, options.model))
        else:
            assert not isinstance(base, LanguageModel)
            weights = self._sharded_weights(base)
            weights.reset()
            self._take(weights)

    @property
    def device(self) -> torch.device:
        return self.decoder.embed.device

    @property
    def weight_bytes(self) -> int:
        """Memory of the base weights on this rank."""
        return self.decoder.weight_bytes

    def stop(self) -> None:
        """End the step that is being computed with StepStopped. Also called from a signal's handler."""
        self.trainer.is_stopped = True

    def forward_backward(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        """Compute the gradient of the batch's loss. Raises StepRefused."""
        seen = self.trainer.micro_batches_seen

        def attempt() -> PassResult:
            self.trainer.micro_batches_seen = seen
            self._drop_gradient()
            return self.trainer.forward_backward(sequences)

        try:
            result = self._fitting(attempt)
        except LossFailed as error:
            raise StepRefused(str(error)) from error
        except RuntimeError as error:
            if not self.options.custom_loss:
                raise
            # Its gradient is computed by the user's code too.
            raise StepRefused(f"the custom loss failed: {error}") from error
        self._loss_of_gradient = result.loss
        return result

    def optim_step(self) -> float:
        """Apply the gradient; returns its norm. Raises StepRefused if there is none, or if it is not finite.

        Raises StepLost if memory runs out.
        """
        loss = self._loss_of_gradient
        if loss is None:
            raise StepRefused("there is no gradient to apply")
        self._loss_of_gradient = None
        clipped = torch.nn.utils.clip_grad_norm_(self.weights.parameters(), self.options.training.max_grad_norm)
        norm = float(whole(clipped))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise StepRefused(f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite")
        lost: StepLost | None = None
        try:
            self._move_moments(self.device)
            self.optimizer.step()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # Some weights may have moved already: only the snapshot brings them back.
            lost = StepLost(StepRefused(DOES_NOT_FIT))
        self._drop_gradient()
        if lost is not None:
            self._free_memory()
        self.ranks.raise_any(lost)
        if self.options.offload:
            self._move_moments(torch.device("cpu"))
        return norm

    def snapshot(self, name: str) -> None:
        """Keep all that a step changes, and begin again with micro-batches of the full size."""
        self.trainer.micro_batch_tokens = self.trainer.usual_micro_batch
        self.trainer.is_stopped = False
        self.trainer.may_stay_whole = True
        self._halvings = 0
        # An adapter is small; a copy of all weights would fill the device.
        copied: Any = {"copy": True} if self.options.rank else {"copy": True, "device": "cpu"}
        weights = [parameter.detach().to(dtype=torch.float32, **copied) for parameter in self.weights.parameters()]
        moments = {name: tensor.to(dtype=tensor.dtype, **copied) for name, tensor in self._moments().items()}
        self._snapshot = Snapshot(name, weights, moments, self.trainer.micro_batches_seen)

    @torch.no_grad()
    def restore(self, name: str) -> None:
        """Return to the newest snapshot. Raises StepRefused if that has another name."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.name != name:
            raise StepRefused("the snapshot is gone")
        self.trainer.micro_batches_seen = snapshot.micro_batches
        for parameter, weight in zip(self.weights.parameters(), snapshot.weights, strict=True):
            parameter.copy_(weight)
        self._drop_gradient()
        self.optimizer.state.clear()
        self._set_moments({name: tensor.clone() for name, tensor in snapshot.moments.items()})

    def score(self, sequences: Sequence[TrainingSequence], *, base: bool = False) -> SpanLogprobs:
        """Log-probs of the spans' tokens under the policy or the base model. Raises StepRefused."""
        return self._fitting(lambda: self.trainer.score(sequences, base=base))

    def write_policy(self, folder: Path) -> None:
        complete = self.weights.complete()
        self.ranks.on_first(lambda: complete.save(folder, self.options.base_model))

    def save(self, folder: Path, steps: int) -> None:
        """Write the policy for other programs, and next to it everything that the next step depends on."""
        self.write_policy(folder)
        moments = self.ranks.collect(self._moments())
        state = {"steps": steps, "micro_batches": self.trainer.micro_batches_seen}

        def write() -> None:
            write_tensors(moments, folder / OPTIMIZER)
            (folder / STATE).write_text(json.dumps(state) + "\n")

        self.ranks.on_first(write)

    def load(self, folder: Path) -> int:
        """Continue from what `save` wrote; returns the number of steps. Raises StepRefused and changes nothing if it
        does not fit."""
        refusal: StepRefused | None = None
        try:
            take = self._read_weights(folder)
            moments = self._read_moments(folder / OPTIMIZER)
            state = json.loads((folder / STATE).read_text())
            steps = int(state["steps"])
            micro_batches = int(state["micro_batches"])
        except (BadPolicy, SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            refusal = StepRefused(f"the checkpoint {folder} cannot be loaded: {error}")
        self.ranks.raise_any(refusal)
        self._take(take())
        self.trainer.micro_batches_seen = micro_batches
        self._set_moments(moments)
        return steps

    def _read_weights(self, folder: Path) -> Callable[[], TrainedWeights]:
        """The trained weights of a checkpoint, as a function that puts them in place. Raises BadPolicy."""
        if self.options.rank or isinstance(self.decoder, Decoder):
            loaded = self._load_weights(folder)
            return lambda: loaded
        assert not isinstance(self.decoder, LanguageModel)
        sharded = self._sharded_weights(self.decoder)
        parts = sharded.read(folder)

        def assign() -> TrainedWeights:
            sharded.assign(parts)
            return sharded

        return assign

    def _read_moments(self, path: Path) -> dict[str, Tensor]:
        if self._sharded is None:
            return load_file(path)
        from openclaw_rl.engines.local.training.sharded import read_moments

        return read_moments(path, self._sharded.parameters())

    def _sharded_weights(self, base: "ShardedDecoder") -> "ShardedFullWeights":
        if self._sharded is None:
            from openclaw_rl.engines.local.training.sharded import ShardedFullWeights

            assert self._sharding is not None
            self._sharded = ShardedFullWeights(base, self._sharding, self.options.model)
        return self._sharded

    def _load_weights(self, folder: Path) -> TrainedWeights:
        """The trained weights of a checkpoint. Raises BadPolicy."""
        options = self.options
        if not options.rank:
            assert isinstance(self.decoder, Decoder)
            return FullWeights.load(folder, self.decoder, options.model)
        lora = LoraWeights.load(folder, self.decoder.shape, self.device)
        wanted = choose_modules(self.decoder.shape, options.modules, experts=options.experts)
        if (lora.rank, lora.modules) != (options.rank, wanted):
            targets = sorted({"experts" if module.experts else module.target for module in lora.modules})
            raise BadPolicy(
                f"it has rank {lora.rank} on {', '.join(targets)}: give the same "
                "--lora-rank, --lora-target-modules and --lora-experts, or start over with --resume-from-ckpt none"
            )
        # The scale belongs to the adapter; dropout belongs to the training.
        return replace(lora, dropout=options.dropout)

    def _take(self, weights: TrainedWeights) -> None:
        """Train these weights from now on, with a new optimiser."""
        options = self.options
        training = self.options.training
        self.weights = weights
        self.trainer = Trainer(self.decoder, weights, self.loss, options.micro_batch_tokens, self.ranks)
        self.optimizer = torch.optim.AdamW(
            weights.parameters(),
            lr=training.learning_rate,
            betas=training.betas,
            weight_decay=training.weight_decay,
            fused=self.device.type == "cuda",
        )
        self._snapshot = self._loss_of_gradient = None
        self._halvings = 0

    def _fitting(self, attempt: Callable[[], T]) -> T:
        """Repeat an attempt with smaller micro-batches until it fits into memory. Raises StepRefused if it never does.

        The micro-batches stay small for the rest of the step.
        """
        while True:
            try:
                return attempt()
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                self._drop_gradient()
                if not out_of_memory(error):
                    raise
                if self._halvings == MAX_HALVINGS:
                    raise StepRefused(DOES_NOT_FIT) from error
            # Outside the handler: the error's traceback holds on to tensors.
            self._halvings += 1
            self.trainer.may_stay_whole = False
            half = max(1, self.trainer.micro_batch_tokens // 2)
            tokens = self.trainer.micro_batch_tokens = 1 if self._halvings == MAX_HALVINGS else half
            size = f"{tokens} tokens" if tokens > 1 else "one sequence"
            log.warning("The step does not fit into memory; trying micro-batches of %s.", size)
            self._free_memory()

    def _free_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def _drop_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._loss_of_gradient = None

    def _moments(self) -> dict[str, Tensor]:
        """The optimiser's state by name; empty before the first step."""
        state: dict[int, dict[str, Any]] = self.optimizer.state_dict()["state"]
        return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}

    def _set_moments(self, moments: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def _move_moments(self, device: torch.device) -> None:
        for values in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                values[name] = values[name].to(device)


def out_of_memory(error: BaseException) -> bool:
    return not isinstance(error, RuntimeError) or "out of memory" in str(error) or CPU_OUT_OF_MEMORY in str(error)
