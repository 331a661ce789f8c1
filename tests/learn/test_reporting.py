"""The numbers of a step arrive where they were asked to be sent, as those programs read them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from openclaw_rl.errors import UserError
from openclaw_rl.learn import build
from openclaw_rl.learn.build import LearnSetup
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.learn.reporting import JsonLines, Prometheus, Reporter, StepReport, TensorBoard, WeightsAndBiases
from support.methods import a_method


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        version=step,
        samples=4,
        opd_rl=1,
        opd=1,
        rl=2,
        reward=0.5,
        loss=-0.25 * step,
        kl_old=0.01,
        kl_base=0.02,
        clip_fraction=0.125,
        grad_norm=1.5,
        staleness=0.5,
        tokens=100,
        response_tokens=40,
        step_seconds=2.0,
        latency_seconds=3.0,
        time=1_800_000_000.0 + step,
    )


def test_the_line_says_what_each_number_is_measured_from() -> None:
    """One divergence is of the step, the other of where it began: neither is of the same two policies."""
    line = report(1).line()
    assert "KL 0.0100 by this step and 0.0200 to the base before it" in line
    assert "staleness 0.5 versions" in line


def test_the_line_names_practised_answers_and_no_score_that_nobody_gave() -> None:
    practised = replace(report(1), opd_rl=0, opd=0, rl=0, samples=8, practice=8, reward=None)
    assert "8 samples (0 opd+rl, 0 opd, 0 rl, 8 practice), KL" in practised.line()
    assert practised.as_json()["practice"] == 8
    assert "reward" not in practised.as_json()
    registry = CollectorRegistry()
    Prometheus(registry).write(practised)
    assert registry.get_sample_value("openclaw_trained_samples_total", {"kind": "practice"}) == 8


def test_tensorboard_reads_what_was_written_for_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = Reporter([TensorBoard(tmp_path / "tensorboard")])
    for step in (1, 2, 3):
        reporter.write(report(step))
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, -0.25), (2, -0.5), (3, -0.75)]
    assert {"reward", "kl_old", "kl_base", "grad_norm", "clip_fraction", "latency_seconds"} <= set(
        read.Tags()["scalars"]
    )
    assert read.Scalars("loss")[0].wall_time == 1_800_000_001.0


def test_the_options_say_where_numbers_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Service:
        def __init__(self, *given: Any) -> None:
            self.given = given

        def write(self, report: StepReport) -> None: ...

    monkeypatch.setattr(build, "WeightsAndBiases", Service)

    def receivers(**options: Any) -> list[Any]:
        values = {"model_name": Path("a/model"), "batch_size": 2}
        setup = LearnSetup(TrainingOptions(**options), tmp_path, a_method("rl"), 2, values, 0, False, False)
        return build.sinks(setup, CollectorRegistry())

    assert [type(sink) for sink in receivers()] == [JsonLines, Prometheus]
    assert [type(sink) for sink in receivers(tensorboard=True)] == [JsonLines, Prometheus, TensorBoard]
    *_, service = receivers(wandb_project="mine")
    assert service.given == ("mine", tmp_path, {"model_name": "a/model", "batch_size": 2})


def test_writing_for_tensorboard_does_not_load_torch(tmp_path: Path) -> None:
    """The server's process stays small."""
    code = (
        "import sys; from pathlib import Path; from openclaw_rl.learn.reporting import TensorBoard; "
        f"TensorBoard(Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_weights_and_biases_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = {"method": "combine", "judge_base_url": "http://alice:S3CRET@judge:9/v1"}
    sink = WeightsAndBiases("learning", tmp_path, settings)
    for step in (1, 2):
        Reporter([sink]).write(report(step))
    assert wandb.run.summary["loss"] == -0.5
    wandb.finish()
    (written,) = tmp_path.rglob("*.wandb")
    assert b"grad_norm" in written.read_bytes()
    assert b"http://judge:9/v1" in written.read_bytes()
    assert b"S3CRET" not in written.read_bytes()


@pytest.mark.parametrize(("package", "option"), [("tensorboard", "--tensorboard"), ("wandb", "--wandb-project")])
def test_a_package_that_is_not_there_is_named(
    package: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"{option} needs the package: pip install {package}"):
        TensorBoard(tmp_path) if package == "tensorboard" else WeightsAndBiases("x", tmp_path, {})
