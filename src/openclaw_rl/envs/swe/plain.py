"""Plain tests: functions without arguments whose names begin with `test_`, with assert statements.

They are taken apart before they enter the sandbox. There the left side of `assert value == literal` is computed; the
literal stays here, and the comparison is made here. So code that is tested can neither change a test, nor replace what
runs it, nor make an object that equals everything. It can only compute the right values.
"""

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.envs.swe.packages import Files

PREFIX = "test_"
NOT_RUN = "it was not run to its end"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an assert expects, and its source."""

    source: str
    value: Any


@dataclass(frozen=True, slots=True)
class PlainTest:
    """One test: its asserts by number, and those that run in any case."""

    id: str
    source: str
    expected: Mapping[int, Expectation]
    certain: frozenset[int]


@dataclass(frozen=True, slots=True)
class PlainResult:
    """What became of a test."""

    passed: bool
    problem: str = ""
    """What is wrong, in a sentence; empty if it passed."""
    loaded: bool = True
    """Whether its file could be loaded, and with it the code that it tests."""


@dataclass(frozen=True, slots=True)
class PlainTests:
    """Tests that are ready to be run, and what they expect."""

    job: list[tuple[str, str, list[str]]]
    """File, source, names of tests: what enters the sandbox."""
    tests: Mapping[str, PlainTest]
    broken: Mapping[str, str] = field(default_factory=dict)
    """Test files that are not Python, and why."""

    def judge(self, reports: Iterable[list[Any]]) -> dict[str, PlainResult]:
        """The result of every test. A test without a report has not passed."""
        results = {id_: PlainResult(False, f"{name_of_test(id_)}: {NOT_RUN}.", loaded=False) for id_ in self.tests}
        for file, name, seen, error in reports:
            if not name:
                failed = PlainResult(False, f"{file} cannot be loaded: {error}.", loaded=False)
                results |= {id_: failed for id_ in results if id_.startswith(f"{file}::")}
            elif (id_ := f"{file}::{name}") in self.tests:
                problem = _problem(self.tests[id_], seen, error)
                results[id_] = PlainResult(not problem, problem)
        return results | {
            file: PlainResult(False, f"{file} cannot be read: {why}.") for file, why in self.broken.items()
        }


def prepare(files: Files) -> PlainTests:
    """Take the tests of test files apart."""
    job = []
    tests: dict[str, PlainTest] = {}
    broken = {}
    for file, text in files.items():
        try:
            module = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            broken[file] = f"{type(error).__name__}: {error}"
            continue
        replacer = _AssertReplacer(file)
        replacer.visit(module)
        ast.fix_missing_locations(module)
        tests |= {test.id: test for test in replacer.tests}
        job.append((file, ast.unparse(module), [name_of_test(test.id) for test in replacer.tests]))
    return PlainTests(job, tests, broken)


def read_reports(output: str) -> list[list[Any]]:
    """The reports in a runner's output. Lines that are none are left out."""
    reports = []
    for line in output.splitlines():
        try:
            file, name, seen, error = json.loads(line)
            pairs = [(int(number), str(shown)) for number, shown in seen]
        except (ValueError, TypeError, RecursionError):
            continue
        reports.append([str(file), str(name), pairs, str(error)])
    return reports


def name_of_test(id_: str) -> str:
    return id_.rpartition("::")[2]


class _AssertReplacer(ast.NodeTransformer):
    """Replaces `assert value == literal` by `__see__(number, value)`; for other asserts the value is the condition."""

    def __init__(self, file: str) -> None:
        self.tests: list[PlainTest] = []
        self._file = file
        self._number = 0
        self._expected: dict[int, Expectation] = {}

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name.startswith(PREFIX):
                self._take_apart(statement)
        return node

    def _take_apart(self, node: ast.FunctionDef) -> None:
        source = ast.unparse(node)
        self._expected, certain = {}, set()
        for index, statement in enumerate(node.body):
            if isinstance(statement, ast.Assert):
                certain.add(self._number)
            node.body[index] = self.visit(statement)
        self.tests.append(PlainTest(f"{self._file}::{node.name}", source, self._expected, frozenset(certain)))

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        match node.test:
            case ast.Compare(left=value, ops=[ast.Eq()], comparators=[right]) if _is_literal(right):
                expected = ast.literal_eval(right)
            case _:
                value, expected = ast.Call(ast.Name("bool", ast.Load()), [node.test], []), True
        number, self._number = self._number, self._number + 1
        self._expected[number] = Expectation(ast.unparse(node.test), expected)
        return ast.Expr(ast.Call(ast.Name("__see__", ast.Load()), [ast.Constant(number), value], []))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _problem(test: PlainTest, seen: list[tuple[int, str]], error: str) -> str:
    """What is wrong with a test that was run; empty if nothing is."""
    for number, shown in seen:
        if number not in test.expected:
            continue
        expected = test.expected[number]
        if not _equals(shown, expected.value):
            return _sentence(expected, f"gives {shown}")
    missed = sorted(test.certain - {number for number, _ in seen})
    if error:
        place = test.expected[missed[0]] if missed else None
        return _sentence(place, f"raises {error}") if place else f"{name_of_test(test.id)} raises {error}."
    return f"{name_of_test(test.id)}: {NOT_RUN}." if missed else ""


def _equals(shown: str, expected: Any) -> bool:
    try:
        return bool(ast.literal_eval(shown) == expected)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _sentence(expectation: Expectation, what_happens: str) -> str:
    test = ast.parse(expectation.source, mode="eval").body
    match test:
        case ast.Call(func=ast.Name(id="raises"), args=[kind, function, *arguments]):
            call = ast.unparse(ast.Call(function, arguments, []))
            return f"{call} should raise {ast.unparse(kind)}, but does not."
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return f"{ast.unparse(left)} {what_happens}, but should give {ast.unparse(right)}."
    return f"{expectation.source} {what_happens}, but should be true."
