"""Reads a model folder with Transformers; with code of the folder only where it is needed and allowed.

That code runs here and nowhere else: in the processes that load the model.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from openclaw_rl.engines.local.families import keeps_state, model_class, needed_code, takes_state
from openclaw_rl.engines.local.model.decoder import TensorFiles
from openclaw_rl.engines.local.model.model_config import MAX_REASON_CHARACTERS, UnsupportedModel
from openclaw_rl.models import read_json_object


class FolderModel(NamedTuple):
    """A model of Transformers that was read from a folder."""

    model: Any
    own_class: Any
    """Its class in the folder's code; None if that is not needed."""
    with_state: bool
    """Whether a state is kept for each sequence."""


def read_model(
    folder: Path, files: TensorFiles, dtype: torch.dtype, attention: str, experts: str | None, *, trusts_code: bool
) -> FolderModel:
    """Read a model, with the attention of this name unless it keeps a state. Raises UnsupportedModel."""
    content = read_json_object(folder / "config.json")
    try:
        own_class = read_class(folder, needed_code(content), trusts_code=trusts_code)
        with_state = keeps_state(content, own_class or model_class(content))
        model, report = read_weights(
            folder,
            files,
            own_class,
            dtype=dtype,
            attn_implementation=None if with_state else attention,
            experts_implementation=experts,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except UnsupportedModel:
        raise
    except Exception as error:
        # Transformers raises errors of many types for folders that it cannot use; some go on for paragraphs.
        raise UnsupportedModel(f"Transformers cannot load it: {in_short(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(f"the checkpoint has no tensor {missing[0]}")
    if wrong := sorted(report["mismatched_keys"]):
        raise UnsupportedModel(f"the checkpoint's tensor {wrong[0][0]} has another size than config.json says")
    return FolderModel(model, own_class, with_state)


def read_class(folder: Path, code: str, *, trusts_code: bool) -> Any:
    """The model's class in the folder's code; None if it needs no such code. Raises UnsupportedModel."""
    if not code:
        return None
    if not trusts_code:
        raise UnsupportedModel(f"only its own code {code} knows it, which needs --trust-remote-code")
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    own_class = get_class_from_dynamic_module(code, folder, local_files_only=True)
    if not takes_state(own_class):
        raise UnsupportedModel(f"its own code {code} keeps the state of a text in a form of its own")
    return own_class


def read_weights(folder: Path, files: TensorFiles, own_class: Any, **settings: Any) -> Any:
    """The model with what is said about its loading. Transformers reads the weights, unless they are quantised."""
    import transformers

    where = {"local_files_only": True, "trust_remote_code": own_class is not None}
    if not files.quantisation and own_class is None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **where, **settings)
    config = transformers.AutoConfig.from_pretrained(folder, **where)
    if not files.quantisation:
        return own_class.from_pretrained(folder, config=config, **where, **settings)
    del config.quantization_config
    family = own_class or getattr(transformers, config.architectures[0])
    return family.from_pretrained(None, config=config, state_dict=files.state_dict(), **where, **settings)


def in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARACTERS].rstrip(".")
