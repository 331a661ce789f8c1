"""Code of the user, named by an option: imported once, and its errors reported with file and line."""

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from openclaw_rl.config.options import ConfigError, read_text

#: The option for a custom loss, and the names that a file may give it. Here, so that the server can check the option
#: without importing PyTorch.
LOSS_OPTION = "--custom-loss-function-path"
LOSS_NAMES = ("compute_loss", "loss")


def load_plugin(given: str, option: str, names: Sequence[str]) -> Any:
    """Import what `given` names: `package.module:name`, `package.module.name` or `path/file.py[:name]`.

    Without a name, it is the first of `names` that the file has. Raises ConfigError, which names `option`.
    """
    place, _, name = given.partition(":")
    if not place.endswith(".py") and not name:
        place, _, name = place.rpartition(".")
    if not place:
        raise ConfigError(f"{option} {given} names neither a file nor package.module:name.")
    module = _import_file(Path(place).expanduser(), option) if place.endswith(".py") else _import_module(place, option)
    wanted = [name] if name else list(names)
    for candidate in wanted:
        if hasattr(module, candidate):
            return getattr(module, candidate)
    raise ConfigError(f"{option}: {place} has no {' or '.join(wanted)}.")


def check_plugin(given: str, option: str, names: Sequence[str]) -> None:
    """Check the same for code that another process will import, without running it. Raises ConfigError."""
    place, _, name = given.partition(":")
    if not place.endswith(".py"):
        return
    path = Path(place).expanduser()
    try:
        tree = ast.parse(read_text(path, option), str(path))
    except SyntaxError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error}.") from error
    wanted = {name} if name else set(names)
    if not wanted & {getattr(node, "name", "") for node in tree.body}:
        raise ConfigError(f"{option}: {place} has no {' or '.join(sorted(wanted))}.")


def _import_file(path: Path, option: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path}.")
    name = f"openclaw_rl_plugin_{path.stem}_{blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up their module by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ConfigError(f"{option}: {path} cannot be imported: {describe(error, path)}.") from error
    return module


def _import_module(name: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{option}: {name} cannot be imported: {describe(error)}.") from error


def describe(error: BaseException, file: Path | None = None) -> str:
    """An error in a user's code: file and line (in `file`, if the error passed through it), type and message."""
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if file is not None and Path(frame.filename).resolve() == file.resolve()]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    last = (in_file or list(frames))[-1:]
    where = "".join(f"{Path(frame.filename).name}:{frame.lineno}: " for frame in last)
    return f"{where}{type(error).__name__}: {error}"
