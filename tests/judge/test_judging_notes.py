"""Wishes become notes when a turn is judged, and answers under notes become lessons without them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from openclaw_rl.engines.base import EngineError, EngineUnavailable, VersionGone
from openclaw_rl.judge.judges.base import Opinion
from openclaw_rl.judge.loop import wishes_around
from openclaw_rl.judge.rules import read_wishes
from openclaw_rl.judge.teacher import NoteDistiller
from openclaw_rl.ledger import notes, turns, verdicts
from openclaw_rl.methods.base import NO_BASELINE, NoSignal
from openclaw_rl.types import (
    ConversationNote,
    Feedback,
    HeardWishes,
    NoteOutcomes,
    NoteState,
    SampleKind,
    ScoreRequest,
    Scores,
    Source,
    State,
    Verdict,
)
from support.judging import ScriptedJudge, judging, until
from support.methods import a_method
from support.records import Book, a_turn

LENGTH = read_wishes("Shorter, please.")[0].topic
NOTE = "Answer in one short sentence."
PLEASED = ScriptedJudge(lambda case: Opinion(1.0))
DISPLEASED = ScriptedJudge(lambda case: Opinion(-1.0, hints=("Be brief.",)))


class Policy:
    """Scores with the same log-prob everywhere, or fails. After notes alone, an answer is unlikely by default."""

    def __init__(self, answer: float | Exception = -0.75, alone: float = -20.0) -> None:
        self.answer, self.alone = answer, alone
        self.asked: list[ScoreRequest] = []
        self.compared: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> Scores:
        if list(request.ids[: -request.last_n]) == [ord(sign) for sign in NOTE]:
            self.compared.append(request)
            return Scores([self.alone] * request.last_n)
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return Scores([self.answer] * request.last_n)


class Signs:
    """Renders the words of a user as one token for each sign."""

    def text(self, messages: list[dict[str, Any]], tools: list[Any]) -> str:
        return str(messages[-1]["content"])

    def prompt(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=[ord(sign) for sign in text])


def came(book: Book, *messages: dict[str, Any], **given: Any) -> int:
    turn = book.capture(a_turn(**given))
    book.change(turns.set_next_state, turn, messages)
    return turn


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def noted(book: Book, **given: Any) -> int:
    """A turn that was answered under a note, and whose user was content."""
    note = book.change(notes.add, "me", NOTE)
    then = [ConversationNote(note.number, note.text, True)]
    values = {"prompt_ids": [1, 7, 8, 2], "plain_ids": [1, 2], "notes": then, **given}
    return came(book, user("thanks"), **values)


def distiller(book: Book, policy: Policy, *, personal: bool = False, several: bool = False) -> NoteDistiller:
    return NoteDistiller(book.ledger, policy, Signs(), personal=personal, several=several)  # type: ignore[arg-type]


async def test_a_wish_is_noted_with_the_verdict(book: Book) -> None:
    async with judging(book, DISPLEASED, keeps_notes=True):
        turn = came(book, user("Shorter, please."))
        await until(lambda: book.state(turn) is State.JUDGED)
    (note,) = notes.of_owner(book.db)
    assert (note.owner, note.turn, note.topic, note.state) == ("me", turn, LENGTH, NoteState.ACTIVE)


async def test_without_notes_nothing_is_kept(book: Book) -> None:
    async with judging(book, DISPLEASED):
        turn = came(book, user("Shorter, please."))
        await until(lambda: book.state(turn) is State.JUDGED)
    assert notes.of_owner(book.db, all_states=True) == []


def test_explicit_feedback_says_wishes_too_and_tools_do_not(book: Book) -> None:
    turn = came(book, {"role": "tool", "content": "Shorter, please.", "tool_call_id": "1"})
    assert wishes_around(book.read(turn)) == HeardWishes()
    completion = book.read(turn).completion
    book.change(turns.add_feedback, "me", completion, 0, Feedback(-1.0, "Shorter, please."))
    assert [wish.topic for wish in wishes_around(book.read(turn)).replied] == [LENGTH]
    book.change(turns.add_feedback, "me", completion, 0, Feedback(-1.0, "Longer, please.", Source.ENVIRONMENT))
    assert len(wishes_around(book.read(turn)).replied) == 1


def test_a_correction_is_the_answer_that_was_wanted(book: Book) -> None:
    """So the examples that the answer was given under did not hold."""
    turn = came(book, user("what else?"))
    completion = book.read(turn).completion
    book.change(turns.add_feedback, "me", completion, 0, Feedback(-1.0, correction="Chef, hello."))
    assert wishes_around(book.read(turn)).wanted == "Chef, hello."


async def test_a_wish_in_an_opening_is_noted_when_it_is_said(book: Book) -> None:
    opening = [user("From now on answer in French. What is the capital of Italy?")]
    before = book.capture(a_turn(messages=[user("Call me Sam. What is the capital of Italy?")]))
    async with judging(book, DISPLEASED, keeps_notes=True):
        await until(lambda: kept(book) == ["Call the user Sam."])
        turn = book.capture(a_turn(messages=opening))
        await until(lambda: len(kept(book)) == 2)
        assert [(note.text, note.turn) for note in notes.of_owner(book.db)][1] == ("Answer in French.", turn)
        assert [book.state(one) for one in (before, turn)] == [State.AWAITING, State.AWAITING], "nobody replied"
        book.change(turns.set_next_state, turn, [user("Shorter, please.")])
        later = [*opening, {"role": "assistant", "content": "Oui."}, user("From now on answer in German.")]
        book.capture(a_turn(messages=later))
        await until(lambda: len(kept(book)) == 3)
    assert "Answer in German." not in kept(book), "it is no opening"


async def test_an_opening_is_no_complaint_and_a_damaged_one_stops_no_other(book: Book) -> None:
    note = book.change(notes.add, "me", NOTE)
    book.capture(a_turn(messages=[user("Call me Sam.")]))
    book.change(lambda db: db.execute("UPDATE messages SET body = '{' WHERE body LIKE '%Sam%'"))
    async with judging(book, PLEASED, keeps_notes=True):
        turn = came(
            book,
            user("thanks"),
            messages=[user("Answer in one short sentence: why?")],
            notes=[ConversationNote(note.number, note.text, True)],
        )
        await until(lambda: book.state(turn) is not State.READY)
    assert notes.of_owner(book.db)[0].given == NoteOutcomes(held=1)


def test_a_wish_knows_the_stronger_instruction_for_the_same(book: Book) -> None:
    long = {"role": "assistant", "content": "word " * 200}
    (after_long,) = wishes_around(book.read(came(book, user("Shorter, please."), message=long))).replied
    (after_short,) = wishes_around(book.read(came(book, user("Shorter, please.")))).replied
    assert after_long.instruction != after_short.instruction == after_long.stronger


def test_what_was_said_last_counts(book: Book) -> None:
    turn = came(book, user("Shorter, please."), user("No, longer, please."))
    (last,) = wishes_around(book.read(turn)).replied
    (alone,) = wishes_around(book.read(came(book, user("Longer, please.")))).replied
    assert last == replace(alone, said=last.said)


def learn(book: Book, turn: int) -> None:
    """Judge a turn, and keep the wishes around it."""
    stored = book.read(turn)
    wishes = wishes_around(stored)
    kind = SampleKind.RL
    assert book.change(verdicts.record, turn, Verdict(-1.0), kind, "", len(stored.feedback), None, wishes)


def rate(book: Book, turn: int, text: str = "") -> None:
    book.change(turns.add_feedback, "me", book.read(turn).completion, 0, Feedback(-1.0, text))


def kept(book: Book) -> list[str]:
    return [note.text for note in notes.of_owner(book.db)]


def test_what_was_said_later_counts_whenever_it_is_judged(book: Book) -> None:
    english, french = (came(book, user(f"From now on answer in {language}.")) for language in ("English", "French"))
    learn(book, french)
    learn(book, english)
    assert kept(book) == ["Answer in French."]
    rate(book, english)
    learn(book, english)
    assert kept(book) == ["Answer in French."], "a thumb on an older answer does not repeat what was said about it"
    rate(book, english, "Answer in German, please.")
    learn(book, english)
    assert kept(book) == ["Answer in German."], "words that are said now are new, whatever they are about"


def test_the_order_of_replies_counts_and_not_that_of_the_answers(book: Book) -> None:
    first, second = book.capture(a_turn()), book.capture(a_turn())
    book.change(turns.set_next_state, second, [user("From now on answer in English.")])
    book.change(turns.set_next_state, first, [user("From now on answer in French.")])
    learn(book, first)
    learn(book, second)
    assert kept(book) == ["Answer in French."]


def test_a_note_that_its_owner_removed_stays_removed_until_it_is_wished_anew(book: Book) -> None:
    turn = came(book, user("From now on answer in French."))
    learn(book, turn)
    (note,) = notes.of_owner(book.db)
    waiting = came(book, user("From now on answer in French."))
    book.change(notes.remove, note.number)
    rate(book, turn)
    learn(book, turn)
    learn(book, waiting)
    assert kept(book) == []
    learn(book, came(book, user("From now on answer in French.")))
    assert kept(book) == ["Answer in French."]


def test_a_wish_from_before_its_owner_wrote_a_note_does_not_replace_the_note(book: Book) -> None:
    turn = came(book, user("From now on answer in French."))
    note = book.change(notes.add, "me", "Answer in Latin.", "language")
    learn(book, turn)
    assert kept(book) == ["Answer in Latin."]
    again = came(book, user("From now on answer in French."))
    book.change(lambda db: notes.edit(db, note.number, text="Answer in Greek.", topic="language"))
    learn(book, again)
    assert kept(book) == ["Answer in Greek."]


async def test_an_accepted_answer_is_scored_after_the_prompt_without_notes(book: Book) -> None:
    policy = Policy()
    async with judging(book, PLEASED, method="notes", keeps_notes=True, distiller=distiller(book, policy)):
        turn = noted(book)
        await until(lambda: book.state(turn) is State.JUDGED)
    stored = book.read(turn)
    assert stored.sample is SampleKind.NOTES
    (request,) = policy.asked
    assert (list(request.ids), request.last_n, request.version) == ([1, 2, 4, 5], 2, stored.version)
    trained = a_method("notes").prepared(stored)
    assert (trained.prompt_ids, trained.response_ids, trained.logprobs) == ([1, 2], [4, 5], [-0.75, -0.75])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (VersionGone("gone"), "not distilled: the policy that answered is no longer loaded"),
        (EngineError("too long"), "not distilled: too long"),
        (float("nan"), "not distilled: the policy's log-probs are not one finite number per token"),
    ],
)
async def test_an_answer_that_cannot_be_scored_is_dropped_with_the_reason(
    book: Book, error: Exception | float, reason: str
) -> None:
    part = distiller(book, Policy(error))
    async with judging(book, PLEASED, method="notes", keeps_notes=True, distiller=part):
        turn = noted(book)
        await until(lambda: book.state(turn) is State.DROPPED)
    assert book.read(turn).reason == reason


async def test_a_policy_that_is_away_is_waited_for(book: Book) -> None:
    policy = Policy(EngineUnavailable("it restarts"))
    async with judging(book, PLEASED, method="notes", keeps_notes=True, distiller=distiller(book, policy)) as running:
        turn = noted(book)
        await until(lambda: running.down == "it restarts")
        assert book.state(turn) is State.READY
        policy.answer = -0.5
        await until(lambda: book.state(turn) is State.JUDGED)
    assert book.read(turn).sample is SampleKind.NOTES


@pytest.mark.parametrize(
    ("judge", "given", "reason"),
    [
        (PLEASED, {"plain_ids": None, "notes": ()}, "answered without notes"),
        (DISPLEASED, {}, "it was not accepted"),
        (ScriptedJudge(lambda case: Opinion(reason="who knows")), {}, "the judge abstained: custom: who knows"),
    ],
)
async def test_nothing_else_is_imitated(book: Book, judge: ScriptedJudge, given: dict[str, Any], reason: str) -> None:
    policy = Policy()
    async with judging(book, judge, method="notes", keeps_notes=True, distiller=distiller(book, policy)):
        turn = noted(book, **given)
        await until(lambda: book.state(turn) is State.DROPPED)
    assert book.read(turn).reason == reason
    assert policy.asked == []


@pytest.mark.parametrize(
    ("question", "answer", "alone", "reason"),
    [
        ("What is photosynthesis?", "A short answer: what is photosynthesis?", -20.0, "only repeats the question"),
        ("What is photosynthesis?", "I am so glad that you are here.", -0.5, "does not depend on the request"),
        ("What is photosynthesis?", "Plants make sugar from light.", -20.0, ""),
        ("Is Paris in France?", "Yes.", -0.5, ""),
        ("Correct this: Paris are in France", "Paris is in France.", -20.0, ""),
        ("什么是光合作用？", "什么是光合作用？", -20.0, "only repeats the question"),
    ],
)
@pytest.mark.parametrize("method", ["notes", "notes+combine"])
async def test_an_accepted_answer_that_forgets_the_question_is_not_imitated(
    book: Book, question: str, answer: str, alone: float, reason: str, method: str
) -> None:
    part = distiller(book, policy := Policy(alone=alone))
    async with judging(book, PLEASED, method=method, keeps_notes=True, distiller=part):
        turn = noted(book, messages=[user(question)], message={"role": "assistant", "content": answer})
        await until(lambda: book.state(turn) in (State.JUDGED, State.DROPPED))
    stored = book.read(turn)
    assert stored.sample is (None if reason else SampleKind.NOTES)
    assert stored.reason == (f"not distilled: the answer {reason}" if reason else "")
    assert stored.verdict is not None
    assert stored.verdict.score == (0.0 if reason else 1.0)
    for request in policy.compared:
        assert list(request.ids[-request.last_n :]) == stored.response_ids
        assert (request.version, request.owner) == (stored.version, "me")


async def test_an_explicit_score_stays_although_the_answer_is_not_imitated(book: Book) -> None:
    echo = noted(book, messages=[user("What is light?")], message={"role": "assistant", "content": "What is light?"})
    verdict = await distiller(book, Policy()).consider(book.read(echo), Verdict(1.0, Source.EXPLICIT))
    assert (verdict.score, verdict.plain_problem) == (1.0, "the answer only repeats the question")


@pytest.mark.parametrize(("personal", "sample"), [(False, None), (True, SampleKind.NOTES)])
async def test_a_note_of_one_of_several_users_is_not_distilled(
    book: Book, personal: bool, sample: SampleKind | None
) -> None:
    part = distiller(book, Policy(), personal=personal, several=True)
    async with judging(book, PLEASED, method="notes", keeps_notes=True, distiller=part):
        turn = noted(book)
        await until(lambda: book.state(turn) is not State.READY)
    assert book.read(turn).sample is sample
    assert ("only one of several users" in book.read(turn).reason) is not personal


@pytest.mark.parametrize("name", ["notes+combine", "notes+topk-select"])
async def test_beside_another_method_accepted_answers_are_distilled_and_others_judged_as_before(
    book: Book, name: str
) -> None:
    policy = Policy()
    async with judging(book, PLEASED, method=name, keeps_notes=True, distiller=distiller(book, policy)):
        accepted, plain = noted(book), came(book, user("thanks"))
        await until(lambda: {book.state(accepted), book.state(plain)} == {State.JUDGED})
    assert (book.read(accepted).sample, book.read(plain).sample) == (SampleKind.NOTES, SampleKind.RL)
    method = a_method(name)
    lesson = method.lesson(method.prepared(book.read(accepted)), method.baseline([book.read(plain)] * 2))
    assert lesson.advantages == [1.0, 1.0], "it is not measured from a mean"
    assert lesson.alternatives is None


def test_a_sample_without_its_prompt_has_no_signal(book: Book) -> None:
    turn = noted(book)
    book.change(lambda db: db.execute("UPDATE turns SET state = 'ready'"))
    method = a_method("notes")
    stored = book.read(turn)
    assert method.prepared(stored) is stored
    with pytest.raises(NoSignal):
        method.prepared(replace(stored, sample=SampleKind.NOTES, plain_ids=None))
    with pytest.raises(NoSignal):
        method.signals(replace(stored, sample=SampleKind.NOTES), NO_BASELINE)
