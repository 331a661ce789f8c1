"""`openclaw-rl doctor`: a finding for every check, how to mend what is broken, and an exit status."""

import contextlib
import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.api.options import ApiKey
from openclaw_rl.app.doctor import CHECKS
from openclaw_rl.ledger.run_dir import RunDirLock
from openclaw_rl.ledger.schema import FILE
from support.chat_api import ChatApi
from support.commands import run_command
from support.harness import Bench, running
from support.records import Book, a_turn

KEY = "a-key-that-is-long-enough"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Bench]:
    with running(Bench(tiny_model, keys=ApiKey.parse_all(KEY))) as bench:
        yield bench


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CODEX_HOME", "XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CONTINUE_GLOBAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def examine(folder: Path, model: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the findings of a run directory."""
    port = () if "--proxy-port" in arguments else ("--proxy-port", str(free_port()))
    code, out, err = run_command(folder, "doctor", "--json", "--model-name", str(model), *port, *arguments)
    assert err == ""
    return code, json.loads(out)


def test_the_model_behind_an_api_is_asked_for(tmp_path: Path, home: Path) -> None:
    api = ChatApi()

    def found(model: str) -> dict[str, Any]:
        flags = ("--sampler", "upstream", "--upstream-url", api.url, "--upstream-model", model)
        _code, out, _err = run_command(tmp_path, "doctor", "--json", "--proxy-port", str(free_port()), *flags)
        finding: dict[str, Any] = json.loads(out)["model"]
        return finding

    assert found("their-model")["health"] == "ok"
    assert "does not list other" in found("other")["text"]
    api.stop()
    assert found("their-model")["health"] == "broken"


@contextlib.contextmanager
def served(folder: Path, url: str) -> Iterator[None]:
    lock = RunDirLock(folder)
    lock.tell(url)
    try:
        yield
    finally:
        lock.close()


def test_a_healthy_machine(home: Path, tiny_model: Path) -> None:
    code, findings = examine(home / "run", tiny_model)
    assert code == 0
    assert set(findings) == set(CHECKS)
    assert all(finding["text"] for finding in findings.values())
    assert findings["model"]["text"] == f"{tiny_model} in {tiny_model}"
    assert (findings["server"]["health"], findings["server"]["mend"]) == ("note", "openclaw-rl serve")
    assert not (home / "run").exists()


def test_the_precision_and_its_reason(home: Path, tiny_model: Path) -> None:
    _code, findings = examine(home / "run", tiny_model, "--device", "cpu", "--dtype", "bfloat16")
    assert findings["precision"]["text"] == "bfloat16 (--dtype)"
    flags = ("--device", "cpu", "--dtype", "auto", "--cache-dir", str(home / "cache"))
    _code, findings = examine(home / "run", tiny_model, *flags)
    assert re.fullmatch(r"(float32|bfloat16): bfloat16 .* here.*", findings["precision"]["text"])
    assert not (home / "cache").exists()


def test_findings_for_people(home: Path, tiny_model: Path) -> None:
    code, out, _err = run_command(home / "run", "doctor", "--model-name", str(tiny_model), "--proxy-port", "0")
    assert code == 0
    for expected in ("Python", "PyTorch", "ok", "how to mend it", "it is not running"):
        assert expected in out


def test_a_model_that_is_not_whole(home: Path, tiny_model: Path) -> None:
    broken = home / "model"
    shutil.copytree(tiny_model, broken)
    (broken / "tokenizer.json").unlink()
    code, findings = examine(home / "run", broken)
    assert code == 1
    assert findings["model"]["health"] == "broken"
    assert "tokenizer.json" in findings["model"]["text"]


def test_a_port_that_is_taken(home: Path, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, findings = examine(home / "run", tiny_model, "--proxy-port", str(taken.getsockname()[1]))
    assert code == 1
    assert "another --proxy-port" in findings["port"]["text"]


def test_a_ledger_is_counted_and_damage_is_found(book: Book, home: Path, tmp_path: Path, tiny_model: Path) -> None:
    book.capture(a_turn())
    folder = tmp_path / "run"
    assert examine(folder, tiny_model)[1]["ledger"]["text"] == f"1 turn in {folder}"
    damaged = home / "damaged"
    damaged.mkdir()
    (damaged / FILE).write_text("this is no database, whatever its name says " * 50)
    code, findings = examine(damaged, tiny_model)
    assert code == 1
    assert "is damaged" in findings["ledger"]["text"]


def test_a_folder_that_cannot_be_used(home: Path, tiny_model: Path) -> None:
    (home / "file").write_text("mine")
    code, findings = examine(home / "file" / "run", tiny_model)
    assert code == 1
    assert "--run-dir" in findings["disk"]["text"]


def test_a_short_key_is_noted_and_no_key_is_shown(home: Path, tiny_model: Path) -> None:
    _code, findings = examine(home / "run", tiny_model, "--api-key", "bob=S3CRET")
    assert findings["keys"]["health"] == "note"
    assert "S3CRET" not in json.dumps(findings)


def test_the_server_gives_a_real_answer(server: Bench, home: Path, tiny_model: Path) -> None:
    with served(home / "run", server.url):
        code, findings = examine(home / "run", tiny_model, "--api-key", KEY)
        assert code == 0
        assert findings["server"]["health"] == "ok"
        assert f"{server.url} answered in" in findings["server"]["text"]
        assert findings["port"]["text"] == f"the server of this run listens at {server.url}"
        assert server.sampler.requests[-1].params.max_tokens == 4
        without = examine(home / "run", tiny_model)[1]["server"]
        assert (without["health"], "--api-key" in without["mend"]) == ("note", True)


def test_a_server_that_does_not_answer(home: Path, tiny_model: Path) -> None:
    with served(home / "run", f"http://127.0.0.1:{free_port()}"):
        code, findings = examine(home / "run", tiny_model)
    assert code == 1
    assert "does not answer" in findings["server"]["text"]


def test_clients_that_are_configured_for_another_server(server: Bench, home: Path, tiny_model: Path) -> None:
    with served(home / "run", server.url):
        assert run_command(home / "run", "connect", "codex", "--yes", "--api-key", KEY)[0] == 0
        _code, findings = examine(home / "run", tiny_model, "--api-key", KEY)
        assert findings["clients"]["text"] == "codex: configured for this server"
        profile = home / ".codex" / "openclaw-rl.config.toml"
        profile.write_text(profile.read_text().replace("tiny", "larger"))
        stale = examine(home / "run", tiny_model, "--api-key", KEY)[1]["clients"]
    assert (stale["health"], stale["mend"]) == ("note", "openclaw-rl connect codex")
