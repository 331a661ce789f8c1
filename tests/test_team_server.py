"""The whole program with a line of policies for each person: real processes, HTTP, kill -9."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.ledger.schema import FILE, connect
from support.commands import run_command
from support.records import Book, stored_turns
from support.server_program import SERVE, Program, serving, until

LEARN = ("--method", "rl", "--judge", "feedback", "--batch-size", "2", "--save-interval", "2", "--lora-rank", "4")
FAST = ("--learning-rate", "1e-2", "--max-kl", "100", "--kv-cache-gib", "0.1", "--max-staleness", "1000", "--no-guard")
KEYS = ("--admin-key", "sk-admin", "--api-key", "anna=sk-anna,ben=sk-ben,carl=sk-carl")
TEAM = ("--policy-per-user", "--policy-slots", "2", "--served-model-name", "tiny", "--proxy-host", "127.0.0.1")
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}


@contextlib.contextmanager
def team(model: Path, run_dir: Path, *flags: str) -> Iterator[Program]:
    with serving(SERVE, model, "--run-dir", str(run_dir), *LEARN, *FAST, *KEYS, *TEAM, *flags) as program:
        yield program


def send(program: Program, method: str, path: str, who: str, body: Any = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer sk-{who}"}
    return httpx.request(method, f"{program.url}{path}", json=body, headers=headers, timeout=120)


def ask(program: Program, who: str, **given: Any) -> dict[str, Any]:
    answer = send(program, "POST", "/v1/chat/completions", who, {**ASK, **given})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def version_of(answer: dict[str, Any]) -> int:
    return int(answer["system_fingerprint"].removeprefix("policy-"))


def teach(program: Program, who: str) -> None:
    """Two answers, and what somebody thinks of them."""
    for score in (1, -1):
        id = ask(program, who, temperature=1.0)["id"]
        assert send(program, "POST", "/v1/feedback", who, {"id": id, "score": score}).status_code == 200


def lines(program: Program, who: str = "admin") -> dict[str, Any]:
    told = send(program, "GET", "/readyz", who).json()["lines"]
    return {line["line"]: line for line in told}


def learned(program: Program, who: str, steps: int) -> int:
    """Wait until a person's line has made so many steps; the version that serves them."""
    until(lambda: lines(program).get(who, {}).get("step") == steps, program)
    until(lambda: version_of(ask(program, who)) == lines(program)[who]["policy_version"], program)
    return int(lines(program)[who]["policy_version"])


def weights(run_dir: Path, who: str) -> dict[str, bytes]:
    folder = run_dir / "lines" / who
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(connect(run_dir / FILE, readonly=True)) as db:
        return [tuple(row) for row in db.execute(query)]


