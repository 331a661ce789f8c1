"""Practice and the guard: what harms the policy, or teaches it nothing, is taken back."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from openclaw_rl.learn.guard import FILE, Guard
from openclaw_rl.learn.plain_answers import plain_prompts
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import NoteState, PracticeState, SampleRequest
from support.learning_run import LearningRun
from support.practising import SHOWN, hash_of, practising, question_in, usual, wished


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(tiny_model)


async def test_a_practice_that_harms_the_policy_is_taken_back(run: LearningRun, renderer: ChatRenderer) -> None:
    plain = {prompt.text for prompt in plain_prompts()}

    def harm(request: SampleRequest, prompt: str) -> str:
        harmed = request.version and question_in(prompt) in plain
        return "so so so so so so so so so so" if harmed else server.follow(request, prompt)

    run.make_guard = lambda run: Guard(run.folder / FILE, run.sampler, renderer, share=0.0)
    async with practising(run, renderer) as server:
        server.answer = harm
        note = server.teach()
        # It is the first that the learner does: nobody let the guard look at the base model before.
        done = await server.ended(server.ask_for(note))
        assert done.state is PracticeState.STOPPED
        assert done.made == 0, "all its steps were made before the guard examined"
        assert run.learner.calls.count("step") == 3
        assert done.reason.startswith("the policy became worse, so the one before serves again (the guard: ")
        assert server.note(note.number).state is NoteState.ACTIVE
        assert not run.applied()
        assert run.loop.step == 0


async def test_a_practice_that_harms_only_what_its_note_is_for_is_taken_back(
    run: LearningRun, renderer: ChatRenderer
) -> None:
    def harm(request: SampleRequest, prompt: str) -> str:
        asked = question_in(prompt)
        harmed = request.version and "why" in asked.lower() and hash_of(asked) % 3 == 0
        return "so so so so so so so so so so" if harmed else server.follow(request, prompt)

    run.make_guard = lambda run: Guard(run.folder / FILE, run.sampler, renderer, share=0.0)
    async with practising(run, renderer) as server:
        server.answer = harm
        done = await server.ended(server.ask_for(server.teach(scope="why")))
        assert (done.state, done.made) == (PracticeState.STOPPED, 0)
        assert done.reason.startswith("the policy became worse, so the one before serves again (the guard: ")
        await run.until(lambda: run.loop.guard is not None and run.loop.guard.also == ())
        assert "practised" not in (run.folder / FILE).read_text(), "what its owner said leaves no trace"


@pytest.mark.parametrize(
    ("harmful", "forgets", "stays"), [((11, 12), False, 8), ((8,), False, 12), ((), True, 8)], ids=str
)
async def test_of_a_practice_that_harms_the_policy_the_last_good_steps_stay(
    run: LearningRun, renderer: ChatRenderer, harmful: Sequence[int], forgets: bool, stays: int
) -> None:
    plain = {prompt.text for prompt in plain_prompts()}

    def answer(request: SampleRequest, prompt: str) -> str:
        asked, version = question_in(prompt), request.version or 0
        if asked in plain and run.loop.step in harmful and version == run.loop.version:
            return "so so so so so so so so so so"
        # Without the note it keeps to it in five of eight answers, so that practice goes on to its last step.
        forgot = forgets and run.loop.step == 12 and version == run.loop.version
        keeps = SHOWN[0] in prompt or (version and hash_of(asked) % 8 < 5 and not forgot)
        return (wished if keeps else usual)(asked)

    run.make_guard = lambda run: Guard(run.folder / FILE, run.sampler, renderer, share=0.0)
    async with practising(run, renderer, steps=12) as server:
        server.answer = answer
        run.sampler.scores = lambda request: [-2.5] * request.last_n
        done = await server.ended(server.ask_for(server.teach()))
        assert run.learner.calls.count("step") == 12
        assert (done.state, done.made) == (PracticeState.DONE, stays)
        assert run.loop.step == stays
        assert run.loop.guard is not None
        assert run.loop.guard.last_good == run.loop.version


async def test_a_practice_that_teaches_nothing_is_taken_back(run: LearningRun, renderer: ChatRenderer) -> None:
    run.make_guard = lambda run: Guard(run.folder / FILE, run.sampler, renderer, share=0.0)
    async with practising(run, renderer) as server:
        server.answer = lambda _request, prompt: (wished if SHOWN[0] in prompt else usual)(question_in(prompt))
        note = server.teach()
        done = await server.ended(server.ask_for(note))
        assert done.state is PracticeState.STOPPED
        assert done.reason == (
            "without the note, 0 of 16 answers to other questions keep to it, so the policy before serves again"
        )
        assert run.loop.step == 0
        assert not run.loop.waits_for_good_score, "it did no harm, so feedback is learned from as before"


async def test_feedback_that_was_learned_meanwhile_is_not_taken_back(run: LearningRun, renderer: ChatRenderer) -> None:
    run.make_guard = lambda run: Guard(run.folder / FILE, run.sampler, renderer, share=0.0)
    async with practising(run, renderer) as server:
        server.answer = lambda _request, prompt: (wished if SHOWN[0] in prompt else usual)(question_in(prompt))
        note = server.teach()
        practice = server.ask_for(note)
        await run.until(lambda: len(run.applied()) == 1)
        judged = run.judged(2)
        done = await server.ended(practice)
        assert done.state is PracticeState.DONE
        assert judged in run.applied()


async def test_a_killed_practice_that_teaches_nothing_is_taken_back(run: LearningRun, renderer: ChatRenderer) -> None:
    run.make_guard = lambda run: Guard(run.folder / FILE, run.sampler, renderer, share=0.0)

    def answer(_request: SampleRequest, prompt: str) -> str:
        return (wished if SHOWN[0] in prompt else usual)(question_in(prompt))

    async with practising(run, renderer) as server:
        server.answer = answer
        practice = server.ask_for(server.teach())
        await run.until(lambda: len(run.applied()) == 1)
    async with practising(run, renderer) as server:
        server.answer = answer
        done = await server.ended(practice)
        assert done.state is PracticeState.STOPPED
        assert run.loop.step == 0
        assert run.loop.guard is not None
        assert run.loop.guard.state.in_words() == "", "no policy was examined"
