"""The environment `terminal`: generated tasks, without end, or those of a folder."""

import functools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import PurePath
from random import Random
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment, Message, Task
from openclaw_rl.envs.terminal.commands import BASH_TOOL, block_of, call_of
from openclaw_rl.envs.terminal.episode import SEVERAL_COMMANDS, TerminalEpisode, TerminalLimits
from openclaw_rl.envs.terminal.families import FAMILIES
from openclaw_rl.envs.terminal.families.draft import TerminalDraft
from openclaw_rl.envs.terminal.user_tasks import UserTasks
from openclaw_rl.lab.tasks import checked_examples, checked_split, digest, several, split_with_examples
from openclaw_rl.sandbox.base import Sandbox
from openclaw_rl.sandbox.fences.run_command import PATH
from openclaw_rl.sandbox.kinds import DEFAULT_IMAGE, ContainerSandbox, choose_sandbox, trial

#: Level → how many answers an attempt has.
TURNS = {1: 1, 2: 4, 3: 6}
#: How a command is given.
STYLES = ("block", "tool")
MAX_EXAMPLES = 8
#: Family → the program that it needs.
PROGRAMS = {"git": "git", "archives": "tar", "processes": "flock"}
ONE_COMMAND = "You are in a Linux shell. Do what the user asks with one bash {style}."
DONE: Message = {"role": "assistant", "content": "DONE"}


def make_terminal(
    sandbox: str = "auto",
    unsafe_no_sandbox: bool = False,
    image: str = DEFAULT_IMAGE,
    path: str | None = None,
    families: str | Sequence[str] | None = None,
    levels: int | Sequence[int] | None = None,
    examples: int | None = None,
    style: str | None = None,
    seconds: float = 10.0,
    max_output: int = 2000,
    memory_mib: int = 512,
) -> Environment:
    """The environment of the given settings. Raises ConfigError."""
    given: dict[str, Any] = {"families": families, "levels": levels, "examples": examples, "style": style}
    settings = {name: value for name, value in given.items() if value is not None}
    if path is not None and settings:
        raise ConfigError(f"{next(iter(settings))} is for generated tasks; leave out path, or {next(iter(settings))}.")
    for name, value in (("seconds", seconds), ("max_output", max_output), ("memory_mib", memory_mib)):
        if not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{name} of terminal must be a number above 0, not {value}.")
    limits = TerminalLimits(seconds, int(max_output), int(memory_mib))
    chosen = choose_sandbox(sandbox, unsafe_no_sandbox, image)
    if path is not None:
        return UserTasks(chosen, limits, path)
    return TerminalEnvironment(chosen, limits, **settings)


