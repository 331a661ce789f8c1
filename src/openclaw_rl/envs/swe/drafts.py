"""Draws bugs: which package, which change, which tests fail by it, and the text of the issue."""

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from random import Random

from openclaw_rl.envs.swe.mutate import Bug, bugs_in, renamed
from openclaw_rl.envs.swe.packages import HIDDEN_SUFFIX, Files, Package, packages_of, visible_tests
from openclaw_rl.envs.swe.plain import PlainTests, name_of_test, prepare
from openclaw_rl.envs.swe.results import TestResult
from openclaw_rl.envs.swe.syntax import parse
from openclaw_rl.envs.swe.trial import try_tests

#: Longest function of level 1, in lines.
MAX_SMALL_LINES = 5

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
def _tests(package: Package) -> PlainTests:
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
        own = [
            node for node in functions if name in _used(node) and _used(node) & _names_of(module) <= {name, *helpers}
        ]
        used = set().union(*map(_used, own)) & helpers.keys()
        for node in [*(helpers[helper] for helper in sorted(used)), *own]:
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
