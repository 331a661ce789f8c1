"""Examples in the ledger: corrected or accepted answers, the notes that they show, their bounds, and forgetting."""

import time
from collections.abc import Mapping
from dataclasses import replace
from sqlite3 import Connection

import pytest

from openclaw_rl.ledger import deletion, examples, notes, turns, verdicts
from openclaw_rl.ledger.errors import CannotJudge, TooManyNotes, UnknownTurn
from openclaw_rl.ledger.pages import session_summaries
from openclaw_rl.ledger.turns import load_turn
from openclaw_rl.types import (
    ConversationNote,
    Feedback,
    HeardWishes,
    Note,
    NoteOrigin,
    NoteState,
    SampleKind,
    State,
    Verdict,
    Wish,
)
from support.records import Book, a_side_turn, a_turn

CHEF = Wish("Call me Chef.", "address", lasting=True)
BOSS = Wish("Call me Boss.", "address", lasting=True)
CAME = [{"role": "user", "content": "what came next"}]
WANTED = "Chef, the capital of France is Paris."
ASKED = "What is the capital of France?"


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ask(book: Book, text: str = ASKED, answer: str = "It is Paris.", **given: object) -> int:
    return book.capture(a_turn(messages=[said(text)], message=answered(answer), **given))


def correct(book: Book, turn: int, text: str = WANTED, owner: str = "me") -> None:
    completion = load_turn(book.db, turn).completion
    book.change(turns.add_feedback, owner, completion, 0, Feedback(-1.0, correction=text))


def judge(
    book: Book, turn: int, score: float, *wishes: Wish, wanted: str = "", obeyed: Mapping[int, bool] | None = None
) -> None:
    book.change(turns.set_next_state, turn, CAME)
    heard = len(load_turn(book.db, turn).feedback)
    made = HeardWishes(tuple(replace(wish, said=time.time()) for wish in wishes), wanted, obeyed or {})
    assert book.change(verdicts.record, turn, Verdict(score), SampleKind.RL, "", heard, None, made)


def kept(book: Book, owner: str = "me") -> list[Note]:
    return notes.of_owner(book.db, owner, examples=True)


def shown(book: Book, owner: str = "me") -> Mapping[int, set[int]]:
    return examples.shown(book.db, owner)


def a_note_that_is_given(book: Book) -> ConversationNote:
    """The note of a complaint, as another conversation has it."""
    judge(book, ask(book, session="one"), -1.0, CHEF)
    (note,) = notes.of_owner(book.db, "me")
    return ConversationNote(note.number, note.text, given=True)


def test_a_correction_is_feedback_and_an_example_of_its_owner(book: Book) -> None:
    turn = ask(book)
    correct(book, turn)
    (example,) = kept(book)
    assert (example.question, example.text, example.origin, example.turn) == (
        ASKED,
        WANTED,
        NoteOrigin.CORRECTED,
        turn,
    )
    assert load_turn(book.db, turn).feedback == [Feedback(-1.0, correction=WANTED)]
    assert load_turn(book.db, turn).state is State.READY, "it can be judged"
    assert notes.of_owner(book.db, "me") == [], "it is no instruction"
    assert kept(book, "somebody else") == []


def test_a_correction_that_says_what_was_said_accepts_it(book: Book) -> None:
    turn = ask(book)
    correct(book, turn, " It is\n Paris. ")
    assert [word.score for word in load_turn(book.db, turn).feedback] == [1.0]


def test_the_last_correction_of_an_answer_counts(book: Book) -> None:
    turn = ask(book)
    correct(book, turn)
    correct(book, turn, "Paris, Chef.")
    assert [example.text for example in kept(book)] == ["Paris, Chef."]


def test_somebody_elses_answer_cannot_be_corrected(book: Book) -> None:
    turn = ask(book)
    with pytest.raises(UnknownTurn):
        correct(book, turn, owner="kim")
    assert kept(book) == kept(book, "kim") == []


def test_a_side_turn_cannot_be_corrected(book: Book) -> None:
    turn = book.capture(a_side_turn())
    with pytest.raises(CannotJudge):
        correct(book, turn)
    assert kept(book) == []


def test_an_answer_that_was_trained_on_can_still_be_corrected(book: Book) -> None:
    """Its score is spent, and the example is not."""
    turn = ask(book)
    judge(book, turn, 1.0)
    book.change(lambda db: db.execute("UPDATE turns SET state = ? WHERE number = ?", (State.APPLIED, turn)))
    correct(book, turn)
    assert [example.text for example in kept(book)] == [WANTED]
    assert load_turn(book.db, turn).state is State.APPLIED


def test_the_question_is_that_which_the_answer_answers(book: Book) -> None:
    """A complaint is no question; a new question after a complaint is."""
    first = ask(book)
    judge(book, first, -1.0)
    again = book.capture(
        a_turn(messages=[said(ASKED), answered("It is Paris."), said("Say it as a pirate!")], parent=first)
    )
    correct(book, again, "Arr, the capital of France be Paris.")
    rain = [said(ASKED), answered("It is Paris."), said("Wrong tone. How does rain form?")]
    other = book.capture(a_turn(messages=rain, parent=first))
    correct(book, other, "Arr, rain do form in the clouds.")
    assert [example.question for example in kept(book)] == [ASKED, "Wrong tone. How does rain form?"]


