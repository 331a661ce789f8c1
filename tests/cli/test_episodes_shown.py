"""Episodes on every surface: status, sessions, report, export and import."""

import json
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import main
from openclaw_rl.types import EpisodeState, State
from support.commands import Program
from support.episodes import attempt, end, judge, play
from support.methods import a_method
from support.records import Book

METHOD = a_method("rl", baseline="group", step_reward_coef=1.0)


def a_group(book: Book) -> list[int]:
    """A group of two attempts, of which the first has two turns; one that failed; and a group that waits."""
    turns = attempt(book, "g", "good", 1.0, turns=2, size=3, steps={0: 0.5})
    turns += attempt(book, "g", "bad", 0.0, size=3, steps={0: 0.25})
    turns += attempt(book, "g", "broken", None, size=3)
    attempt(book, "h", "first", 1.0, size=8)
    play(book, "held", turns=2)
    judge(book, METHOD)
    return turns


def test_status_says_why_nothing_is_trained(book: Book, program: Program) -> None:
    play(book, "held", turns=2)
    assert "2 turns wait for the reward of an episode: POST /v1/sessions/ID/reward." in one_line(program("status")[1])
    for name, group in (("a", "g"), ("b", "g"), ("c", "h")):
        attempt(book, group, name, 1.0, size=8)
    judge(book, METHOD)
    assert "2 groups wait for attempts: 2 of 8, 1 of 8." in one_line(program("status")[1])
    status = json.loads(program("status", "--json")[1])
    assert status["held"] == 2
    assert status["groups_waiting"] == [{"name": "g", "ended": 2, "size": 8}, {"name": "h", "ended": 1, "size": 8}]


def one_line(out: str) -> str:
    return " ".join(out.split())


def test_sessions_show_task_group_reward_and_advantage(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_group(book)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OPENCLAW_BASELINE", "group")
    monkeypatch.setenv("STEP_REWARD_COEF", "1.0")
    listed = program("sessions")[1]
    rows = {line.split("│")[1].strip(): line for line in listed.splitlines() if line.startswith("│")}
    assert "task of g" in rows["good"]
    assert "│ 1 " in rows["good"]
    assert "failed" in rows["broken"]
    assert "held" in rows["held"]
    out = one_line(program("sessions", "good")[1])
    assert "episode · task task of g · group g · reward +1 · mean of its group +0.5 (2 attempts)" in out
    assert "step 0 · reward of this step +0.5 (mean +0.375) · advantage +0.625" in out
    assert "step 1 · advantage +0.5" in out
    assert "failed: the environment broke" in one_line(program("sessions", "broken")[1])


def test_the_report_has_a_table_of_episodes(book: Book, tiny_model: Path) -> None:
    a_group(book)
    folder = book.folder
    assert main(["report", str(folder), "--model-name", str(tiny_model), "--no-answers"]) == 0
    page = (folder / "report.html").read_text("utf-8")
    for words in ("Episodes", "task of g", "failed: the environment broke", "waits for its reward", "+0.5"):
        assert words in page


def exported(book: Book, how: str = "trajectories") -> list[dict[str, Any]]:
    file = book.folder.parent / "out.jsonl"
    assert main(["export", "--format", how, "--run-dir", str(book.folder), str(file)]) == 0
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_export_carries_episodes_and_import_brings_them_back(book: Book, tiny_model: Path, tmp_path: Path) -> None:
    a_group(book)
    play(book, "said")
    end(book, "said", 0.5, solved=True, text="The unit must be km.")
    lines = {line["session_id"]: line.get("episode") for line in exported(book)}
    assert lines["good"] == {
        "mode": "train",
        "task": "task of g",
        "group": "g",
        "group_size": 3,
        "reward": 1.0,
        "solved": None,
        "error": "",
        "advantage": 0.5,
        "steps": [{"index": 0, "reward": 0.5, "text": ""}],
    }
    assert {line["episode"]["group"] for line in exported(book, "jsonl")} == {"g", "h", None}
    other = tmp_path / "other"
    out = str(book.folder.parent / "out.jsonl")
    exported(book)
    for _ in range(2):
        assert main(["import", "--run-dir", str(other), "--model-name", str(tiny_model), out]) == 0
    again = Book(other)
    turns = {turn.session.id: turn for turn in (again.read(n) for (n,) in again.rows("SELECT number FROM turns"))}
    assert {name: turn.state for name, turn in turns.items()} == {
        "good": State.CAPTURED,
        "bad": State.CAPTURED,
        "first": State.CAPTURED,
        "said": State.CAPTURED,
        "broken": State.DROPPED,
        "held": State.DROPPED,
    }
    assert turns["said"].feedback[-1].text == "The unit must be km."
    assert {name: turn.episode.state for name, turn in turns.items() if turn.episode} == {
        **dict.fromkeys(("good", "bad", "first", "said"), EpisodeState.REWARDED),
        **dict.fromkeys(("broken", "held"), EpisodeState.FAILED),
    }
    assert again.rows("SELECT name, size, closed IS NULL FROM groups ORDER BY name") == [("g", 3, 0), ("h", 8, 1)]
    again.close()
