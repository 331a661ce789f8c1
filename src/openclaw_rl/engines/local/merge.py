"""Merges a base model and an adapter into one model folder, for programs that cannot load adapters."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from openclaw_rl.engines.local.model.decoder import write_tensors
from openclaw_rl.engines.local.model.policy_slots import BadPolicy, read_adapter
from openclaw_rl.engines.local.training.lora import module_path
from openclaw_rl.errors import UserError
from openclaw_rl.models import ON_TINKER, copy_companion_files


def merge_adapter(base: Path, adapter: Path, out: Path, track: Callable[[list[Path]], Iterable[Path]] = iter) -> None:
    """Write `base` with `adapter` added to its weights into a new folder. Raises UserError."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is not empty: choose a new folder.")
    if (adapter / "config.json").exists():
        raise UserError(f"{adapter} is already a whole model: no merge is needed.")
    if (adapter / ON_TINKER).exists():
        raise UserError(
            f"The policy in {adapter} is stored on Tinker, under the path in {ON_TINKER}: download it first."
        )
    try:
        config, modules = read_adapter(adapter)
    except BadPolicy as error:
        raise UserError(f"{error}.") from None
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    deltas = {f"{module_path(*module)}.weight": factors for module, factors in modules.items()}
    check_fit(base, adapter, deltas)
    out.mkdir(parents=True, exist_ok=True)
    copy_companion_files(base, out)
    for shard in track(sorted(base.glob("*.safetensors"))):
        with safe_open(shard, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in tensors.keys() & deltas.keys():
            factors = deltas.pop(name)
            change = scale * factors["B"].float() @ factors["A"].float()
            tensors[name] = (tensors[name].float() + change).to(tensors[name].dtype)
        write_tensors(tensors, out / shard.name)


def check_fit(base: Path, adapter: Path, deltas: dict[str, Any]) -> None:
    """Check that the adapter fits this model. Raises UserError."""
    shapes: dict[str, list[int]] = {}
    for shard in base.glob("*.safetensors"):
        try:
            with safe_open(shard, framework="pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{shard} is damaged: {error}.") from error
    for name, factors in deltas.items():
        if name not in shapes:
            raise UserError(f"{adapter} adapts {name}, which {base} does not have.")
        if shapes[name] != [factors["B"].shape[0], factors["A"].shape[1]]:
            raise UserError(f"{adapter} does not fit {base}: {name} has another size there.")
