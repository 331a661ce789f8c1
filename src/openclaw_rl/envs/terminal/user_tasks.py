"""Tasks that a user writes: a folder for each, with task.toml, files/ and check.sh."""

import asyncio
import dataclasses
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Outcome, Task
from openclaw_rl.envs.terminal.episode import SEVERAL_COMMANDS, TerminalEpisode, TerminalLimits
from openclaw_rl.envs.terminal.workspace import RAN_WEIGHT
from openclaw_rl.lab.tasks import checked_split, digest, split_of
from openclaw_rl.sandbox.base import Sandbox, remove_folder
from openclaw_rl.sandbox.kinds import ContainerSandbox
from openclaw_rl.sandbox.programs import EndReason

TASK_FILE = "task.toml"
FILES = "files"
#: The script that checks a task; the second is where Terminal-Bench has it.
CHECKS = ("check.sh", "tests/test.sh")
#: What a task.toml may have at its top. Tables, as those of Terminal-Bench, may have more than is read here.
KEYS = {"instruction": str, "split": str, "turns": int, "network": bool, "image": str, "setup": str}
DEFAULT_TURNS = 8
DEFAULT_CHECK_SECONDS = 60.0
#: Runs the check, whose path is its argument: neither a shell nor Python takes settings or modules from the workspace.
RUN_CHECK = 'export HOME="$TMPDIR" PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1; exec bash "$0"'
#: The last line of a check that gives partial credit.
PARTIAL_CREDIT = re.compile(r"reward: (0(?:\.\d+)?|1(?:\.0+)?)")
#: How much of the check's output is a hint.
MAX_HINT = 500


class UserTasks:
    """The tasks in a folder, each a folder of its own. The seed gives their order, which is the same in each round."""

    def __init__(self, sandbox: Sandbox, limits: TerminalLimits, path: str | Path) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self.about = f"sandbox: {sandbox.about}"
        folder = Path(path).expanduser().absolute()
        places = (
            [folder]
            if (folder / TASK_FILE).is_file()
            else sorted(file.parent for file in folder.glob(f"*/{TASK_FILE}"))
        )
        if not places:
            raise ConfigError(f"{folder} has no task: a task is a folder with {TASK_FILE} and check.sh.")
        self._tasks = [read_task(place, sandbox) for place in places]

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        tasks = [task for task in self._tasks if task.data["split"] == checked_split("terminal", split)]
        if not tasks:
            raise ConfigError(f"None of the tasks is in the split {split}.")
        Random(f"own {split} {seed}").shuffle(tasks)
        return cycle(tasks)

    def open(self, task: Task) -> "UserTaskEpisode":
        sandbox = self._sandbox
        image = task.data["image"]
        if image and isinstance(sandbox, ContainerSandbox):
            sandbox = dataclasses.replace(sandbox, image=image)
        return UserTaskEpisode(sandbox, task.data, self._limits)


class UserTaskEpisode(TerminalEpisode):
    """An attempt at a user's task.

    - The check runs after the attempt, in the sandbox, from a copy that the policy never had.
    - Its home is an empty folder, and its Python imports nothing from the workspace.
    - Its status 0 means solved. Otherwise its last line may be the reward, as in "reward: 0.3", if it ended by itself.
    """

    def _write_files(self) -> None:
        source = Path(self._task["folder"]) / FILES
        if source.is_dir():
            shutil.copytree(source, self.folder, symlinks=True, dirs_exist_ok=True)

    async def outcome(self) -> Outcome:
        await self._shell.close()
        check = Path(tempfile.mkdtemp(prefix="openclaw-check-"))
        try:
            await asyncio.to_thread(_copy_check, Path(self._task["folder"]), check)
            result = await self._sandbox.run(
                ["bash", "-c", RUN_CHECK, str(check / self._task["check"])],
                self.folder,
                seconds=self._task["check_seconds"],
                memory_mib=self._limits.memory_mib,
                readable=[check],
                network=self._task["network"],
            )
        finally:
            await asyncio.to_thread(remove_folder, check)
        if result.ended is EndReason.EXITED and result.exit_code == 0:
            return Outcome(1.0, solved=True)
        said = (result.stdout + result.stderr).strip()[-MAX_HINT:]
        partial = partial_credit(result.stdout) if result.ended is EndReason.EXITED else 0.0
        reward = max(RAN_WEIGHT * self._ran, partial)
        return Outcome(reward, False, f"The check failed: {said or result.ended}")


def read_task(folder: Path, sandbox: Sandbox) -> Task:
    """The task in a folder. Raises ConfigError, which names the file."""
    place = folder / TASK_FILE
    try:
        given = tomllib.loads(place.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place} cannot be read: {error}.") from None
    for key, value in given.items():
        if not isinstance(value, dict) and key not in (*KEYS, "version", "schema_version"):
            raise ConfigError(f"{place} has {key!r}; a task has {', '.join(KEYS)}.")
        if key in KEYS and not isinstance(value, KEYS[key]):
            raise ConfigError(f"{place}: {key} must be of type {KEYS[key].__name__}.")
    environment = _table(given, "environment")
    verifier = _table(given, "verifier")
    file = folder / "instruction.md"
    instruction = given.get("instruction") or (file.read_text() if file.is_file() else "")
    check = next((name for name in CHECKS if (folder / name).is_file()), None)
    if not instruction or check is None:
        raise ConfigError(f"The task {folder} has no {'check.sh' if instruction else 'instruction'}.")
    image = given.get("image") or environment.get("docker_image", "")
    if (image or (folder / "environment").is_dir()) and not isinstance(sandbox, ContainerSandbox):
        raise ConfigError(f"The task {folder} needs a container: use --sandbox docker or podman.")
    default_split = split_of(digest(folder.name))
    data = {
        "folder": str(folder),
        "check": check,
        "check_seconds": float(verifier.get("timeout_sec", DEFAULT_CHECK_SECONDS)),
        "split": checked_split("terminal", given.get("split", default_split)),
        "turns": given.get("turns", DEFAULT_TURNS),
        "network": bool(given.get("network", environment.get("allow_internet", False))),
        "image": image,
        "setup": given.get("setup", ""),
        "messages": [
            {"role": "system", "content": SEVERAL_COMMANDS.format(style="block")},
            {"role": "user", "content": instruction.strip()},
        ],
    }
    return Task(folder.name, data)


def _copy_check(source: Path, target: Path) -> None:
    """Copy what the check may need, and let another user read it."""
    for entry in source.iterdir():
        if entry.name in (FILES, "environment") or entry.stem.startswith("solution"):
            continue
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name)
        else:
            shutil.copy(entry, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755)


def partial_credit(output: str) -> float:
    """The reward on the last line of a check's output; 0 if there is none."""
    given = PARTIAL_CREDIT.fullmatch((output.strip().splitlines() or [""])[-1].strip())
    return float(given[1]) if given else 0.0


def _table(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = given.get(name, {})
    return table if isinstance(table, dict) else {}
