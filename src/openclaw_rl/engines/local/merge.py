"""Adds an adapter to the weights of its model, and writes the result as a model folder.

For programs that cannot load adapters. `gguf_export` writes the same weights as a GGUF file.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from openclaw_rl.engines.local.families import needed_code
from openclaw_rl.engines.local.model.decoder import write_tensors
from openclaw_rl.engines.local.model.policy_slots import BadPolicy, peft_tensors, read_adapter
from openclaw_rl.engines.local.training.policy_trainer import OPTIMIZER, STATE
from openclaw_rl.errors import UserError
from openclaw_rl.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ON_TINKER, copy_companion_files, read_json_object

#: In a folder that is being written: what there is of it so far.
UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class FittingAdapter:
    """An adapter that fits a model."""

    scale: float
    """What the product of two factors is multiplied by."""
    factors: Mapping[str, Mapping[str, Tensor]]
    """A [rank, in] and B [out, rank], by the name of the weight that they change; those of all experts stacked."""

    def add(self, name: str, weight: Tensor) -> Tensor:
        """A weight with its change; in float32 if it has one."""
        return weight.float() + self.change(name) if name in self.factors else weight

    def change(self, name: str) -> Tensor:
        factors = self.factors[name]
        return self.scale * factors["B"].float() @ factors["A"].float()


def merge_adapter(base: Path, adapter: Path, out: Path, track: Callable[[list[Path]], Iterable[Path]] = iter) -> None:
    """Write `base` with `adapter` added to its weights into a new folder. Raises UserError."""
    if (adapter / "config.json").exists():
        raise UserError(f"{adapter} is already a whole model: no merge is needed.")
    config, modules = readable_adapter(adapter)
    if any(pair["A"].dim() > 2 for pair in modules.values()):
        with finished_folder(out) as folder:
            merge_experts(base, adapter, FittingAdapter(scale_of(config), modules), folder)
        return
    fitting = fitting_adapter(base, adapter)
    with finished_folder(out) as folder:
        copy_companion_files(base, folder)
        for shard in track(sorted(base.glob("*.safetensors"))):
            with safe_open(shard, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            merged = {name: fitting.add(name, tensor).to(tensor.dtype) for name, tensor in tensors.items()}
            write_tensors(merged, folder / shard.name)


def merge_experts(base: Path, adapter: Path, fitting: FittingAdapter, folder: Path) -> None:
    """The same for an adapter on experts, with the whole model in memory: how a family's files hold the weights of
    experts, only Transformers knows. Raises UserError."""
    import transformers

    if code := needed_code(read_json_object(base / "config.json")):
        raise UserError(f"{adapter} is on experts, and {base} needs its own code {code}, which merge does not run.")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype="auto", local_files_only=True, trust_remote_code=False
    )
    weights = dict(model.named_parameters())
    for path in fitting.factors:
        weight = weights.get(path, weights.get(f"{path}.weight"))
        if weight is None:
            raise UserError(f"{adapter} adapts {path}, which {base} does not have.")
        change = fitting.change(path)
        if path in weights and getattr(model.get_submodule(path.rpartition(".")[0]), "is_transposed", False):
            change = change.mT
        if change.shape != weight.shape:
            raise UserError(f"{adapter} does not fit {base}: {path} has another size there.")
        weight.data = (weight.data.float() + change).to(weight.dtype)
    copy_companion_files(base, folder)
    # The weights may be in other files than before.
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    model.save_pretrained(folder)


def readable_adapter(adapter: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """A PEFT folder's config, and its factors by the name of what they change. Raises UserError."""
    if (adapter / ON_TINKER).exists():
        raise UserError(
            f"The policy in {adapter} is stored on Tinker, under the path in {ON_TINKER}: download it first."
        )
    try:
        return read_adapter(adapter)
    except BadPolicy as error:
        raise UserError(f"{error}.") from None


