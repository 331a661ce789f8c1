"""A hint under which the teacher itself answers badly is not learned from."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from openclaw_rl.judge.own_answers import FEWEST_LOOKS, MAX_TOKENS, MOST_LOOKS, TEMPERATURE, OwnAnswers, fault_of
from openclaw_rl.judge.teacher import Teacher
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION, Priority, SampleRequest, StoredTurn
from support.fakes import ScriptedSampler
from support.records import Book, a_turn

ASKED = [{"role": "user", "content": "How do magnets attract iron?"}]
SAID = "Magnets attract iron because their tiny atomic fields line up."
SENSIBLE = "Magnets pull iron with their field."
ABSENT = "Dear friend, every day brings wonderful chances to shine and to smile."
HINT = "Be warm."


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
    """A teacher whose own answers are these, one after the other; the last one again and again."""

    def script(request: SampleRequest, index: int) -> list[int]:
        text = answers[min(len(fake.requests), len(answers)) - 1]
        return [*renderer.tokenizer.encode_text(text), min(renderer.tokenizer.eos_ids)]

    fake = ScriptedSampler(script)
    return Teacher(fake, renderer, own_answers=OwnAnswers(fake, renderer)), fake


async def test_a_hint_is_refused_in_the_turn_that_the_teacher_answers_badly(book: Book, renderer: ChatRenderer) -> None:
    teacher, fake = teacher_that_says([ABSENT, SENSIBLE], renderer)
    turn = record(book, renderer)
    first, second = await teacher.teach(turn, HINT), await teacher.teach(turn, HINT)
    assert first.problem == "the teacher's own answer with the hint is about something else"
    assert not first.logprobs
    assert not second.problem
    assert second.logprobs
    asked = fake.requests[0]
    assert (asked.version, asked.priority, asked.owner) == (BASE_VERSION, Priority.BACKGROUND, turn.session.owner)
    assert asked.params.max_tokens == MAX_TOKENS
    assert asked.params.temperature == TEMPERATURE
    assert len({request.params.seed for request in fake.requests}) == 2, "another draw each time"


async def test_a_hint_that_mostly_fails_is_refused_without_another_look(book: Book, renderer: ChatRenderer) -> None:
    teacher, fake = teacher_that_says([ABSENT], renderer)
    turn = record(book, renderer)
    hints = [await teacher.teach(turn, HINT) for _ in range(FEWEST_LOOKS + 3)]
    assert len(fake.requests) == FEWEST_LOOKS
    assert hints[-1].problem == "the teacher's own answers with this hint are bad in 12 of 12 turns"
    assert not (await teacher_that_says([SENSIBLE], renderer)[0].teach(turn, HINT)).problem


async def test_a_hint_that_works_is_trusted_after_some_looks(book: Book, renderer: ChatRenderer) -> None:
    teacher, fake = teacher_that_says([SENSIBLE], renderer)
    turn = record(book, renderer)
    hints = [await teacher.teach(turn, HINT) for _ in range(MOST_LOOKS + 3)]
    assert all(hint.logprobs for hint in hints)
    assert len(fake.requests) == MOST_LOOKS


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
        (ABSENT, "is about something else"),
        (SENSIBLE, ""),
        ("Great question! Iron is full of tiny magnets.", ""),
        ("Yes.", ""),
    ],
)
def test_bad_answers_are_told_from_sensible_ones(answer: str, fault: str) -> None:
    assert fault_of(answer, ASKED[0]["content"], SAID) == fault
