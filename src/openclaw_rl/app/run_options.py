"""A run remembers what the server that last learned in it was started with: commands about the run need not be told
again, and `openclaw-rl serve --config` starts it as it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.app.config import FIELDS, Config, Loaded, load
from openclaw_rl.config.options import option_of

#: In a run directory.
FILE = "options.toml"
HEAD = "# What the server that last learned in this run was given, but for keys; for openclaw-rl serve --config.\n"
#: Where the run is, and where it went on from, are of one start.
NOT_KEPT = ("run_dir", "resume_from_ckpt")
#: What a run is, whoever judges or serves it: the options that commands about it take from there.
OF_THE_RUN = ("Method", "Model", "Capture")
ALSO_OF_THE_RUN = ("keep_checkpoints", "cache_dir")


def keep_options(config: Config) -> None:
    """Write the given options into the run directory, never a secret. A server that only serves does not overwrite."""
    path = config.run.folder / FILE
    if path.exists() and not config.learns:
        return
    unfinished = path.with_suffix(".part")
    unfinished.write_text(HEAD + to_toml(given(config)))
    unfinished.replace(path)


def given(config: Config) -> dict[str, Any]:
    """The options that are not left to their defaults; files and folders that are there with their whole paths."""
    return {name: _whole(name, value) for name, value in config.given().items() if name not in NOT_KEPT}


def _whole(name: str, value: Any) -> Any:
    if not isinstance(value, Path) and not name.endswith(("model_name", "_path")):
        return value
    # Code of one's own is file.py:name.
    place, colon, rest = str(value).partition(":")
    path = Path(place).expanduser()
    return f"{os.path.abspath(path)}{colon}{rest}" if path.exists() else str(value)


def to_toml(options: Mapping[str, Any]) -> str:
    """Options as a configuration file has them."""
    return "".join(f"{name.replace('_', '-')} = {_literal(value)}\n" for name, value in options.items())


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A string of JSON is one of TOML, but for a character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_for_run(flags: Mapping[str, Any], file: Path | None = None) -> Loaded:
    """The options of a command about a run: what the run remembers stands in for a configuration file.

    Raises ConfigError.
    """
    loaded = load(flags, file=file)
    own = loaded.config.run.folder / FILE
    return load(flags, file=own, only=_is_of_the_run) if file is None and own.is_file() else loaded


def _is_of_the_run(name: str) -> bool:
    return name in ALSO_OF_THE_RUN or option_of(FIELDS[name]).group in OF_THE_RUN
