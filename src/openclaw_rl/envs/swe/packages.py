"""The small Python packages in which bugs are planted.

A package is a text file in `packages/`; lines `==> path` begin its files. Tests whose names end with `_more` are
hidden: the repository of an episode does not have them, but it is judged by them too.
"""

import ast
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.lab.tasks import digest

FOLDER = Path(__file__).with_name("packages")
FILE_MARK = "==> "
HIDDEN_SUFFIX = "_more"
#: The package that only examples are made of.
EXAMPLES = "calc"
#: Of so many packages one is held out.
HELD_OUT_ONE_IN = 4

#: A file's path in its repository → its text.
Files = Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Package:
    """A package without bugs."""

    name: str
    sources: Files
    tests: Files
    """All tests, also the hidden ones."""


_parsing = threading.Lock()


def parse(source: str) -> ast.Module:
    """As `ast.parse`, used by one thread at a time.

    CPython 3.11 keeps one count of a tree's depth for the whole interpreter. If threads switch while a tree is made, as
    in garbage collection, another thread changes the count, and `ast.parse` raises SystemError.
    """
    with _parsing:
        return ast.parse(source)


def literal(source: str) -> Any:
    """As `ast.literal_eval`, used by one thread at a time, for the same reason."""
    with _parsing:
        return ast.literal_eval(source)


@functools.cache
def read_packages() -> dict[str, Package]:
    """Every package, by its name."""
    return {path.stem: _package(path.stem, path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.txt"))}


@functools.cache
def packages_of(split: str) -> tuple[Package, ...]:
    """The packages of a split: train, held-out or examples. Each package belongs to one split."""
    packages = read_packages()
    names = sorted(packages.keys() - {EXAMPLES}, key=digest)
    held_out = len(names) // HELD_OUT_ONE_IN
    chosen = {"examples": [EXAMPLES], "held-out": names[:held_out], "train": names[held_out:]}[split]
    return tuple(packages[name] for name in sorted(chosen))


def visible_tests(text: str) -> str:
    """A test file without its hidden tests."""
    lines = text.splitlines(keepends=True)
    for node in reversed(parse(text).body):
        if isinstance(node, ast.FunctionDef) and node.name.endswith(HIDDEN_SUFFIX):
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines).rstrip() + "\n"


def _package(name: str, text: str) -> Package:
    sources: dict[str, str] = {}
    tests: dict[str, str] = {}
    for part in f"\n{text}".split(f"\n{FILE_MARK}")[1:]:
        path, _, content = part.partition("\n")
        (tests if path.startswith("tests/") else sources)[path] = content.strip("\n") + "\n"
    return Package(name, sources, tests)
