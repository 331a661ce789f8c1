"""What a family of tasks makes, and what its generators share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

#: Names of files, folders, branches and so on. No word contains another.
WORDS = (
    *("apple", "birch", "cedar", "daisy", "ember", "fern", "grape", "hazel", "iris", "jade", "kiwi", "lemon"),
    *("maple", "north", "olive", "pearl", "quartz", "river", "stone", "tulip", "umber", "violet", "willow", "yarrow"),
    *("amber", "basil", "coral", "delta", "eagle", "frost", "ginger", "harbor", "indigo", "jasper", "koala", "lotus"),
    *("mango", "nickel", "otter", "plum", "quince", "robin", "silver", "topaz", "urchin", "velvet", "walnut", "zebra"),
)
ENDINGS = ("txt", "md", "log", "csv", "cfg", "dat")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Tokyo", "Paris")
PEOPLE = ("Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Lea")


@dataclass(frozen=True, slots=True)
class TerminalDraft:
    """A task before it has messages: what is asked, what is there, what should be there, and one way to do it."""

    question: str
    solution: str
    files: Mapping[str, Any]
    changes: Mapping[str, Any]
    """The entries that the task changes; None for one that has to be gone."""
    setup: str = ""
    """Commands that prepare the workspace, run in the same shell."""
    checks: Sequence[Mapping[str, Any]] = field(default=())
    """What else is looked at; each has "about", a sentence, and "kept", whether it is so from the start.

    With "run" and "expect", a command and what it has to print. With "lock" and "held", whether a process holds the
    lock of a file that exists after the setup; with "pid" too, a file that must have the process id in the locked file.
    """
    key: str = ""
    """What makes it this task and no other, where the solution is the same for several."""


Generator = Callable[[Random], TerminalDraft]


def names(random: Random, number: int, ending: str = "") -> list[str]:
    """Different names, of files with an ending if one is given."""
    return [f"{word}.{ending}" if ending else word for word in random.sample(WORDS, number)]


def lines(random: Random, number: int) -> list[str]:
    """Lines of two words each, all different."""
    return [f"{first} {second}" for first, second in zip(names(random, number), names(random, number), strict=True)]


def text(random: Random, number: int = 3) -> str:
    return "".join(f"{line}\n" for line in lines(random, number))


def joined(parts: Sequence[object]) -> str:
    """One line for each part."""
    return "".join(f"{part}\n" for part in parts)


def others(random: Random, *taken: str) -> dict[str, str]:
    """Two files that a task has nothing to do with."""
    stems = {name.split("/")[0].split(".")[0] for name in taken}
    free = [word for word in WORDS if word not in stems]
    return {f"{word}.{random.choice(ENDINGS)}": text(random) for word in random.sample(free, 2)}
