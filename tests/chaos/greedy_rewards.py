"""One key wants to outweigh all others: rewards beyond the limit are refused, and a large one has a bounded effect."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

from chaos.learning import check_ledger, learning_server, rows, states
from chaos.report import Report, Setting
from support.server_program import Program, until

ROUNDS = 30
KEYS = {"owner": "owner-secret", "one": "one-secret", "two": "two-secret", "greedy": "greedy-secret"}
#: What no user's key may give, whatever it is.
GREEDY: tuple[Any, ...] = (1e6, -1e6, 1.001, -1.001, 5e5, 1e7, 1e308, 10**400, "1", True, None, [1], {"reward": 1})
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999")
#: A batch with the largest reward may not have a gradient that is larger by more than this: --max-advantage is 10.
MOST = 40.0
NORMS = "SELECT metrics FROM updates WHERE outcome = 'applied' ORDER BY number"


def run(report: Report, setting: Setting) -> None:
    run_dir, draw = setting.folder / "run", random.Random(setting.seed)
    keys = ",".join(f"{name}={secret}" for name, secret in KEYS.items())
    with learning_server(setting.model, run_dir, "--batch-size", "4", "--api-key", keys) as program:
        for name in ("one", "two", "one", "two"):
            episode(program, name, f"before-{name}-{draw.random()}", draw.choice([-1.0, 1.0]))
        until(lambda: states(run_dir)["applied"] == 4, program)
        for number in range(setting.times(ROUNDS, least=2)):
            refused(report, program, f"greedy-{number}")
            for name, reward in (("owner", draw.choice([-1e6, 1e6])), ("one", 1.0), ("two", -1.0), ("greedy", 1.0)):
                episode(program, name, f"{name}-{number}", reward)
            until(lambda count=4 * (number + 2): states(run_dir)["applied"] == count, program)
        usual, *others = (json.loads(text)["grad_norm"] for (text,) in rows(run_dir, NORMS))
        report.most("times the usual gradient", round(max(others) / usual))
        report.check(max(others) <= MOST * usual, "one reward outweighed its batch", f"{usual}, then {others}")
        report.check_log(program.log)
    check_ledger(report, run_dir)


def send(program: Program, name: str, path: str, body: bytes, **headers: str) -> httpx.Response:
    sent = {"Authorization": f"Bearer {KEYS[name]}", "Content-Type": "application/json", **headers}
    return httpx.post(f"{program.url}{path}", content=body, headers=sent, timeout=60)


def play(program: Program, name: str, session: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": session}], "max_tokens": 6}).encode()
    answer = send(program, name, "/v1/chat/completions", body, **{"X-Session-Id": session, "X-Episode": "1"})
    assert answer.status_code == 200, answer.text


def episode(program: Program, name: str, session: str, reward: float) -> None:
    """An episode of one turn with its reward."""
    play(program, name, session)
    answer = send(program, name, f"/v1/sessions/{session}/reward", json.dumps({"reward": reward}).encode())
    assert answer.status_code == 200, answer.text


def refused(report: Report, program: Program, session: str) -> None:
    """Everything that is too large or no number is refused, as an episode's reward and as a step's."""
    play(program, "greedy", f"{session}-held")
    for body in bodies():
        answer = send(program, "greedy", f"/v1/sessions/{session}-held/reward", body)
        report.count("rewards refused")
        report.check(answer.status_code == 400, "a greedy reward was not refused", f"{body[:80]!r}: {answer.text}")


def bodies() -> Iterator[bytes]:
    values = [*map(json.dumps, GREEDY), *NOT_NUMBERS]
    yield from (f'{{"reward": {value}}}'.encode() for value in values)
    yield from (
        f'{{"reward": 1, "steps": [{{"index": 0, "reward": {value}}}]}}'.encode() for value in values if value != "null"
    )
