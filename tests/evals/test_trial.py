"""A trial ends by its limits, or with an error if anything fails that it needs: it never hangs or goes on blind."""

import asyncio
import io
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openclaw_rl.client import ServerError
from openclaw_rl.evals import trial
from openclaw_rl.evals.chat import Reply
from openclaw_rl.evals.demo import not_trained
from openclaw_rl.evals.personas.persona import load
from openclaw_rl.evals.screen import Screen
from openclaw_rl.evals.trial import Exam, Trial, TrialOutcome, TrialPlan
from openclaw_rl.lab import server as module
from openclaw_rl.lab.server import ServerFailed, run_server

WAITING = {"policy_version": 0, "learner": "", "next_step": {"samples": 8, "needed": 8}}
READY = {"policy_version": 0, "learner": "", "next_step": {"samples": 0, "needed": 8}}


class Silent:
    """Looks on and says nothing."""

    def starting(self, plan: TrialPlan) -> None: ...
    def started(self, plan: TrialPlan) -> None: ...
    def talking(self, outcome: TrialOutcome, seconds: float, state: str) -> None: ...
    def examining(self, outcome: TrialOutcome, seconds: float, done: int, total: int) -> None: ...
    def examined(self, outcome: TrialOutcome, exam: Exam) -> None: ...


class FakeServer:
    def __init__(self, tell: Callable[[], dict[str, Any]]) -> None:
        self.tell = tell

    async def state(self) -> dict[str, Any]:
        return self.tell()


class FakeChat:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.asked = fails, 0
        self.examined_with_notes: list[bool] = []

    async def ask(self, messages: Any, **given: Any) -> Reply:
        self.asked += 1
        if not given.get("keep", True):
            self.examined_with_notes.append(given["notes"])
        await asyncio.sleep(0.001)
        if self.fails and given.get("keep", True):
            raise ServerError("it does not answer")
        return Reply("It is so because of gravity, which pulls things together.")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LONG_EXAM", 3)


def make(tmp_path: Path, tell: Callable[[], dict[str, Any]], chat: FakeChat, **given: Any) -> Trial:
    method = given.pop("method", "rl")
    plan = TrialPlan(method, load("brief"), 0, tmp_path, **{"sessions": 6, "minutes": 1.0, **given})
    made = Trial(TrialOutcome(plan), FakeServer(tell), chat, Silent())  # type: ignore[arg-type]
    made.poll_seconds = 0.01
    return made


async def outcome_of(held: Trial) -> TrialOutcome:
    await held.run()
    assert held.outcome.is_complete
    return held.outcome


async def test_a_trial_ends_after_its_sessions(tmp_path: Path) -> None:
    outcome = await outcome_of(make(tmp_path, lambda: READY, FakeChat()))
    assert [held.number for held in outcome.sessions] == list(range(6))
    assert [exam.version for exam in outcome.exams] == [0, 0]


@pytest.mark.parametrize(("method", "exams"), [("combine", [False] * 6), ("notes+combine", [False] * 6 + [True] * 3)])
async def test_policies_are_examined_without_notes_and_at_last_with_them(
    tmp_path: Path, method: str, exams: list[bool]
) -> None:
    chat = FakeChat()
    outcome = await outcome_of(make(tmp_path, lambda: READY, chat, method=method))
    assert chat.examined_with_notes == exams
    assert (outcome.noted is not None) is exams[-1]


async def test_no_session_begins_while_the_judge_lags_behind(tmp_path: Path) -> None:
    """A person comes back later than that, so what they asked for has been read."""
    lagging = {**READY, "queue": {"to_judge": trial.MOST_UNJUDGED + 1}}
    states = iter([*[lagging] * 40, {**READY, "queue": {"to_judge": trial.MOST_UNJUDGED}}])
    chat, asked = FakeChat(), []

    def tell() -> dict[str, Any]:
        asked.append(chat.asked)
        return next(states, READY)

    outcome = await outcome_of(make(tmp_path, tell, chat))
    assert len(outcome.sessions) == 6
    assert set(asked[:40]) == {3}, "only the first examination"


async def test_the_first_sessions_come_one_after_another(tmp_path: Path) -> None:
    """As one person's do, who wants to see in the next session what was said in the one before."""
    chat = TalkingChat()
    outcome = await outcome_of(make(tmp_path, lambda: READY, chat, sessions=12))
    first = [f"rl-0-{number}" for number in range(trial.SESSIONS_OF_ONE)]
    assert list(dict.fromkeys(chat.sessions))[: len(first)] == first
    assert chat.sessions[: chat.sessions.index(f"rl-0-{len(first)}")] == sorted(
        session for session in chat.sessions if session in first
    )
    assert len(outcome.sessions) == 12
    rest = [session for session in chat.sessions if session not in first]
    assert rest != sorted(rest, key=rest.index), "later ones overlap"


