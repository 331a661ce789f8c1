"""Notes in the ledger: kept with the verdict, replaced, counted, retired, brought back and forgotten."""

import contextlib
import math
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from openclaw_rl.ledger import deletion, notes, turns, verdicts
from openclaw_rl.ledger.errors import TooManyNotes, UnknownNote
from openclaw_rl.ledger.note_outcomes import LEVEL, MARGIN, RECENT_OUTCOMES, does_without
from openclaw_rl.ledger.packing import sequence_without_notes
from openclaw_rl.ledger.pages import session_summaries
from openclaw_rl.ledger.schema import FILE, open_ledger, transaction
from openclaw_rl.types import (
    ConversationNote,
    HeardWishes,
    Note,
    NoteOutcomes,
    NoteState,
    SampleKind,
    State,
    Verdict,
    Wish,
)
from support.records import Book, a_turn

SHORT = Wish("Answer in one short sentence.", "length", lasting=True)
LONG = Wish("Answer at length.", "length", lasting=True)
SAM = Wish("Call me Sam.", "address", lasting=True)
TODAY = Wish("Answer in French.", "language", lasting=False)
CAME = [{"role": "user", "content": "what came next"}]
GOOD, BAD = Verdict(1.0), Verdict(-1.0)


def judge(
    book: Book, *wishes: Wish, verdict: Verdict = BAD, kept: Mapping[int, bool] | None = None, **given: Any
) -> int:
    """A turn of which the user said this next, judged; `kept` are the notes whose keeping was checked on its answer."""
    turn = book.capture(a_turn(**given))
    book.change(turns.set_next_state, turn, CAME)
    heard = HeardWishes(tuple(replace(wish, said=time.time()) for wish in wishes), kept=kept or {})
    assert book.change(verdicts.record, turn, verdict, SampleKind.RL, "", 0, None, heard)
    return turn


def in_use(book: Book, owner: str | None = None) -> list[Note]:
    return notes.of_owner(book.db, owner)


def texts(book: Book, owner: str = "me") -> list[str]:
    return [note.text for note in in_use(book, owner) if note.state is NoteState.ACTIVE]


def all_notes(book: Book) -> list[Note]:
    return notes.of_owner(book.db, all_states=True)


def test_a_wish_becomes_a_note_of_the_owner_alone(book: Book) -> None:
    turn = judge(book, SHORT, SAM)
    assert [(note.text, note.topic, note.turn, note.state) for note in in_use(book, "me")] == [
        (SHORT.instruction, "length", turn, NoteState.ACTIVE),
        (SAM.instruction, "address", turn, NoteState.ACTIVE),
    ]
    assert in_use(book, "somebody else") == []


def test_a_wish_for_one_answer_becomes_none(book: Book) -> None:
    judge(book, TODAY)
    assert all_notes(book) == []


def test_a_contradiction_replaces_the_older_note(book: Book) -> None:
    judge(book, SHORT, SAM)
    judge(book, LONG)
    assert texts(book) == [SAM.instruction, LONG.instruction]
    (old, *_) = all_notes(book)
    assert (old.state, old.reason) == (NoteState.REMOVED, "replaced by note 3")
    judge(book, LONG, owner="kim")
    assert texts(book) == [SAM.instruction, LONG.instruction], "another owner's wish replaces nothing"


def test_the_same_wish_again_is_the_same_note(book: Book) -> None:
    judge(book, SHORT)
    judge(book, SHORT)
    assert len(all_notes(book)) == 1


def test_a_verdict_that_is_not_stored_leaves_no_note(book: Book) -> None:
    turn = book.capture(a_turn())
    assert not book.change(
        verdicts.record, turn, BAD, SampleKind.RL, "", 0, None, HeardWishes((replace(SHORT, said=1.0),))
    ), "it is not ready"
    assert all_notes(book) == []


