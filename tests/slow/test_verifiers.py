"""A real environment of the verifiers package trains a policy. Run by `make test-verifiers`.

OPENCLAW_RL_VERIFIERS names a Python that has verifiers.
"""

import os
from pathlib import Path

import httpx
import pytest

from openclaw_rl.cli import main
from openclaw_rl.ledger.pages import session_summaries
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.types import EpisodeState
from support.server_program import SERVE, serving, until

PYTHON = os.environ.get("OPENCLAW_RL_VERIFIERS", "")
ENVIRONMENTS = Path(__file__).parent / "verifiers_environments"
FLAGS = ("--method", "rl", "--baseline", "group", "--batch-size", "8", "--save-interval", "1", "--max-kl", "100")

pytestmark = pytest.mark.skipif(not PYTHON, reason="OPENCLAW_RL_VERIFIERS names no Python with verifiers")


def test_a_verifiers_environment_trains_a_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ENVIRONMENTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path), *FLAGS) as program:
        flags = ["--url", program.url, "--env", "verifiers:short-answers", "--verifiers-python", PYTHON]
        size = ["--tasks", "10", "--group", "4", "--parallel", "4", "--max-tokens", "12", "--temperature", "1"]
        assert main(["rollout", *flags, *size]) == 0
        until(lambda: httpx.get(f"{program.url}/readyz").json()["policy_version"] >= 1, program)
    out = capsys.readouterr().out
    assert "32 rewarded, 8 failed, 10 tasks" in out
    assert "the scorer is broken" in out
    with open_ledger(tmp_path, readonly=True) as db:
        episodes = [summary.episode for summary in session_summaries(db)]
    states = [episode.state for episode in episodes if episode is not None]
    assert (states.count(EpisodeState.REWARDED), states.count(EpisodeState.FAILED)) == (32, 8)
    assert all(episode.reward is None for episode in episodes if episode and episode.state is EpisodeState.FAILED)

    assert main(["rollout", "--url", program.url, "--env", "verifiers:nowhere", "--verifiers-python", PYTHON]) == 2
