"""Judging in the whole program: a real server, a judge behind a real socket, and the commands beside it."""

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from openclaw_rl.cli import main
from openclaw_rl.ledger import verdicts
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.turns import set_next_state
from openclaw_rl.types import SampleKind, Source, State, Verdict
from support.harness import wait_for
from support.judge_server import Body, JudgeServer, Reply, completion, opinion
from support.records import Book, a_turn, stored_turns
from support.server_program import SECONDS, SERVE, Program, serving
from support.tiny_models import save_tiny_model

HINT = "Give the distance in kilometres."
#: For tests in which no hint is scored and nothing is learned: no process is started for learning.
JUDGES_ONLY = ("--max-steps", "0")


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer(opinion("-1", HINT))
    yield server
    server.stop()


def by(server: JudgeServer) -> tuple[str, ...]:
    return ("--judge", "llm", "--judge-base-url", server.url, "--judge-model", "judge-1")


def talk(program: Program, session: str, *replies: str) -> str:
    """A conversation of one turn and one more for each reply; the id of the first completion."""
    messages, ids = [{"role": "user", "content": "How far is it?"}], []
    for words in (*replies, None):
        ask = {"messages": messages, "max_tokens": 8}
        answer = httpx.post(
            f"{program.url}/v1/chat/completions", json=ask, headers={"X-Session-Id": session}, timeout=60
        ).json()
        ids.append(answer["id"])
        messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": words}]
    return str(ids[0])


def everything(folder: Path) -> dict[str, list[Any]]:
    with contextlib.closing(connect(folder / FILE, readonly=True)) as db:
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: [tuple(row) for row in db.execute(f"SELECT * FROM {table}")] for table in tables}


Command = Callable[..., str]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*arguments, "--run-dir", str(tmp_path)]) == code
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    return run


def test_a_conversation_is_judged_and_every_command_shows_it(
    tiny_model: Path, tmp_path: Path, server: JudgeServer, command: Command
) -> None:
    def status() -> dict[str, Any]:
        told: dict[str, Any] = json.loads(command("status", "--json"))
        return told

    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path), *by(server)) as program:
        talk(program, "mine", "In kilometres, please.")
        wait_for(lambda: status()["turns"]["judged"] == 1, SECONDS)
        first, second = stored_turns(tmp_path)
        assert (first.sample, second.state) == (SampleKind.OPD_RL, State.AWAITING)
        assert first.verdict is not None
        assert (first.verdict.score, first.verdict.source) == (-1, Source.LLM)
        assert [len(hint.logprobs) for hint in first.verdict.hints] == [len(first.response_ids)]
        assert "In kilometres, please." in server.requests[0]["messages"][-1]["content"]
        shown = command("sessions", "mine")
        for part in (
            "judged as opd+rl",
            "score -1",
            "by llm",
            "votes -1 -1 -1",
            f"hint: {HINT}",
            "scored by the teacher",
        ):
            assert part in shown
        # The verdict is counted after it is stored.
        counted = 'openclaw_verdicts_total{score="bad",source="llm"} 1.0'
        wait_for(lambda: counted in httpx.get(f"{program.url}/metrics", timeout=60).text, SECONDS)
        metrics = httpx.get(f"{program.url}/metrics", timeout=60).text
        for name in ("openclaw_judge_seconds_count 1.0", "openclaw_vote_agreement_count 1.0"):
            assert name in metrics
        assert program.metric("openclaw_judge_tokens_total") > 0
        assert httpx.get(f"{program.url}/readyz", timeout=60).json()["judge"] == "on"
        server.stop()
        talk(program, "yours", "Thanks.")
        wait_for(lambda: status()["judge_down"] is not None, SECONDS)
        assert "cannot be reached" in status()["judge_down"]
        assert status()["waiting_for"].startswith("1 turn waits for the judge, which cannot be asked: ")
        assert httpx.get(f"{program.url}/readyz", timeout=60).json()["judge"].startswith("suspended: ")
        assert httpx.get(f"{program.url}/readyz", timeout=60).status_code == 200, "serving does not depend on judging"
        server.answer = opinion("1")
        server.start()
        wait_for(lambda: status()["turns"]["judged"] == 2, SECONDS)
        assert status()["judge_down"] is None
    before = everything(tmp_path)
    shown = command("rejudge", *by(server))
    assert "2 turns; both gave a score to 2, the same to 1 (50%)." in shown
    assert [word for word in shown.split() if word in ("stored", "good", "neutral", "bad", "abstains")]
    assert "turn 1: -1 → +1" in command("rejudge", *by(server), "--turns")
    assert everything(tmp_path) == before


