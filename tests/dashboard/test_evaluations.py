"""What demos and evaluations measured of a run's policies, on its page and in its report."""

import json
import stat
from pathlib import Path

import pytest

from openclaw_rl.dashboard.evaluations import FILE, Evaluation, read_evaluations, record_evaluations
from openclaw_rl.dashboard.views.learning import evaluation_charts
from openclaw_rl.evals.evaluate import add_to_runs
from openclaw_rl.evals.scores import CaseScore, EvalPlan, TaskScores
from openclaw_rl.lab.charts import COLOURS
from support.commands import run_command
from support.live_page import live_page


def labels(evaluations: list[Evaluation]) -> list[str]:
    return [label for chart in evaluation_charts(evaluations) for _, label in chart.legend]


def test_what_was_recorded_is_read_and_private(tmp_path: Path) -> None:
    first, second = Evaluation(0, "brief", 1, 40), Evaluation(4, "brief", 10, 16)
    record_evaluations(tmp_path, [first])
    record_evaluations(tmp_path, [second])
    assert read_evaluations(tmp_path) == [first, second]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert read_evaluations(tmp_path / "nowhere") == read_evaluations(None) == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[" * 10_000,
        "[1]",
        '{"version": 1}',
        '{"version": 1, "what": "x", "passed": 1, "cases": 0, "created": 1}',
        '{"version": 1, "what": "x", "passed": 3, "cases": 2, "created": 1}',
        '{"version": 1e999, "what": "x", "passed": 1, "cases": 2, "created": 1}',
        '{"version": true, "what": "x", "passed": 1, "cases": 2, "created": 1}',
    ],
)
def test_a_line_that_cannot_be_read_is_left_out(line: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(line + "\n")
    record_evaluations(tmp_path, [Evaluation(1, "coding", 1, 2)])
    assert [one.what for one in read_evaluations(tmp_path)] == ["coding"]


def test_the_last_evaluation_of_a_policy_counts() -> None:
    (chart,) = evaluation_charts(
        [Evaluation(4, "brief", 1, 4), Evaluation(0, "brief", 0, 4), Evaluation(4, "brief", 2, 4)]
    )
    assert chart.title.endswith("(brief)")
    assert "policy 4: brief 50 %" in chart.svg
    assert "25 %</title>" not in chart.svg
    assert evaluation_charts([]) == []
    assert len(labels([Evaluation(1, f"task {number}", 1, 2) for number in range(9)])) == COLOURS


def test_the_page_and_the_report_draw_it(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with live_page(tiny_model, folder) as page, page.visitor() as visitor:
        assert "Adherence" not in visitor.see("learning").text
        record_evaluations(folder, [Evaluation(0, "<b>brief", 0, 40), Evaluation(4, "<b>brief", 30, 40)])
        seen = visitor.see("learning")
        (chart,) = [c for c in seen.all("svg", class_="chart") if "Adherence" in c.attributes["aria-label"]]
        assert chart.attributes["aria-label"].endswith("over 2 points: <b>brief, from 0 % to 75 %.")
        assert "<b>brief" not in visitor.get("learning").text
    code, _, err = run_command(folder, "report", "--no-answers", "--model-name", str(tiny_model))
    assert (code, err) == (0, "")
    report = (folder / "report.html").read_text()
    assert "Adherence: share of unseen cases answered as wanted (&lt;b&gt;brief), over 2 points" in report


def scores(task: str, *passed: bool) -> TaskScores:
    return TaskScores(task, tuple(CaseScore(str(number), mark, {}, "", "") for number, mark in enumerate(passed)))


async def unused(*_: object) -> TaskScores:
    raise AssertionError


def test_an_evaluation_of_a_checkpoint_is_added_to_its_run(tmp_path: Path) -> None:
    plans = [EvalPlan("coding", 2, 10, unused), EvalPlan("tool-use", 2, 10, unused)]
    checkpoint, elsewhere = tmp_path / "run" / "checkpoints" / "step-000007-v7", tmp_path / "copy"
    for folder in (checkpoint, elsewhere):
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(json.dumps({"version": 7}))
    measured = {
        str(checkpoint): [scores("coding", True, True), scores("tool-use", True)],
        "base": [scores("coding", False, True)],
    }
    assert add_to_runs(measured, plans, is_quick=False) == [tmp_path / "run"]
    assert add_to_runs({str(checkpoint): [scores("coding", True, False)]}, plans, is_quick=True) == [tmp_path / "run"]
    assert add_to_runs({str(elsewhere): measured["base"], "base": measured["base"]}, plans, is_quick=False) == []
    told = [(one.version, one.what, one.share) for one in read_evaluations(tmp_path / "run")]
    # The second task was stopped.
    assert told == [(7, "coding", 1.0), (0, "coding", 0.5), (7, "coding (quick)", 0.5)]
