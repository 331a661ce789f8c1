"""What is no answer, whatever was asked, and hints under which the teacher itself answers badly."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from openclaw_rl.judge.answer_checks import (
    FEWEST_LOOKS,
    LOOKS_PER_TURN,
    MAX_TOKENS,
    MOST_LOOKS,
    TEMPERATURE,
    HintCheck,
    fault_of,
    repeats_question,
    words_of,
)
from openclaw_rl.judge.teacher import Teacher
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION, Priority, SampleRequest, ScoreRequest, StoredTurn
from support.fakes import ScriptedSampler
from support.records import Book, a_turn

ASKED = [{"role": "user", "content": "How do magnets attract iron?"}]
SAID = "Magnets attract iron because their tiny atomic fields line up."
SENSIBLE = "Magnets pull iron with their field."
ABSENT = "Dear friend, every day brings wonderful chances to shine and to smile."
HINT = "Be warm."
MAGNETS = "How do magnets attract iron?"


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(tiny_model)


def record(book: Book, renderer: ChatRenderer) -> StoredTurn:
    tokenizer = renderer.tokenizer
    ids = [*tokenizer.encode_text(SAID), min(tokenizer.eos_ids)]
    prompt = renderer.prompt(renderer.text(ASKED, [])).ids
    turn = a_turn(
        messages=ASKED,
        message={"role": "assistant", "content": SAID},
        prompt_ids=prompt,
        response_ids=ids,
        logprobs=[-1.0] * len(ids),
    )
    return book.read(book.capture(turn))


def teacher_that_says(answers: Sequence[str], renderer: ChatRenderer) -> tuple[Teacher, ScriptedSampler]:
    """A teacher whose own answers are these, one after the other; the last one again and again.

    A sensible answer is unlikely after the hint alone, the others are as likely as after the request.
    """
    drawn: list[str] = []
    encode = renderer.tokenizer.encode_text

    def script(request: SampleRequest, index: int) -> list[int]:
        drawn.append(answers[min(len(drawn), len(answers) - 1)])
        return [*encode(drawn[-1]), min(renderer.tokenizer.eos_ids)]

    def scores(request: ScoreRequest) -> list[float]:
        said = list(request.ids)[-request.last_n : -1]
        return [-5.0 if said == list(encode(SENSIBLE)) else -0.5] * request.last_n

    fake = ScriptedSampler(script, scores=scores)
    return Teacher(fake, renderer, hint_check=HintCheck(fake, renderer)), fake


async def test_a_hint_is_refused_in_the_turn_that_the_teacher_answers_badly(book: Book, renderer: ChatRenderer) -> None:
    teacher, fake = teacher_that_says(
        [SENSIBLE, ABSENT, SENSIBLE, ABSENT, SENSIBLE, SENSIBLE, ABSENT, SENSIBLE], renderer
    )
    turn = record(book, renderer)
    first, second = await teacher.teach(turn, HINT), await teacher.teach(turn, HINT)
    assert first.problem == "2 of 4 own answers of the teacher are bad: one does not depend on the request"
    assert not first.logprobs
    assert not second.problem, "one of four may be bad"
    assert second.logprobs
    asked = fake.requests[0]
    assert (asked.n, asked.version, asked.priority) == (LOOKS_PER_TURN, BASE_VERSION, Priority.BACKGROUND)
    assert asked.owner == turn.session.owner
    assert asked.params.max_tokens == MAX_TOKENS
    assert asked.params.temperature == TEMPERATURE
    assert len({request.params.seed for request in fake.requests}) == 2, "other draws each time"


async def test_an_answer_is_compared_with_what_is_said_to_the_hint_alone(book: Book, renderer: ChatRenderer) -> None:
    teacher, fake = teacher_that_says([SENSIBLE], renderer)
    turn = record(book, renderer)
    await teacher.teach(turn, HINT)
    answer = [*renderer.tokenizer.encode_text(SENSIBLE), min(renderer.tokenizer.eos_ids)]
    *looked, taught = fake.scored
    assert len(looked) == LOOKS_PER_TURN
    for request in looked:
        ids = list(request.ids)
        assert ids[-request.last_n :] == answer
        prompt = renderer.tokenizer.backend.decode(ids[: -request.last_n])
        assert HINT in prompt
        assert ASKED[0]["content"] not in prompt
        assert request.owner == turn.session.owner
    assert list(taught.ids)[-taught.last_n :] == list(turn.response_ids)


async def test_a_hint_that_mostly_fails_is_refused_without_another_look(book: Book, renderer: ChatRenderer) -> None:
    teacher, fake = teacher_that_says([ABSENT], renderer)
    turn = record(book, renderer)
    hints = [await teacher.teach(turn, HINT) for _ in range(FEWEST_LOOKS // LOOKS_PER_TURN + 3)]
    assert len(fake.requests) == FEWEST_LOOKS // LOOKS_PER_TURN
    assert all(hint.problem for hint in hints), "also before the hint is refused for good"
    assert hints[-1].problem == "12 of 12 own answers of the teacher with this hint are bad"
    assert not (await teacher_that_says([SENSIBLE], renderer)[0].teach(turn, HINT)).problem


async def test_a_hint_that_works_is_trusted_after_some_looks(book: Book, renderer: ChatRenderer) -> None:
    teacher, fake = teacher_that_says([SENSIBLE], renderer)
    turn = record(book, renderer)
    hints = [await teacher.teach(turn, HINT) for _ in range(MOST_LOOKS // LOOKS_PER_TURN + 3)]
    assert all(hint.logprobs for hint in hints)
    assert len(fake.requests) == MOST_LOOKS // LOOKS_PER_TURN


@pytest.mark.parametrize("answer", ["Yes.", "No."])
async def test_a_very_short_answer_may_suit_any_request(book: Book, renderer: ChatRenderer, answer: str) -> None:
    teacher, _ = teacher_that_says([answer], renderer)
    assert not (await teacher.teach(record(book, renderer), HINT)).problem


async def test_without_the_option_the_teacher_is_not_asked_for_answers(book: Book, renderer: ChatRenderer) -> None:
    _, fake = teacher_that_says([ABSENT], renderer)
    assert (await Teacher(fake, renderer).teach(record(book, renderer), HINT)).logprobs
    assert not fake.requests


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("", "is empty"),
        ("…", "is empty"),
        ("very very very very very very very very very very", "repeats itself"),
        ("Magnets pull iron with their field.", ""),
        ("Yes.", ""),
    ],
)
def test_empty_and_repetitive_answers_are_bad(answer: str, fault: str) -> None:
    assert fault_of(words_of(answer)) == fault


@pytest.mark.parametrize(
    ("answer", "request_", "instruction", "repeats"),
    [
        ("How do magnets attract iron?", MAGNETS, "", True),
        ("Great question, how do magnets attract iron?", MAGNETS, 'Start with "Great question!".', True),
        ("There are 5 minutes in 5 minutes.", "How many minutes are 5 minutes?", "", True),
        ("Great question! Their fields line up.", MAGNETS, 'Start with "Great question!".', False),
        ("The capital of France is Paris.", "What is the capital of France?", "", False),
        ("There are 60 minutes in an hour.", "How many minutes are in an hour?", "", False),
        ("A spider has eight legs.", "How many legs does a spider have?", "", False),
        ("Yes.", "Is iron magnetic?", "", False),
        ("Magnets attract iron.", "Put it shorter: magnets, as we all know, attract iron", "", False),
        ("", MAGNETS, "", False),
    ],
)
def test_an_answer_that_adds_nothing_to_its_question_is_found(
    answer: str, request_: str, instruction: str, repeats: bool
) -> None:
    assert repeats_question(answer, request_, instruction) is repeats
