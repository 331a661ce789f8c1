"""Turns from files and to files: good lines go in, bad ones are named, and words come back as they went."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openclaw_rl.cli import main
from openclaw_rl.ledger import deletion, pages, sessions
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.turns import add_feedback, load_turn, set_next_state, turn_numbers
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import (
    Continuation,
    EpisodeState,
    EpisodeSummary,
    Feedback,
    State,
    StoredTurn,
    TopTokens,
    TurnKind,
)
from support.episodes import attempt, end, play
from support.records import Book, a_side_turn, a_turn

LIKELY = TopTokens(np.array([[1, 2]] * 2), np.array([[-0.5, -1.0]] * 2))
TURN = {"prompt": "What is the fox?", "response": "Quick and brown.", "next_state": "thanks"}
TOOL_CALL = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the fox"}'}}


def line(session: str, *turns: dict[str, Any]) -> str:
    return json.dumps({"session_id": session, "turns": list(turns) or [TURN]}, ensure_ascii=False)


class Run:
    """A run directory and what the program does with it."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model, self.capsys = folder, model, capsys

    def imports(self, content: str | bytes, name: str = "in.jsonl") -> tuple[int, str, list[str]]:
        """Exit status, what was said, and the lines of complaint."""
        file = self.folder.parent / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        self.capsys.readouterr()
        code = main(["import", "--run-dir", str(self.folder), "--model-name", str(self.model), str(file)])
        said = self.capsys.readouterr()
        return code, said.out.strip(), said.err.splitlines()

    def exports(self, how: str = "trajectories") -> list[dict[str, Any]]:
        file = self.folder.parent / f"{self.folder.name}.out.jsonl"
        self.capsys.readouterr()
        assert main(["export", "--format", how, "--run-dir", str(self.folder), str(file)]) == 0
        assert self.capsys.readouterr().err == "", "progress is for terminals"
        return [json.loads(one) for one in file.read_text(encoding="utf-8").split("\n")[:-1]]

    def turns(self) -> list[StoredTurn]:
        with connect(self.folder / FILE, readonly=True) as db:
            return [load_turn(db, number) for number in turn_numbers(db)]


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path / "run", tiny_model, capsys)


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(tiny_model)


# Into the ledger.

BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"session_id": "x", "turns": [', "Invalid JSON"),
    (b"hello", "Invalid JSON"),
    (b"[1, 2]", "object"),
    (b"null", "object"),
    (b'{"turns": [{"prompt": "a", "response": "b"}]}', "session_id"),
    (b'{"session_id": 7, "turns": [{"prompt": "a", "response": "b"}]}', "session_id"),
    (b'{"session_id": "", "turns": [{"prompt": "a", "response": "b"}]}', "session_id"),
    (b'{"session_id": "x", "turns": []}', "turns"),
    (b'{"session_id": "x", "turns": [{"prompt": "a"}]}', "turns.0.response"),
    (b'{"session_id": "x", "turns": [{"prompt": 1, "response": "b"}]}', "turns.0.prompt"),
    (b'{"session_id": "x", "turns": [{"prompt": "a", "response": "b", "type": "other"}]}', "turns.0.type"),
    (b'{"session_id": "x", "turns": [{"prompt": "a", "response": "b"}, {"prompt": null}]}', "turns.1.prompt"),
    (b'{"session_id": "x", "turns": [{"prompt": "caf\xe9", "response": "b"}]}', "Invalid JSON"),
    (b'{"session_id": "x", "turns": [{"prompt": "\\ud800", "response": "b"}]}', "Invalid JSON"),
    (b"\xff\xfe", "Invalid JSON"),
    (b'{"messages": []}', "no message is the assistant's"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', ":3: no message is the assistant's"),
    (
        b'{"messages": [{"role": "assistant", "content": "a"}], "message": {}, "response_ids": [1]}',
        ":3: this is a turn of 'export --format jsonl'",
    ),
    (b'{"messages": [{"role": "robot", "content": "a"}]}', "messages.0.role"),
    (b'{"messages": [{"role": "user", "content": 7}]}', "messages.0.content"),
    (b'{"messages": "hello"}', "messages"),
    *(
        (json.dumps({"session_id": "x", "turns": [TURN], "episode": episode}).encode(), what)
        for episode, what in (
            ({"reward": 1e7}, "episode.reward"),
            ({"reward": -1e308}, "episode.reward"),
            ({"reward": 1, "steps": [{"index": 0, "reward": -1e7}]}, "episode.steps.0.reward"),
            ({"reward": 1, "steps": [{"index": 5}]}, "no turn with index 5"),
            ({"reward": 1, "group": "g", "group_size": 1}, "episode.group_size"),
            ({"reward": 1, "group": "g", "group_size": 1025}, "episode.group_size"),
        )
    ),
]


@pytest.mark.parametrize(("bad", "what"), BAD_LINES)
def test_a_bad_line_is_named_and_the_good_ones_go_in(run: Run, bad: bytes, what: str) -> None:
    content = b"\n".join([line("a").encode(), b"", bad, b"   ", line("b").encode()])
    code, said, complaints = run.imports(content)
    assert code == 1
    assert len(complaints) == 1
    assert complaints[0].startswith(f"{run.folder.parent / 'in.jsonl'}:3: ")
    assert what in complaints[0]
    assert said == "2 turns imported, 1 line refused"
    assert [turn.session.id for turn in run.turns()] == ["a", "b"]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the fox?"},
    {"role": "assistant", "content": "Quick."},
    {"role": "user", "content": [{"type": "text", "text": "Look again."}]},
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    {"role": "tool", "tool_call_id": "a1", "content": "brown"},
    {"role": "assistant", "content": "Brown.", "weight": 0},
    {"role": "user", "content": "thanks"},
]


