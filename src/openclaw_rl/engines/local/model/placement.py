"""The device and precision of a model, and the memory of its weights."""

import torch

from openclaw_rl.engines.local.model.decoder import Decoder, take_apart
from openclaw_rl.engines.local.model.model_config import UnsupportedModel


def placement(name: str, precision: str) -> tuple[torch.device, torch.dtype]:
    """The device and precision for these options; either may be auto."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel("--device cuda needs a CUDA device, and PyTorch finds none")
    dtype = precision if precision != "auto" else {"cpu": "float32", "cuda": "bfloat16"}[name]
    return torch.device(name), getattr(torch, dtype)


def weight_bytes(decoder: Decoder) -> int:
    """Memory of the base weights."""
    return sum(tensor.nbytes for tensor in take_apart(decoder).values())


def describe(error: Exception) -> str:
    """An error as a sentence, with its type unless the message was written for users."""
    return f"{error}." if isinstance(error, UnsupportedModel) else f"{type(error).__name__}: {error}."
