"""Plants bugs: which package, which change, which tests fail by it, and the text of the issue.

The tests are run in this process to see which ones a bug fails. That is for code of `packages/` with a bug of `bugs`,
never for what a model wrote: there is no sandbox. A loop that a bug makes endless is stopped after a number of lines.
"""

import ast
import builtins
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from random import Random
from types import FrameType, ModuleType
from typing import Any

from openclaw_rl.envs.swe.assert_tests import AssertTests, name_of_test, prepare
from openclaw_rl.envs.swe.assert_tests_child import run_file
from openclaw_rl.envs.swe.bugs import Bug, bugs_in, renamed
from openclaw_rl.envs.swe.packages import HIDDEN_SUFFIX, Files, Package, packages_of, parse, visible_tests
from openclaw_rl.envs.swe.suites import TestResult

#: Longest function of level 1, in lines.
MAX_SMALL_LINES = 5
#: Lines of code that all tests of a package may run; they need a few thousand.
MAX_LINES = 60_000

#: Path and bug.
Place = tuple[str, Bug]


@dataclass(frozen=True, slots=True)
class BugDraft:
    """A package with one bug or two."""

    package: Package
    bugs: Sequence[Place]
    """At most one in each file."""
    results: Mapping[str, TestResult]
    """The result of each test, also of hidden ones, with the bugs."""

    @property
    def files(self) -> dict[str, str]:
        """The files that an episode begins with."""
        tests = {path: visible_tests(text) for path, text in self.package.tests.items()}
        return {**_with_bugs(self.package, self.bugs), **tests}

    @property
    def failing(self) -> list[str]:
        """The visible tests that fail."""
        return [id_ for id_, result in self.results.items() if not result.passed and not is_hidden(id_)]

    @property
    def issue(self) -> str:
        """What the first failing test shows, with the test if it has more than asserts."""
        first = self.failing[0]
        source = _tests(self.package).tests[first].source
        body = parse(source).body[0]
        assert isinstance(body, ast.FunctionDef)
        problem = self.results[first].problem
        return problem if all(isinstance(part, ast.Assert) for part in body.body) else f"{problem}\n\n{source}"


def draw(split: str, level: int, kind: str, random: Random) -> BugDraft:
    """A draft of a level whose first bug is of a kind."""
    packages = [package for package in _packages(split, level) if _bugs(package, kind)]
    while True:
        package = random.choice(packages)
        places = [random.choice(_bugs(package, kind))]
        if level == 3:
            places.append(random.choice([place for place in _bugs(package) if place[0] != places[0][0]]))
        # Each bug alone has to fail a test, so that mending one of two is not enough.
        if all(_tried(package, (place,)) for place in places) and (draft := _tried(package, tuple(places))):
            return _with_other_names(draft, random) if level == 1 else draft


