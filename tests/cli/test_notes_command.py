"""`openclaw-rl notes` lists and changes notes; status, sessions and forget know them."""

from typing import Any

import pytest

from openclaw_rl.ledger import notes, turns, verdicts
from openclaw_rl.types import ConversationNote, HeardWishes, SampleKind, Verdict, Wish
from support.commands import Program, status
from support.records import Book, a_turn

SHORT = Wish("Answer in one short sentence.", "length", lasting=True)


def said(book: Book, *wishes: Wish, owner: str = "me", score: float = -1.0, **given: Any) -> int:
    """A turn that was judged; its answer keeps to all its notes."""
    kept = {note.number: True for note in given.get("notes", ())}
    turn = book.capture(a_turn(owner=owner, **given))
    book.change(turns.set_next_state, turn, [{"role": "user", "content": "next"}])
    book.change(verdicts.record, turn, Verdict(score), SampleKind.RL, "", 0, None, HeardWishes(wishes, kept=kept))
    return turn


def test_notes_are_listed_with_their_source_and_effect(book: Book, program: Program) -> None:
    turn = said(book, SHORT)
    for given, score in ((True, 1.0), (True, 1.0), (False, -1.0)):
        wishes = () if score > 0 else (SHORT,)
        said(book, *wishes, score=score, notes=[ConversationNote(1, SHORT.instruction, given)])
    code, out, _err = program("notes")
    assert code == 0
    for part in (SHORT.instruction, f"turn {turn}", "2 of 2", "0 of 1", "active"):
        assert part in out


def test_the_text_of_a_note_has_room_in_a_terminal_of_80_columns(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner in ("anna", "somebody-with-a-long-name"):
        first = said(book, SHORT, owner=owner)
        for given in [True] * 12 + [False] * 11:
            note = ConversationNote(first, SHORT.instruction, given)
            said(book, owner=owner, score=1.0, notes=[note])
    monkeypatch.setenv("COLUMNS", "80")
    out = program("notes")[1]
    assert max(map(len, out.splitlines())) <= 80
    assert "Answer in one short" in out, "a line has several words"


def test_notes_are_listed_by_user(book: Book, program: Program) -> None:
    said(book, SHORT)
    said(book, Wish("Call me Kim.", "address", lasting=True), owner="kim")
    assert "Call me Kim." in program("notes")[1]
    out = program("notes", "--user", "kim")[1]
    assert "Call me Kim." in out
    assert SHORT.instruction not in out
    assert "There is no note of lee yet" in program("notes", "--user", "lee")[1]


def test_notes_are_changed_by_hand(book: Book, program: Program) -> None:
    book.capture(a_turn(owner="sam"))
    assert "Note 1 of sam: Use metric units." in program("notes", "add", "Use metric units.")[1]
    assert "Note 1 is now: Use SI units." in program("notes", "edit", "1", "Use SI units.")[1]
    assert "pinned" in program("notes", "pin", "1")[1]
    assert "pinned" in program("notes")[1]
    assert "no longer pinned" in program("notes", "unpin", "1")[1]
    assert "Removed note 1: Use SI units." in program("notes", "remove", "1")[1]
    assert "There is no note" in program("notes")[1]
    assert "removed: by its owner" in " ".join(program("notes", "--all")[1].split())


def test_mistakes_are_said_in_a_sentence(book: Book, program: Program) -> None:
    book.capture(a_turn(owner="sam"))
    book.capture(a_turn(owner="kim"))
    for arguments, problem in (
        (("add", "Be kind."), "Give --user: the users of this run are kim, sam."),
        (("add", " ", "--user", "sam"), "A note has 1 to 300 characters."),
        (("remove", "7"), "There is no note 7."),
        (("edit", "7", "Be kind."), "There is no note 7."),
    ):
        code, _out, err = program("notes", *arguments)
        assert code == 2
        assert problem in err
    assert program("notes", "add", "Be kind.", "--user", "sam")[0] == 0


def test_status_counts_notes(book: Book, program: Program) -> None:
    said(book, SHORT)
    assert "1 note" in program("status")[1]
    assert status(program)["notes"] == {"active": 1, "retired": 0}


def test_sessions_show_the_notes_of_a_turn(book: Book, program: Program) -> None:
    said(book, SHORT)
    then = [ConversationNote(1, SHORT.instruction, True), ConversationNote(2, "Call me Sam.", False)]
    book.capture(a_turn("later", notes=then, plain_ids=[1, 2]))
    out = " ".join(program("sessions", "later")[1].split())
    assert f"note 1: {SHORT.instruction}" in out
    assert "note 2 (withheld): Call me Sam." in out
    assert "2 without notes" in out


def test_forgetting_a_user_deletes_notes(book: Book, program: Program) -> None:
    said(book, SHORT)
    book.change(notes.add, "kim", "Call me Kim.")
    assert "1 note" in program("forget", "--user", "me")[1]
    assert [note.owner for note in notes.of_owner(book.db, all_states=True)] == ["kim"]
    code, out, _err = program("forget", "--user", "kim")
    assert (code, "1 note" in out) == (0, True), "a user may have notes and no session"
