"""The device and precision of a model, and the memory of its device."""

import torch

from openclaw_rl.engines.host import usable_memory
from openclaw_rl.engines.local.model.model_config import UnsupportedModel

#: What --dtype auto stands for on a GPU. Old Apple GPUs, and macOS before 14, have no bfloat16.
ON_GPU = {"cuda": "bfloat16", "mps": "float32"}


def find_device(name: str) -> torch.device:
    """The device of this name, which may be auto: never an Apple GPU, on which this has not been run."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def placement(name: str, precision: str, on_cpu: str = "float32") -> tuple[torch.device, torch.dtype]:
    """The device and precision for these options; either may be auto. A CUDA device may have a number.

    `on_cpu` is the precision that auto stands for on a CPU.
    """
    device = find_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        wanted = "a CUDA device" if device.index is None else f"{device.index + 1} CUDA devices"
        raise UnsupportedModel(f"the device {name} needs {wanted}, and PyTorch finds {torch.cuda.device_count()}")
    dtype = precision if precision != "auto" else {"cpu": on_cpu, **ON_GPU}[device.type]
    return device, getattr(torch, dtype)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take. An Apple GPU uses the machine's memory, up to a limit of its own."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return min(usable_memory(), torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return usable_memory()


def name_of(dtype: torch.dtype) -> str:
    """A precision as --dtype names it."""
    return str(dtype).removeprefix("torch.")


def describe(error: Exception) -> str:
    """An error as a sentence, with its type unless the message was written for users.

    CUDA adds lines of advice for those who write kernels, which are left out.
    """
    message = str(error).strip().partition("\n")[0].removesuffix(".")
    return f"{message}." if isinstance(error, UnsupportedModel) else f"{type(error).__name__}: {message}."
