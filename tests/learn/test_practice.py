"""Practice: notes that the policy learns to keep without being told, with a scripted model and a real ledger."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from openclaw_rl.engines.base import EngineStats, StepStopped
from openclaw_rl.learn.practice_teacher import TRIAL_PROMPTS, shipped_prompts
from openclaw_rl.learn.practiser import ANCHORS
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import deletion, notes, pages, practices, training
from openclaw_rl.ledger.errors import CannotPractise, UnknownNote
from openclaw_rl.methods.practice import END_ADVANTAGE
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.sense import lacks_code
from openclaw_rl.types import (
    Note,
    NoteState,
    PracticeState,
    Priority,
    SampleKind,
    SampleRequest,
    Source,
    State,
    StoredTurn,
    TrainingSequence,
    TurnKind,
)
from support.learning_run import LearningRun
from support.practising import SHOWN, Practising, code_for, hash_of, practising, question_in, react, usual, wished
from support.records import a_turn


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(tiny_model)


def is_anchor(turn: StoredTurn) -> bool:
    return "keep other answers" in turn.kind_reason


async def test_a_note_is_learned_for_good(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        note = server.teach()
        done = await server.ended(server.ask_for(note))
        assert (done.state, done.made) == (PracticeState.LEARNED, 3)
        assert (
            done.reason == f"without the note, {TRIAL_PROMPTS} of {TRIAL_PROMPTS} answers to other questions keep to it"
        )
        assert (server.note(note.number).state, server.note(note.number).reason) == (
            NoteState.RETIRED,
            practices.LEARNED,
        )
        batches = run.applied()
        assert [len(batch) for batch in batches] == [practices.BATCH + ANCHORS] * 3
        run.check()
        for turn in map(run.book.read, batches[0]):
            assert (turn.kind, turn.sample, turn.state) == (TurnKind.SIDE, SampleKind.PRACTICE, State.APPLIED)
            purpose = "keep other answers as they were beside" if is_anchor(turn) else "practise"
            assert turn.kind_reason.startswith(f"made to {purpose} note {note.number}, from ")
            assert turn.verdict is not None
            assert turn.verdict.source is Source.PRACTICE
            assert turn.message["content"] == wished(turn.messages[0]["content"])
            prompt = renderer.tokenizer.backend.decode(turn.prompt_ids, skip_special_tokens=False)
            assert "Well" not in prompt
            assert turn.messages[0]["content"] in prompt
        # They are no conversations of their owner.
        listed = run.book.ledger.read(pages.session_page, "me", None, 50)
        assert {card.key.id for card in listed} == {"me-0", "me-1"}


async def test_answers_are_sampled_from_the_base_model_with_the_note(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        await server.ended(server.ask_for(server.teach()))
        for request, prompt in zip(run.sampler.requests, server.prompts, strict=True):
            assert request.owner == "me"
            if "Begin with Well." in prompt:
                assert request.version == 0
                assert SHOWN[0] in prompt or SHOWN[1] in prompt


async def test_own_questions_are_practised_with(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer, personal=True) as server:
        note = server.teach()
        asked = "How do I water a cactus in winter?"
        turn = run.book.capture(a_turn("mine", messages=[{"role": "user", "content": asked}]))
        run.book.capture(a_turn("theirs", "other", messages=[{"role": "user", "content": "Whose secret is this?"}]))
        await server.ended(server.ask_for(note))
        practised = [run.book.read(number) for batch in run.applied() for number in batch]
        own = [one for one in practised if one.messages[0]["content"] == asked]
        assert own
        assert own[0].kind_reason.endswith(f"from your message of turn {turn}")
        assert not any("secret" in prompt for prompt in server.prompts)
        # What was practised with a message goes with it.
        run.book.change(deletion.delete_sessions, [run.book.scalar("SELECT number FROM sessions WHERE id = 'mine'")])
        assert not run.book.rows(f"SELECT 1 FROM turns WHERE number IN ({', '.join(str(o.number) for o in own)})")
        assert run.book.ledger.read(training.versions_with_deleted_turns)


async def test_what_the_model_cannot_do_is_not_practised(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        server.answer = lambda _request, prompt: usual(question_in(prompt))
        note = server.teach()
        done = await server.ended(server.ask_for(note))
        assert done.state is PracticeState.STOPPED
        assert done.reason == "this model keeps to it in 0 of 96 answers; a larger model may"
        assert not run.applied()
        assert server.note(note.number).state is NoteState.ACTIVE


async def test_a_note_that_is_not_learned_stays(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        server.answer = lambda _request, prompt: (wished if SHOWN[0] in prompt else usual)(question_in(prompt))
        note = server.teach()
        done = await server.ended(server.ask_for(note))
        assert (done.state, done.made) == (PracticeState.DONE, 3)
        assert done.reason.startswith("without the note, 0 of 16")
        assert server.note(note.number).state is NoteState.ACTIVE


async def test_people_and_feedback_go_first(
    run: LearningRun, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with practising(run, renderer) as server:
        someone = EngineStats(ready=True, active=100, waiting=0, restarts=0)
        busy = True
        stats = run.sampler.stats
        monkeypatch.setattr(run.sampler, "stats", lambda: someone if busy else stats())
        practice = server.ask_for(server.teach())
        await asyncio.sleep(0.2)
        assert not run.sampler.requests
        # Somebody comes while answers are sampled: no other is begun.
        busy, run.sampler.seconds_per_token = False, 0.005
        await run.until(lambda: run.sampler.open > 0)
        busy = True
        begun = len(run.sampler.requests)
        await run.until(lambda: run.sampler.open == 0)
        await asyncio.sleep(0.1)
        assert len(run.sampler.requests) == begun
        assert {request.priority for request in run.sampler.requests} == {Priority.IDLE}
        assert not run.applied()
        # A step from feedback is made before the others.
        judged = run.judged(2)
        await run.until(lambda: run.states(judged) == {State.APPLIED})
        busy, run.sampler.seconds_per_token = False, 0.0
        await server.ended(practice)
        assert run.applied()[0] == judged
        run.check()


async def test_a_step_rests_while_somebody_is_there(
    run: LearningRun, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with practising(run, renderer) as server:
        busy = False
        stats = run.sampler.stats
        someone = EngineStats(ready=True, active=100, waiting=0, restarts=0)
        monkeypatch.setattr(run.sampler, "stats", lambda: someone if busy else stats())
        ended = asyncio.Event()
        run.learner.hooks["step"] = lambda _sequences: ended.wait()
        practice = server.ask_for(server.teach())
        await run.until(lambda: run.loop.phase is Phase.TRAINING)
        busy = True
        await run.until(lambda: run.learner.is_paused)
        busy = False
        await run.until(lambda: not run.learner.is_paused)
        assert "stop_step" not in run.learner.calls
        busy = True
        await run.until(lambda: run.learner.is_paused)
        ended.set()
        busy = False
        done = await server.ended(practice)
        assert (done.state, done.made, run.learner.is_paused) == (PracticeState.LEARNED, 3, False)
        run.check()


async def test_a_step_is_taken_back_for_feedback(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:

        async def work(*_: object) -> None:
            await run.learner.stopped.wait()
            del run.learner.hooks["step"]
            raise StepStopped("the step was stopped")

        run.learner.hooks["step"] = work
        practice = server.ask_for(server.teach())
        await run.until(lambda: run.loop.phase is Phase.TRAINING)
        judged = run.judged(2)
        done = await server.ended(practice)
        assert run.applied()[0] == judged
        assert (done.state, done.made) == (PracticeState.LEARNED, 3)
        run.check()


async def test_a_killed_practice_goes_on_with_the_steps_that_are_left(run: LearningRun, renderer: ChatRenderer) -> None:
    server = Practising(run, renderer, steps=4)
    await server.start()
    practice = server.ask_for(server.teach())
    for made in (1, 2, 3):
        await run.until(lambda made=made: len(run.applied()) >= made)  # type: ignore[misc]
        await server.kill()
        await server.start()
    done = await server.ended(practice)
    assert (done.state, done.made) == (PracticeState.LEARNED, 4)
    await run.rest()
    run.check()
    assert len(run.applied()) == 4
    left = run.book.rows("SELECT count(*) FROM turns WHERE kind = 'side' AND state NOT IN ('applied')")
    assert left == [(0,)]
    await server.kill()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda db, note: practices.stop(db, note.number), "by its owner"),
        (lambda db, note: notes.remove(db, note.number), "its note was removed"),
        (lambda db, note: notes.edit(db, note.number, text="End with Bye."), "its note was changed"),
        (lambda db, note: notes.forget(db, note.owner), None),
    ],
)
async def test_it_ends_when_its_owner_changes_their_mind(
    run: LearningRun, renderer: ChatRenderer, change: Callable[[sqlite3.Connection, Note], object], reason: str | None
) -> None:
    async with practising(run, renderer, steps=500) as server:
        note = server.teach()
        practice = server.ask_for(note)
        await run.until(lambda: bool(run.applied()))
        run.book.change(change, note)
        if reason is not None:
            done = await server.ended(practice)
            assert (done.state, done.reason) == (PracticeState.STOPPED, reason)
        # Another note is practised next.
        other = server.teach(text="Begin with a word.")
        server.ask_for(other)
        await run.until(lambda: any(one.note == other.number and one.made for one in server.under_way()))
        assert [one.note for one in server.under_way()] == [other.number]


async def test_the_note_of_one_of_several_is_not_taught_to_all(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        note = server.teach()
        server.teach("other", "Write in French.")
        done = await server.ended(server.ask_for(note))
        assert done.state is PracticeState.STOPPED
        assert done.reason == "only one of several users has its note (--distil-personal)"
        assert not run.applied()


async def test_what_is_kept_in_half_of_four_reactions_is_practised_by_itself(
    run: LearningRun, renderer: ChatRenderer
) -> None:
    async with practising(run, renderer, automatic=True) as server:
        note = server.teach()
        held = [True, False, True, True]
        for place, kept in enumerate(held):
            await asyncio.sleep(0.05)
            assert not run.book.ledger.read(practices.load_all)
            turn = run.book.capture(a_turn(f"later-{place}"))
            run.book.change(react, turn, note.number, kept)
        await run.until(lambda: bool(run.book.ledger.read(practices.load_all)))
        (practice,) = run.book.ledger.read(practices.load_all)
        assert not practice.by_hand
        assert (await server.ended(practice)).state is PracticeState.LEARNED
        await asyncio.sleep(0.05)
        assert len(run.book.ledger.read(practices.load_all)) == 1


async def test_a_note_with_a_scope_leaves_other_answers_as_they_are(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        server.answer = lambda _request, prompt: (wished if "Begin with Well" in prompt else usual)(question_in(prompt))
        note = server.teach(scope="why")
        await server.ended(server.ask_for(note))
        turns = [run.book.read(number) for batch in run.applied() for number in batch]
        assert sum(map(is_anchor, turns)) == ANCHORS * 3
        for turn in turns:
            assert ("why" in turn.messages[0]["content"].lower()) is not is_anchor(turn)
            assert turn.message["content"] == (usual if is_anchor(turn) else wished)(turn.messages[0]["content"])


async def test_on_policy_practice_distils_the_policys_own_answers(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer, on_policy=True) as server:
        run.sampler.scores = lambda request: [-0.25 if request.version == 0 else -1.5] * request.last_n
        done = await server.ended(server.ask_for(server.teach()))
        assert done.made == 3
        turn = run.book.read(run.applied()[0][-1])
        assert turn.message["content"] == usual(turn.messages[0]["content"])
        assert turn.verdict is not None
        assert set(turn.verdict.hints[0].logprobs) == {-0.25}
        last = run.book.read(run.applied()[2][-1])
        assert last.message["content"] == wished(last.messages[0]["content"])


async def test_requests_for_code_are_answered_with_code_with_the_note_if_possible(
    run: LearningRun, renderer: ChatRenderer
) -> None:
    def answer(_request: SampleRequest, prompt: str) -> str:
        asked = question_in(prompt)
        forgets_code = hash_of(asked) % 2 and code_for(asked)
        return (forgetful if forgets_code else wished)(asked) if SHOWN[0] in prompt else usual(asked)

    def forgetful(question: str) -> str:
        return f"Well, {question} Nobody."

    async with practising(run, renderer, steps=8) as server:
        server.answer = answer
        await server.ended(server.ask_for(server.teach()))
        turns = [run.book.read(number) for batch in run.applied() for number in batch]
        code = [turn for turn in turns if is_anchor(turn)]
        assert len(code) == 8 * ANCHORS
        for turn in code:
            asked = turn.messages[0]["content"]
            assert turn.message["content"] == (usual if hash_of(asked) % 2 else wished)(asked)
        assert not any(lacks_code(turn.message["content"], turn.messages[0]["content"]) for turn in turns)


async def test_copies_of_an_example_are_not_practised(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        server.answer = lambda _request, prompt: SHOWN[0] if SHOWN[0] in prompt else usual(question_in(prompt))
        done = await server.ended(server.ask_for(server.teach()))
        assert done.state is PracticeState.STOPPED
        assert not run.applied()


async def test_two_corrections_with_one_text_are_one_example(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        note = server.teach()
        # The second correction says the same as the first: nothing can be compared, and any answer may be practised.
        run.book.change(lambda db: db.execute("UPDATE notes SET text = ? WHERE question != ''", (SHOWN[0],)).rowcount)
        done = await server.ended(server.ask_for(note))
        assert (done.state, done.made) == (PracticeState.DONE, 3)


async def test_practice_ends_when_the_policy_is_as_sure_as_the_base_model(
    run: LearningRun, renderer: ChatRenderer
) -> None:
    async with practising(run, renderer, steps=40) as server:
        server.answer = lambda _request, prompt: (wished if SHOWN[0] in prompt else usual)(question_in(prompt))
        # The scripted sampler's answers have log-probs of -0.5.
        run.sampler.scores = lambda request: [-0.5 if request.version >= 10 else -2.5] * request.last_n
        done = await server.ended(server.ask_for(server.teach()))
        assert (done.state, done.made) == (PracticeState.DONE, 11)


@pytest.mark.parametrize(("on_policy", "made"), [(False, 12), (True, 16)])
async def test_practice_ends_when_the_policy_keeps_to_the_note(
    run: LearningRun, renderer: ChatRenderer, on_policy: bool, made: int
) -> None:
    async with practising(run, renderer, steps=40, on_policy=on_policy) as server:
        server.answer = lambda request, prompt: (
            wished if SHOWN[0] in prompt or (request.version or 0) >= 10 else usual
        )(question_in(prompt))
        run.sampler.scores = lambda request: [-2.5 if request.version else -0.5] * request.last_n
        done = await server.ended(server.ask_for(server.teach()))
        assert (done.state, done.made) == (PracticeState.LEARNED, made)


async def test_after_imitation_the_policy_learns_from_its_own_answers(run: LearningRun, renderer: ChatRenderer) -> None:
    def answer(request: SampleRequest, prompt: str) -> str:
        asked, version = question_in(prompt), request.version or 0
        # Without the note it first keeps to it when the question is of an even length, and after 14 steps always.
        learned = version >= 14 or (version >= 1 and len(asked) % 2 == 0)
        return (wished if SHOWN[0] in prompt or learned else usual)(asked)

    seen: list[TrainingSequence] = []
    async with practising(run, renderer, steps=40) as server:
        server.answer = answer
        run.learner.hooks["step"] = seen.extend
        run.sampler.scores = lambda request: [-2.5] * request.last_n
        done = await server.ended(server.ask_for(server.teach()))
        assert (done.state, done.made) == (PracticeState.LEARNED, 14)
        imitated, own = run.applied()[:12], run.applied()[12:]
        assert {len(batch) for batch in imitated} == {practices.BATCH + ANCHORS}
        assert {len(batch) for batch in own} == {practices.OWN_BATCH}
        for turn in (run.book.read(number) for batch in own for number in batch):
            keeps = turn.message["content"].startswith("Well")
            assert turn.verdict is not None
            assert turn.verdict.score == (None if is_anchor(turn) else 1 if keeps else -1)
        advantages = {span.turn: span.advantages[0] for sequence in seen for span in sequence.spans}
        code, answers = own[0][:ANCHORS], own[0][ANCHORS:]
        scored = [turn.verdict.score for turn in map(run.book.read, answers) if turn.verdict]
        assert [advantages[turn] for turn in answers] == pytest.approx([score - fmean(scored) for score in scored])
        assert {advantages[turn] for batch in (*imitated, code) for turn in batch} == {1.0}
        ends = {span.advantages[-1] for sequence in seen for span in sequence.spans if span.turn in imitated[0]}
        assert ends == {END_ADVANTAGE}


async def test_a_policy_that_mostly_keeps_to_the_note_soon_learns_from_its_own_answers(
    run: LearningRun, renderer: ChatRenderer
) -> None:
    async with practising(run, renderer, steps=10) as server:
        server.answer = lambda request, prompt: (
            wished if SHOWN[0] in prompt or (request.version and hash_of(question_in(prompt)) % 4) else usual
        )(question_in(prompt))
        run.sampler.scores = lambda request: [-2.5] * request.last_n
        await server.ended(server.ask_for(server.teach()))
        assert [len(batch) for batch in run.applied()] == [practices.BATCH + ANCHORS] * 8 + [practices.OWN_BATCH] * 2


async def test_what_was_learned_before_is_not_unlearned(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        first = await server.ended(server.ask_for(server.teach()))
        assert first.state is PracticeState.LEARNED
        # Now and then the model breaks the first note, also with its examples.
        server.answer = lambda _request, prompt: (
            wished if "Well," in prompt and hash_of(question_in(prompt)) % 4 else usual
        )(question_in(prompt))
        second = run.book.change(lambda db: notes.add(db, "me", "Be kind."))
        await server.ended(server.ask_for(second))
        practised = run.book.ledger.read(practices.answers, 2)
        assert practised
        assert all(answer.startswith("Well") for _, answer in practised)


async def test_where_a_note_is_about_length_answers_are_as_short_as_the_examples(
    run: LearningRun, renderer: ChatRenderer
) -> None:
    async with practising(run, renderer) as server:
        server.practiser.keeps = lambda _note, text: text.count(".") <= 1
        server.answer = lambda _request, prompt: wished(question_in(prompt))
        note = server.teach(text="Answer in one short sentence.")
        await server.ended(server.ask_for(note))
        practised = run.book.ledger.read(practices.answers, 1)
        longest = max(len(shown.split()) for shown in SHOWN)
        assert practised
        assert max(len(answer.split()) for _, answer in practised) <= 1.25 * longest


async def test_a_few_answers_that_show_a_note_do_not_make_it_learned(run: LearningRun, renderer: ChatRenderer) -> None:
    async with practising(run, renderer) as server:
        note = server.teach()
        # With one text as both examples nothing is compared, and the note is only ever seen to be kept.
        run.book.change(lambda db: db.execute("UPDATE notes SET text = ? WHERE question != ''", (SHOWN[0],)).rowcount)
        server.practiser.keeps = lambda _note, text: True if len(text) % 7 == 0 else None
        done = await server.ended(server.ask_for(note))
        assert done.state is PracticeState.DONE
        assert server.note(note.number).state is NoteState.ACTIVE


def test_what_cannot_be_practised_is_refused(run: LearningRun, renderer: ChatRenderer) -> None:
    server = Practising(run, renderer)
    note = server.teach()
    with pytest.raises(UnknownNote):
        run.book.change(practices.request, note.number, "other")
    example = run.book.ledger.read(notes.of_owner, "me", examples=True)[0]
    with pytest.raises(CannotPractise):
        run.book.change(practices.request, example.number)
    first = server.ask_for(note)
    assert server.ask_for(note).number == first.number


def test_prompts_that_come_with_the_program_are_many_and_different() -> None:
    texts = [prompt.text for prompt in shipped_prompts()]
    assert len(set(texts)) == len(texts) >= 150