@pytest.mark.more
def test_each_person_has_a_line_that_is_killed_resumed_named_rolled_back_and_forgotten_apart(
    tiny_model: Path, tmp_path: Path
) -> None:
    with team(tiny_model, tmp_path) as program:
        for who in ("anna", "ben"):
            teach(program, who)
        served = {who: learned(program, who, 1) for who in ("anna", "ben")}
        assert len(set(served.values())) == 2
        assert version_of(ask(program, "carl")) == 0, "who has taught nothing is served by the shared line"

        # A model's name may name a line. Others' are the operator's matter.
        assert version_of(ask(program, "anna", model="tiny:shared")) == 0
        assert version_of(ask(program, "anna", model="tiny:anna")) == served["anna"]
        assert version_of(ask(program, "admin", model="tiny:ben")) == served["ben"]
        refused = send(program, "POST", "/v1/chat/completions", "anna", {**ASK, "model": "tiny:ben"})
        assert refused.status_code == 404
        names = [model["id"] for model in send(program, "GET", "/v1/models", "anna").json()["data"]]
        assert names == ["tiny", "tiny:shared", "tiny:anna"]
        assert list(lines(program, "anna")) == ["shared", "anna"]

        # On the page and in commands too, people see their own line.
        with httpx.Client(base_url=f"{program.url}/dashboard", follow_redirects=True, timeout=120) as page:
            page.post("/login", data={"key": "sk-anna"})
            shown = page.get("/learning", params={"line": "ben"}).text
            assert f"The line anna: policy {served['anna']} serves it" in shown
            steps = rows(tmp_path, "SELECT number, line FROM updates")
            for number, line in steps:
                assert page.get(f"/learning/{number}").status_code == (200 if line == "anna" else 404)
        code, out, err = run_command(tmp_path, "status", "--line", "ben", "--api-key", "sk-admin")
        assert (code, err) == (0, "")
        assert f"ben: policy {served['ben']}, step 1, 0 of 2 judged turns for its next step." in out
        assert "anna" not in out

        # With two slots, the adapters of three people take turns.
        teach(program, "carl")
        served["carl"] = learned(program, "carl", 1)
        for who in ("anna", "ben", "carl", "anna", "ben", "carl"):
            assert version_of(ask(program, who)) == served[who]
        answers = {who: ask(program, who)["choices"] for who in served}
        for who in ("anna", "ben"):
            teach(program, who)
        program.process.kill()

    owners = dict(rows(tmp_path, "SELECT t.number, s.owner FROM turns t JOIN sessions s ON s.number = t.session"))
    for turn, line in rows(tmp_path, "SELECT turn, line FROM update_turns JOIN updates USING (number)"):
        assert owners[turn] == line
    assert {line for (line,) in rows(tmp_path, "SELECT line FROM policies")} == {"anna", "ben", "carl"}
    answered = {(turn.session.owner, turn.line) for turn in stored_turns(tmp_path)}
    assert {("anna", "shared"), ("anna", "anna"), ("admin", "ben")} <= answered
    assert ("anna", "ben") not in answered
    code, out, err = run_command(tmp_path, "checkpoints", "--line", "anna")
    assert (code, err) == (0, "")

    with team(tiny_model, tmp_path) as program:
        assert ask(program, "carl")["choices"] == answers["carl"]
        assert version_of(ask(program, "carl")) == served["carl"]
        for who in ("anna", "ben"):
            learned(program, who, 2)
        code, out, err = run_command(tmp_path, "merge", "--lines", str(tmp_path / "average"))
        assert code == 0, err
        assert "anna, ben" in out
        into = ("merge", "--lines", str(tmp_path / "merged"), "--into-shared", "--api-key", "sk-admin")
        code, out, err = run_command(tmp_path, *into)
        assert code == 0, err
        merged = version_of(ask(program, "carl", model="tiny:shared"))
        assert f"serves it now, as policy {merged}" in out
        assert merged, "it was the base model"
        back = send(program, "POST", "/v1/policy/rollback", "admin", {"line": "anna", "version": 0})
        assert back.status_code == 200, back.text
        assert lines(program)["anna"]["step"] == 0
        assert lines(program)["ben"]["step"] == 2
        assert send(program, "POST", "/v1/policy/rollback", "admin", {"line": "nobody"}).status_code == 409
        assert send(program, "DELETE", "/v1/lines/carl", "ben").status_code == 403

        before, of_carl = weights(tmp_path, "carl"), ask(program, "carl")["choices"]
        code, out, err = run_command(tmp_path, "forget", "--user", "ben", "--api-key", "sk-admin")
        assert code == 0, err
        assert "Deleted the line ben" in out
        assert f"policy {merged}, which serves" in out, "what the shared line has of ben"
        assert not (tmp_path / "lines" / "ben").exists()
        assert version_of(ask(program, "ben")) == merged
        assert weights(tmp_path, "carl") == before
        assert ask(program, "carl")["choices"] == of_carl

    with team(tiny_model, tmp_path / "next", "--resume-from-ckpt", str(tmp_path / "average")) as program:
        assert version_of(ask(program, "carl")) == 1, "the average of all is the shared line of another run"
        teach(program, "carl")
        learned(program, "carl", 1)


A_SAMPLER = """
from openclaw_rl.engines.local.factory import LocalSamplerFactory

class Mine(LocalSamplerFactory):
    name, has_lines = "mine", False

SAMPLER = Mine()
"""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--lora-rank", "0"], "--lora-rank 0 trains all weights"),
        (["--learner", "outside", "--sampler", "vllm"], "outside trains one line"),
        (["--learner", "slime", "--sampler", "sglang"], "slime trains one line"),
        (["--sampler", "{folder}/mine.py"], "vllm or sglang, and --sampler is mine"),
        (["--sampler", "upstream", "--upstream-url", "http://127.0.0.1:1", "--upstream-model", "m"], "weights"),
        (["--custom-generate-function-path", "mine.py"], "which asks the shared line"),
        (["--api-key", ""], "needs a key for each person"),
        (["--api-key", "shared=sk-1"], "cannot name one"),
    ],
)
def test_what_cannot_have_lines_is_refused_in_a_sentence(tmp_path: Path, flags: list[str], sentence: str) -> None:
    given = {"--api-key": "anna=sk-anna", **dict(zip(flags[::2], flags[1::2], strict=True))}
    words = [word.format(folder=tmp_path) for pair in given.items() for word in pair]
    (tmp_path / "mine.py").write_text(A_SAMPLER)
    code, out, err = run_command(tmp_path, "serve", "--policy-per-user", "--dry-run", *words)
    assert code != 0
    assert sentence in json.dumps(err + out)


def test_commands_about_a_team_s_run_need_no_keys_and_training_on_files_is_refused(tmp_path: Path) -> None:
    Book(tmp_path).close()
    (tmp_path / "options.toml").write_text('preset = "team"\n')
    code, _out, err = run_command(tmp_path, "status", "--json")
    assert (code, err) == (0, "")
    (tmp_path / "some.jsonl").write_text("")
    code, _out, err = run_command(tmp_path, "train", str(tmp_path / "some.jsonl"), "--preset", "team")
    assert code != 0
    assert "one line learns from all turns" in err
