"""The driver against the real API and ledger: what is recorded, at speed, and when the driver dies."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from openclaw_rl.envs.connection import PolicyServer, Sampling
from openclaw_rl.envs.driver import Driver, EpisodeLimits, RolloutPlan
from openclaw_rl.envs.host import EnvironmentHost
from openclaw_rl.envs.tally import Tally
from openclaw_rl.ledger import training, verdicts
from openclaw_rl.ledger.episodes import close_idle, settle_groups
from openclaw_rl.ledger.turns import load_turn, ready_turns
from openclaw_rl.types import EpisodeState, SampleKind, Source, State, Verdict
from support.environments import Guess, Unwatched
from support.harness import running, wait_for
from support.recording import Recording
from support.server_program import ROOT

LIMITS = EpisodeLimits(max_turns=4, turn_seconds=60, episode_seconds=300, sampling=Sampling(32))


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    with running(Recording(tiny_model, tmp_path_factory.mktemp("ledger"))) as bench:
        yield bench  # type: ignore[misc]
        bench.ledger.close()  # type: ignore[attr-defined]


@pytest.fixture
def bench(server: Recording) -> Recording:
    server.empty()
    server.ledger.group_timeout = 600.0
    return server


async def drive(bench: Recording, tasks: int, group: int, parallel: int, *, evaluates: bool = False) -> Tally:
    limits = EpisodeLimits(4, 60, 300, Sampling(32), evaluates=evaluates)
    plan = RolloutPlan("guess", "train", 0, tasks, group, parallel, limits)
    host = EnvironmentHost(Guess())
    try:
        async with PolicyServer(bench.url) as policy:
            return await Driver(host, policy, plan, Unwatched()).run()
    finally:
        await host.close()


def episodes(bench: Recording) -> list[dict[str, object]]:
    rows = bench.db.execute("SELECT e.*, g.name FROM episodes e LEFT JOIN groups g ON g.number = e.group_number")
    return [dict(row) for row in rows]


async def judge_all(bench: Recording) -> None:
    """Do what the judge does with rewarded turns, and settle the groups."""
    for number in bench.ledger.read(ready_turns, (), 1000):
        turn = bench.ledger.read(load_turn, number)
        verdict = Verdict(turn.feedback[-1].score, Source.ENVIRONMENT)
        await bench.ledger.write(verdicts.record, number, verdict, SampleKind.RL, "", len(turn.feedback))
    opened_before = time.time() - bench.ledger.group_timeout
    await bench.ledger.write(settle_groups, opened_before, lambda episode: "")


async def test_every_episode_of_sixty_four_at_once_is_recorded_with_its_exact_tokens(bench: Recording) -> None:
    bench.says = "seven"
    tally = await drive(bench, tasks=8, group=8, parallel=64)
    assert (len(tally.rewarded), tally.retries, tally.unrecorded) == (64, 0, {})
    recorded = episodes(bench)
    assert Counter(episode["state"] for episode in recorded) == {EpisodeState.REWARDED: 64}
    assert sorted(Counter(episode["name"] for episode in recorded).values()) == [8] * 8
    turns = bench.turns()
    assert len(turns) == 128
    by_session: dict[str, list[int]] = {}
    for turn in sorted(turns, key=lambda turn: turn.number):
        before = by_session.get(turn.session.id, [])
        assert turn.prompt_ids[: len(before)] == before, "a request continues the recorded tokens"
        by_session[turn.session.id] = [*turn.prompt_ids, *turn.response_ids]


async def test_an_evaluation_is_recorded_and_never_trained_on(bench: Recording) -> None:
    tally = await drive(bench, tasks=2, group=2, parallel=4, evaluates=True)
    assert tally.unrecorded == {}
    assert {episode["reward"] for episode in episodes(bench)} == {result.reward for result in tally.results}
    assert set(bench.states()) == {State.DROPPED}


async def test_a_driver_that_is_killed_leaves_no_half_group(bench: Recording) -> None:
    bench.says = "seven and more words that take a while"
    bench.sampler.seconds_per_token = 0.01
    sums = f"{ROOT / 'examples' / 'custom_environment.py'}:Sums"
    flags = ["--url", bench.url, "--env", sums, "--tasks", "9", "--group", "4", "--parallel", "3"]
    driver = subprocess.Popen([sys.executable, "-m", "openclaw_rl", "rollout", *flags], cwd=ROOT)

    def is_in_mid_group() -> bool:
        recorded = episodes(bench)
        sizes = Counter(episode["name"] for episode in recorded if episode["name"])
        held = sum(episode["state"] == EpisodeState.HELD for episode in recorded)
        return len(sizes) >= 2 and held >= 1 and 2 in sizes.values()

    wait_for(is_in_mid_group)
    driver.kill()
    driver.wait()
    sizes = Counter(episode["name"] for episode in episodes(bench) if episode["name"])
    whole = {name for name, size in sizes.items() if size == 4}
    assert len(sizes) > len(whole), "the last group is not complete"
    await judge_all(bench)
    assert await claimed_groups(bench, step=1) == whole, "only whole groups are trained on"
    # When the group has timed out, its survivors are trained on together, if there are two.
    bench.ledger.group_timeout = 0.0
    await judge_all(bench)
    survivors = {name for name, size in sizes.items() if name not in whole}
    assert await claimed_groups(bench, step=2) == survivors
    await bench.ledger.write(close_idle, 0)
    assert EpisodeState.HELD not in {episode["state"] for episode in episodes(bench)}


async def claimed_groups(bench: Recording, step: int) -> set[object]:
    """The groups of the turns that a step takes, each of which it must take as a whole."""
    turns = set(await bench.ledger.write(training.claim, 1000, step, max_staleness=8))
    groups = set()
    rows = bench.db.execute(
        "SELECT t.number, g.name, t.state FROM turns t JOIN episodes e ON e.session = t.session "
        "JOIN groups g ON g.number = e.group_number"
    ).fetchall()
    for name in {row["name"] for row in rows}:
        members = {row["number"] for row in rows if row["name"] == name}
        assert members <= turns or not members & turns
        if members & turns:
            groups.add(name)
    return groups
