"""`openclaw-rl connect`: asks before it changes a file, keeps a copy, hides keys, and can be undone."""

import io
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from openclaw_rl.api.options import ApiKey
from openclaw_rl.connect.clients import CLIENTS
from openclaw_rl.ledger.run_dir import RunDirLock
from support.commands import run_command
from support.harness import Bench, running

KEY = "S3CRET-key"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Bench]:
    with running(Bench(tiny_model, keys=ApiKey.parse_all(KEY))) as bench:
        yield bench


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory of a user without any client."""
    for name in os.environ:
        if name.startswith(("OPENCLAW_", "CLAUDE_", "CODEX_", "OPENCODE_", "XDG_", "CONTINUE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def connect(server: Bench, *arguments: str) -> tuple[int, str, str]:
    return run_command(Path("nowhere"), "connect", *arguments, "--url", server.url, "--api-key", KEY)


def file_of(client: str, home: Path) -> Path:
    places = {
        "openclaw": ".openclaw/openclaw.json",
        "claude-code": ".claude/settings.json",
        "codex": ".codex/openclaw-rl.config.toml",
        "opencode": ".config/opencode/opencode.json",
        "continue": ".continue/config.yaml",
        "aider": ".aider.conf.yml",
    }
    return home / places[client]


WITH_FILES = ("openclaw", "claude-code", "codex", "opencode", "continue", "aider")


@pytest.mark.parametrize("client", WITH_FILES)
def test_a_new_file_is_written_and_undone(server: Bench, home: Path, client: str) -> None:
    path = file_of(client, home)
    code, out, err = connect(server, client, "--yes")
    assert (code, err) == (0, "")
    assert KEY not in out
    assert f"openclaw-rl connect {client} --undo" in out
    assert KEY in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "has these settings already" in connect(server, client, "--yes")[1]
    code, out, err = run_command(home / "no-run", "connect", client, "--undo", "--yes")
    assert (code, err) == (0, "")
    assert KEY not in out
    assert not [file for file in path.parent.iterdir() if file.is_file()]


@pytest.mark.parametrize("client", ["openclaw", "claude-code", "opencode"])
def test_an_existing_file_keeps_the_rest_and_its_permissions(server: Bench, home: Path, client: str) -> None:
    path = file_of(client, home)
    path.parent.mkdir(parents=True)
    before = {"theme": "dark", "env": {"OTHER": "1"}, "tools": {"profile": "full", "allow": ["x"]}}
    path.write_text(json.dumps(before))
    path.chmod(0o644)
    assert connect(server, client, "--yes")[0] == 0
    after = json.loads(path.read_text())
    assert (after["theme"], after["env"]["OTHER"], after["tools"]["allow"]) == ("dark", "1", ["x"])
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_text(json.dumps(after | {"later": True}))
    assert run_command(home, "connect", client, "--undo", "--yes")[0] == 0
    assert json.loads(path.read_text()) == before | {"later": True}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_each_client_is_told(server: Bench, home: Path) -> None:
    for client in WITH_FILES:
        assert connect(server, client, "--yes")[0] == 0
    environment = json.loads(file_of("claude-code", home).read_text())["env"]
    assert environment["ANTHROPIC_BASE_URL"] == server.url
    assert environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == environment["ANTHROPIC_MODEL"] == "tiny"
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    # Claude Code warns of a window below 100k, and takes the context length without it.
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in environment
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"].isdigit()
    codex = tomllib.loads(file_of("codex", home).read_text())
    headers = {"X-Store": "1", "Authorization": f"Bearer {KEY}"}
    assert codex["model_providers"][codex["model_provider"]]["http_headers"] == headers
    openclaw = json.loads(file_of("openclaw", home).read_text())
    provider, _, model = openclaw["agents"]["defaults"]["model"]["primary"].partition("/")
    assert openclaw["models"]["providers"][provider]["models"][0]["id"] == model == "tiny"
    assert yaml.safe_load(file_of("continue", home).read_text())["models"][0]["apiBase"] == f"{server.url}/v1"


def test_the_file_behind_a_link_is_changed_and_the_link_stays(server: Bench, home: Path) -> None:
    path = file_of("claude-code", home)
    path.parent.mkdir()
    target = home / "dotfiles.json"
    target.write_text("{}")
    path.symlink_to(target)
    assert connect(server, "claude-code", "--yes")[0] == 0
    assert path.is_symlink()
    assert KEY in target.read_text()


@pytest.mark.parametrize("client", WITH_FILES)
def test_undo_leaves_no_key_behind_a_link_that_led_nowhere(server: Bench, home: Path, client: str) -> None:
    path = file_of(client, home)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = home / "dotfiles"
    path.symlink_to(target)
    assert connect(server, client, "--yes")[0] == 0
    assert KEY in target.read_text()
    assert run_command(home, "connect", client, "--undo", "--yes")[0] == 0
    assert path.is_symlink()
    assert not [file for file in home.rglob("*") if file.is_file()]


def test_undo_after_the_file_was_deleted_takes_the_copies_with_the_key(server: Bench, home: Path) -> None:
    assert connect(server, "codex", "--yes")[0] == 0
    file_of("codex", home).unlink()
    assert run_command(home, "connect", "codex", "--undo", "--yes")[0] == 0
    assert not [file for file in home.rglob("*") if file.is_file()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "written"), [("n\n", False), ("\n", False), ("y\n", True)])
def test_it_asks_first(server: Bench, home: Path, monkeypatch: pytest.MonkeyPatch, answer: str, written: bool) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    code, out, _err = connect(server, "codex")
    assert code == 0
    assert "+model_provider" in out
    assert file_of("codex", home).exists() is written
    assert ("Nothing was changed." in out) is not written


def test_nobody_to_ask_changes_nothing(server: Bench, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, _out, err = connect(server, "codex")
    assert code == 2
    assert "give --yes" in err
    assert not any(home.iterdir())


def test_other_secrets_in_the_file_are_not_shown(server: Bench, home: Path) -> None:
    path = file_of("claude-code", home)
    path.parent.mkdir()
    path.write_text(json.dumps({"env": {"ANTHROPIC_API_KEY": "sk-mine", "GITHUB_TOKEN": "ghp-mine"}}, indent=2))
    _code, out, _err = connect(server, "claude-code", "--yes")
    assert "GITHUB_TOKEN" in out
    assert "mine" not in out


@pytest.mark.parametrize("client", CLIENTS)
def test_print_changes_nothing_and_can_be_piped(server: Bench, home: Path, client: str) -> None:
    code, out, err = connect(server, client, "--print")
    assert code == 0
    assert server.url in out
    assert KEY in out
    assert err.strip()
    assert not any(home.iterdir())


def test_a_file_with_comments_is_left_as_it_is(server: Bench, home: Path) -> None:
    path = file_of("openclaw", home)
    path.parent.mkdir()
    path.write_text("{ // mine\n}")
    code, _out, err = connect(server, "openclaw", "--yes")
    assert code == 2
    assert f"{path} is left as it is: it is not plain JSON" in err
    assert "--print" in err
    assert path.read_text() == "{ // mine\n}"


@pytest.mark.parametrize("client", ["codex", "openai"])
def test_nothing_to_undo(home: Path, client: str) -> None:
    code, _out, err = run_command(home, "connect", client, "--undo", "--yes")
    assert code == 2
    assert "There is nothing to undo" in err


def test_the_key_must_be_right(server: Bench, home: Path) -> None:
    for key in ((), ("--api-key", "wrong")):
        code, _out, err = run_command(home, "connect", "codex", "--yes", "--url", server.url, *key)
        assert code == 2
        assert "The server needs a key" in err
    assert not any(home.iterdir())


def test_the_server_of_the_run_is_found(server: Bench, home: Path) -> None:
    run_dir = home / "run"
    lock = RunDirLock(run_dir)
    lock.tell(server.url)
    try:
        code, out, _err = run_command(run_dir, "connect", "openai", "--api-key", KEY)
    finally:
        lock.close()
    assert code == 0
    assert f"export OPENAI_BASE_URL={server.url}/v1\n" in out
    code, _out, err = run_command(run_dir, "connect", "openai")
    assert code == 2
    assert f"No server runs in {run_dir}" in err


@pytest.mark.parametrize("url", ["http://u:pass@127.0.0.1:9", "ftp://u:pass@x", "http://u:pass@[x"])
def test_a_server_that_cannot_be_asked_is_said_without_its_password(home: Path, url: str) -> None:
    code, _out, err = run_command(home, "connect", "openai", "--url", url)
    assert code == 2
    assert "pass" not in err