def fitting_adapter(base: Path, adapter: Path) -> FittingAdapter:
    """The adapter in a PEFT folder. Raises UserError if it does not fit the model."""
    config, modules = readable_adapter(adapter)
    if any(pair["A"].dim() > 2 for pair in modules.values()):
        raise UserError(f"{adapter} is on experts, which are not written as GGUF: merge it without --gguf.")
    factors = {f"{module}.weight": pair for module, pair in modules.items()}
    shapes = weight_shapes(base)
    for name, pair in factors.items():
        if name not in shapes:
            raise UserError(f"{adapter} adapts {name}, which {base} does not have.")
        if shapes[name] != [pair["B"].shape[0], pair["A"].shape[1]]:
            raise UserError(f"{adapter} does not fit {base}: {name} has another size there.")
    return FittingAdapter(scale_of(config), factors)


def average_adapters(checkpoints: Sequence[Path], folder: Path) -> None:
    """Write a learner's state whose adapter changes the weights as the checkpoints do on average. Raises UserError.

    It comes as near to that as its rank allows. No step is in it, and the optimiser has seen nothing.
    """
    read = [readable_adapter(checkpoint) for checkpoint in checkpoints]
    config, own = read[0]
    for checkpoint, (_, modules) in zip(checkpoints, read, strict=True):
        if sizes_of(modules) != sizes_of(own):
            raise UserError(f"{checkpoint} adapts other modules than {checkpoints[0]}: they have no average.")
    adapters = [(scale_of(one) / len(read), modules) for one, modules in read]
    tensors: dict[str, Tensor] = {}
    for name, first in own.items():
        factors = [(share * pairs[name]["B"].float(), pairs[name]["A"].float()) for share, pairs in adapters]
        down, up = best_factors(
            torch.cat([b for b, _ in factors], -1), torch.cat([a for _, a in factors], -2), config["r"]
        )
        up /= scale_of(config)
        tensors |= peft_tensors(name, down.to(first["A"].dtype), up.to(first["B"].dtype))
    write_tensors(tensors, folder / ADAPTER_WEIGHTS)
    shutil.copy(checkpoints[0] / ADAPTER_CONFIG, folder)
    try:
        moments = load_file(checkpoints[0] / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{checkpoints[0] / OPTIMIZER} cannot be read: {error}.") from None
    write_tensors({name: torch.zeros_like(moment) for name, moment in moments.items()}, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps({"steps": 0, "micro_batches": 0}))


def sizes_of(modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    """The size of each weight that an adapter changes: outputs and inputs, and before them the experts."""
    return {name: (*pair["B"].shape[:-1], pair["A"].shape[-1]) for name, pair in modules.items()}


def best_factors(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The two factors of this rank, [..., rank, in] and [..., out, rank], whose product is nearest to `up @ down`."""
    # The product has at most as many directions as the factors together, so it is never computed as a whole.
    (left, one), (right, other) = torch.linalg.qr(up), torch.linalg.qr(down.mT)
    u, sizes, v = torch.linalg.svd(one @ other.mT)
    root = sizes[..., :rank].sqrt()
    factors = (root[..., None] * (v[..., :rank, :] @ right.mT), (left @ u[..., :rank]) * root[..., None, :])
    missing = rank - root.shape[-1]
    return torch.nn.functional.pad(factors[0], (0, 0, 0, missing)), torch.nn.functional.pad(factors[1], (0, missing))


def scale_of(config: Mapping[str, Any]) -> float:
    """What the product of an adapter's factors is multiplied by."""
    return float(config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"]))


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """The size of every tensor in a model folder, by name. Raises UserError."""
    shapes: dict[str, list[int]] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(shard, framework="pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{shard} is damaged: {error}.") from error
    return shapes


@contextlib.contextmanager
def finished_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, whose files get into `out` when all are complete. Raises UserError if `out` is in use.

    If writing fails, nothing is left. What a killed program leaves has another name, and the next run removes it.
    """
    there = out.exists()
    if there and not (out.is_dir() and all(path.name == UNFINISHED for path in out.iterdir())):
        raise UserError(f"{out} is not empty: choose a new folder.")
    folder = out / UNFINISHED
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in sorted(folder.iterdir(), reverse=True):
            path.replace(out / path.name)
        folder.rmdir()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if not there:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise
