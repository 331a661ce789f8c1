"""Coding problems: right answers pass, wrong ones and cheats do not, whatever they look like."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.client import TOO_LONG, ServerError
from openclaw_rl.evals import coding
from openclaw_rl.evals.chat import Message, Reply
from openclaw_rl.evals.coding import Problem, extract_code, problems, score
from openclaw_rl.evals.scores import CaseScore, TaskScores, ask_all
from openclaw_rl.lab.schema import same_json
from support.coding_solutions import solution

NAMES = [problem.name for problem in problems()]


def fenced(code: str) -> str:
    return f"Here you are:\n\n```python\n{code}\n```\nThis works because it does."


def problem(name: str) -> Problem:
    return next(one for one in problems() if one.name == name)


async def run(chat: Any, some: Sequence[Problem] | None = None, **settings: Any) -> TaskScores:
    asked = problems() if some is None else some
    return await ask_all(coding.TASK, chat, asked, score, max_tokens=coding.MAX_TOKENS, **settings)


class Scripted:
    """A model whose answers are known by the problem's name; what it is asked is kept."""

    def __init__(self, answers: dict[str, str | Exception]) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []
        self.busy = self.most_busy = 0

    async def ask(self, messages: Sequence[Message], **how: Any) -> Reply:
        self.asked.append({"messages": list(messages), **how})
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(0.01)
        self.busy -= 1
        said = messages[-1]["content"]
        answer = next((answer for name, answer in self.answers.items() if f"def {name}(" in said), "I do not know.")
        if isinstance(answer, Exception):
            raise answer
        return Reply(answer)


def test_there_are_enough_problems_and_each_is_whole():
    assert len(NAMES) == len(set(NAMES)) >= 36
    for one in problems():
        assert one.signature.startswith(f"def {one.name}(")
        assert len(one.cases) >= 3
        assert one.signature in one.prompt
        # Whoever returns always the same solves nothing.
        assert len({json.dumps(expected) for _, expected in one.cases}) > 1


@pytest.mark.more
async def test_every_right_answer_passes_and_every_wrong_one_fails():
    right = await run(Scripted({name: fenced(solution(name)) for name in NAMES}))
    assert {case.case: case.detail for case in right.cases if not case.passed} == {}
    assert right.pass_rate == 1.0
    wrong = {one.name: fenced(f"{one.signature}\n    return 'no such thing'") for one in problems()}
    scores = await run(Scripted(wrong))
    assert [case.case for case in scores.cases] == NAMES
    assert not any(case.passed or case.parts["tests"] for case in scores.cases)
    assert all(case.parts["code"] == 1.0 for case in scores.cases)


async def test_a_share_of_the_tests_is_told():
    seen = await score(problem("is_even"), Reply(fenced("def is_even(n):\n    return True")))
    assert seen.parts == {"code": 1.0, "tests": 0.6}
    assert seen.detail == "is_even(7) returns True instead of False."
    assert not seen.passed


CHEATS = {
    "leaves": "import sys\nsys.exit(0)\ndef add(a, b): return 0",
    "leaves in the call": "import sys\ndef add(a, b): sys.exit(0)",
    "leaves hard": "import os\ndef add(a, b): os._exit(0)",
    "leaves hard at once": "import os\ndef add(a, b): return 0\nos._exit(0)",
    "equals everything": (
        "class Yes:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def add(a, b): return Yes()"
    ),
    "a number that equals everything": (
        "class Yes(int):\n    def __eq__(self, o): return True\ndef add(a, b): return Yes(77)"
    ),
    "says that it passed": (
        "import sys\ndef add(a, b):\n    print('ok', 'PASSED', True)\n    sys.__stdout__.write('[]')\n    return 77"
    ),
    "says so with the mark": (
        "import sys, json\n"
        "def add(a, b):\n"
        "    frame = sys._getframe(1)\n"
        "    real, mark = frame.f_globals['out'], frame.f_globals['mark']\n"
        "    real.write(mark + json.dumps([['value', None]] * 5)); real.flush()\n"
        "    import os; os._exit(0)"
    ),
    "changes json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0",
    "writes rubbish behind the mark": (
        "import sys, os\n"
        "def add(a, b):\n"
        "    there = sys._getframe(1).f_globals\n"
        "    there['out'].write(there['mark'] + '[' * 9999); there['out'].flush(); os._exit(0)"
    ),
    "changes the comparison": (
        "import builtins\nbuiltins.all = builtins.isinstance = lambda *a: True\ndef add(a, b): return 77"
    ),
    "returns a very large number": "def add(a, b): return 10 ** 4000",
    "returns something deep": (
        "import sys\nsys.setrecursionlimit(10**4)\n"
        "def add(a, b):\n    deep = []\n    for _ in range(940): deep = [deep]\n    return deep"
    ),
    "no number at all": "def add(a, b): return float('nan')",
    "raises": "def add(a, b): raise AssertionError('caught?')",
    "is a string": "def add(a, b): return str(a + b)",
    "is a generator": "def add(a, b): yield a + b",
    "waits": "import asyncio\nasync def add(a, b): return a + b\nadd = add",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
async def test_success_cannot_be_faked(code: str):
    seen = await score(problem("add"), Reply(fenced(code)))
    assert not seen.passed
    assert seen.parts["tests"] == 0.0
    assert seen.detail


async def test_an_answer_that_never_ends_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coding, "MAX_SECONDS", 0.7)
    seen = await score(problem("add"), Reply(fenced("def add(a, b):\n    while True: pass")))
    assert seen.detail == "The program did not end within 0.7 seconds."


