"""What is reported of each step."""

import json
import logging
import time
from typing import Any

import pytest
from prometheus_client import generate_latest

from support.learning_run import LearningRun


async def test_a_step_is_reported_in_the_log_in_a_file_and_to_prometheus(
    run: LearningRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await run.start()
    run.judged(1)
    turns = run.judged(1, score=-1.0)
    await run.trained(*turns)
    (line,) = [message for message in caplog.messages if message.startswith("step 1:")]
    for part in ("2 samples (0 opd+rl, 0 opd, 2 rl)", "reward +0.00", "KL 0.0100", "clipped 12.5%", "policy 1 serves"):
        assert part in line
    (row,) = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    expected = {"step": 1, "version": 1, "samples": 2, "rl": 2, "opd": 0, "opd_rl": 0, "reward": 0.0, "staleness": 0.0}
    assert {name: row[name] for name in expected} == expected
    assert row["kl_old"] == 0.01
    assert row["latency_seconds"] >= 0
    assert json.loads(run.book.scalar("SELECT metrics FROM updates"))["step"] == 1
    told = generate_latest(run.registry).decode()
    assert 'openclaw_trained_samples_total{kind="rl"} 2.0' in told
    assert "openclaw_step_version 1.0" in told


async def test_the_latency_of_a_step_ends_when_its_policy_can_serve(
    run: LearningRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.start()
    publish, published = run.sampler.publish, []

    async def publish_and_note(*args: Any, **options: Any) -> None:
        await publish(*args, **options)
        published.append(time.time())

    monkeypatch.setattr(run.sampler, "publish", publish_and_note)
    await run.trained(*run.judged(2))
    row = json.loads((run.folder / "metrics.jsonl").read_text())
    assert row["time"] >= published[-1]


async def test_a_sink_that_fails_is_said_once_and_stops_nothing(
    run: LearningRun, caplog: pytest.LogCaptureFixture
) -> None:
    (run.folder / "metrics.jsonl").mkdir()
    await run.start()
    turns = run.judged(6)
    await run.trained(*turns)
    assert sum("JsonLines" in message for message in caplog.messages) == 1
    assert "openclaw_step_version 3.0" in generate_latest(run.registry).decode()
