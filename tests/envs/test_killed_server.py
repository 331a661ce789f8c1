"""A rollout whose server is killed at random instants, and started again: real processes, kill -9."""

import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.types import EpisodeState
from support.server_program import ROOT, SERVE, free_port, serving, until

pytestmark = pytest.mark.more

#: Its rewards differ for any model.
LENGTHS = f"{ROOT / 'tests' / 'support' / 'environments.py'}:Lengths"
KILLS = 2
GROUP = 2
LEARN = (
    *("--method", "rl", "--judge", "feedback", "--baseline", "group", "--batch-size", "4", "--max-staleness", "1000"),
    *("--lora-rank", "4", "--kv-cache-gib", "0.1", "--max-kl", "100", "--group-timeout", "1", "--session-timeout", "1"),
)


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(connect(run_dir / FILE, readonly=True)) as db:
        return [tuple(row) for row in db.execute(query)]


def rewarded(run_dir: Path) -> int:
    ((count,),) = rows(run_dir, "SELECT count(*) FROM episodes WHERE reward IS NOT NULL")
    return int(count)


def applied(run_dir: Path) -> list[int]:
    """The turns that were trained on."""
    trained = "update_turns JOIN updates USING (number) WHERE outcome = 'applied'"
    return [turn for (turn,) in rows(run_dir, f"SELECT turn FROM {trained}")]


def test_nothing_is_trained_on_twice_and_no_half_group_when_the_server_is_killed_in_mid_episode(
    tiny_model: Path, tmp_path: Path
) -> None:
    draw, port = random.Random(3), free_port()
    run_dir = tmp_path / "run"
    flags = ("--run-dir", str(run_dir), *LEARN, "--proxy-port", str(port))
    rollout = [
        "rollout",
        "--url",
        f"http://127.0.0.1:{port}",
        "--env",
        LENGTHS,
        "--group",
        str(GROUP),
        "--parallel",
        "4",
    ]
    size = ["--tasks", "1000", "--max-tokens", "12", "--temperature", "1"]
    driver: subprocess.Popen[str] | None = None
    try:
        for _ in range(KILLS):
            with serving(SERVE, tiny_model, *flags) as program:
                driver = driver or subprocess.Popen(
                    [sys.executable, "-m", "openclaw_rl", *rollout, *size], cwd=ROOT, text=True, stdout=subprocess.PIPE
                )
                before = rewarded(run_dir)
                until(lambda before=before: rewarded(run_dir) > before + 4, program)
                time.sleep(draw.uniform(0, 0.3))
                program.process.kill()
                program.process.wait()
        with serving(SERVE, tiny_model, *flags) as program:
            before = rewarded(run_dir)
            until(lambda: rewarded(run_dir) > before + 4 and len(applied(run_dir)) > 0, program)
            assert driver is not None
            assert driver.poll() is None, "the driver waits for the server"
            driver.kill()
            driver.wait()
            held = f"SELECT count(*) FROM episodes WHERE state = '{EpisodeState.HELD}'"
            until(lambda: rows(run_dir, held) == [(0,)], program)
    finally:
        if driver is not None:
            driver.kill()
            driver.wait()
    check(run_dir)


def check(run_dir: Path) -> None:
    """Each turn is trained on at most once, and the attempts of a group together. Attempts left alone have a reason."""
    turns = applied(run_dir)
    assert len(set(turns)) == len(turns)
    of_groups = rows(
        run_dir,
        "SELECT e.group_number, count(DISTINCT u.number) "
        "FROM episodes e LEFT JOIN turns t ON t.session = e.session LEFT JOIN update_turns ut ON ut.turn = t.number "
        "LEFT JOIN updates u ON u.number = ut.number AND u.outcome = 'applied' "
        "WHERE e.group_number IS NOT NULL AND e.reward IS NOT NULL GROUP BY e.group_number",
    )
    assert all(steps <= 1 for _, steps in of_groups), "a group is trained on in one step"
    half = rows(
        run_dir,
        "SELECT e.group_number FROM episodes e JOIN turns t ON t.session = e.session "
        "WHERE e.reward IS NOT NULL GROUP BY e.group_number "
        "HAVING count(DISTINCT t.state IN ('applied', 'batched')) > 1",
    )
    assert half == [], "no half group"
    reasons = rows(run_dir, f"SELECT state, error FROM episodes WHERE state != '{EpisodeState.REWARDED}'")
    assert all(error for _, error in reasons), reasons
