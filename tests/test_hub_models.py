"""Models that a start would download: a dry run and the doctor ask the Hub, and refuse nothing if it cannot answer."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from openclaw_rl.app import doctor, hub
from openclaw_rl.cli import main

THERE, GATED, MISSING, ODD = "lab/there", "lab/gated", "lab/missing", "lab/odd"
ERRORS = {GATED: (403, "GatedRepo"), MISSING: (404, "RepoNotFound"), ODD: (404, "")}
DRY_RUN = ("serve", "--dry-run", "--no-environment", "--model-name")


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does about each of the models above."""

    def do_GET(self) -> None:
        name = self.path.partition("/api/models/")[2].partition("?")[0]
        status, code = ERRORS.get(name, (200, ""))
        body = json.dumps({"id": name, "modelId": name, "tags": [], "siblings": []} if status == 200 else {}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (THERE, "is on the Hugging Face Hub: the first start downloads it."),
        (GATED, "is on the Hugging Face Hub, for those who were given access"),
        # Something that answers, but not as the Hub does: a proxy, or a login page of a network.
        (ODD, "could not be checked"),
    ],
)
def test_a_dry_run_says_what_the_hub_says(capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    assert main([*DRY_RUN, name]) == 0
    assert f"{name} {said}" in capsys.readouterr().out.replace("may be on the Hugging Face Hub: this ", "")


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("options", [(MISSING,), (THERE, "--teacher-model-name", MISSING)])
def test_a_model_that_the_hub_does_not_have_is_refused(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert main([*DRY_RUN, *options]) == 2
    shown = capsys.readouterr()
    assert f"{MISSING} is not on the Hugging Face Hub, or is private" in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_without_a_network_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main([*DRY_RUN, THERE]) == 0
    assert "could not be checked, because the Hub could not be reached." in capsys.readouterr().out


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(hub, "_ask", lambda name: never.wait(30))
    monkeypatch.setattr(hub, "MAX_SECONDS", 0.05)
    assert hub.ask_hub(THERE) is hub.OnHub.UNKNOWN
    never.set()


@pytest.mark.usefixtures("served")
def test_the_doctor_asks_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclaw_rl.app.doctor.CHECKS", {"model": doctor.model})
    assert main(["doctor", "--json", "--model-name", THERE]) == 0
    assert "not on this machine yet; it is on the Hugging Face Hub" in capsys.readouterr().out
    assert main(["doctor", "--json", "--model-name", MISSING]) == 1
    assert "is not on the Hugging Face Hub, or is private" in capsys.readouterr().out
