"""The policy in training: its weights, their optimiser, and steps that are made whole or not at all."""

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openclaw_rl.engines.base import StepRefused, StepResult
from openclaw_rl.engines.local.model.adapters import BadPolicy
from openclaw_rl.engines.local.model.decoder import Decoder
from openclaw_rl.engines.local.process.learner_messages import LearnerOptions
from openclaw_rl.engines.local.training.full_weights import FullWeights
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.trainer import Metrics, TrainedWeights, Trainer
from openclaw_rl.engines.measures import check_move, distance
from openclaw_rl.losses.custom import LossFailed, load_loss
from openclaw_rl.losses.policy import Loss, PolicyLoss
from openclaw_rl.types import TrainingSequence

log = logging.getLogger(__name__)

#: The optimiser's is a safetensors file that does not look like one: some programs load all those of a model folder.
OPTIMIZER, STATE = "learner.optimizer", "learner.json"
#: The distance from the base model is looked at on so many tokens of a batch, unless the loss needs it anyway.
BASE_SAMPLE_TOKENS = 2048
#: How often a step that does not fit into memory is tried with micro-batches of half the size.
SMALLER_TRIALS = 3
#: What torch says on a CPU that has no memory left.
CPU_OUT_OF_MEMORY = "allocate memory"


class Snapshot(NamedTuple):
    """What a step changes, as it was before."""

    weights: list[Tensor]
    moments: dict[str, Tensor]
    micro_batches: int


