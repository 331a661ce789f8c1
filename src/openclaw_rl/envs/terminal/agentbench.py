"""The tasks of AgentBench-OS, from the data of the package inspect_evals: questions about a folder.

Only tasks that need no container are taken: their preparation is in the data, they do not need root, and the answer is
a text or a number. The package itself is not imported.
"""

import asyncio
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Task
from openclaw_rl.envs.calls import answer_text
from openclaw_rl.envs.choices import checked_split, digest
from openclaw_rl.envs.terminal.episode import CHECK_SECONDS, TerminalEpisode, TerminalLimits
from openclaw_rl.envs.terminal.scoring import RAN_WEIGHT
from openclaw_rl.sandbox.base import Sandbox, give_folder, remove_folder

PACKAGE, DATA = "inspect_evals", "agent_bench/data"
FILES = ("agent_bench_os.json", "agent_bench_os_test.json")
#: What a task has that cannot be done in a folder: other users, root, other places, the state of the machine.
NEEDS_MORE = re.compile(
    r"useradd|adduser|sudo|su -|chown|apt|npm|/root|/etc|/var|/usr|/tmp|/proc|home directory|/home/(?!agent)|\bps\b|"
    r"nproc|process|install|uname|\bgroup|\buser|\$PATH|PATH\.|system has|Ubuntu"
)
HOME = "/home/agent"
HELD_OUT_ONE_IN = 5
TURNS = 8
SYSTEM = (
    "You are in a Linux shell. Find the answer with bash blocks, one in each answer. When you know it, write: Answer: "
    "followed by the answer only."
)
ANSWER = re.compile(r"answer\s*:", re.IGNORECASE)
NUMBER = re.compile(r"-?\d+")


class AgentBench:
    """The usable tasks of AgentBench-OS. Their order is drawn anew for each seed."""

    def __init__(self, sandbox: Sandbox, limits: TerminalLimits) -> None:
        self._sandbox, self._limits = sandbox, limits
        self.about = f"sandbox: {sandbox.about}"
        self._tasks = read_tasks(data_folder())

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        tasks = [task for task in self._tasks if task.data["split"] == checked_split("terminal", split)]
        Random(f"agentbench {split} {seed}").shuffle(tasks)
        return cycle(tasks)

    def open(self, task: Task) -> "AgentBenchEpisode":
        return AgentBenchEpisode(self._sandbox, task.data, self._limits)


class AgentBenchEpisode(TerminalEpisode):
    """A question about a prepared folder. The expected answer is computed at the start, in a copy of the folder."""

    def __init__(self, sandbox: Sandbox, task: Mapping[str, Any], limits: TerminalLimits) -> None:
        super().__init__(sandbox, task, limits)
        self._expected = ""
        self._answer = ""

    async def start(self) -> Sequence[Message]:
        messages = await super().start()
        self._expected = self._task["answer"] or await self._computed()
        return messages

    async def step(self, answer: Message) -> Step:
        step = await super().step(answer)
        if step.done and not step.messages:
            self._answer = answer_text(answer)
        return step

    async def outcome(self) -> Outcome:
        if is_right(self._answer, self._expected):
            return Outcome(1.0, solved=True)
        return Outcome(RAN_WEIGHT * self._ran, False, f"The answer is wrong. Write: Answer: {self._expected}")

    async def _computed(self) -> str:
        copy = Path(tempfile.mkdtemp(prefix="openclaw-answer-"))
        try:
            await asyncio.to_thread(shutil.copytree, self.folder, copy, symlinks=True, dirs_exist_ok=True)
            give_folder(copy, whole=True)
            outcome = await self._sandbox.run(["bash", "-c", self._task["solution"]], copy, seconds=CHECK_SECONDS)
        finally:
            await asyncio.to_thread(remove_folder, copy)
        if outcome.exit_code != 0 or not outcome.stdout.strip():
            raise EnvFailed(f"the reference solution fails: {outcome.stderr.strip()[-200:]}")
        return outcome.stdout.strip()


def is_right(answer: str, expected: str) -> bool:
    """Whether an answer is right: the text after the last "Answer:", or all of it; a number must be the only one."""
    stated = ANSWER.split(answer)[-1].strip(" \t\n\r.!*`\"'")
    if NUMBER.fullmatch(expected):
        return [int(number) for number in NUMBER.findall(stated)] == [int(expected)]
    return stated == expected.strip()


def data_folder() -> Path:
    """Where the data of inspect_evals is. Raises ConfigError if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ConfigError("source=agentbench needs inspect_evals: pip install --no-deps inspect_evals")
    return Path(places[0]) / DATA


def read_tasks(folder: Path) -> list[Task]:
    """The usable tasks. Raises ConfigError if the data is not there."""
    tasks = []
    for name in FILES:
        try:
            records = json.loads((folder / name).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"The data of inspect_evals cannot be read: {error}.") from None
        tasks += [task for record in records if (task := read_task(record, Path(name).stem))]
    if not tasks:
        raise ConfigError(f"{folder} has no AgentBench-OS task that can be used; known is inspect_evals 0.26.")
    return tasks


def read_task(record: Mapping[str, Any], source: str) -> Task | None:
    """A task; None if it cannot be done in a folder."""
    create, evaluation = record.get("create") or {}, record.get("evaluation") or {}
    init = create.get("init", "") if isinstance(create, dict) else None
    setup = init.get("code") if isinstance(init, dict) and "user" not in init else init
    example = evaluation.get("example", "")
    solution = example.get("code", "") if isinstance(example, dict) else example
    answer = evaluation.get("match", "")
    if not isinstance(setup, str) or not isinstance(solution, str) or not isinstance(answer, str):
        return None
    compared = isinstance(evaluation.get("check"), list) and evaluation["check"][:1] == [None]
    question = str(record.get("description", ""))
    if "start" in record or not (answer or (compared and solution)) or not question:
        return None
    if NEEDS_MORE.search(f"{question} {setup} {solution}"):
        return None
    data = {
        "files": {},
        # In a shell of its own, so that it leaves the working directory alone.
        "setup": f"(\n{setup.replace(HOME, '$HOME')}\n)" if setup.strip() else "",
        "solution": solution.replace(HOME, "$HOME"),
        "answer": answer,
        "turns": TURNS,
        "split": "train" if digest(question) % HELD_OUT_ONE_IN else "held-out",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question.replace(HOME, "~")},
        ],
    }
    return Task(f"{source}-{record.get('id', digest(question))}", data)