@pytest.mark.parametrize(
    "code",
    [
        "def add(a, b): return a + b\nprint(add(1, 2))\nassert add(1, 1) == 3",
        "def add(a, b): return a + b\nprint(input('a number: '))",
        "def add(a, b): return a + b\nif __name__ == '__main__':\n    while True: pass",
        "def add(a, b):\n    print('adding' * 1000)\n    return a + b",
        "add = lambda a, b: a + b",
        "class Sum:\n    def of(self, a, b): return a + b\nadd = Sum().of",
    ],
)
async def test_what_stands_around_a_good_function_does_not_matter(code: str):
    seen = await score(problem("add"), Reply(fenced(code)))
    assert seen.passed, seen.detail


ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    "answer",
    [
        ADD,
        fenced(ADD),
        f"```\n{ADD}\n```",
        f"```py\n{ADD}\n```",
        f"~~~python\n{ADD}\n~~~",
        f"```python\n{ADD}",
        f"```python\n{ADD}```",
        f"Sure! Here it is.\n\n{ADD}\n\nThis function adds two numbers. It's simple!",
        f"Let me import what I need.\nimport is easy.\n{ADD}",
        f"```bash\npip install adder\n```\n```python\n{ADD}\n```",
        f"1. First:\n\n   ```python\n   {ADD.replace(chr(10), chr(10) + '   ')}\n   ```\n2. Then rest.",
        f"```python\n{ADD}\n```\nUse it so:\n```python\n>>> add(1, 2)\n3\n```",
        f"```python\n{ADD}\n```\nOutput:\n```\n3 is it\n```",
        f"{ADD}\n\nprint(add(1, 2))  # and so",
        ADD.replace("\n", "\r\n"),
        f"```python\n{ADD}\n\ndef unfinished(a",
    ],
)
async def test_code_is_found(answer: str):
    seen = await score(problem("add"), Reply(answer))
    assert seen.passed, (extract_code(answer), seen.detail)


async def test_blocks_that_belong_together_are_one_program():
    answer = (
        "```python\ndef helper(a):\n    return a\n```\nand\n```python\ndef add(a, b):\n    return helper(a) + b\n```"
    )
    assert (await score(problem("add"), Reply(answer))).passed


@pytest.mark.parametrize(
    "answer", ["", "I cannot.", "```javascript\nfunction add(a, b) {}\n```", "```python\n", "a + b"]
)
async def test_no_code_is_no_code(answer: str):
    assert extract_code(answer) == ""
    seen = await score(problem("add"), Reply(answer))
    assert seen.parts == {"code": 0.0, "tests": 0.0}
    assert seen.detail == "The answer has no Python function add."


@given(st.text(alphabet="`~ \n\tdefabc(,):+=#'\"\\[{\0é", max_size=300))
def test_extraction_survives_anything(answer: str):
    code = extract_code(answer)
    assert code == "" or compile(code, "<answer>", "exec")


@pytest.mark.parametrize("answer", ["(" * 10**6, "x = " + "-" * 10**6 + "1", "```\n" + "def f(\n" * 10**5])
def test_extraction_survives_a_model_in_a_loop(answer: str):
    assert extract_code(answer) == ""


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (True, 1, False),
        (1, True, False),
        (2.0, 2, True),
        (0.1 + 0.2, 0.3, True),
        (98.6001, 98.6, False),
        (2**60 + 1, 2**60, False),
        (10**400, 2.5, False),
        (10**400, 10**400, True),
        (1.5, 10**400, False),
        ([1, [2]], [1, [2]], True),
        ([1, 2, 3], [1, 2], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("1", 1, False),
        (None, 0, False),
        (0, None, False),
    ],
)
def test_values_are_compared_by_kind_too(value: Any, expected: Any, equal: bool):
    assert same_json(value, expected) is equal


async def test_a_run_is_bounded_repeatable_and_kept_out_of_the_record():
    some = problems()[:8]
    model, heard = Scripted({one.name: fenced(solution(one.name)) for one in some}), []
    scores = await run(model, some, seed=7, on_case=heard.append, at_once=2)
    assert model.most_busy == 2
    assert {(how["seed"], how["temperature"], how["keep"]) for how in model.asked} == {(7, 0.0, False)}
    assert sorted(case.case for case in heard) == sorted(one.name for one in some)
    assert scores == await run(model, some, seed=7, at_once=4)


async def test_a_problem_that_the_model_cannot_hold_is_the_failure_of_its_case():
    some = problems()[:2]
    too_long = ServerError("There is no room.", status=400, code=TOO_LONG)
    answers = {
        some[0].name: too_long,
        some[1].name: fenced(solution(some[1].name)),
    }
    scores = await run(Scripted(answers), some)
    assert scores.cases[0] == CaseScore(some[0].name, False, {}, "", "There is no room.")
    assert scores.cases[1].passed
    assert scores.part_means() == {"code": 0.5, "tests": 0.5}


async def test_a_server_that_refuses_ends_the_run():
    with pytest.raises(ServerError, match="Nobody answers"):
        await run(Scripted({NAMES[5]: ServerError("Nobody answers.")}))
