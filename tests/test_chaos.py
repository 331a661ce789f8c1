"""A small run of the fuzzer of `make test-chaos`, so that it keeps working."""

from pathlib import Path

from chaos.fuzz import SLOW_HEALTH
from chaos.report import Setting
from chaos.scenarios import run


def test_hostile_requests_get_answers_and_leave_the_server_in_order(tiny_model: Path, tmp_path: Path) -> None:
    report = run("fuzz", Setting(tiny_model, tmp_path, scale=0.003, seed=0))
    failures = [report.describe(sentence) for sentence in report.failed if sentence != SLOW_HEALTH]
    assert not failures, "\n".join(failures)
    assert report.counts["requests"] == 300