def test_what_has_tools_or_is_too_long_is_no_example(book: Book) -> None:
    tools = {"role": "tools", "tools": []}
    correct(book, book.capture(a_turn(messages=[tools, said(ASKED)])))
    correct(book, ask(book, "x" * (examples.MAX_EXAMPLE_CHARACTERS + 1)))
    assert kept(book) == []


def test_an_example_shows_the_notes_of_its_session_and_its_conversation(book: Book) -> None:
    first = ask(book, session="one")
    correct(book, first)
    judge(book, first, -1.0, CHEF)
    (note,) = notes.of_owner(book.db, "me")
    (example,) = kept(book)
    assert shown(book) == {example.number: {note.number}}, "the wish was said after the correction"
    second = ask(book, "Why?", session="two", notes=[ConversationNote(note.number, note.text, given=True)])
    correct(book, second, "Chef, because.")
    assert shown(book)[kept(book)[1].number] == {note.number}
    third = ask(book, "How?", session="three", notes=[ConversationNote(note.number, note.text, given=False)])
    correct(book, third, "Like that.")
    assert kept(book)[2].number not in shown(book), "the note was withheld"


def test_examples_follow_a_note_that_is_said_again_in_other_words(book: Book) -> None:
    turn = ask(book)
    correct(book, turn)
    judge(book, turn, -1.0, CHEF)
    judge(book, ask(book, session="later"), -1.0, Wish("Always address me as Chef.", "address", lasting=True))
    (note,) = notes.of_owner(book.db, "me")
    assert shown(book) == {kept(book)[0].number: {note.number}}
    judge(book, ask(book, session="last"), -1.0, BOSS)
    (boss,) = notes.of_owner(book.db, "me")
    assert boss.text == BOSS.instruction
    assert boss.number not in shown(book)[kept(book)[0].number], "an example for Chef does not show Boss"
    judge(book, ask(book, session="back"), -1.0, CHEF)
    (back,) = notes.of_owner(book.db, "me")
    assert shown(book) == {kept(book)[0].number: {back.number}}, "a wish that comes back has its examples again"


@pytest.mark.parametrize(
    ("text", "older", "same"),
    [
        ("Say Chef when you talk to me.", "Call me Chef.", True),
        ("Do not use emojis.", "Use emojis.", False),
        ("Answer in at most 20 words.", "Answer in at most 50 words.", False),
        ("Answer in English.", "Answer in French.", False),
    ],
)
def test_notes_that_say_the_same(text: str, older: str, *, same: bool) -> None:
    assert examples.says_the_same(text, older) is same


def test_an_answer_that_was_accepted_under_notes_becomes_an_example(book: Book) -> None:
    note = a_note_that_is_given(book)
    judge(book, ask(book, answer=WANTED, session="two", notes=[note]), 1.0)
    (example,) = kept(book)
    assert (example.text, example.origin) == (WANTED, NoteOrigin.ACCEPTED)
    judge(book, ask(book, session="three"), 1.0)
    assert len(kept(book)) == 1, "without a note an answer shows nothing"


def test_an_answer_that_was_accepted_after_a_complaint_becomes_an_example(book: Book) -> None:
    first = ask(book)
    judge(book, first, -1.0, CHEF)
    history = [said(ASKED), answered("It is Paris."), said("You forgot to call me Chef.")]
    second = book.capture(a_turn(messages=history, message=answered(WANTED), parent=first))
    judge(book, second, 1.0)
    (example,) = kept(book)
    assert (example.question, example.text, example.origin) == (ASKED, WANTED, NoteOrigin.IMPROVED)


def test_an_answer_that_was_accepted_with_a_new_wish_does_not_show_it(book: Book) -> None:
    """ "Thanks. And call me Chef from now on." """
    judge(book, ask(book), 1.0, CHEF)
    assert kept(book) == []


def test_an_answer_that_was_accepted_before_a_wish_does_not_show_it(book: Book) -> None:
    chef = a_note_that_is_given(book)
    first = ask(book, answer=WANTED, session="two", notes=[chef])
    judge(book, first, 1.0)
    later = book.capture(a_turn(messages=[said(ASKED), answered(WANTED), said("Why?")], parent=first, session="two"))
    judge(book, later, -1.0, Wish("Answer in one sentence.", "length", lasting=True))
    (example,) = kept(book)
    assert shown(book) == {example.number: {chef.number}}


def test_an_accepted_answer_that_does_not_keep_to_a_note_is_no_example(book: Book) -> None:
    note = a_note_that_is_given(book)
    judge(book, ask(book, session="two", notes=[note]), 1.0, obeyed={note.number: False})
    assert kept(book) == []


