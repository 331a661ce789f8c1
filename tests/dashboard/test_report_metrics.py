"""What the learner wrote is read as far as it can be, and each number is in its picture."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.dashboard.run import read_metrics, read_step
from openclaw_rl.dashboard.views.learning import PANELS, step_charts
from openclaw_rl.learn.reporting import JsonLines
from openclaw_rl.types import SampleKind
from support.judged_run import a_report, write_metrics


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        sink.write(a_report(step, reward=step / 4))
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [step["reward"] for step in found.steps] == [0.25, 0.5, 0.75]
    assert found.unreadable == 0


def test_a_step_that_was_made_again_counts_as_it_was_made_last(tmp_path: Path) -> None:
    write_metrics(tmp_path, [a_report(1), a_report(2, loss=9.0), a_report(3), a_report(2, loss=4.0)])
    found = read_metrics(tmp_path / "metrics.jsonl").steps
    assert [(step["step"], step["loss"]) for step in found] == [(1, 1.25), (2, 4.0), (3, 1.25)]


BROKEN = ['{"step": 2, "rew', "null", "[]", "7", '{"step": "two"}', '{"loss": 1}', '{"step": NaN}', '{"step": 1e999}']


@pytest.mark.parametrize(
    "line", [*BROKEN, "\x00\xff", '{"step": 3, "loss": {}}', f'{{"step": {"9" * 400}}}', "[" * 9999]
)
def test_what_cannot_be_read_is_counted_and_left_out(tmp_path: Path, line: str) -> None:
    good = json.dumps({"step": 1, "loss": 0.5, "new": "words", "reward": None})
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n\n{line}\n", "utf-8")
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert found.steps == [{"step": 1.0, "loss": 0.5}]
    assert found.unreadable == 1


@given(
    st.text()
    | st.dictionaries(st.sampled_from(["step", "loss", "x"]), st.none() | st.floats() | st.text()).map(json.dumps)
)
def test_no_line_is_an_error(line: str) -> None:
    found = read_step(line)
    assert found is None or "step" in found


def test_no_file_has_no_steps(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl").steps == []
    assert step_charts([]) == []


def test_every_number_that_is_asked_for_has_a_picture() -> None:
    shown = {name for panel in PANELS for name, _ in panel.lines}
    wanted = {"reward", "loss", "kl_old", "kl_base", "clip_fraction", "grad_norm", "staleness", "latency_seconds"}
    assert wanted <= shown
    kinds = {kind.replace("+", "_") for kind in SampleKind}
    assert kinds in [{name for name, _ in panel.lines} for panel in PANELS], "all samples of a step in one picture"
    drawn = step_charts([{**dict.fromkeys(shown, 0.5), "step": float(step)} for step in (1, 2)])
    assert len(drawn) == len(PANELS)
    assert any("from feedback to served weights, from 0.5 to 0.5" in chart.svg for chart in drawn)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e30, float("nan"), float("inf")])
def test_one_step_with_any_number_can_be_drawn(value: float) -> None:
    names = {name for panel in PANELS for name, _ in panel.lines}
    drawn = step_charts([{**dict.fromkeys(names, value), "step": 1.0}])
    assert len(drawn) == (len(PANELS) if abs(value) < 1e31 else 0)