#: What somebody says, and how a judge writes it down.
WISHES = [
    (
        "Faltou o TL;DR. Da próxima vez coloque um.",
        {"said": "Faltou o TL;DR.", "instruction": "Adicione uma linha TL;DR no final.", "scope": ""},
    ),
    (
        "Bei Rezepten bitte Gramm, keine Tassen.",
        {
            "said": "Bei Rezepten bitte Gramm, keine Tassen.",
            "instruction": "Wenn der Nutzer nach einem Rezept fragt: Gib Mengen in Gramm an.",
            "scope": "Rezept Rezepte kochen backen",
        },
    ),
    (
        "翻訳のときは原文も書いてほしい。",
        {"said": "翻訳のときは原文も書いてほしい", "instruction": "原文も一緒に書く", "scope": "翻訳 訳"},
    ),
    (
        "لا تستخدم هذه الرموز التعبيرية مرة أخرى.",
        {"said": "لا تستخدم هذه الرموز التعبيرية", "instruction": "لا تستخدم الرموز التعبيرية.", "scope": ""},
    ),
    ("You forgot to call me Chef.", {"said": "", "instruction": "Call the user Chef.", "scope": ""}),
]


@pytest.mark.more
def test_wishes_in_any_language_become_notes_and_are_given_where_they_apply(
    tiny_model: Path, tmp_path: Path, server: JudgeServer
) -> None:
    def read(body: Body) -> Reply:
        asked = body["messages"][-1]["content"]
        found = [{"replaces": [], "once": False, **wish} for said, wish in WISHES if said in asked]
        answer = json.dumps({"wishes": found, "wanted": ""}, ensure_ascii=False, indent=1)
        text = f"The user is not content, because the response misses something.\n```json\n{answer}\n```\n\\boxed{{-1}}"
        return completion(*[text] * body["n"])

    def texts() -> list[str]:
        return [note["text"] for note in httpx.get(f"{program.url}/v1/notes", timeout=60).json()["data"]]

    server.answer = read
    judge = ("--judge-base-url", server.url, "--judge-model", "judge-1", "--method", "rl")
    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path), *judge, *JUDGES_ONLY) as program:
        for number, (said, _wish) in enumerate(WISHES):
            if number % 2:
                given = {"id": talk(program, f"s{number}"), "thumb": "down", "text": said}
                assert httpx.post(f"{program.url}/v1/feedback", json=given, timeout=60).status_code == 200
            else:
                talk(program, f"s{number}", said)
            wait_for(lambda count=number + 1: len(texts()) == count, SECONDS)
        portuguese, german, japanese, arabic, english = texts()
        for number, question in enumerate(("Ein Nudelrezept!", "これを翻訳して", "How far is it?")):
            ask = {"messages": [{"role": "user", "content": question}], "max_tokens": 2}
            headers = {"X-Session-Id": f"new{number}"}
            httpx.post(f"{program.url}/v1/chat/completions", json=ask, headers=headers, timeout=60).raise_for_status()
    assert portuguese == "Adicione uma linha TL;DR no final."
    assert german == "Wenn der Nutzer nach einem Rezept fragt: Gib Mengen in Gramm an."
    assert japanese == "翻訳 訳: 原文も一緒に書く。"
    assert arabic == "لا تستخدم الرموز التعبيرية."
    assert english == "Call the user Chef."
    given_notes = [[note.text for note in turn.notes] for turn in stored_turns(tmp_path)[-3:]]
    always = [portuguese, arabic, english]
    assert given_notes == [[portuguese, german, arabic, english], [portuguese, japanese, arabic, english], always]


@pytest.mark.more
def test_whatever_kill_9_interrupts_every_turn_is_judged_once(
    tiny_model: Path, tmp_path: Path, server: JudgeServer
) -> None:
    thinking, answer = threading.Semaphore(0), threading.Event()
    sure = opinion("1")

    def think(body: Body) -> Reply:
        thinking.release()
        answer.wait(60)
        return sure(body)

    server.answer = think
    flags = ("--run-dir", str(tmp_path), "--method", "rl", *by(server), *JUDGES_ONLY)
    with serving(SERVE, tiny_model, *flags) as program:
        for session in "abc":
            talk(program, session, "Thanks.", "And back?")
        for _ in range(4):
            thinking.acquire(timeout=30)
        program.process.kill()
        program.process.wait()
    answer.set()
    assert all(turn.verdict is None for turn in stored_turns(tmp_path))
    with serving(SERVE, tiny_model, *flags):
        wait_for(lambda: sum(turn.state is State.JUDGED for turn in stored_turns(tmp_path)) == 6, SECONDS)
    rows = everything(tmp_path)["verdicts"]
    assert len(rows) == 6
    assert all(turn.verdict is not None or turn.next_state is None for turn in stored_turns(tmp_path))