def test_an_answer_that_is_rejected_after_all_is_no_example(book: Book) -> None:
    turn = ask(book, answer=WANTED, session="two", notes=[a_note_that_is_given(book)])
    judge(book, turn, 1.0)
    assert len(kept(book)) == 1
    book.change(turns.add_feedback, "me", load_turn(book.db, turn).completion, 0, Feedback(-1.0))
    assert book.change(verdicts.record, turn, Verdict(-1.0), SampleKind.RL, "", 1, None, HeardWishes())
    assert kept(book) == []


def test_examples_of_what_a_note_said_do_not_show_what_its_owner_makes_of_it(book: Book) -> None:
    turn = ask(book)
    correct(book, turn)
    judge(book, turn, -1.0, CHEF)
    (note,) = notes.of_owner(book.db, "me")
    book.change(lambda db: notes.edit(db, note.number, text="Address me as Chef.", topic="address"))
    assert shown(book) == {kept(book)[0].number: {note.number}}
    book.change(lambda db: notes.edit(db, note.number, text="Call me Boss.", topic="address"))
    (old,) = shown(book)[kept(book)[0].number]
    assert [one.number for one in notes.of_owner(book.db, "me")] == [note.number] != [old]


def test_a_retired_example_comes_back_with_its_note(book: Book) -> None:
    turn = ask(book)
    correct(book, turn)
    judge(book, turn, -1.0, CHEF)
    book.change(lambda db: db.execute("UPDATE notes SET state = ?", (NoteState.RETIRED,)))
    judge(book, ask(book, session="later"), -1.0, CHEF)
    assert [one.state for one in kept(book)] == [NoteState.ACTIVE]


def test_what_was_cut_off_is_no_example(book: Book) -> None:
    note = a_note_that_is_given(book)
    judge(book, ask(book, session="two", notes=[note], finish_reason="length"), 1.0)
    assert kept(book) == []


def test_the_wanted_answer_in_a_reply_is_kept(book: Book) -> None:
    turn = ask(book)
    judge(book, turn, -1.0, wanted=WANTED)
    assert [(one.text, one.origin) for one in kept(book)] == [(WANTED, NoteOrigin.CORRECTED)]


def test_the_number_of_examples_is_bounded_and_corrections_stay(book: Book) -> None:
    note = a_note_that_is_given(book)
    judge(book, ask(book, answer="Chef: 1", session="two", notes=[note]), 1.0)
    for number in range(examples.MAX_EXAMPLES):
        correct(book, ask(book, session=f"s{number}"), f"Chef: {number}")
    left = kept(book)
    assert len(left) == examples.MAX_EXAMPLES
    assert {one.origin for one in left} == {NoteOrigin.CORRECTED}
    rows = book.db.execute("SELECT count(*) FROM notes WHERE question != ''").fetchone()[0]
    assert rows == examples.MAX_EXAMPLES, "each accepted answer would leave one"
    mine = book.change(notes.add_example, "me", ASKED, WANTED)
    assert mine in kept(book), "what was just written stays, although corrections are better"
    assert len(kept(book)) == examples.MAX_EXAMPLES


def test_pinned_examples_are_bounded_too(book: Book) -> None:
    def pin(db: Connection) -> Note:
        return notes.add_example(db, "me", ASKED, WANTED, pinned=True)

    for _ in range(examples.MAX_EXAMPLES):
        book.change(pin)
    with pytest.raises(TooManyNotes):
        book.change(pin)
    with pytest.raises(TooManyNotes):
        book.change(notes.add_example, "me", ASKED, WANTED)
    assert len(kept(book)) == examples.MAX_EXAMPLES


def test_a_forgotten_session_takes_its_examples_along(book: Book) -> None:
    correct(book, ask(book, session="gone"))
    correct(book, ask(book, session="stays"), "Another.")
    gone = [session.number for session in session_summaries(book.db, id="gone")]
    book.change(lambda db: deletion.delete_sessions(db, gone))
    assert [one.text for one in kept(book)] == ["Another."]


def test_a_correction_stays_when_what_came_next_is_deleted(book: Book) -> None:
    """It was sent as feedback, and not said in the message that is gone."""
    corrected, said_so = ask(book, session="one"), ask(book, session="two")
    correct(book, corrected)
    judge(book, corrected, -1.0)
    judge(book, said_so, -1.0, wanted="Chef, it is Paris.")
    for turn in (corrected, said_so):
        book.change(deletion.forget_next_state, turn, State.JUDGED)
    assert [one.text for one in kept(book)] == [WANTED]


def test_an_example_by_hand_can_be_edited_pinned_and_removed(book: Book) -> None:
    note = book.change(notes.add_example, "me", ASKED, WANTED)
    book.change(lambda db: notes.edit(db, note.number, "me", text="Line one.\nLine two.", pinned=True))
    (example,) = kept(book)
    assert (example.text, example.pinned, example.origin) == ("Line one.\nLine two.", True, NoteOrigin.WRITTEN)
    book.change(notes.remove, note.number, "me")
    assert kept(book) == []
    assert notes.of_owner(book.db, "me", all_states=True, examples=True)[0].state is NoteState.REMOVED