def test_conversations_as_other_programs_write_them_go_in(run: Run, renderer: ChatRenderer) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    lines = "\n".join(
        map(json.dumps, ({"messages": CHAT, "tools": tools}, {"messages": CHAT[:3], "session_id": "mine"}))
    )
    assert run.imports(lines) == (0, "4 turns imported, 0 lines refused", [])
    first, called, last, alone = run.turns()
    assert [message["role"] for message in called.messages] == ["tools", "system", "user", "assistant", "user"]
    assert list(called.prompt_ids) == renderer.prompt(renderer.text(CHAT[:4], tools)).ids
    assert [turn.message.get("content") for turn in (first, last)] == ["Quick.", "Brown."]
    assert called.message["tool_calls"][0]["function"]["name"] == "look"
    assert "look" in renderer.tokenizer.backend.decode(list(called.response_ids))
    came = [[message["role"] for message in turn.next_state or []] for turn in (first, called, last, alone)]
    assert came == [["user"], ["tool"], ["user"], []]
    assert [turn.state for turn in (first, called, last, alone)] == [State.CAPTURED] * 2 + [State.DROPPED] * 2
    assert alone.session.id == "mine"
    assert run.imports(lines)[1] == "0 turns imported, 4 were there already, 0 lines refused"


def test_the_first_line_in_an_unknown_form_shows_the_forms(run: Run) -> None:
    _code, _said, complaints = run.imports('{"conversations": [{"from": "human"}]}\n{"text": "a"}\n')
    assert len(complaints) == 2
    assert '{"messages": [{"role": "user"' in complaints[0]
    assert '"turns": [{"prompt"' in complaints[0]
    assert "A line is" not in complaints[1]


def test_every_bad_line_is_named(run: Run) -> None:
    content = b"".join(bad + b"\r\n" + line(str(i)).encode() + b"\r\n" for i, (bad, _) in enumerate(BAD_LINES))
    code, said, complaints = run.imports(content)
    file = run.folder.parent / "in.jsonl"
    assert code == 1
    assert [one.split(": ")[0] for one in complaints] == [f"{file}:{2 * i + 1}" for i in range(len(BAD_LINES))]
    assert said == f"{len(BAD_LINES)} turns imported, {len(BAD_LINES)} lines refused"


def test_a_good_file_is_imported_without_complaint(run: Run) -> None:
    assert run.imports(line("a") + "\n" + line("b")) == (0, "2 turns imported, 0 lines refused", [])


def test_a_byte_order_mark_is_no_error(run: Run) -> None:
    assert run.imports(b"\xef\xbb\xbf" + line("a").encode()) == (0, "1 turn imported, 0 lines refused", [])


def test_unicode_line_separators_inside_a_text_do_not_cut_the_line(run: Run) -> None:
    said = "one\u2028two\u0085three\x0b"
    code, _said, _complaints = run.imports(line("a", {**TURN, "response": said}))
    assert code == 0
    assert run.turns()[0].message["content"] == said