@pytest.mark.more
def test_without_a_judge_turns_are_recorded_and_wait(tiny_model: Path, tmp_path: Path, command: Command) -> None:
    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path), "--judge", "none", *JUDGES_ONLY) as program:
        talk(program, "mine", "Thanks.")
        assert "none: turns are recorded and wait" in program.log
        told = httpx.get(f"{program.url}/readyz", timeout=60).json()
        turns = json.loads(command("status", "--json"))["turns"]
    assert (turns["ready"], turns["judged"], turns["dropped"]) == (1, 0, 0)
    assert told["judge"] == "off"


@pytest.mark.more
def test_a_teacher_with_another_vocabulary_is_refused_with_a_sentence(tiny_model: Path, tmp_path: Path) -> None:
    teacher = save_tiny_model(tmp_path / "teacher", seed=1)
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(teacher / "tokenizer.json"))
    arguments = ("--model-name", str(tiny_model), "--teacher-model-name", str(teacher), "--run-dir", str(tmp_path))
    done = subprocess.run(
        [*SERVE, *arguments, "--proxy-port", "0"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 2
    assert "--teacher-model-name has another vocabulary than the policy" in done.stderr
    assert "Traceback" not in done.stderr


# without a server


def test_a_judge_that_cannot_be_made_is_refused_before_anything_is_loaded(
    tiny_model: Path, tmp_path: Path, command: Command
) -> None:
    """--dry-run checks everything."""
    model = ("--model-name", str(tiny_model))
    said = command("serve", *model, "--dry-run", "--custom-rm-path", str(tmp_path / "none.py"), code=2)
    assert "--custom-rm-path: there is no file" in said
    said = command("serve", *model, "--dry-run", "--judge-rubric", str(tmp_path / "none.txt"), code=2)
    assert "--judge-rubric" in said


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Book]:
    """Eight turns of which half were good."""
    book = Book(tmp_path)
    for number in range(8):
        turn = book.capture(a_turn())
        book.change(set_next_state, turn, [{"role": "user", "content": "so"}])
        verdict = Verdict(1.0 if number % 2 else -1.0, Source.LLM)
        book.change(verdicts.record, turn, verdict, SampleKind.RL, "", 0)
    yield book
    book.close()


def test_rejudging_with_a_judge_that_is_down_says_so_instead_of_a_table(
    judged: Book, server: JudgeServer, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openclaw_rl.judge.judges.base.MAX_SECONDS_DOWN", 0.0)
    server.stop()
    said = command("rejudge", *by(server), code=2)
    assert "cannot be reached" in said


def test_rejudging_waits_for_a_judge_that_asks_for_patience(
    judged: Book, server: JudgeServer, command: Command
) -> None:
    sure, asked = opinion("1"), []

    def limited(body: Body) -> Reply:
        asked.append(body)
        return Reply(429, headers={"Retry-After": "0.2"}) if len(asked) == 2 else sure(body)

    server.answer = limited
    assert "8 turns; both gave a score to 8, the same to 4 (50%)." in command("rejudge", *by(server))


def test_rejudging_without_a_verdict_or_a_judge_is_said_in_a_sentence(
    tmp_path: Path, server: JudgeServer, command: Command
) -> None:
    Book(tmp_path).close()
    assert "No turn has been judged yet" in command("rejudge", *by(server), code=2)
    assert "--judge none judges nothing" in command("rejudge", "--judge", "none", code=2)


def test_rejudging_only_the_last(judged: Book, server: JudgeServer, command: Command) -> None:
    server.answer = opinion("0")
    shown = command("rejudge", *by(server), "--last", "3", "--turns")
    assert "3 turns; both gave a score to 3, the same to 0 (0%)." in shown
    assert "turn 8: +1 → +0" in shown
    assert "turn 5:" not in shown
    assert len(server.requests) == 3
