"""A smoke run of `make test-chaos`, at a size that shows that it works; the fuzzer also runs in CI."""

import os
from pathlib import Path

import pytest

from chaos.report import Setting
from chaos.scenarios import SCENARIOS, run

#: Runs all scenarios at this scale.
SCALE = os.environ.get("OPENCLAW_RL_CHAOS", "")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_runs_without_failures(name: str, tiny_model: Path, tmp_path: Path) -> None:
    if name != "fuzz" and not SCALE:
        pytest.skip("OPENCLAW_RL_CHAOS is not set; use `make test-chaos`")
    report = run(name, Setting(tiny_model, tmp_path, float(SCALE or 0.003), seed=0))
    assert not report.failed, "\n".join(map(report.describe, report.failed))