def draw_examples(kind: str, number: int) -> list[BugDraft]:
    """Drafts of one short function each, always the same ones, and as different as there are functions."""
    random = Random(f"swe examples {kind}")
    packages = [package for package in _packages("examples", 1) if _noticed(package, kind)]
    random.shuffle(packages)
    places = [(packages[index % len(packages)], index // len(packages)) for index in range(number)]
    drafts = [
        _tried(package, (_noticed(package, kind)[turn % len(_noticed(package, kind))],)) for package, turn in places
    ]
    return [draft for draft in drafts if draft]


def _with_other_names(draft: BugDraft, random: Random) -> BugDraft:
    """The draft of a short function with other names of its arguments. The tests do not name them."""
    ((path, bug),) = draft.bugs
    return replace(draft, bugs=((path, renamed(bug, draft.package.sources[path], random)),))


def is_hidden(test: str) -> bool:
    return name_of_test(test).endswith(HIDDEN_SUFFIX)


@functools.cache
def _packages(split: str, level: int) -> tuple[Package, ...]:
    whole = packages_of(split)
    return whole if level > 1 else tuple(small for package in whole for small in _small_packages(package))


@functools.cache
def _bugs(package: Package, kind: str = "") -> tuple[Place, ...]:
    """The bugs of a kind, or of all kinds, that can be planted in a package."""
    if kind:
        return tuple(place for place in _bugs(package) if place[1].kind == kind)
    return tuple((path, bug) for path, text in package.sources.items() for bug in bugs_in(text))


def _noticed(package: Package, kind: str) -> list[Place]:
    return [place for place in _bugs(package, kind) if _tried(package, (place,))]


@functools.lru_cache(maxsize=4096)
def _tried(package: Package, places: tuple[Place, ...]) -> BugDraft | None:
    """The draft with the results of its tests; None if no visible test fails, or if the tests do not end."""
    results = try_tests(_with_bugs(package, places), _tests(package))
    if results is None:
        return None
    draft = BugDraft(package, places, results)
    return draft if draft.failing else None


def _with_bugs(package: Package, places: Sequence[Place]) -> Files:
    return {**package.sources, **{path: bug.text for path, bug in places}}


@functools.cache
def _tests(package: Package) -> AssertTests:
    return prepare(package.tests)


@functools.cache
def _small_packages(package: Package) -> tuple[Package, ...]:
    """A package of one file for each short function that uses nothing else of its module."""
    small = []
    for path, text in package.sources.items():
        module = parse(text)
        defined = _names_of(module)
        for function in module.body:
            if not isinstance(function, ast.FunctionDef) or _length(function) > MAX_SMALL_LINES:
                continue
            if _used(function) & defined - {function.name}:
                continue
            file = PurePosixPath(path).name
            source = ast.get_source_segment(text, function) or ""
            if tests := "".join(_tests_of(function.name, package.tests)):
                test = f"from {file.removesuffix('.py')} import {function.name}\n{tests}"
                small.append(Package(f"{package.name}-{function.name}", {file: source + "\n"}, {f"test_{file}": test}))
    return tuple(small)


def _tests_of(name: str, tests: Files) -> Iterator[str]:
    """The tests that use this function and nothing else of the package, and the helpers that they need."""
    for text in tests.values():
        module = parse(text)
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
        helpers = {node.name: node for node in functions if not node.name.startswith("test_")}
        tests_of_it = [
            node for node in functions if name in _used(node) and _used(node) & _names_of(module) <= {name, *helpers}
        ]
        used = set().union(*map(_used, tests_of_it)) & helpers.keys()
        for node in [*(helpers[helper] for helper in sorted(used)), *tests_of_it]:
            yield f"\n\n{ast.get_source_segment(text, node)}\n"


def _names_of(module: ast.Module) -> set[str]:
    """The names that a module has: imported, assigned, and defined."""
    names = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    for node in module.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _used(function: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def _length(function: ast.FunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


class TooManyLines(BaseException):
    """The tests do not end."""


def try_tests(sources: Files, tests: AssertTests) -> dict[str, TestResult] | None:
    """The result of every test; None if the tests do not end."""
    modules = _Modules(sources)
    reports: list[list[Any]] = []

    def report(result: list[Any]) -> None:
        # Python ends tracing when the limit is reached, so nothing more may be run.
        if result[-1].startswith(TooManyLines.__name__):
            raise TooManyLines
        reports.append(result)

    try:
        with _LineLimit():
            for file, source, names in tests.job:
                run_file(file, source, names, {"__builtins__": modules.builtins}, report)
    except TooManyLines:
        return None
    return tests.judge(reports)


class _Modules:
    """Imports modules of a package from their texts."""

    def __init__(self, sources: Files) -> None:
        self._sources = {path.removesuffix(".py").replace("/", "."): text for path, text in sources.items()}
        self._loaded: dict[str, ModuleType] = {}
        self.builtins = {**vars(builtins), "__import__": self._import}

    def _import(self, name: str, *_: Any) -> ModuleType:
        if name not in self._loaded:
            module = self._loaded[name] = ModuleType(name)
            vars(module)["__builtins__"] = self.builtins
            exec(compile(self._sources[name], name, "exec"), vars(module))
        return self._loaded[name]


class _LineLimit:
    """Raises TooManyLines in this thread after a number of lines."""

    def __enter__(self) -> None:
        self._left = MAX_LINES
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, _frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any]:
        self._left -= 1
        if self._left < 0:
            raise TooManyLines
        return self._trace