def test_a_crash_while_a_verdict_is_stored_leaves_neither_verdict_nor_note(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any statement: the transaction is whole or not there, and the turn is judged again."""
    turn = book.capture(a_turn())
    book.change(turns.set_next_state, turn, CAME)
    before = book.everything()
    statements: list[str] = []

    class Dying:
        """A connection that dies at its n-th statement."""

        def __init__(self, db: sqlite3.Connection, last: int) -> None:
            self.db, self.last = db, last

        def __getattr__(self, name: str) -> Any:
            return getattr(self.db, name)

        def execute(self, query: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
            statements.append(query)
            if len(statements) > self.last:
                raise MemoryError("killed")
            return self.db.execute(query, values)

    def record(db: sqlite3.Connection, last: int) -> bool:
        statements.clear()
        return verdicts.record(
            Dying(db, last), turn, BAD, SampleKind.RL, "", 0, None, HeardWishes((replace(SHORT, said=1.0),))
        )  # type: ignore[arg-type]

    for last in range(100):
        try:
            assert book.change(record, last)
            break
        except MemoryError:
            assert book.everything() == before
    assert last > 8, "it was tried at every statement"
    assert (book.state(turn), texts(book)) == (State.JUDGED, [SHORT.instruction])


def test_a_user_has_a_bounded_number_of_notes(book: Book) -> None:
    pinned = book.change(notes.add, "me", "I am pinned.")
    book.change(lambda db: notes.edit(db, pinned.number, pinned=True))
    # A judged turn for each would take ten seconds.
    most = [("me", f"Wish {number}.", f"topic {number}", None, 0.0) for number in range(notes.MAX_NOTES - 3)]
    book.change(lambda db: [notes._insert(db, *one) for one in most])
    for number in range(notes.MAX_NOTES - 3, notes.MAX_NOTES + 3):
        judge(book, Wish(f"Wish {number}.", f"topic {number}", lasting=True))
    left = texts(book)
    assert len(left) == notes.MAX_NOTES
    assert left[0] == "I am pinned."
    assert left[-1] == f"Wish {notes.MAX_NOTES + 2}."
    with pytest.raises(TooManyNotes):
        book.change(notes.add, "me", "One more.")


def test_a_pinned_note_is_not_replaced_by_what_is_said(book: Book) -> None:
    judge(book, SHORT)
    (note,) = in_use(book)
    book.change(lambda db: notes.edit(db, note.number, pinned=True))
    judge(book, LONG)
    assert texts(book) == [SHORT.instruction]


def test_a_written_note_replaces_others_of_its_topic_and_is_replaced_by_what_is_said(book: Book) -> None:
    judge(book, SHORT, SAM)
    written = book.change(notes.add, "me", LONG.instruction, "length")
    assert texts(book) == [SAM.instruction, LONG.instruction]
    judge(book, SHORT)
    assert texts(book) == [SAM.instruction, SHORT.instruction]
    with pytest.raises(UnknownNote):
        notes.load(book.db, written.number)


def test_a_note_is_edited_and_removed_by_its_owner_only(book: Book) -> None:
    note = book.change(notes.add, "me", "  Call me\n Sam. ")
    assert note.text == "Call me Sam."
    with pytest.raises(UnknownNote):
        notes.load(book.db, note.number, "kim")
    book.change(lambda db: notes.edit(db, note.number, text="Call me Samuel."))
    assert texts(book) == ["Call me Samuel."]
    book.change(notes.remove, note.number)
    assert texts(book) == []
    with pytest.raises(UnknownNote):
        notes.load(book.db, note.number, "me")


# Counts.


def converse(
    book: Book,
    note: Note,
    *wishes: Wish,
    given: bool,
    verdict: Verdict = GOOD,
    owner: str = "me",
    keeps: bool | None = True,
) -> tuple[int, int]:
    """A conversation of two turns that began with a note, or with the note withheld; its turns."""
    notes_then = [ConversationNote(note.number, note.text, given)]
    kept = {} if keeps is None else {note.number: keeps}
    first = judge(book, *wishes, verdict=verdict, owner=owner, notes=notes_then, kept=kept)
    second = judge(book, verdict=GOOD, owner=owner, parent=first, notes_from=first)
    return first, second


def only_note(book: Book) -> Note:
    (note,) = in_use(book)
    return note


def test_the_first_answers_of_conversations_are_counted(book: Book) -> None:
    judge(book, SHORT)
    note = only_note(book)
    converse(book, note, given=True)
    converse(book, note, given=True)
    converse(book, note, SHORT, given=True, verdict=BAD)
    converse(book, note, given=False)
    converse(book, note, SHORT, given=False, verdict=BAD)
    converse(book, note, SAM, given=True, verdict=BAD)
    counted = next(one for one in in_use(book) if one.number == note.number)
    assert counted.given == NoteOutcomes(held=2, complained=1), "a complaint about something else does not count"
    assert counted.withheld == NoteOutcomes(held=1, complained=1)


def test_a_note_is_retired_when_the_policy_does_without_it_and_comes_back(book: Book) -> None:
    judge(book, SHORT)
    note = only_note(book)
    for _ in range(RECENT_OUTCOMES):
        converse(book, note, given=True)
    for _ in range(5):
        converse(book, note, SHORT, given=False, verdict=BAD)
    assert only_note(book).state is NoteState.ACTIVE
    tries = 0
    while only_note(book).state is NoteState.ACTIVE:
        converse(book, note, given=False)
        tries += 1
    assert RECENT_OUTCOMES // 2 < tries <= RECENT_OUTCOMES, "old complaints no longer count"
    assert only_note(book).reason == notes.DOES_WITHOUT
    converse(book, note, given=False)
    assert only_note(book).state is NoteState.RETIRED
    judge(book, SHORT)
    assert only_note(book).state is NoteState.ACTIVE
    converse(book, note, given=True)
    assert only_note(book).state is NoteState.ACTIVE, "what was counted before its return no longer counts"


def test_a_complaint_about_an_answer_without_the_note_repeats_the_note(book: Book) -> None:
    """In whatever words: the reader words a wish by the answer that it is about."""
    judge(book, SHORT)
    note = only_note(book)
    converse(book, note, Wish("Give a shorter answer.", "length", lasting=True), given=False, verdict=BAD)
    assert texts(book) == [SHORT.instruction]
    converse(book, note, LONG, given=True, verdict=BAD)
    assert texts(book) == [LONG.instruction]


def test_a_stronger_instruction_is_not_replaced_by_a_weaker_one_of_the_same_words(book: Book) -> None:
    """ "Shorter!" after a long answer must not undo what "Shorter!" after a short one became."""
    weak = Wish("Give a shorter answer.", "length", lasting=True, stronger=SHORT.instruction)
    judge(book, weak)
    judge(book, SHORT)
    assert texts(book) == [SHORT.instruction]
    judge(book, weak)
    assert texts(book) == [SHORT.instruction]


def test_a_note_that_did_not_help_becomes_the_stronger_instruction(book: Book) -> None:
    weak = Wish("Give a shorter answer.", "length", lasting=True, stronger=SHORT.instruction)
    judge(book, weak)
    note = only_note(book)
    converse(book, note, weak, given=False, verdict=BAD)
    assert texts(book) == [weak.instruction], "it was not given"
    converse(book, note, weak, given=True, verdict=BAD)
    assert texts(book) == [SHORT.instruction]
    old, new = all_notes(book)
    assert (old.state, old.reason) == (NoteState.REMOVED, f"replaced by note {new.number}")


def test_a_stronger_note_of_another_topic_covers_a_wish(book: Book) -> None:
    """ "No bold" is part of "one paragraph of plain text", which is a note about lists."""
    paragraph = Wish("Answer in one paragraph of plain text.", "format/lists", lasting=True)
    judge(book, paragraph)
    note = only_note(book)
    plain = Wish("Use plain text.", "format/bold", lasting=True, stronger=paragraph.instruction)
    converse(book, note, plain, given=True, verdict=BAD)
    assert texts(book) == [paragraph.instruction]
    assert only_note(book).given == NoteOutcomes(complained=1)


def test_a_note_held_only_if_the_answer_shows_it(book: Book) -> None:
    judge(book, SHORT)
    note = only_note(book)
    converse(book, note, given=True, keeps=None)
    assert only_note(book).given == NoteOutcomes(), "whoever accepted an answer that cannot be checked"
    converse(book, note, given=True, keeps=False)
    assert only_note(book).given == NoteOutcomes(complained=1)
    converse(book, note, SHORT, given=True, verdict=BAD, keeps=True)
    assert only_note(book).given == NoteOutcomes(complained=2), "its owner wants more than the check"


def test_a_wish_takes_a_note_back(book: Book) -> None:
    stop = Wish("Do not call the user Sam.", "address", lasting=True, undoes=frozenset({"sam"}))
    sam = Wish("Call the user Sam.", "address", lasting=True)
    judge(book, SHORT, sam)
    judge(book, stop)
    assert texts(book) == [SHORT.instruction]
    assert all_notes(book)[1].reason == notes.TAKEN_BACK
    judge(book, stop)
    assert texts(book) == [SHORT.instruction, stop.instruction], "there was no note of it: the model does so by itself"
    judge(book, replace(stop, undoes=frozenset({"sam"})))
    assert texts(book) == [SHORT.instruction, stop.instruction], "it does not take itself back"
    judge(book, sam)
    assert texts(book) == [SHORT.instruction, sam.instruction]


def test_an_older_wish_does_not_return_after_it_was_taken_back(book: Book) -> None:
    stop = Wish("Do not call the user Sam.", "address", lasting=True, undoes=frozenset({"sam"}))
    early = book.capture(a_turn())
    book.change(turns.set_next_state, early, CAME)
    said = time.time()
    judge(book, SAM)
    judge(book, stop)
    wish = HeardWishes((replace(SAM, said=said),))
    assert book.change(verdicts.record, early, BAD, SampleKind.RL, "", 0, None, wish)
    assert texts(book) == []


def test_a_pinned_note_is_never_retired(book: Book) -> None:
    judge(book, SHORT)
    note = only_note(book)
    book.change(lambda db: notes.edit(db, note.number, pinned=True))
    for _ in range(RECENT_OUTCOMES):
        converse(book, note, given=True)
        converse(book, note, given=False)
    assert only_note(book).state is NoteState.ACTIVE


@pytest.mark.parametrize(
    ("given", "withheld", "retired"),
    [
        ((16, 0), (16, 0), True),
        ((16, 0), (12, 0), True),
        ((16, 0), (8, 0), False),
        ((16, 0), (13, 3), False),
        ((14, 2), (15, 1), True),
        ((8, 8), (14, 2), True),
        ((16, 0), (0, 16), False),
        ((0, 0), (16, 0), False),
        ((16, 0), (0, 0), False),
    ],
)
def test_when_the_policy_does_without(given: tuple[int, int], withheld: tuple[int, int], retired: bool) -> None:
    assert does_without(NoteOutcomes(*given), NoteOutcomes(*withheld)) is retired


def test_the_level_of_the_test_is_kept() -> None:
    """Where the policy is worse without the note by the margin, it is retired at most so often."""

    def chance(held: int, share: float) -> float:
        count = RECENT_OUTCOMES
        return math.comb(count, held) * share**held * (1 - share) ** (count - held)

    for with_note in (1.0, 0.9, 0.7):
        wrong = sum(
            chance(one, with_note) * chance(other, with_note - MARGIN)
            for one in range(RECENT_OUTCOMES + 1)
            for other in range(RECENT_OUTCOMES + 1)
            if does_without(NoteOutcomes(one, RECENT_OUTCOMES - one), NoteOutcomes(other, RECENT_OUTCOMES - other))
        )
        assert wrong < 1.3 * LEVEL, "the interval is approximate"


# Several users.


def test_a_note_is_personal_if_no_other_user_has_it_or_one_contradicts_it(book: Book) -> None:
    judge(book, SHORT)
    turn, _ = converse(book, only_note(book), given=True)
    assert book.ledger.read(notes.why_personal, turn, several=False) == "", "there is one user"
    assert "only one of several users" in book.ledger.read(notes.why_personal, turn, several=True)
    judge(book, SHORT, owner="kim")
    assert book.ledger.read(notes.why_personal, turn, several=False) == "", "another user has it too"
    judge(book, LONG, owner="lee")
    assert "opposite" in book.ledger.read(notes.why_personal, turn, several=False)


def test_a_note_that_was_withheld_does_not_make_an_answer_personal(book: Book) -> None:
    judge(book, SHORT)
    judge(book, SAM, owner="kim")
    turn, _ = converse(book, in_use(book, "me")[0], given=False)
    assert book.ledger.read(notes.why_personal, turn, several=True) == ""


# What is stored and deleted.


@pytest.mark.parametrize(
    ("prompt", "plain"),
    [
        ([1, 7, 8, 2, 3], [1, 2, 3]),
        ([1, 9, 9, 2], [1, 9, 2]),
        ([5, 1, 2, 3], [1, 2, 3]),
        ([1, 2, 3], [1, 4, 5, 6, 3]),
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 1, 2], [1, 2]),
    ],
)
def test_the_prompt_without_notes_is_exact(book: Book, prompt: list[int], plain: list[int]) -> None:
    turn = book.capture(a_turn(prompt_ids=prompt, plain_ids=plain, notes=[ConversationNote(1, "a", True)]))
    stored = book.read(turn)
    assert (stored.prompt_ids, stored.plain_ids) == (prompt, plain)
    assert book.ledger.read(sequence_without_notes, turn) == [*plain, *stored.response_ids]
    assert stored.notes == [ConversationNote(1, "a", True)]


def test_forgetting_a_user_deletes_the_users_notes(book: Book) -> None:
    judge(book, SHORT)
    converse(book, only_note(book), given=True)
    judge(book, SAM, owner="kim")
    book.change(notes.add, "me", "I wrote this.")
    book.close()
    with open_ledger(book.folder) as db:
        with transaction(db):
            deletion.delete_sessions(db, [session.number for session in session_summaries(db, owner="me")])
            notes.forget(db, "me")
        deletion.wipe(db, beside_server=False)
    with contextlib.closing(sqlite3.connect(book.folder / FILE)) as db:
        assert db.execute("SELECT text FROM notes").fetchall() == [(SAM.instruction,)]
        for table in ("turn_notes", "note_outcomes", "prompts_without_notes"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    assert SHORT.instruction.encode() not in book.raw_bytes()


def test_forgetting_a_session_deletes_the_notes_that_it_made(book: Book) -> None:
    judge(book, SHORT, session="one")
    judge(book, SAM, session="two")
    book.close()
    with open_ledger(book.folder) as db:
        with transaction(db):
            deletion.delete_sessions(db, [session.number for session in session_summaries(db, id="one")])
        assert [note.text for note in notes.of_owner(db)] == [SAM.instruction]


def test_a_changed_note_changes_the_stamp(book: Book) -> None:
    """Also if the clock was set back, and if one is pinned in place of another."""
    one, other = (book.change(notes.add, "me", text) for text in ("Be kind.", "Use metric units."))
    book.change(lambda db: notes.edit(db, other.number, pinned=True))
    stamps = [notes.stamp(book.db, "me")]

    def swap(db: sqlite3.Connection) -> None:
        notes.edit(db, one.number, pinned=True)
        notes.edit(db, other.number, pinned=False)

    def age(db: sqlite3.Connection) -> None:
        db.execute("UPDATE notes SET state = 'retired', changed = changed - 3600 WHERE number = ?", (one.number,))

    for change in (swap, age, lambda db: notes.remove(db, one.number)):
        book.change(change)
        stamps.append(notes.stamp(book.db, "me"))
    assert len(set(stamps)) == len(stamps)


def test_a_note_that_is_written_again_stays_pinned(book: Book) -> None:
    book.change(lambda db: notes.add(db, "me", "Be kind.", pinned=True))
    assert book.change(notes.add, "me", "Be kind.").pinned


def test_an_edited_note_that_does_not_name_its_scope_is_for_all_requests(book: Book) -> None:
    wish = Wish("When asked for a recipe: use grams.", "units", lasting=True, scope="recipe")
    judge(book, wish)
    (note,) = notes.of_owner(book.db, "me")
    assert book.change(lambda db: notes.edit(db, note.number, text="For recipes, use ounces.")).scope == "recipe"
    assert book.change(lambda db: notes.edit(db, note.number, text="Use grams.")).scope == ""
