"""Checks a model folder before a server is told to load it: a server may die of one that is incomplete."""

import json
from pathlib import Path
from typing import Any

from openclaw_rl.engines.base import EngineError

#: The fields of config.json that say which model it is and how large.
SHAPE_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
#: A safetensors file begins with the size of its header, in this many bytes.
SIZE_BYTES = 8
MAX_HEADER_BYTES = 100 << 20
HEAD = "lm_head.weight"
#: Weights that are computed, so that a folder may leave them out.
COMPUTED = "rotary_emb.inv_freq"


class UnusableModel(EngineError):
    """A model folder is incomplete, or holds another model."""


def check_model_folder(folder: Path, base: Path) -> None:
    """Raise UnusableModel unless `folder` holds all weights of the model in `base`, in the same sizes, whole."""
    config = read_config(folder)
    expected = read_config(base)
    for field in SHAPE_FIELDS:
        if config.get(field) != expected.get(field):
            raise UnusableModel(
                f"{folder} holds another model than {base}: {field} is {config.get(field)}, not {expected.get(field)}"
            )
    tied = has_tied_head(base)
    if has_tied_head(folder) != tied:
        raise UnusableModel(f"{folder} holds another model than {base}: tie_word_embeddings differs")
    shapes = weight_shapes(folder)
    expected_shapes = weight_shapes(base)
    for name, shape in expected_shapes.items():
        may_miss = name.endswith(COMPUTED) or (tied and name == HEAD)
        if name not in shapes and not may_miss:
            raise UnusableModel(f"{folder} is incomplete: it has no {name}")
        if shapes.get(name, shape) != shape:
            raise UnusableModel(f"{folder} holds another model than {base}: {name} has another size")


def has_tied_head(folder: Path) -> bool:
    """Whether the embedding of a model is also its head. Where config.json does not say it, the weights do: the default
    depends on the kind of model."""
    says = read_config(folder).get("tie_word_embeddings")
    return HEAD not in weight_shapes(folder) if says is None else bool(says)


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UnusableModel(f"{folder} has no config.json that can be read: {error}") from error
    if not isinstance(config, dict):
        raise UnusableModel(f"{folder / 'config.json'} is not a JSON object")
    return config


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """The sizes of all weights by name, from the headers of the files. Raises UnusableModel if one is cut off."""
    shapes: dict[str, list[int]] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            shapes |= read_header(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnusableModel(f"{file} is damaged: {error}") from error
    if not files:
        raise UnusableModel(f"{folder} has no .safetensors files")
    return shapes


def read_header(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(SIZE_BYTES), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError("its header is too long")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    end = SIZE_BYTES + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if file.stat().st_size != end:
        raise ValueError(f"it has {file.stat().st_size} bytes instead of {end}")
    return {name: entry["shape"] for name, entry in header.items()}
