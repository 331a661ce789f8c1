"""An answer is given whether or not it can be recorded."""

from pathlib import Path

import pytest

from openclaw_rl.api import completion
from openclaw_rl.api.capture import capture
from openclaw_rl.ledger.store import Ledger
from support.harness import Bench, running


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_the_ledger_refuses_is_served_all_the_same(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Refused for whatever reason: here two completions that have the same id."""
    monkeypatch.setattr(completion, "token_hex", lambda _bytes: "7" * 32)
    ledger = Ledger(tmp_path)
    with running(Bench(tiny_model, ledger)) as bench:
        for _ in range(2):
            response = bench.post({"messages": [{"role": "user", "content": "hello"}], "stream": stream})
            assert response.status_code == 200
            assert "error" not in response.text
            assert response.text.endswith("data: [DONE]\n\n") == stream
        lost = [line for line in bench.service.metrics.text().decode().splitlines() if "lost" in line]
    ledger.close()
    assert any(line.endswith(" 1.0") for line in lost)


def test_a_fault_before_the_answer_is_logged_and_the_request_served(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    monkeypatch.setattr(capture, "find_ancestor", lambda *_: 1 / 0)
    with running(Bench(tiny_model, ledger)) as bench:
        assert bench.post({"messages": [{"role": "user", "content": "hello"}]}).status_code == 200
        assert "openclaw_lost_turns_total 1.0" in bench.service.metrics.text().decode()
    ledger.close()
    (fault,) = [record for record in caplog.records if record.exc_info]
    assert fault.exc_info is not None
    assert fault.exc_info[0] is ZeroDivisionError
