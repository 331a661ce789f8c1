"""A real server that is killed again and again learns, bit for bit, what it would have learned undisturbed."""

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.learn.checkpoints import Checkpoint, Checkpoints, line_folder
from openclaw_rl.ledger import verdicts
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.types import SHARED, SampleKind, Source, State, Verdict
from support.records import Book
from support.server_program import SECONDS, SERVE, Program, serving, until

pytestmark = pytest.mark.more

STEPS, BATCH = 9, 2
FLAGS = (
    *("--method", "rl", "--judge", "feedback", "--batch-size", str(BATCH), "--save-interval", "3"),
    *("--lora-rank", "4", "--lora-dropout", "0.2", "--learning-rate", "1e-3", "--max-kl", "100"),
    *("--kv-cache-gib", "0.1", "--max-staleness", "1000"),
)
#: How many steps count when the server is killed: before the first checkpoint, after it, after the second.
KILLED_AT = (1, 4, 7)
#: The same, with lines: each of three people has a third of the turns, and the learner holds two lines at a time.
PEOPLE = ("anna", "ben", "carl")
KEY = "sk-admin"
TEAM = (
    *("--policy-per-user", "--policy-slots", "2", "--proxy-host", "127.0.0.1", "--admin-key", KEY),
    *("--api-key", ",".join(f"{name}=sk-{name}" for name in PEOPLE)),
)
#: These numbers of a step depend on the clock.
TIMES = {"step_seconds", "latency_seconds", "time"}


def judged_turns(folder: Path, *owners: str) -> None:
    """Record the turns of all steps as a server would have captured and judged them."""
    draw, book = random.Random(3), Book(folder)
    for count in range(STEPS * BATCH):
        prompt, response = ([draw.randrange(3, 300) for _ in range(length)] for length in (12, 6))
        number = book.put(
            State.READY,
            prompt_ids=prompt,
            response_ids=response,
            logprobs=[-draw.uniform(1, 5) for _ in response],
            **({"owner": owners[count % len(owners)]} if owners else {}),
        )
        score = draw.choice([-1.0, 1.0])
        assert book.change(verdicts.record, number, Verdict(score, Source.LLM), SampleKind.RL, "", 0)
    book.close()


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """The record of all steps, without what depends on the clock."""
    with contextlib.closing(connect(run_dir / FILE, readonly=True)) as db:
        rows = db.execute("SELECT number, step, version, outcome, metrics FROM updates ORDER BY number").fetchall()
        return [
            {
                **dict(row),
                "metrics": {k: v for k, v in json.loads(row["metrics"]).items() if k not in TIMES},
                "turns": [
                    turn
                    for (turn,) in db.execute(
                        "SELECT turn FROM update_turns WHERE number = ? ORDER BY turn", (row["number"],)
                    )
                ],
            }
            for row in rows
        ]


def count_applied(run_dir: Path) -> int:
    with contextlib.closing(connect(run_dir / FILE, readonly=True)) as db:
        (count,) = db.execute("SELECT count(*) FROM updates WHERE outcome = 'applied'").fetchone()
        return int(count)


def state(program: Program) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(
        f"{program.url}/readyz", headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    ).json()
    return told


def serving_version(program: Program) -> int:
    return int(state(program)["policy_version"])


def finish(model: Path, run_dir: Path, *flags: str) -> None:
    """Let a server make the steps that are left, and stop it."""
    with serving(SERVE, model, "--run-dir", str(run_dir), *FLAGS, *flags) as program:
        until(lambda: count_applied(run_dir) == STEPS, program)
        until(lambda: flags or serving_version(program) == STEPS, program)
        program.process.terminate()
        assert program.process.wait(SECONDS) == 0
        assert "Traceback" not in program.log


def last(run_dir: Path, line: str = SHARED) -> Checkpoint:
    latest = Checkpoints.of_run(line_folder(run_dir, line), 3).latest()
    assert latest is not None
    return latest


def assert_same(actual: Checkpoint, expected: Checkpoint) -> None:
    for name in ("adapter_model.safetensors", "learner.optimizer", "learner.json"):
        assert (actual.folder / name).read_bytes() == (expected.folder / name).read_bytes(), name


def test_killed_again_and_again_it_learns_bit_for_bit_what_it_learns_undisturbed(
    tiny_model: Path, tmp_path: Path
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    judged_turns(undisturbed)
    shutil.copytree(undisturbed, killed)
    finish(tiny_model, undisturbed)
    served = 0
    for step in KILLED_AT:
        with serving(SERVE, tiny_model, "--run-dir", str(killed), *FLAGS) as program:
            # What served last serves again, before any step is made again.
            assert serving_version(program) >= served
            until(lambda step=step: count_applied(killed) >= step, program)
            served = serving_version(program)
            program.process.kill()
            program.process.wait()
    finish(tiny_model, killed)
    actual, expected = last(killed), last(undisturbed)
    assert (actual.step, actual.version) == (expected.step, expected.version) == (STEPS, STEPS)
    assert_same(actual, expected)
    assert steps(killed) == steps(undisturbed)
    assert not [path.name for path in killed.rglob(".unfinished-*")]


def test_killed_in_steps_of_one_line_while_others_wait_all_lines_learn_what_they_learn_undisturbed(
    tiny_model: Path, tmp_path: Path
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    judged_turns(undisturbed, *PEOPLE)
    shutil.copytree(undisturbed, killed)
    finish(tiny_model, undisturbed, *TEAM)
    for step in KILLED_AT:
        with serving(SERVE, tiny_model, "--run-dir", str(killed), *FLAGS, *TEAM) as program:
            until(lambda step=step: count_applied(killed) >= step, program)
            while (training := state(program)["learner"])[:13] != "training step" and count_applied(killed) < STEPS:
                pass
            program.process.kill()
            program.process.wait()
            assert "of the line" in training
    finish(tiny_model, killed, *TEAM)
    for name in PEOPLE:
        assert last(killed, name).step == STEPS // len(PEOPLE)
        assert_same(last(killed, name), last(undisturbed, name))
    # A step of one line before or after one of another line is the same step.
    made = [
        {(tuple(step["turns"]), step["step"]) for step in steps(folder) if step["outcome"] == "applied"}
        for folder in (killed, undisturbed)
    ]
    assert made[0] == made[1]
    assert len(made[0]) == STEPS