class TerminalEnvironment:
    """Tasks of the families in `families`.

    - The same split, seed and families give the same tasks. Without `families`, those that need what this machine lacks
      are left out, and `about` names them.
    - A task belongs to one split for all seeds, by a digest of its solution. So the splits share no task, however it
      is worded, and neither split shares one with the examples.
    - All tasks of a family and level have the same examples, so the server reads them once and keeps them in its cache.
    - `open` needs only the task: its data holds the messages, the files and what they should become.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        limits: TerminalLimits,
        families: str | Sequence[str] | None = None,
        levels: int | Sequence[int] = (1,),
        examples: int = 2,
        style: str = "block",
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self.about = f"sandbox: {sandbox.about}"
        missing = {family: lack for family in FAMILIES if (lack := what_is_missing(family, sandbox))}
        if families:
            self._families = several("terminal", "family", families, FAMILIES)
            for family in missing.keys() & set(self._families):
                raise ConfigError(f"The family {family} of terminal needs {missing[family]}.")
        else:
            self._families = tuple(family for family in FAMILIES if family not in missing)
            self.about += "".join(f"; without the family {family}, which needs {missing[family]}" for family in missing)
        self._levels = several("terminal", "level", levels, TURNS)
        self._examples = checked_examples("terminal", examples, MAX_EXAMPLES)
        self._beginnings: dict[tuple[str, int], list[Message]] = {}
        (self._style,) = several("terminal", "style", [style], STYLES)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        checked_split("terminal", split)
        return (self._task(split, Random(f"terminal {split} {seed} {index}")) for index in count())

    def open(self, task: Task) -> TerminalEpisode:
        tools = [BASH_TOOL] if task.data["style"] == "tool" else []
        return TerminalEpisode(self._sandbox, task.data, self._limits, tools)

    def _task(self, split: str, random: Random) -> Task:
        family = random.choice(self._families)
        level = random.choice(self._levels)
        draft = draw(family, level, split, random)
        if (family, level) not in self._beginnings:
            self._beginnings[family, level] = self._first_messages(family, level)
        messages = [*self._beginnings[family, level], {"role": "user", "content": draft.question}]
        data: dict[str, Any] = {"family": family, "level": level, "turns": TURNS[level], "style": self._style}
        data |= {**asdict(draft), "messages": messages}
        asked = digest([draft.question, draft.solution, draft.files])
        return Task(f"terminal/{split}/{family}-{level}-{asked:016x}", data)

    def _first_messages(self, family: str, level: int) -> list[Message]:
        """The system prompt and the examples."""
        prompt = ONE_COMMAND if level == 1 else SEVERAL_COMMANDS
        named = "block" if self._style == "block" else "call"
        messages: list[Message] = [{"role": "system", "content": prompt.format(style=named)}]
        same_for_all = Random(f"terminal examples {family} {level}")
        for number in range(self._examples):
            draft = draw(family, level, "examples", same_for_all, kind=number)
            messages += example(draft, level, self._style, f"example{number}")
        return messages


def draw(family: str, level: int, split: str, random: Random, kind: int | None = None) -> TerminalDraft:
    """A task that belongs to a split, of any kind in the family or of the kind with that number."""
    generators = FAMILIES[family][level]
    while True:
        make = random.choice(generators) if kind is None else generators[kind % len(generators)]
        draft = make(random)
        if split_of(family, draft) == split:
            return draft


def split_of(family: str, draft: TerminalDraft) -> str:
    """The split of a task. It depends on what has to be done, and not on how it is worded."""
    return split_with_examples(digest([family, draft.key or draft.solution]))


def example(draft: TerminalDraft, level: int, style: str, id_: str) -> list[Message]:
    """A question and how it is answered, as messages. No solution prints anything."""
    answer = block_of(draft.solution) if style == "block" else call_of(draft.solution, id_)
    messages: list[Message] = [{"role": "user", "content": draft.question}, answer]
    result: Message = {"role": "user", "content": "[no output]"}
    if style == "tool":
        result = {"role": "tool", "tool_call_id": id_, "content": "[no output]"}
    return messages if level == 1 else [*messages, result, DONE]


def what_is_missing(family: str, sandbox: Sandbox) -> str:
    """What this machine lacks for a family, in words; empty if nothing."""
    if family in PROGRAMS and PROGRAMS[family] not in installed_programs(sandbox):
        return f"the program {PROGRAMS[family]}"
    # tar, git and sed set modes too.
    if family in ("permissions", "archives", "git", "text", "data") and not sandbox.changes_modes:
        return "a sandbox in which modes can be changed: install bubblewrap"
    return ""


def installed_programs(sandbox: Sandbox) -> frozenset[str]:
    """Which of the programs that families need are there: in the image of a container, else on this machine."""
    if isinstance(sandbox, ContainerSandbox):
        return _programs_in_image(sandbox)
    return frozenset(program for program in PROGRAMS.values() if shutil.which(program, path=PATH))


@functools.cache
def _programs_in_image(sandbox: ContainerSandbox) -> frozenset[str]:
    found = trial(sandbox, f"command -v {' '.join(PROGRAMS.values())}").splitlines()
    return frozenset(PurePath(path).name for path in found)