def test_importing_twice_adds_nothing(run: Run) -> None:
    content = line("a", TURN, TURN) + "\n" + line("b")
    run.imports(content)
    before = run.turns()
    assert run.imports(content) == (0, "0 turns imported, 3 were there already, 0 lines refused", [])
    assert run.turns() == before


def test_a_file_that_has_grown_adds_what_is_new(run: Run) -> None:
    more = {"prompt": "And the dog?", "response": "Lazy.", "next_state": "ok"}
    run.imports(line("a"))
    assert run.imports(line("a", TURN, more))[1] == "1 turn imported, 1 was there already, 0 lines refused"
    assert [message["content"] for message in run.turns()[1].messages] == [
        TURN["prompt"],
        TURN["response"],
        more["prompt"],
    ]


def test_a_file_that_is_not_there_is_said_in_a_sentence(run: Run, tmp_path: Path) -> None:
    assert main(["import", "--run-dir", str(run.folder), str(tmp_path / "nothing.jsonl")]) == 2
    assert "There is no file" in run.capsys.readouterr().err


def test_imported_turns_wait_to_be_scored(run: Run, renderer: ChatRenderer) -> None:
    run.imports(line("a", TURN, {**TURN, "prompt": "Again?", "response": "<|im_end|> <think>é"}))
    tokenizer = renderer.tokenizer
    first, second = run.turns()
    for turn in (first, second):
        assert (turn.state, turn.kind, turn.kind_reason) == (State.CAPTURED, TurnKind.MAIN, "imported")
        assert turn.session == ("imported", "a")
        assert (turn.logprobs, turn.top, turn.continuation) == ([], None, Continuation.NEW)
        assert turn.next_state == [{"role": "user", "content": "thanks"}]
        assert turn.response_ids[-1] == tokenizer.backend.token_to_id("<|im_end|>")
        assert turn.prompt_ids == renderer.prompt(renderer.text(turn.messages)).ids
    assert tokenizer.backend.decode(first.response_ids[:-1]) == TURN["response"]
    # Text is text: what looks like a control token is not one.
    assert not set(second.response_ids[:-1]) & set(tokenizer.eos_ids)
    assert tokenizer.backend.decode(second.response_ids[:-1]) == "<|im_end|> <think>é"
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"type": "side"}, "imported as not trainable"),
        ({"trainable": False}, "imported as not trainable"),
        ({"next_state": None}, sessions.NO_NEXT_STATE),
    ],
)
def test_what_cannot_be_trained_on_is_imported_as_dropped(run: Run, written: dict, reason: str) -> None:
    run.imports(line("a", {**TURN, **written}))
    (turn,) = run.turns()
    assert (turn.state, turn.reason) == (State.DROPPED, reason)


def test_an_imported_session_is_over_and_another_import_of_its_name_goes_on(run: Run) -> None:
    run.imports(line("a"))
    with connect(run.folder / FILE, readonly=True) as db:
        (summary,) = pages.session_summaries(db)
    assert (summary.closed, summary.source, summary.turns) == (True, "import", 1)


def test_an_imported_session_s_tokens_are_stored_once(run: Run) -> None:
    chance = random.Random(1)

    def long(session: str, turns: int) -> str:
        return line(
            session, *({**TURN, "prompt": chance.randbytes(200).hex(), "response": f"{i}"} for i in range(turns))
        )

    run.imports(long("a", 10) + "\n" + long("b", 20))
    with connect(run.folder / FILE, readonly=True) as db:
        query = "SELECT sum(length(added)) FROM turns t JOIN sessions s ON s.number = t.session WHERE id = ?"
        short, twice = (db.execute(query, (name,)).fetchone()[0] for name in "ab")
    assert twice < 2.2 * short


# Episodes.


def episode_line(session: str, *turns: dict[str, Any], **episode: Any) -> str:
    return json.dumps({"session_id": session, "turns": list(turns) or [TURN], "episode": episode})


def imported_episodes(run: Run) -> dict[str, EpisodeSummary]:
    with connect(run.folder / FILE, readonly=True) as db:
        return {summary.key.id: summary.episode for summary in pages.session_summaries(db) if summary.episode}


