"""The options that a run directory stores: those of the server that last learned there.

Commands about the run read them, and `openclaw-rl serve --config` starts a server with them.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.app.config import FIELDS, Config, Loaded, load
from openclaw_rl.config.options import ConfigError, option_of
from openclaw_rl.http_client import text_without_accounts

#: In a run directory.
FILE = "options.toml"
HEAD = (
    "# The options of the server that last learned in this run, for openclaw-rl serve --config.\n"
    "# Keys, and names and passwords in URLs, are left out: give these options again.\n"
)
#: These options hold for one start only.
NOT_KEPT = ("run_dir", "resume_from_ckpt")
#: The options that commands about a run read from its directory: those that stay the same in all its servers.
OF_THE_RUN = ("Method", "Model", "Capture")
ALSO_OF_THE_RUN = ("keep_checkpoints", "cache_dir", "preset")


def keep_options(config: Config) -> None:
    """Write the given options into the run directory, without keys and without the passwords of URLs.

    A server that does not learn keeps the file. Raises ConfigError if the file cannot be written.
    """
    path = config.run.folder / FILE
    if path.exists() and not config.learns:
        return
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_text(HEAD + to_toml(given(config)))
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Mend it, or give another --run-dir.") from None


def given(config: Config) -> dict[str, Any]:
    """The options that were given. Files and folders that exist have absolute paths; URLs have no passwords."""
    return {name: _whole(name, value) for name, value in config.given().items() if name not in NOT_KEPT}


def _whole(name: str, value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        return text_without_accounts(value)
    if not isinstance(value, Path) and not name.endswith(("model_name", "_path", "method")):
        return value
    # A path to the user's own code has the form file.py:name.
    place, colon, rest = str(value).partition(":")
    path = Path(place).expanduser()
    return f"{os.path.abspath(path)}{colon}{rest}" if path.exists() else str(value)


def to_toml(options: Mapping[str, Any]) -> str:
    """Options as the text of a configuration file."""
    return "".join(f"{name.replace('_', '-')} = {_literal(value)}\n" for name, value in options.items())


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is also a TOML string, except that TOML requires this character to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_for_run(flags: Mapping[str, Any], file: Path | None = None) -> Loaded:
    """The options of a command about a run. Without a configuration file, the options in the run directory are used.

    Raises ConfigError.
    """
    loaded = load(flags, file=file)
    stored = loaded.config.run.folder / FILE
    return load(flags, file=stored, only=_is_of_the_run) if file is None and stored.is_file() else loaded


def _is_of_the_run(name: str) -> bool:
    return name in ALSO_OF_THE_RUN or option_of(FIELDS[name]).group in OF_THE_RUN
