"""Tests whose asserts are compared outside the sandbox: functions without arguments whose names begin with `test_`.

They are taken apart before they enter the sandbox. Three forms of assert are known:

- `assert value == literal`: the value is computed in the sandbox. The literal stays here and is compared here.
- `assert raises(ValueError, function, *arguments)`, with a built-in exception: the call is made in the sandbox, which
  reports the exception. The expected one stays here.
- Any other condition: the sandbox reports whether it is true.

Tested code cannot change a test or make an object that equals everything. It shares a process with what reports the
values, so it could forge a report. For the first two forms a forged report has to name the right value, and the values
of hidden tests are nowhere in the sandbox; for the third, True is enough. The built-in packages use the first two only.

Whatever tests and reports contain, nothing here raises: a model may have written them.
"""

import ast
import asyncio
import builtins
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclaw_rl.envs.swe.assert_tests_child import MAX_SHOWN
from openclaw_rl.envs.swe.packages import Files, literal, parse
from openclaw_rl.envs.swe.repository import Repository, is_protected
from openclaw_rl.envs.swe.suites import TestResult, copy_of, output_of_tests
from openclaw_rl.sandbox.base import Sandbox

#: Limits of one run of such tests.
RUN_SECONDS = 10.0
RUN_MEMORY_MIB = 256
MAX_REPORT_BYTES = 1 << 20
#: No site packages, no settings of the user, no bytecode files; the folder is not searched for modules at the start.
BARE_PYTHON = ("python3", "-I", "-S", "-B", "-X", "utf8", "-c")
RUNNER = Path(__file__).with_name("assert_tests_child.py").read_text("utf-8")
PREFIX = "test_"
NOT_RUN = "it was not run to its end"
#: What Python raises for text that is not Python, not a literal, not JSON, too deep or too large.
CANNOT_BE_READ = (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an assert expects of the value that the sandbox reports."""

    subject: str
    """Source of what is computed."""
    wanted: str
    """What it should do, such as "give 5"."""
    value: Any = None
    exception: type[BaseException] | None = None
    """The exception that the subject has to raise; its name is the value then."""

    def holds(self, shown: str) -> bool:
        """Whether a reported value is the expected one."""
        if len(shown) > MAX_SHOWN:
            return False
        try:
            value = literal(shown)
            if self.exception is None:
                return bool(value == self.value)
        except CANNOT_BE_READ:
            return False
        raised = builtin_exception(value) if isinstance(value, str) else None
        return raised is not None and issubclass(raised, self.exception)

    def sentence(self, what_happens: str) -> str:
        if self.exception is not None:
            return f"{self.subject} should {self.wanted}, but does not."
        return f"{self.subject} {what_happens}, but should {self.wanted}."


@dataclass(frozen=True, slots=True)
class AssertTest:
    """One test: its asserts by number, and those that run in any case."""

    id: str
    source: str
    expected: Mapping[int, Expectation]
    certain: frozenset[int]


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Tests that are ready to be run, and what they expect."""

    job: list[tuple[str, str, list[str]]]
    """File, source, names of tests: what enters the sandbox."""
    tests: Mapping[str, AssertTest]
    broken: Mapping[str, str] = field(default_factory=dict)
    """Test files that cannot be read, and why."""

    def judge(self, reports: Iterable[list[Any]]) -> dict[str, TestResult]:
        """The result of every test. A test without a report has not passed."""
        results = {id_: TestResult(False, f"{name_of_test(id_)}: {NOT_RUN}.", loaded=False) for id_ in self.tests}
        for file, name, seen, error in reports:
            if not name:
                failed = TestResult(False, f"{file} cannot be loaded: {error}.", loaded=False)
                results |= {id_: failed for id_ in results if id_.startswith(f"{file}::")}
            elif (id_ := f"{file}::{name}") in self.tests:
                problem = _problem(self.tests[id_], seen, error)
                results[id_] = TestResult(not problem, problem)
        return results | {
            file: TestResult(False, f"{file} cannot be read: {why}.") for file, why in self.broken.items()
        }


class AssertSuite:
    """Tests with asserts, which need Python alone."""

    def __init__(self, sandbox: Sandbox, tests: Files) -> None:
        self._sandbox = sandbox
        self._tests = tests

    async def run(self, repository: Repository) -> dict[str, TestResult]:
        tests = await asyncio.to_thread(lambda: prepare(_tests_in(repository)))
        return await self._run(repository, tests, judged=False)

    async def judge(self, repository: Repository) -> dict[str, TestResult]:
        return await self._run(repository, await asyncio.to_thread(prepare, self._tests), judged=True)

    async def _run(self, repository: Repository, tests: AssertTests, *, judged: bool) -> dict[str, TestResult]:
        async with copy_of(repository, judged=judged) as folder:
            outcome = await self._sandbox.run(
                [*BARE_PYTHON, RUNNER],
                folder,
                stdin=json.dumps(tests.job).encode(),
                seconds=RUN_SECONDS,
                memory_mib=RUN_MEMORY_MIB,
                max_output=MAX_REPORT_BYTES,
            )
        return await asyncio.to_thread(lambda: tests.judge(read_reports(output_of_tests(outcome, self._sandbox))))


def _tests_in(repository: Repository) -> Files:
    return {path: repository.read(path) for path in repository.paths() if is_test_file(path)}


def is_test_file(path: str) -> bool:
    return path.rpartition("/")[2].startswith("test_") and path.endswith(".py") and is_protected(path)


def prepare(files: Files) -> AssertTests:
    """Take the tests of test files apart."""
    job = []
    tests: dict[str, AssertTest] = {}
    broken = {}
    for file, text in files.items():
        replacer = _AssertReplacer(file)
        try:
            source = ast.unparse(ast.fix_missing_locations(replacer.visit(parse(text))))
        except CANNOT_BE_READ as error:
            broken[file] = f"{type(error).__name__}: {error}".rstrip(": ")
            continue
        tests |= {test.id: test for test in replacer.tests}
        job.append((file, source, [name_of_test(test.id) for test in replacer.tests]))
    return AssertTests(job, tests, broken)


def read_reports(output: str) -> list[list[Any]]:
    """The reports in a runner's output. Lines that are none are left out."""
    reports = []
    for line in output.splitlines():
        try:
            file, name, seen, error = json.loads(line)
            pairs = [(int(number), str(shown)) for number, shown in seen]
            reports.append([str(file), str(name), pairs, str(error)])
        except CANNOT_BE_READ:
            continue
    return reports


def name_of_test(id_: str) -> str:
    return id_.rpartition("::")[2]


def builtin_exception(name: str) -> type[BaseException] | None:
    """The built-in exception of that name; None if there is none."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


class _AssertReplacer(ast.NodeTransformer):
    """Replaces asserts by calls of `__see__(number, value)`, and keeps what they expect."""

    def __init__(self, file: str) -> None:
        self.tests: list[AssertTest] = []
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
        self._expected = {}
        certain = set()
        for index, statement in enumerate(node.body):
            if isinstance(statement, ast.Assert):
                certain.add(self._number)
            node.body[index] = self.visit(statement)
        self.tests.append(AssertTest(f"{self._file}::{node.name}", source, self._expected, frozenset(certain)))

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        match node.test:
            case ast.Compare(left=value, ops=[ast.Eq()], comparators=[right]) if _is_literal(right):
                wanted = Expectation(ast.unparse(value), f"give {ast.unparse(right)}", ast.literal_eval(right))
            case ast.Call(ast.Name("raises"), [ast.Name(kind), function, *arguments], []) if (
                exception := builtin_exception(kind)
            ):
                call = ast.unparse(ast.Call(function, arguments, []))
                wanted = Expectation(call, f"raise {kind}", exception=exception)
                value = _call("__raised__", function, *arguments)
            case condition:
                wanted = Expectation(ast.unparse(condition), "be true", value=True)
                value = _call("bool", condition)
        number = self._number
        self._number = self._number + 1
        self._expected[number] = wanted
        return ast.Expr(_call("__see__", ast.Constant(number), value))


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except CANNOT_BE_READ:
        return False
    return True


def _problem(test: AssertTest, seen: list[tuple[int, str]], error: str) -> str:
    """What is wrong with a test that was run; empty if nothing is."""
    for number, shown in seen:
        if number not in test.expected:
            continue
        expected = test.expected[number]
        if not expected.holds(shown):
            return expected.sentence(f"gives {shown}")
    missed = sorted(test.certain - {number for number, _ in seen})
    if error:
        place = test.expected[missed[0]] if missed else None
        return place.sentence(f"raises {error}") if place else f"{name_of_test(test.id)} raises {error}."
    return f"{name_of_test(test.id)}: {NOT_RUN}." if missed else ""
