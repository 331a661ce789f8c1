"""The device and precision of a model."""

import torch

from openclaw_rl.engines.local.model.model_config import UnsupportedModel


def find_device(name: str) -> torch.device:
    """The device of this name, which may be auto."""
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
    dtype = precision if precision != "auto" else {"cpu": on_cpu, "cuda": "bfloat16"}[device.type]
    return device, getattr(torch, dtype)


def name_of(dtype: torch.dtype) -> str:
    """A precision as --dtype names it."""
    return str(dtype).removeprefix("torch.")


def describe(error: Exception) -> str:
    """An error as a sentence, with its type unless the message was written for users."""
    return f"{error}." if isinstance(error, UnsupportedModel) else f"{type(error).__name__}: {error}."