def test_an_attempt_that_came_too_late_comes_back_as_failed_and_outside_its_group(run: Run, tmp_path: Path) -> None:
    book = Book(tmp_path / "recorded")
    play(book, "late")
    for name, reward in (("a", 1.0), ("b", 0.0)):
        attempt(book, "g", name, reward)
    assert end(book, "late", 5.0, group="g")
    book.close()
    lines = Run(book.folder, run.model, run.capsys).exports()
    assert run.imports("\n".join(map(json.dumps, lines)))[0] == 0
    there = imported_episodes(run)
    assert {name: episode.state for name, episode in there.items()} == {
        "a": EpisodeState.REWARDED,
        "b": EpisodeState.REWARDED,
        "late": EpisodeState.FAILED,
    }
    assert (there["late"].reward, there["late"].group) == (None, None)


def test_an_attempt_at_a_group_that_is_closed_here_is_refused(run: Run) -> None:
    for name in "ab":
        assert run.imports(episode_line(name, reward=1, group="g", group_size=2))[0] == 0
    code, said, complaints = run.imports(episode_line("c", reward=1, group="g", group_size=2))
    assert (code, said) == (1, "0 turns imported, 1 line refused")
    assert complaints[0].endswith("in.jsonl:1: too late: its group was closed")
    assert set(imported_episodes(run)) == {"a", "b"}


def test_equal_group_names_of_two_owners_stay_two_groups(run: Run, tmp_path: Path) -> None:
    book = Book(tmp_path / "recorded")
    for owner in ("me", "you"):
        play(book, owner, owner=owner)
        end(book, owner, 1.0, owner=owner, group="g", group_size=2)
    attempt(book, "h", "other", 1.0)
    book.close()
    lines = Run(book.folder, run.model, run.capsys).exports()
    assert {one["session_id"]: one["episode"]["group"] for one in lines} == {
        "me": "me/g",
        "you": "you/g",
        "other": "h",
    }


def test_a_group_that_lost_attempts_is_exported_with_a_size_that_can_be_imported(run: Run, tmp_path: Path) -> None:
    book = Book(tmp_path / "recorded")
    for name in "ab":
        attempt(book, "g", name, 1.0)
    book.change(deletion.delete_sessions, [book.scalar("SELECT number FROM sessions WHERE id = 'a'")])
    book.close()
    lines = Run(book.folder, run.model, run.capsys).exports()
    assert run.imports("\n".join(map(json.dumps, lines)))[:2] == (0, "1 turn imported, 0 lines refused")


def test_a_session_that_is_known_is_not_made_an_episode(run: Run) -> None:
    run.imports(line("a"))
    assert run.imports(episode_line("a", TURN, {**TURN, "prompt": "And the dog?"}, reward=1))[0] == 0
    assert imported_episodes(run) == {}
    assert [turn.state for turn in run.turns()] == [State.CAPTURED] * 2


def test_what_is_added_to_an_episode_that_has_ended_is_dropped(run: Run) -> None:
    run.imports(episode_line("a", reward=1))
    assert run.imports(episode_line("a", TURN, {**TURN, "prompt": "And the dog?"}, reward=2))[0] == 0
    assert imported_episodes(run)["a"].reward == 1
    assert [(turn.state, turn.reason) for turn in run.turns()] == [
        (State.CAPTURED, ""),
        (State.DROPPED, sessions.EPISODE_ENDED),
    ]