class TalkingChat(FakeChat):
    """Writes down which session each message belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[str] = []

    async def ask(self, messages: Any, **given: Any) -> Reply:
        if given.get("keep", True):
            self.sessions.append(given["session"])
        return await super().ask(messages, **given)


class Clock:
    """A minute goes by whenever somebody looks."""

    def __init__(self) -> None:
        self._minutes = count(1)

    def monotonic(self) -> float:
        return 60.0 * next(self._minutes)


async def test_the_time_that_is_shown_never_runs_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "time", Clock())
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Screen(console, 1) as screen:
        held = make(tmp_path, lambda: READY, FakeChat(), minutes=1000.0)
        held.watch = screen
        screen.starting(held.plan)
        outcome = await outcome_of(held)
    shown = re.findall(r"time .* (\d+\.\d) min", console.file.getvalue())  # type: ignore[attr-defined]
    minutes = [float(number) for number in shown]
    assert minutes == sorted(minutes)
    # That of the last examination goes on too, which is what is seen in the end.
    assert minutes[-1] > outcome.exams[-1].seconds / 60 > 0


async def test_a_server_that_is_gone_ends_the_trial(tmp_path: Path) -> None:
    """Also where everybody waits for a training step."""

    def tell() -> dict[str, Any]:
        calls.append(1)
        if len(calls) > 3:
            raise ServerFailed("it is gone")
        return WAITING

    calls: list[int] = []
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup) as raised:
            await make(tmp_path, tell, FakeChat(), sessions=10_000).run()
    assert raised.group_contains(ServerFailed, match="it is gone")


async def test_a_request_that_fails_ends_the_trial(tmp_path: Path) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup) as raised:
            await make(tmp_path, lambda: READY, FakeChat(fails=True)).run()
    assert raised.group_contains(ServerError)


async def test_nobody_waits_for_ever_for_a_step(tmp_path: Path) -> None:
    held = make(tmp_path, lambda: WAITING, FakeChat(), sessions=10_000, minutes=0.005)
    held.settle_seconds = 0.1
    async with asyncio.timeout(10):
        outcome = await outcome_of(held)
    assert len(outcome.sessions) < 10_000
    assert outcome.left == "8 judged turns wait for the next training step, which needs 8"
    assert not_trained(outcome).startswith("No training step was made, so nothing has changed. 8 judged turns wait")


async def test_a_step_of_what_was_said_is_waited_for_when_the_time_is_up(tmp_path: Path) -> None:
    def tell() -> dict[str, Any]:
        # The step is made a while after the time is up.
        trained = held.seconds > 1.0
        return {**READY, "policy_version": 1} if trained else WAITING

    held = make(tmp_path, tell, FakeChat(), sessions=10_000, minutes=0.005)
    async with asyncio.timeout(20):
        outcome = await outcome_of(held)
    assert outcome.exams[-1].version == 1
    assert not_trained(outcome) == ""


async def test_a_demo_without_a_step_says_how_many_turns_wait(tmp_path: Path) -> None:
    few = {**READY, "next_step": {"samples": 3, "needed": 8}}
    outcome = await outcome_of(make(tmp_path, lambda: few, FakeChat()))
    assert "3 judged turns wait for the next training step, which needs 8. Give it more --m" in not_trained(outcome)
    outcome = await outcome_of(make(tmp_path, lambda: {**few, "policy_version": 2}, FakeChat()))
    assert not_trained(outcome) == "", "some turns always wait"


async def test_a_server_that_cannot_start_is_said_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=r"did not start.*no-such-option"):
        async with run_server(tmp_path, "--no-such-option"):
            raise AssertionError("it started")


async def test_the_options_of_the_owners_own_server_do_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("METHOD", "nonsense"), ("PROXY_HOST", "0.0.0.0"), ("BATCH_SIZE", "many")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ServerFailed):
        async with run_server(tmp_path, "--dry-run"):
            raise AssertionError("it is ready")
    assert "Configuration" in (tmp_path / "server.log").read_text(), "the options were accepted"


async def test_a_server_that_does_not_become_ready_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ServerFailed, match="did not become ready"):
        async with run_server(tmp_path, "--dry-run", start_seconds=0.3):
            raise AssertionError("it is ready")
    assert time.monotonic() - began < 30


async def test_what_goes_wrong_beside_a_server_is_not_taken_for_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ready(*_: Any) -> str:
        return "http://127.0.0.1:1"

    monkeypatch.setattr(module, "ready", ready)
    with pytest.raises(TimeoutError, match="mine"):
        async with run_server(tmp_path, "--dry-run"):
            raise TimeoutError("mine")
