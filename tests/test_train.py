"""`openclaw-rl train`: trajectories in, a checkpoint out, also after a kill -9 and Ctrl-C."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openclaw_rl.app import train as training
from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.app.config import Config
from openclaw_rl.app.console import TurnsBar
from openclaw_rl.app.startup_signals import Start
from openclaw_rl.cli import main
from openclaw_rl.learn.checkpoints import Checkpoints, verify
from openclaw_rl.learn.samples import score_imported
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.types import ScoreRequest, Scores, State
from support.learning_run import LearningRun, PickySampler

GOOD, BAD = "Perfect, thank you!", "No, that is wrong."
OPTIONS = ("--method", "rl", "--judge", "feedback", "--batch-size", "2", "--lora-rank", "4", "--learning-rate", "1e-3")
FAST = ("--max-kl", "100", "--kv-cache-gib", "0.1", "--max-context-tokens", "256")
#: A test fails when nothing has happened for this long.
SECONDS = 120


def sessions(*next_states: str | None) -> str:
    """A session of one turn for each next state."""
    return "".join(
        json.dumps(
            {
                "session_id": f"s{number}",
                "turns": [{"prompt": f"What is {number}?", "response": "the quick fox", "next_state": next_state}],
            }
        )
        + "\n"
        for number, next_state in enumerate(next_states)
    )


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The command takes over Ctrl-C; the tests keep theirs."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Training:
    """A file, a run directory, and the command on both."""

    def __init__(self, folder: Path, model: Path, content: str) -> None:
        self.run_dir, self.file = folder / "run", folder / "data.jsonl"
        self.file.write_text(content)
        self.arguments = ["train", str(self.file), "--run-dir", str(self.run_dir), "--model-name", str(model)]
        self.arguments += [*OPTIONS, *FAST]

    def run(self, *flags: str) -> int:
        return main([*self.arguments, *flags])

    @contextlib.contextmanager
    def process(self, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "openclaw_rl", *self.arguments, *flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(connect(self.run_dir / FILE, readonly=True)) as db:
            return [tuple(row) for row in db.execute(query)]

    def uses(self) -> Counter[int]:
        """In how many steps that count each turn is."""
        query = "SELECT turn FROM update_turns JOIN updates USING (number) WHERE outcome = 'applied'"
        return Counter(turn for (turn,) in self.rows(query))

    def until_steps(self, count: int, process: "subprocess.Popen[bytes]") -> None:
        end = time.monotonic() + SECONDS
        while not (self.run_dir / FILE).is_file() or sum(self.uses().values()) < 2 * count:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end, "no step was made"
            time.sleep(0.01)


@pytest.mark.more
def test_killed_it_goes_on_and_uses_each_turn_once_an_epoch(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Training(tmp_path, tiny_model, sessions(GOOD, BAD, GOOD, BAD, GOOD, None) + "no json\n")
    with command.process("--epochs", "2") as process:
        command.until_steps(1, process)
        process.kill()
    assert command.run("--epochs", "2") == 1, "a line was refused"
    said = capsys.readouterr()
    assert f"{command.file}:7: " in said.err
    table = {line[:10].strip(): line[10:].strip() for line in said.out.splitlines()}
    # Five turns in batches of two: the last batch of each epoch is smaller.
    assert table["steps"].endswith(" now, 6 in all")
    assert (table["turns"], table["judged"], table["trained on"], table["dropped"]) == ("6", "5", "5", "1")
    assert table["1"] == "the session ended without a next state"
    assert command.uses() == dict.fromkeys(range(1, 6), 2)
    newest = Checkpoints.of_run(command.run_dir, 3).all()[-1]
    verify(newest.folder)
    assert (newest.step, table["checkpoint"]) == (6, str(newest.folder))
    # The second epoch begins with the probabilities of policies that the first one made.
    versions = {version for (version,) in command.rows("SELECT version FROM turns WHERE state = 'applied'")}
    assert min(versions) >= 3


class Scorer(PickySampler):
    """Gives every token the same log-prob, under any version."""

    async def score(self, request: ScoreRequest) -> Scores:
        return Scores([-0.5] * request.last_n)


async def through(run: LearningRun, epochs: int) -> str:
    """Go through imported turns with a learner that only notes what it is given."""
    ledger, sampler = run.book.ledger, Scorer()
    sampler.served = run.sampler.served
    scoring = asyncio.create_task(score_imported(ledger, sampler, run.settings["batch_size"]))
    try:
        async with asyncio.timeout(SECONDS):
            return await training.run_epochs(ledger, run.loop, epochs, TurnsBar(Console(quiet=True)))
    finally:
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)


async def test_every_epoch_has_all_imported_turns_also_the_last_few_and_a_checkpoint(tmp_path: Path) -> None:
    run = await LearningRun(tmp_path, save_interval=100).start()
    turns = run.judged(5, owner="imported")
    (other,) = run.judged(1)
    assert await through(run, 2) == ""
    assert run.applied() == [turns[:2], turns[2:4], [turns[4], other], turns[:2], turns[2:4], turns[4:]]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [3, 6]
    assert run.learner.policy == run.applied()
    # The same call again has nothing to do; a third epoch is one more.
    assert await through(run, 2) == ""
    assert await through(run, 3) == ""
    assert run.loop.step == 9
    await run.close()


async def test_after_ctrl_c_the_steps_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await LearningRun(tmp_path, save_interval=100).start()

    async def start_loops(stack: contextlib.AsyncExitStack, *_given: Any) -> BackgroundLoops:
        loops = BackgroundLoops(None, run.loop, SECONDS)
        stack.push_async_callback(loops.stop)
        return loops

    monkeypatch.setattr(training, "start_loops", start_loops)
    run.judged(2, owner="imported")
    run.book.put(State.CAPTURED, owner="imported")  # nobody scores it, so there is no end by itself
    work = asyncio.create_task(training.begin(Config.of(), tmp_path, run.book.ledger, 1, Start()))
    await run.until(lambda: run.loop.step == 1)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(asyncio.CancelledError):
        await work
    assert [checkpoint.step for checkpoint in run.checkpoints] == [1]
    await run.close()


def test_ctrl_c_is_answered_with_how_to_go_on(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def begin(*given: Any) -> str:
        given[-1].enter_loop()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(SECONDS)
        return ""

    monkeypatch.setattr(training, "begin", begin)
    assert Training(tmp_path, tiny_model, sessions(GOOD)).run() == 130
    assert "The same command goes on from here." in capsys.readouterr().err


async def test_it_ends_at_the_last_step(tmp_path: Path) -> None:
    run = await LearningRun(tmp_path, max_steps=1).start()
    turns = run.judged(5, owner="imported")
    assert await through(run, 3) == "3 turns are left, because --max-steps 1 have been made"
    assert run.applied() == [turns[:2]]
    await run.close()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--judge", "none"], "Nothing would be trained"),
        (["--max-steps", "0"], "Nothing would be trained"),
        (["--max-staleness", "1"], "--max-staleness must be 2 or more"),
        (["--learner", "outside"], "--learner outside trains outside this program"),
        (["--epochs", "0"], "--epochs '0' is not a whole number above 0. See openclaw-rl train --help."),
        (["--proxy-port", "1"], "There is no option --proxy-port"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path, tiny_model: Path, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Training(tmp_path, tiny_model, sessions(GOOD))
    assert command.run(*flags) == 2
    assert sentence in capsys.readouterr().err
    assert not command.run_dir.exists()


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Training(tmp_path, tiny_model, sessions(GOOD))
    assert main(["train", str(command.file), "/nowhere.jsonl", *command.arguments[2:]]) == 2
    assert "There is no file or run directory /nowhere.jsonl." in capsys.readouterr().err


def test_a_dry_run_shows_the_configuration_and_starts_nothing(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Training(tmp_path, tiny_model, sessions(GOOD))
    assert command.run("--dry-run") == 0
    assert "--batch-size" in capsys.readouterr().out
    assert not command.run_dir.exists()
