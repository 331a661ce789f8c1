"""The driver against a server that does what a test wants: what is sent, what is rewarded, and what failures become."""

import asyncio
import json
import math
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from openclaw_rl.envs import connection as connection_module
from openclaw_rl.envs.base import Outcome, Step
from openclaw_rl.envs.connection import PolicyServer, QueueState, Sampling
from openclaw_rl.envs.driver import STOPPED, Driver, EpisodeLimits, RolloutPlan
from openclaw_rl.envs.host import MAX_TEXT_CHARACTERS, EnvironmentHost
from openclaw_rl.envs.tally import Tally, troubles
from openclaw_rl.errors import UserError
from support.environments import Guess, InstantPolicy, Repeats, first_only, hangs, raises
from support.episode_server import EpisodeServer, completion, refusal
from support.harness import running

LIMITS = EpisodeLimits(max_turns=4, turn_seconds=20, episode_seconds=60, sampling=Sampling(32, 0.5))
PLAN = RolloutPlan("guess", "train", seed=3, tasks=1, group=1, parallel=4, limits=LIMITS)
#: Time-outs that a test waits for.
HASTY = replace(LIMITS, turn_seconds=0.2)
QUICK = replace(connection_module.CHAT_RETRIES, first_pause=0.001)


class Strange(dict[str, Any]):
    """A message whose parts cannot be read."""

    def get(self, *_: Any) -> Any:
        raise ValueError("strange")


class Silent:
    """Watches nothing."""

    def __init__(self) -> None:
        self.waits = 0

    def ended(self, tally: Tally) -> None: ...

    def waiting(self, tally: Tally) -> None:
        self.waits += 1


@pytest.fixture(scope="module")
def service() -> Iterator[EpisodeServer]:
    with running(EpisodeServer(), timeout_graceful_shutdown=0) as server:  # type: ignore[arg-type]
        yield server  # type: ignore[misc]


@pytest.fixture
def server(service: EpisodeServer) -> EpisodeServer:
    url, app = service.url, service.app
    fresh = EpisodeServer()
    service.__dict__.update({**fresh.__dict__, "url": url, "app": app})
    return service


@pytest.fixture
async def policy(server: EpisodeServer) -> AsyncIterator[PolicyServer]:
    async with PolicyServer(server.url, retries=QUICK) as policy:
        yield policy


@pytest.fixture
def instant() -> InstantPolicy:
    return InstantPolicy()


@pytest.fixture
def env() -> Guess:
    return Guess()


async def run(
    env: Any, policy: Any, plan: RolloutPlan = PLAN, watch: Silent | None = None, grace_seconds: float = 2.0
) -> Tally:
    host = EnvironmentHost(env, grace_seconds)
    try:
        return await Driver(host, policy, plan, watch or Silent()).run()
    finally:
        await host.close()


