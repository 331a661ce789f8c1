"""Small Python problems: the model writes a function, and the function is called in the sandbox.

The program in the sandbox does not know the expected values: it receives the arguments and returns the results, which
are compared here. So an answer cannot cheat; only the right values pass.
"""

import ast
import functools
import json
import re
import reprlib
import secrets
import warnings
from dataclasses import dataclass
from typing import Any

from openclaw_rl.evals.chat import Reply, Tool
from openclaw_rl.evals.scores import CaseScore, data_lines
from openclaw_rl.lab.schema import same_json
from openclaw_rl.sandbox.programs import EndReason, ProgramOutcome, run_python

#: A fenced block: its language, and its text up to the closing fence or the end of the answer.
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n]*\n(.*?)(?:\1|\Z)", re.DOTALL | re.MULTILINE)
#: A line with which code may begin in an answer without fences.
CODE_LINE = re.compile(r"^(?:def |async def |class |import |from \w+ import |@)", re.MULTILINE)
PYTHON_NAMES = ("python", "py", "python3")
#: How many such lines are tried as the beginning of the code.
MAX_BEGINNINGS = 8
#: The rest of a longer answer is ignored: no function here is longer, and Python's parser fails on huge expressions.
MAX_ANSWER_CHARACTERS = 20_000
TASK = "coding"
#: Longest answer in tokens: enough for every function here and an explanation.
MAX_TOKENS = 512
#: Limits for all calls of one function together.
MAX_SECONDS = 10.0
MAX_MEMORY_MIB = 512
#: The program that runs in the sandbox. It discards what the answer prints, and writes the results after a random mark.
HARNESS = """
import io, json, sys
mark, code, function, calls = json.loads({packed!r})
out, sys.stdout = sys.stdout, io.StringIO()
results, answer, trouble = [], {{"__name__": "answer"}}, None
try:
    exec(compile(code, "<answer>", "exec"), answer)
except BaseException as error:  # it may come from an example below a correct function
    trouble = error
for arguments in calls:
    try:
        if function not in answer and trouble:
            raise trouble
        results.append(["value", json.loads(json.dumps(answer[function](*arguments), allow_nan=False))])
    except BaseException as error:
        results.append(["error", type(error).__name__ + ": " + str(error)[:200]])
out.write(mark + json.dumps(results) + "\\n")
out.flush()
"""


def extract_code(answer: str) -> str:
    """The Python code in an answer; empty if there is none.

    - Fenced blocks count if there are any; otherwise the text from a line that looks like the beginning of code.
    - Blocks that form one valid program together are joined; otherwise the first valid block counts.
    - Text after the code, or a last line that was cut off, is left out.
    """
    answer = answer[:MAX_ANSWER_CHARACTERS]
    fenced = FENCE.findall(answer)
    blocks = [_dedented(text) for _, language, text in fenced if language.lower() in ("", *PYTHON_NAMES)]
    if fenced:
        candidates = ["\n\n".join(blocks), *blocks]
    else:
        beginnings = [match.start() for match in CODE_LINE.finditer(answer)][:MAX_BEGINNINGS]
        candidates = [answer[start:] for start in beginnings]
    whole = (code for code in candidates if defines(code))
    cut = (code for code in map(_without_tail, candidates) if defines(code))
    return next(whole, None) or next(cut, "")


def _without_tail(code: str) -> str:
    """The code up to the first line that is not Python."""
    lines = code.splitlines()
    while lines:
        try:
            _parse("\n".join(lines))
        except SyntaxError as error:
            lines = lines[: min((error.lineno or 1) - 1, len(lines) - 1)]
        except (ValueError, RecursionError, MemoryError):
            return ""
        else:
            break
    return "\n".join(lines)


def _dedented(text: str) -> str:
    """A block without the indentation of its first line: a block inside a list is indented as a whole."""
    margin = len(text) - len(text.lstrip(" "))
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in text.splitlines())


def defines(code: str, name: str | None = None) -> bool:
    """Whether code is valid Python that defines or assigns this name, or any name if none is given."""
    try:
        body = _parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return bool(names) if name is None else name in names


def _parse(code: str) -> ast.Module:
    with warnings.catch_warnings():
        # Warnings about the model's code must not reach the user.
        warnings.simplefilter("ignore")
        return ast.parse(code)


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to be written, and its expected results."""

    name: str
    signature: str
    task: str
    cases: tuple[tuple[list[Any], Any], ...]
    tools: tuple[Tool, ...] = ()

    @property
    def prompt(self) -> str:
        """The request to the model."""
        return (
            f"Write a Python function that has this signature:\n\n```python\n{self.signature}\n```\n\n"
            f"It should {self.task}\n\nAnswer with the complete function in one Python code block."
        )


@functools.cache
def problems() -> tuple[Problem, ...]:
    """All problems, from the easiest to the hardest."""
    return tuple(map(_problem, data_lines("coding.jsonl")))


def _problem(line: dict[str, Any]) -> Problem:
    cases = tuple((arguments, expected) for arguments, expected in line.pop("cases"))
    return Problem(cases=cases, **line)


async def score(problem: Problem, reply: Reply) -> CaseScore:
    """Run an answer. Parts: `code`, 1 if it is Python that defines the function; `tests`, the share that pass."""
    answer = reply.text
    code = extract_code(answer)
    if not defines(code, problem.name):
        parts = {"code": 0.0, "tests": 0.0}
        return CaseScore(problem.name, False, parts, answer, f"The answer has no Python function {problem.name}.")
    mark = secrets.token_hex(16)
    calls = [arguments for arguments, _ in problem.cases]
    source = HARNESS.format(packed=json.dumps([mark, code, problem.name, calls]))
    outcome = await run_python(source, seconds=MAX_SECONDS, memory_mib=MAX_MEMORY_MIB)
    faults = _faults(problem, outcome, mark)
    passed = sum(not fault for fault in faults)
    parts = {"code": 1.0, "tests": passed / len(faults)}
    return CaseScore(problem.name, passed == len(faults), parts, answer, next(filter(None, faults), ""))


def _faults(problem: Problem, outcome: ProgramOutcome, mark: str) -> list[str]:
    """What is wrong with each call, empty if it is right."""
    results = _results(outcome, mark, len(problem.cases))
    if results is None:
        return [_why_no_results(outcome)] * len(problem.cases)
    return [
        _fault(problem.name, arguments, expected, result)
        for (arguments, expected), result in zip(problem.cases, results, strict=True)
    ]


def _results(outcome: ProgramOutcome, mark: str, count: int) -> list[Any] | None:
    """The results after the harness's mark; None if they are missing or malformed."""
    _, _, written = outcome.stdout.partition(mark)
    try:
        results = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(results, list) or len(results) != count:
        return None
    return results if all(isinstance(result, list) and len(result) == 2 for result in results) else None


def _why_no_results(outcome: ProgramOutcome) -> str:
    if outcome.ended is EndReason.TIMED_OUT:
        return f"The program did not end within {MAX_SECONDS:g} seconds."
    return f"The program failed with status {outcome.exit_code}: {outcome.stderr.strip()[-200:]}".rstrip(": ")


def _fault(name: str, arguments: list[Any], expected: Any, result: list[Any]) -> str:
    kind, value = result
    if kind == "value" and same_json(value, expected):
        return ""
    call = f"{name}({', '.join(map(repr, arguments))})"
    # A returned value may be too large or too deeply nested to be shown in full.
    if kind == "value":
        return f"{call} returns {reprlib.repr(value)} instead of {expected!r}."
    return f"{call} raises {value if isinstance(value, str) else 'something'}."