class PolicyTrainer:
    """Trains one policy. After StepRefused, weights and optimiser are bit for bit what they were."""

    def __init__(self, decoder: Decoder, options: LearnerOptions) -> None:
        self.decoder, self.options = decoder, options
        settings = PolicyLoss(**asdict(options.training.loss))
        self.loss: Loss = load_loss(options.custom_loss, settings) if options.custom_loss else settings
        self._before: Snapshot | None = None
        self.reset()

    def reset(self) -> None:
        options, base = self.options, self.decoder
        if not options.rank:
            self._take(FullWeights.create(base, options.model))
            return
        settings = (options.rank, options.alpha, options.modules, options.dropout, options.training.seed)
        self._take(LoraWeights.create(base.shape, *settings, base.embed.device))

    def undo(self) -> None:
        """Take the last step back. Raises StepRefused if there is none to take back."""
        if self._before is None:
            raise StepRefused("there is no step to take back")
        self._restore(self._before)
        self.steps -= 1
        self._before = None

    def step(self, sequences: Sequence[TrainingSequence]) -> StepResult:
        """One step, in micro-batches as large as memory allows. Raises StepRefused."""
        before = self._before = self._snapshot()
        budget = self.options.micro_batch_tokens
        for trial in range(SMALLER_TRIALS + 1):
            try:
                return self._step(sequences, budget)
            except (StepRefused, LossFailed) as error:
                self._restore(before)
                self._before = None
                raise StepRefused(str(error)) from error
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                self._restore(before)
                if not out_of_memory(error):
                    self._before = None
                    if self.options.custom_loss:
                        # Its gradient is the owner's code too.
                        raise StepRefused(f"the custom loss failed: {error}") from error
                    raise
                if trial == SMALLER_TRIALS:
                    self._before = None
                    raise StepRefused("the step does not fit into memory") from error
                budget = max(1, budget // 2)
                log.warning("The step does not fit into memory; trying micro-batches of %d tokens.", budget)
            self._free_memory()
        raise AssertionError("unreachable")

    def write_policy(self, folder: Path) -> None:
        self.weights.save(folder, self.options.base_model)

    def save(self, folder: Path) -> None:
        """The policy for other programs, and beside it what the next step depends on."""
        self.write_policy(folder)
        save_file({name: tensor.cpu() for name, tensor in self._moments().items()}, folder / OPTIMIZER)
        state = {"steps": self.steps, "micro_batches": self.trainer.micro_batches_seen}
        (folder / STATE).write_text(json.dumps(state) + "\n")

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises StepRefused, and keeps what there is, if it is not fit."""
        try:
            weights = self._load_weights(folder)
            moments = load_file(folder / OPTIMIZER)
            state = json.loads((folder / STATE).read_text())
            steps, micro_batches = int(state["steps"]), int(state["micro_batches"])
        except (BadPolicy, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise StepRefused(f"the checkpoint {folder} cannot be loaded: {error}") from error
        self._take(weights)
        self.steps, self.trainer.micro_batches_seen = steps, micro_batches
        self._set_moments(moments)

    def _load_weights(self, folder: Path) -> TrainedWeights:
        """What a checkpoint trained. Raises BadPolicy."""
        options = self.options
        if not options.rank:
            return FullWeights.load(folder, self.decoder, options.model)
        lora = LoraWeights.load(folder, self.decoder.shape, self.decoder.embed.device)
        if (lora.rank, sorted(lora.a)) != (options.rank, sorted(options.modules)):
            raise BadPolicy(
                f"it has rank {lora.rank} on {', '.join(sorted(lora.a))}: give the same "
                "--lora-rank and --lora-target-modules, or begin anew with --resume-from-ckpt none"
            )
        # Its scale is part of what an adapter means; what is dropped in training is not.
        return replace(lora, dropout=options.dropout)

    def _take(self, weights: TrainedWeights) -> None:
        options, training = self.options, self.options.training
        self.weights, self.steps, self._before = weights, 0, None
        self.trainer = Trainer(self.decoder, weights, self.loss, options.micro_batch_tokens, options.checkpointing)
        self.optimizer = torch.optim.AdamW(
            weights.parameters(), lr=training.learning_rate, betas=training.betas, weight_decay=training.weight_decay
        )

    def _step(self, sequences: Sequence[TrainingSequence], budget: int) -> StepResult:
        started = time.monotonic()
        self.trainer.micro_batch_tokens = budget
        self._move_moments(self.decoder.embed.device)
        first: Metrics | None = None
        norms = []
        kl_base = self._distance_from_base(sequences)
        # What dropout does to a pass is not a move of the policy.
        before = self.trainer.score(sequences) if self.weights.dropout else None
        for _ in range(self.options.training.epochs):
            metrics = self.trainer.forward_backward(sequences)
            first = first or metrics
            norms.append(self._update(metrics.loss))
        assert first is not None
        kl = distance(before or first.logprobs, self.trainer.score(sequences))
        check_move(kl, self.options.training.max_kl)
        self.steps += 1
        if self.options.offload:
            self._move_moments(torch.device("cpu"))
        tokens = max(1, metrics.response_tokens)
        return StepResult(
            loss=first.loss,
            clip_fraction=metrics.clipped / tokens,
            kl_old=kl,
            kl_base=first.kl_base / tokens if self.loss.kl_coef else kl_base,
            grad_norm=max(norms),
            tokens=metrics.tokens,
            response_tokens=metrics.response_tokens,
            seconds=time.monotonic() - started,
        )

    def _update(self, loss: float) -> float:
        """Apply the gradient that has been gathered; its norm. Raises StepRefused if it is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.parameters(), self.options.training.max_grad_norm))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise StepRefused(f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _distance_from_base(self, sequences: Sequence[TrainingSequence]) -> float:
        """How far the policy is from the base model, a token, on the first sequences."""
        if self.loss.kl_coef or not self.steps:
            return 0.0
        part: list[TrainingSequence] = []
        tokens = 0
        for sequence in sequences:
            if part and tokens + len(sequence.ids) > BASE_SAMPLE_TOKENS:
                break
            part.append(sequence)
            tokens += len(sequence.ids)
        return distance(self.trainer.score(part, base=True), self.trainer.score(part))

    def _snapshot(self) -> Snapshot:
        # An adapter is small; a whole model's copy would fill the device.
        aside: Any = {"copy": True} if self.options.rank else {"copy": True, "device": "cpu"}
        weights = [parameter.detach().to(dtype=torch.float32, **aside) for parameter in self.weights.parameters()]
        moments = {name: tensor.to(dtype=tensor.dtype, **aside) for name, tensor in self._moments().items()}
        return Snapshot(weights, moments, self.trainer.micro_batches_seen)

    @torch.no_grad()
    def _restore(self, before: Snapshot) -> None:
        weights, moments, self.trainer.micro_batches_seen = before
        for parameter, weight in zip(self.weights.parameters(), weights, strict=True):
            parameter.copy_(weight)
            parameter.grad = None
        self.optimizer.state.clear()
        self._set_moments({name: tensor.clone() for name, tensor in moments.items()})

    def _moments(self) -> dict[str, Tensor]:
        """The optimiser's state by name; empty before the first step."""
        state: dict[int, dict[str, Any]] = self.optimizer.state_dict()["state"]
        return {f"{index}.{name}": value for index, own in state.items() for name, value in own.items()}

    def _set_moments(self, moments: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value
        whole = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**whole, "state": state})

    def _move_moments(self, device: torch.device) -> None:
        for own in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                own[name] = own[name].to(device)

    def _free_memory(self) -> None:
        if self.decoder.embed.is_cuda:
            torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    return not isinstance(error, RuntimeError) or "out of memory" in str(error) or CPU_OUT_OF_MEMORY in str(error)