async def test_an_episode_is_a_session_with_its_exact_history(
    env: Guess, policy: PolicyServer, server: EpisodeServer
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x":  1}'}}
    said = {"content": None, "tool_calls": [call], "reasoning_content": "hm", "unknown": [1]}
    server.script = lambda session, number: completion(number, version=number, **said)
    tally = await run(env, policy)
    ((session, (first, second)),) = server.requests.items()
    question = {"role": "user", "content": "Guess train-3-0."}
    assert first["messages"] == [question]
    answer = {"role": "assistant", **said}
    assert second["messages"] == [question, answer, {"role": "user", "content": "Again."}]
    assert (first["max_tokens"], first["temperature"], first["seed"] == second["seed"]) == (32, 0.5, False)
    assert {headers["x-episode"] for headers in server.headers} == {"1"}
    (body,) = server.rewards[session]
    steps = [{"id": f"chatcmpl-{number}", "reward": 0.5, "text": "Guess lower."} for number in (1, 2)]
    reward = body.pop("reward")
    assert body == {"task": "guess/train-3-0", "solved": reward > 0.5, "text": "Guess 7.", "steps": steps}
    (result,) = tally.results
    assert (result.reward, result.turns, result.staleness, tally.version) == (reward, 2, 1, 2)
    assert env.log == ["closed train-3-0", "closed"]
    assert env.sessions == [session], "it may keep something under this name"


async def test_attempts_at_a_task_are_a_group(env: Guess, policy: PolicyServer, server: EpisodeServer) -> None:
    tally = await run(env, policy, replace(PLAN, tasks=3, group=2))
    groups = [body["group"] for body in server.reported]
    assert [groups.count(group) for group in set(groups)] == [2, 2, 2]
    assert {body["group_size"] for body in server.reported} == {2}
    seeds = [bodies[0]["seed"] for bodies in server.requests.values()]
    assert len(set(seeds)) == 6, "attempts at a task differ"
    assert (len(tally.results), tally.groups) == (6, 3)


async def test_a_seed_gives_the_same_tasks_and_the_same_draws(policy: PolicyServer, server: EpisodeServer) -> None:
    async def sent(seed: int) -> list[Any]:
        server.requests.clear()
        await run(Guess(), policy, replace(PLAN, tasks=4, seed=seed))
        return sorted(json.dumps(bodies) for bodies in server.requests.values())

    assert await sent(1) == await sent(1)
    assert await sent(1) != await sent(2)


async def test_an_evaluation_is_marked_and_never_waits(env: Guess, policy: PolicyServer, server: EpisodeServer) -> None:
    server.state = {"policy_version": 1, "queue": {"to_judge": 99, "to_train": 99}, "next_step": {"needed": 4}}
    await run(env, policy, replace(PLAN, limits=replace(LIMITS, evaluates=True)))
    assert {headers["x-episode"] for headers in server.headers} == {"eval"}
    assert len(server.reported) == 1


async def test_after_the_last_turn_the_episode_is_rewarded_as_it_stands(
    policy: PolicyServer, server: EpisodeServer
) -> None:
    tally = await run(Guess(turns=99), policy)
    assert tally.results[0].turns == LIMITS.max_turns
    assert "reward" in server.reported[0]


async def test_an_episode_that_outgrows_the_context_is_rewarded_as_it_stands(
    policy: PolicyServer, server: EpisodeServer
) -> None:
    too_long = refusal(400, "too long", "context_length_exceeded")
    server.script = lambda session, number: too_long if number == 3 else None
    tally = await run(Guess(turns=99), policy)
    assert (tally.results[0].turns, "reward" in server.reported[0]) == (2, True)
    server.script = lambda session, number: too_long
    tally = await run(Guess(), policy)
    assert "400: too long" in tally.results[0].error, "nothing that the policy wrote made the first prompt too long"


@pytest.mark.parametrize(
    ("call", "fault", "reason"),
    [
        ("open", raises(ValueError("no room")), "open failed: environments.py:.* ValueError: no room"),
        ("start", raises(SystemExit(3)), "start failed: .*SystemExit: 3"),
        ("start", raises(asyncio.CancelledError()), "start failed: CancelledError"),
        ("step", raises(TimeoutError("the page")), "step failed: .*TimeoutError: the page"),
        ("step", hangs, "step did not end within 0.2 seconds"),
        ("step", lambda: Step([], reward=math.nan, done=True), "the reward nan, which is not a finite number"),
        ("step", lambda: Step([]), "no message, though the episode is not done"),
        ("step", lambda: Step([], reward=10**400, done=True), "the reward 10000.*, which is not a finite number from"),
        ("step", lambda: Step([{"role": "robot"}]), "instead of a message with a role"),
        ("step", lambda: Step([{"role": ["x"]}]), "instead of a message with a role"),  # type: ignore[list-item]
        ("step", lambda: Step([Strange()]), "step failed: .*ValueError: strange"),
        ("step", lambda: Step([{"role": "user", "content": {1, 2}}]), "content is a set"),
        ("step", lambda: Step([{"role": "user", "content": "x"}] * 100), "100 messages; at most 64"),
        ("step", lambda: "done", "a str instead of a Step"),
        ("outcome", lambda: Outcome(math.inf, solved=True), "the reward inf, which is not a finite number"),
        ("outcome", lambda: Outcome(2e6, solved=True), "the reward 2000000.0, which is not .* to 1e.06"),
        ("outcome", lambda: 1.0, "a float instead of an Outcome"),
        ("outcome", hangs, "outcome did not end within 0.2 seconds"),
    ],
)
async def test_a_failure_of_the_environment_is_made_again_and_then_an_error(
    env: Guess, instant: InstantPolicy, call: str, fault: Any, reason: str
) -> None:
    env.faults[call] = fault
    tally = await run(env, instant, replace(PLAN, group=2, limits=HASTY if fault is hangs else LIMITS))
    assert (len(tally.results), tally.retries, len(tally.rewarded)) == (2, 2, 0)
    assert sum("group" in body for body in instant.reports) == 2, "the first try is outside the group"
    assert len(instant.reports) == 4
    for body in instant.reports:
        assert "reward" not in body
        assert re.search(reason, body["error"]), body["error"]


async def test_an_attempt_that_works_the_second_time_counts(
    env: Guess, policy: PolicyServer, server: EpisodeServer
) -> None:
    env.faults["step"] = first_only(raises(RuntimeError("once")))
    tally = await run(env, policy, replace(PLAN, group=2))
    assert (len(tally.rewarded), tally.retries, tally.failures.total()) == (2, 1, 0)
    (again,) = [session for session in server.rewards if session.endswith("-retry")]
    assert server.rewards[again][0]["group"] == again.rsplit("-", 2)[0]


async def test_an_environment_that_hangs_while_closing_changes_nothing(env: Guess, instant: InstantPolicy) -> None:
    env.faults["close"] = hangs
    tally = await run(env, instant, replace(PLAN, limits=HASTY))
    assert (len(tally.rewarded), tally.retries) == (1, 0)


async def test_an_environment_that_blocks_its_thread_is_left_behind(env: Guess, instant: InstantPolicy) -> None:
    freed = threading.Event()
    env.faults["step"] = first_only(freed.wait)
    tally = await run(env, instant, replace(PLAN, tasks=3, parallel=1, limits=HASTY), grace_seconds=0.2)
    assert not freed.is_set()
    freed.set()
    assert (len(tally.rewarded), tally.retries) == (3, 1)


async def test_a_flood_is_cut_with_a_note(env: Guess, policy: PolicyServer, server: EpisodeServer) -> None:
    flood = "x" * 5_000_000
    parts = [{"type": "text", "text": flood}]
    messages = [{"role": "user", "content": flood}, {"role": "user", "content": parts}]
    env.faults["step"] = first_only(lambda: Step(messages, hint=flood))
    tally = await run(env, policy)
    assert len(tally.rewarded) == 1
    ((_, second),) = server.requests.values()
    for content in (second["messages"][2]["content"], second["messages"][3]["content"][0]["text"]):
        assert len(content) < MAX_TEXT_CHARACTERS + 100
        assert f"[… {len(flood) - MAX_TEXT_CHARACTERS} characters cut …]" in content
    assert len(server.reported[0]["steps"][0]["text"]) < 5000


async def test_a_busy_server_is_waited_for(env: Guess, policy: PolicyServer, server: EpisodeServer) -> None:
    busy = {1: refusal(429, **{"retry-after": "0.01"}), 2: refusal(503), 3: refusal(503, **{"retry-after": "soon"})}
    server.script = lambda session, number: busy.get(number)
    server.on_reward = lambda session, number: refusal(503) if number < 3 else None
    tally = await run(env, policy)
    assert (len(tally.rewarded), tally.retries) == (1, 0)
    assert len({json.dumps(body) for (bodies,) in [server.rewards.values()] for body in bodies}) == 1


async def test_a_server_that_fails_is_not_the_policys_fault(
    env: Guess, policy: PolicyServer, server: EpisodeServer
) -> None:
    server.script = lambda session, number: refusal(500, "the worker died") if number == 2 else None
    tally = await run(env, policy, replace(PLAN, group=2))
    assert tally.failures == {"the server answers 500: the worker died": 2}
    assert sum("group" in body for body in server.reported) == 2


async def test_a_server_that_is_too_slow_is_not_the_policys_fault(
    env: Guess, policy: PolicyServer, server: EpisodeServer
) -> None:
    server.seconds = 5
    tally = await run(env, policy, replace(PLAN, limits=HASTY))
    assert tally.failures == {"the server did not answer within 0.2 seconds": 1}
    tally = await run(env, policy, replace(PLAN, limits=replace(LIMITS, episode_seconds=0.05)))
    assert tally.failures == {"the episode took longer than 0.05 seconds": 1}


async def test_a_reward_that_is_refused_is_counted(env: Guess, policy: PolicyServer, server: EpisodeServer) -> None:
    server.on_reward = lambda session, number: refusal(409, "too late")
    tally = await run(env, policy)
    assert tally.unrecorded == {"too late": 1}


async def test_an_attempt_whose_reward_is_refused_ends_with_an_error(
    env: Guess, policy: PolicyServer, server: EpisodeServer
) -> None:
    server.on_reward = lambda session, number: refusal(400, "the text is odd") if number == 1 else None
    tally = await run(env, policy, replace(PLAN, group=2))
    assert (len(tally.results), tally.rewarded, tally.unrecorded) == (2, [], {"the text is odd": 2})
    for reward, error in server.rewards.values():
        group = {name: reward[name] for name in ("task", "group", "group_size")}
        assert error == {**group, "error": "the text is odd"}


async def test_a_wrong_key_ends_the_rollout_with_a_sentence(
    env: Guess, policy: PolicyServer, server: EpisodeServer
) -> None:
    server.script = lambda session, number: refusal(401, "Wrong key.")
    with pytest.raises(ExceptionGroup) as raised:
        await run(env, policy)
    assert raised.group_contains(UserError, match="Wrong key. Give --api-key")


async def test_a_server_that_is_gone_ends_the_rollout(env: Guess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_AWAY_SECONDS", 0.05)
    async with PolicyServer("http://127.0.0.1:9", retries=QUICK) as nobody:
        with pytest.raises(ExceptionGroup) as raised:
            await run(env, nobody)
    assert raised.group_contains(
        UserError, match=r"^The server at http://127\.0\.0\.1:9 does not .*\. Is it still running\?"
    )


async def test_at_most_so_many_episodes_run_at_once(env: Guess, policy: PolicyServer, server: EpisodeServer) -> None:
    server.seconds = 0.1
    await run(env, policy, replace(PLAN, tasks=2, group=4, parallel=3))
    assert server.most_running == 3


async def test_no_group_starts_while_two_batches_wait(env: Guess, policy: PolicyServer, server: EpisodeServer) -> None:
    queue = {"held": 500, "to_judge": 3, "to_train": 6}
    server.state = {"policy_version": 5, "queue": queue, "next_step": {"needed": 4}}

    class CatchesUp(Silent):
        def waiting(self, tally: Tally) -> None:
            super().waiting(tally)
            assert (tally.batches_ahead, tally.version, server.requests) == (2.25, 5, {})
            if self.waits == 3:
                queue["to_train"] = 5

    watch = CatchesUp()
    tally = await run(env, policy, replace(PLAN, poll_seconds=0.001), watch)
    assert (watch.waits, len(tally.rewarded)) == (3, 1)


async def test_a_driver_that_is_stopped_reports_every_attempt_of_its_groups(
    env: Guess, policy: PolicyServer, server: EpisodeServer
) -> None:
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stuck() -> Any:
        loop.call_soon_threadsafe(reached.set)
        return hangs()

    env.faults["outcome"] = stuck
    driving = asyncio.create_task(run(env, policy, replace(PLAN, tasks=9, group=4, parallel=2)))
    await reached.wait()
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert [body["error"] for body in server.reported] == [STOPPED] * 4
    assert len({body["group"] for body in server.reported}) == 1
    assert env.log[-1] == "closed"
    assert len(env.log) == 3, "both running episodes were closed"


async def test_tasks_that_cannot_be_had_end_the_rollout_with_a_sentence(policy: PolicyServer) -> None:
    class NoTasks(Guess):
        def tasks(self, split: str, seed: int) -> Any:
            raise LookupError(split)

    with pytest.raises(ExceptionGroup) as raised:
        await run(NoTasks(), policy)
    assert raised.group_contains(UserError, match="The environment guess gives no tasks for split 'train'")


async def test_a_task_that_is_repeated_is_answered_anew_or_not_attempted_again(
    policy: PolicyServer, server: EpisodeServer
) -> None:
    await run(Repeats(), policy, replace(PLAN, tasks=6))
    seeds = [bodies[0]["seed"] for bodies in server.requests.values()]
    assert len(set(seeds)) == 6
    tally = await run(Repeats(), policy, replace(PLAN, tasks=6, distinct=True))
    assert (len(tally.results), tally.tasks_repeat) == (2, True)
    assert ("tasks", "only 2 different ones") in troubles(tally)


async def test_sessions_have_plain_names(env: Guess, policy: PolicyServer, server: EpisodeServer) -> None:
    await run(env, policy, replace(PLAN, name="of/größe (1)\n"))
    (session,) = server.requests
    assert re.fullmatch(r"gr-e-1--[0-9a-f]{10}-0-0", session), session


async def test_an_episode_that_was_being_opened_is_closed(env: Guess, instant: InstantPolicy) -> None:
    reached, freed = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow() -> None:
        loop.call_soon_threadsafe(reached.set)
        freed.wait()

    env.faults["open"] = slow
    driving = asyncio.create_task(run(env, instant))
    await reached.wait()
    driving.cancel()
    await asyncio.wait([driving], timeout=0.05)
    freed.set()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert env.log == ["closed train-3-0", "closed"]


async def test_tools_that_cannot_be_sent_are_an_error(env: Guess, instant: InstantPolicy) -> None:
    class Odd(Guess):
        def open(self, task: Any) -> Any:
            episode = super().open(task)
            episode.tools = [{"type": {1, 2}}]
            return episode

    tally = await run(Odd(), instant)
    assert "tools has a tool that is not JSON" in tally.results[0].error


STEP = {"needed": 4}


@pytest.mark.parametrize(
    "state",
    [
        {"queue": None, "next_step": STEP},
        {"queue": {"to_judge": [], "to_train": 0}, "next_step": STEP},
        {"queue": 7, "next_step": STEP},
        {"queue": {"to_judge": 0, "to_train": 0}, "next_step": "soon"},
        {"policy_version": None},
        ["ready"],
    ],
)
async def test_a_queue_that_is_not_told_is_unknown(policy: PolicyServer, server: EpisodeServer, state: Any) -> None:
    server.state = state
    assert await policy.queue() is None


async def test_nothing_starts_while_the_queue_is_unknown(
    env: Guess, instant: InstantPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([None, None, QueueState(version=4)])

    async def queue() -> QueueState | None:
        assert not instant.reports
        return next(states)

    monkeypatch.setattr(instant, "queue", queue)
    tally = await run(env, instant, replace(PLAN, poll_seconds=0.001))
    assert (len(tally.rewarded), tally.version) == (1, 4)


async def test_a_server_is_gone_when_it_has_failed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1000.0, 1000.0 + connection_module.MAX_AWAY_SECONDS, 2000.0])
    async with PolicyServer("http://127.0.0.1:9") as nobody:
        monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert await nobody.queue() is None, "the time before the first failure does not count"
        assert await nobody.queue() is None
        with pytest.raises(UserError, match=r"Is it still running\?"):
            await nobody.queue()


async def test_an_environment_may_run_out_of_tasks(policy: PolicyServer) -> None:
    class Few(Guess):
        def tasks(self, split: str, seed: int) -> Any:
            return [task for task, _ in zip(super().tasks(split, seed), range(2), strict=False)]

    tally = await run(Few(), policy, replace(PLAN, tasks=9))
    assert len(tally.results) == 2
