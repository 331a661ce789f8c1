"""The child process for a program that confines itself, such as bubblewrap: leaves root, sets limits, becomes it.

Nothing here keeps a program from the files and the network of its user.
"""

import json
import os
import sys

from .limits import limit_command
from .user import end_with, leave_root

#: Where a command is looked for.
PATH = "/usr/local/bin:/usr/bin:/bin"
#: The exit status when the command cannot be started, as in a shell.
CANNOT_START = 127


def main() -> None:
    """The last argument is JSON: "argv", "cpu_seconds", "memory_mib", "max_processes", "parent", "scratch"."""
    settings = json.loads(sys.argv[-1])
    leave_root()
    end_with(settings["parent"])
    limit_command(settings["cpu_seconds"], settings["memory_mib"], settings["max_processes"])
    become(settings["argv"], settings["scratch"])


def become(argv: list[str], scratch: str) -> None:
    """Become a command with an environment of its own; its home is the working folder."""
    try:
        os.execvpe(argv[0], argv, {"PATH": PATH, **variables(os.getcwd(), scratch or os.getcwd())})
    except OSError as error:
        sys.stderr.write(f"{cannot_start(argv[0])}{error.strerror}.\n")
        sys.stderr.flush()
        os._exit(CANNOT_START)


def variables(home: str, scratch: str) -> dict[str, str]:
    """The environment of a command besides PATH."""
    # Git stops if the machine has settings of its own that it may not read.
    return {"HOME": home, "LANG": "C.UTF-8", "TMPDIR": scratch, "GIT_CONFIG_NOSYSTEM": "1"}


def cannot_start(program: str) -> str:
    """The beginning of the message when the command cannot be started."""
    return f"{program} cannot be started: "