# Out of it.


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Book]:
    """A ledger as a server leaves it: tools, side turns, a retry, next states."""
    book = Book(tmp_path / "recorded")
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Where is the fox? 狐"}]
    called = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    results = [
        {"role": "tool", "content": "in the wood", "tool_call_id": "a1"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]
    tools = {"role": "tools", "tools": [{"type": "function", "function": {"name": "look"}}]}
    first = book.capture(a_turn("s", messages=[tools, *asked], message=called, top=LIKELY))
    book.change(set_next_state, first, results)
    answer = {"role": "assistant", "content": "In the wood."}
    last = a_turn("s", messages=[tools, *asked, called, *results], message=answer)
    book.capture(last)
    book.change(add_feedback, "me", last.completion, 0, Feedback(1.0, "right"))
    book.capture(a_side_turn("s"))
    book.capture(a_turn("t", owner="you"))
    yield book
    book.close()


def words(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {one["session_id"]: one["turns"] for one in lines}


def test_trajectories_are_sessions_in_words(recorded: Book, run: Run) -> None:
    told = words(Run(recorded.folder, run.model, run.capsys).exports())
    assert set(told) == {"s", "t"}
    assert told["s"][0] == {
        "type": "main",
        "prompt": "Where is the fox? 狐",
        "response": '<tool_call>\n{"name": "look", "arguments": {"at": "the fox"}}\n</tool_call>',
        "next_state": "in the wood\nand?",
        "trainable": True,
    }
    assert told["s"][1]["prompt"] == "in the wood\nand?"
    assert "next_state" not in told["s"][1]
    assert (told["s"][2]["type"], told["s"][2]["trainable"]) == ("side", False)


def test_words_survive_export_import_export(recorded: Book, run: Run) -> None:
    first = Run(recorded.folder, run.model, run.capsys).exports()
    code, said, _complaints = run.imports("\n".join(json.dumps(one) for one in first))
    assert (code, said) == (0, "4 turns imported, 0 lines refused")
    assert run.exports() == first


def test_what_was_exported_here_is_known_when_it_comes_back(recorded: Book, run: Run) -> None:
    here = Run(recorded.folder, run.model, run.capsys)
    lines = here.exports()
    code, said, _complaints = here.imports("\n".join(json.dumps(one) for one in lines))
    assert (code, said) == (0, "0 turns imported, 4 were there already, 0 lines refused")
    assert here.exports() == lines
    # What was written by hand under the name of a session that is here is something else.
    assert here.imports(line("s"))[1] == "1 turn imported, 0 lines refused"


def test_equal_session_names_of_two_owners_survive_export_and_import(tmp_path: Path, run: Run) -> None:
    book = Book(tmp_path / "recorded")
    for owner in ("me", "you"):
        answer = {"role": "assistant", "content": "hi"}
        book.capture(a_turn("s", owner, messages=[{"role": "user", "content": "hello"}], message=answer))
    book.close()
    first = Run(book.folder, run.model, run.capsys).exports()
    assert len(first) == 2
    there = "\n".join(json.dumps(one) for one in first)
    assert run.imports(there)[1] == "2 turns imported, 0 lines refused"
    back = Run(book.folder, run.model, run.capsys).imports(there)
    assert back[1] == "0 turns imported, 2 were there already, 0 lines refused"


def test_jsonl_has_everything_a_turn_a_line(recorded: Book, run: Run) -> None:
    lines = Run(recorded.folder, run.model, run.capsys).exports("jsonl")
    assert len(lines) == 4
    for number, told in zip(turn_numbers(recorded.db), lines, strict=True):
        turn = recorded.read(number)
        assert told["number"] == number
        assert told["session"] == list(turn.session)
        assert (told["prompt_ids"], told["response_ids"]) == (turn.prompt_ids, turn.response_ids)
        assert told["logprobs"] == turn.logprobs
        assert told["messages"] == turn.messages
        assert (told["kind"], told["state"]) == (turn.kind, turn.state)
    assert lines[0]["top"] == {"ids": [[1, 2]] * 2, "logprobs": [[-0.5, -1.0]] * 2}
    assert lines[0]["next_state"][0]["content"] == "in the wood"
    (given,) = lines[1]["feedback"]
    assert given.items() >= {"score": 1.0, "text": "right", "source": "explicit"}.items()


def test_half_characters_are_exported_as_valid_json(tmp_path: Path, run: Run) -> None:
    book = Book(tmp_path / "recorded")
    book.capture(a_turn(messages=[{"role": "user", "content": "half \ud83d"}]))
    book.close()
    told = Run(book.folder, run.model, run.capsys).exports("jsonl")
    assert told[0]["messages"][0]["content"] == "half \ud83d"


def test_a_place_that_cannot_be_written_is_said_in_a_sentence(recorded: Book, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "no" / "such" / "folder.jsonl"
    assert main(["export", "--run-dir", str(recorded.folder), str(out)]) == 2
    assert str(out) in run.capsys.readouterr().err


def test_without_a_ledger_there_is_nothing_to_export(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    assert main(["export", "--run-dir", str(run.folder), str(out)]) == 2
    assert "no ledger" in run.capsys.readouterr().err
    assert out.read_text() == "precious"


def test_a_correction_is_in_the_file_and_comes_back(run: Run) -> None:
    """An imported turn that somebody corrected needs no next state: its correction is feedback, and an example."""
    asked = {"prompt": "Where is the fox?", "response": "In the wood.", "correction": "Chef, in the wood."}
    run.imports(json.dumps({"session_id": "a", "turns": [asked]}))
    (turn,) = run.turns()
    assert (turn.state, [said.correction for said in turn.feedback]) == (State.CAPTURED, ["Chef, in the wood."])
    assert words(run.exports())["a"][0]["correction"] == "Chef, in the wood."
