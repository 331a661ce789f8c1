"""Judges that answer nonsense, hang or fail: nothing of it may be trained on, and others are served meanwhile."""

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from chaos.learning import FAST, check_ledger, healthy, rows, states
from chaos.report import Report, Setting
from support import bad_judge
from support.judge_server import Body, JudgeServer, Reply, completion, opinion
from support.process_stats import memory_mib
from support.records import stored_turns
from support.server_program import SERVE, Program, serving, until

#: Conversations with each kind of answer.
ROUNDS = 20
#: The longest wait until every turn has a verdict: three trials with pauses, for some turns at a time.
VERDICT_SECONDS = 240
FLAGS = ("--method", "combine", "--batch-size", "2", "--lora-rank", "4", "--judge-timeout", "1", "--prm-m", "1")
MANY = ("--num-judge-workers", "16")


def body(content: bytes, status: int = 200, **headers: str) -> Reply:
    return Reply(status, content, headers)


#: Replies that are no verdict, by name.
NONSENSE: dict[str, Reply] = {
    "nan": completion("\\boxed{nan}"),
    "1e9": completion("\\boxed{1e9}"),
    "large": completion("\\boxed{1000000000}"),
    "long number": completion("\\boxed{" + "1" * 5000 + "}"),
    "infinite": completion("\\boxed{-inf}"),
    "empty box": completion("\\boxed{}"),
    "open boxes": completion("\\boxed{1" * 20_000),
    "brackets": completion("[" * 200_000),
    "garbage": completion("\x00\x1b[2J\ufffd\ud800" * 50),
    "no text": completion(""),
    "null text": completion(None),
    "thoughts": completion("<think>" * 5_000 + "\\boxed{1}"),
    "hint without end": completion("[HINT_START]" * 20_000),
    "long": completion("a" * 5_000_000),
    "no choices": body(b'{"choices": []}'),
    "null choices": body(b'{"choices": null}'),
    "number as text": body(b'{"choices": [{"message": {"content": 1}}]}'),
    "lists": body(b"[" * 200_000),
    "nested choices": body(b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "huge usage": body(b'{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 1e999}}'),
    "not json": body(b"<html>error</html>"),
    "not text": body(b"\xff\xfe\x00"),
    "nothing": body(b""),
    "null": body(b"null"),
    "teapot": body(b"short and stout", 418),
    "bad request": body(b"[" * 100_000, 400),
}


def hang(_: Body) -> Reply:
    time.sleep(3)
    return completion("\\boxed{1}")


def close(_: Body) -> Reply:
    raise ConnectionError  # the connection is closed without an answer


#: Judges that cannot be asked at all: turns wait for them.
AWAY: dict[str, Callable[[Body], Reply]] = {
    "hang": hang,
    "close": close,
    "500": lambda _: body(b"oops", 500),
    "503": lambda _: body(b"", 503, **{"Retry-After": "-1e999"}),
    "429": lambda _: body(b"[" * 100_000, 429, **{"Retry-After": "0"}),
    "401": lambda _: body(b"no", 401),
}


def run(report: Report, setting: Setting) -> None:
    endpoint = JudgeServer(by_case)
    flags = ("--judge", "llm", "--judge-base-url", endpoint.url, "--judge-model", "judge")
    try:
        with judged_server(setting.model, setting.folder / "endpoint", *flags, *MANY) as program:
            before = memory_mib(program.process.pid)
            nonsense(report, program, setting.folder / "endpoint", NONSENSE, setting.times(ROUNDS))
            away(report, program, setting.folder / "endpoint", endpoint)
            report.memory = (before, memory_mib(program.process.pid))
            report.check_log(program.log)
    finally:
        endpoint.stop()
    custom = ("--judge", "custom", "--custom-rm-path", bad_judge.__file__)
    cases = [case for case in bad_judge.CASES if case != "hang"]
    with judged_server(setting.model, setting.folder / "custom", *custom, *MANY) as program:
        nonsense(report, program, setting.folder / "custom", cases, setting.times(ROUNDS))
        converse(program, "hang", "case hang.")
        converse(program, "good", "thanks")
        report.check(healthy(program), "/healthz was slow while a custom judge hung")
        until(lambda: scores(setting.folder / "custom").get("good") == 1.0, program)
        report.check_log(program.log)


@contextlib.contextmanager
def judged_server(model: Path, run_dir: Path, *flags: str) -> Any:
    with serving(SERVE, model, "--run-dir", str(run_dir), *FLAGS, *FAST, *flags) as program:
        yield program


def by_case(request: Body) -> Reply:
    """The reply that the judged turn names; a good opinion for others."""
    named = re.search(r"case ([\w ]+)\.", request["messages"][-1]["content"])
    return NONSENSE[named[1]] if named else opinion("1")(request)


def converse(program: Program, session: str, reply: str) -> None:
    """A turn, and the user's reply to it."""
    messages: list[Any] = [{"role": "user", "content": f"How far is it from {session}?"}]
    for words in (reply, None):
        response = httpx.post(
            f"{program.url}/v1/chat/completions",
            json={"messages": messages, "max_tokens": 4},
            headers={"X-Session-Id": session},
            timeout=60,
        )
        assert response.status_code == 200, response.text
        messages += [response.json()["choices"][0]["message"], {"role": "user", "content": words}]


def scores(run_dir: Path) -> dict[str, float | None]:
    """The scores of judged turns, by session."""
    return {turn.session.id: turn.verdict.score for turn in stored_turns(run_dir) if turn.verdict is not None}


def nonsense(
    report: Report, program: Program, run_dir: Path, cases: Sequence[str] | dict[str, Any], rounds: int
) -> None:
    """Every turn that gets a nonsensical answer ends without a score, and is not trained on."""
    for number in range(rounds):
        for case in cases:
            converse(program, f"{case} {number}", f"case {case}.")
            report.count("bad verdicts")
    end = time.monotonic() + VERDICT_SECONDS
    while states(run_dir)["ready"] and time.monotonic() < end:
        report.check(healthy(program), "/healthz was slow while turns were judged")
        time.sleep(0.2)
    report.check(not states(run_dir)["ready"], "turns still wait for a verdict", str(states(run_dir)))
    scored = {session: score for session, score in scores(run_dir).items() if score is not None}
    report.check(not scored, "nonsense became a score", str(scored))
    report.check(not rows(run_dir, "SELECT * FROM update_turns"), "nonsense was trained on")


def away(report: Report, program: Program, run_dir: Path, endpoint: JudgeServer) -> None:
    """Turns wait for a judge that cannot be asked, and are judged and trained on when it is back."""
    for case, answer in AWAY.items():
        endpoint.answer = answer
        converse(program, case, "And then?")
        report.count("outages")
        time.sleep(1.5)
        report.check(healthy(program), "/healthz was slow while the judge was away")
        report.check(scores(run_dir).get(case) is None, "a judge that was away gave a score", case)
    endpoint.answer = opinion("1")
    until(lambda: all(scores(run_dir).get(case) == 1.0 for case in AWAY), program)
    until(lambda: states(run_dir)["applied"] >= len(AWAY) // 2 * 2, program)
    check_ledger(report, run_dir)
