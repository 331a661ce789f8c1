"""A batch as sequences: turns that extend each other go through the model once, and every turn is there once."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.learn.samples import to_sequences
from openclaw_rl.methods.base import NoSignal
from openclaw_rl.types import (
    SampleKind,
    SessionKey,
    Source,
    Span,
    State,
    StoredTurn,
    TrainingSequence,
    TurnKind,
    Verdict,
)
from support.methods import a_method
from support.properties import examples

RL = a_method("rl")
CENTRED = a_method("rl", baseline="batch")


def turn(number: int, prompt: Sequence[int], response: Sequence[int], score: float = 1.0) -> StoredTurn:
    """A judged turn; its log-probs are its own, so that a mix-up shows."""
    return StoredTurn(
        number=number,
        session=SessionKey("me", "s"),
        completion=f"chatcmpl-{number}",
        choice=0,
        kind=TurnKind.MAIN,
        kind_reason="chat",
        state=State.BATCHED,
        reason="",
        created=0.0,
        version=0,
        continuation="new",
        messages=[],
        message={},
        prompt_ids=list(prompt),
        response_ids=list(response),
        logprobs=[-number - 0.01 * i for i in range(len(response))],
        top=[],
        sampling={},
        finish_reason="stop",
        next_state=None,
        ready_at=None,
        feedback=[],
        verdict=Verdict(score, Source.LLM),
        sample=SampleKind.RL,
    )


@dataclass(frozen=True)
class Placed:
    """A span and the sequence it is in."""

    sequence: TrainingSequence
    span: Span

    @property
    def response(self) -> list[int]:
        return list(self.sequence.ids[self.span.start : self.span.stop])

    @property
    def prompt(self) -> list[int]:
        return list(self.sequence.ids[: self.span.start])


def placed(sequences: Sequence[TrainingSequence]) -> dict[int, Placed]:
    found = [(span.turn, Placed(sequence, span)) for sequence in sequences for span in sequence.spans]
    assert len(dict(found)) == len(found), "a turn is there twice"
    return dict(found)


def shape(sequences: Sequence[TrainingSequence]) -> set[tuple[int, ...]]:
    """Which turns share a sequence, in order."""
    return {tuple(span.turn for span in sequence.spans) for sequence in sequences}


def assert_whole(sequences: Sequence[TrainingSequence], turns: Sequence[StoredTurn]) -> None:
    """Every turn once, after its own prompt, with its own tokens, log-probs and signal; no span in another's way."""
    found = placed(sequences)
    assert found.keys() == {turn.number for turn in turns}
    for turn in turns:
        own = found[turn.number]
        assert own.prompt == turn.prompt_ids
        assert own.response == turn.response_ids
        assert list(own.span.old_logprobs) == turn.logprobs
        assert turn.verdict is not None
        assert list(own.span.advantages) == [turn.verdict.score] * len(turn.response_ids)
    for sequence in sequences:
        bounds = [edge for span in sequence.spans for edge in (span.start, span.stop)]
        assert bounds == sorted(bounds)
        assert bounds[-1] == len(sequence.ids)


def test_a_conversation_is_one_sequence_with_a_span_for_each_turn() -> None:
    first = turn(1, [1, 2], [3, 4])
    second = turn(2, [1, 2, 3, 4, 5], [6], score=-1.0)
    third = turn(3, [1, 2, 3, 4, 5, 6, 7], [8, 9])
    sequences = to_sequences([second, third, first], RL)
    assert shape(sequences) == {(1, 2, 3)}
    assert list(sequences[0].ids) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert_whole(sequences, [first, second, third])


def test_a_turn_in_the_middle_that_is_not_in_the_batch_is_context_and_nothing_else() -> None:
    sequences = to_sequences([turn(1, [1, 2], [3]), turn(3, [1, 2, 3, 4, 5, 6], [7])], RL)
    (sequence,) = sequences
    assert [(span.start, span.stop) for span in sequence.spans] == [(2, 3), (6, 7)]


def test_a_fork_has_a_sequence_of_its_own() -> None:
    """Also where a template has rewritten the history by a single token."""
    turns = [turn(1, [1, 2], [3, 4]), turn(2, [1, 2, 3, 4, 5], [6]), turn(3, [1, 2, 3, 9, 5], [6])]
    sequences = to_sequences(turns, RL)
    assert shape(sequences) == {(1, 2), (3,)}
    assert_whole(sequences, turns)


def test_two_branches_share_their_beginning_with_one_of_them() -> None:
    turns = [turn(1, [1], [2]), turn(2, [1, 2, 3], [4]), turn(3, [1, 2, 5], [6])]
    sequences = to_sequences(turns, RL)
    assert_whole(sequences, turns)
    assert len(sequences) == 2


def test_equal_answers_to_one_prompt_are_samples_of_their_own() -> None:
    turns = [turn(number, [1, 2], [3, 4], score) for number, score in ((1, 1.0), (2, -1.0), (3, 1.0))]
    sequences = to_sequences(turns, RL)
    assert shape(sequences) == {(1,), (2,), (3,)}
    assert_whole(sequences, turns)


def test_of_n_choices_one_that_begins_like_another_is_not_part_of_it() -> None:
    """Cut by length, an answer's tokens may begin another's: the same tokens cannot have two signals."""
    turns = [turn(1, [1, 2], [3]), turn(2, [1, 2], [3, 4], score=-1.0), turn(3, [1, 2, 3, 4, 5], [6])]
    sequences = to_sequences(turns, RL)
    assert_whole(sequences, turns)
    assert (1, 2) not in shape(sequences)


def test_equal_turns_of_two_conversations_go_into_both_or_neither_but_never_twice_into_one() -> None:
    turns = [
        turn(1, [1], [2]),
        turn(2, [1], [2]),
        turn(3, [1, 2, 3], [4]),
        turn(4, [1, 2, 3], [4]),
    ]
    sequences = to_sequences(turns, RL)
    assert_whole(sequences, turns)
    assert len(sequences) == 2


def test_one_turn_without_a_signal_is_said_and_not_left_out() -> None:
    with pytest.raises(NoSignal):
        to_sequences([turn(1, [1], [2]), turn(2, [1, 2, 3], [4], score=0.0)], RL)


@pytest.mark.parametrize("score", [1.0, -1.0, 0.1, 1 / 3])
def test_a_batch_that_was_judged_alike_teaches_nothing_once_it_is_measured_from_its_mean(score: float) -> None:
    turns = [turn(number, [1, number], [3, 4], score) for number in range(2, 8)]
    for count in (2, 3, 6):
        with pytest.raises(NoSignal, match="equal"):
            to_sequences(turns[:count], CENTRED)
        assert len(to_sequences(turns[:count], RL)) == count
    other = turn(9, [1, 9], [3, 4], score / 2)
    assert len(to_sequences([*turns, other], CENTRED)) == 7


def test_a_sample_alone_is_measured_from_nothing() -> None:
    (sequence,) = to_sequences([turn(1, [1, 2], [3, 4], score=-1.0)], CENTRED)
    assert sequence.spans[0].advantages == [-1.0, -1.0]


def test_nothing_gives_nothing() -> None:
    assert to_sequences([], RL) == []


tokens = st.lists(st.integers(1, 2), min_size=1, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[StoredTurn]:
    """Turns that go on from each other, fork and repeat each other; so few different tokens that all of it happens."""
    turns: list[StoredTurn] = []
    for number in range(1, draw(st.integers(1, 9)) + 1):
        prompt = draw(tokens)
        if turns and draw(st.booleans()):
            before = draw(st.sampled_from(turns))
            prompt = [*before.prompt_ids, *before.response_ids, *draw(tokens)]
        turns.append(turn(number, prompt, draw(tokens), draw(st.sampled_from([-1.0, 1.0]))))
    return draw(st.permutations(turns))


@given(conversations())
@examples(300)
def test_whatever_conversations_are_in_a_batch_every_turn_is_in_it_once(turns: list[StoredTurn]) -> None:
    sequences = to_sequences(turns, RL)
    assert_whole(sequences, turns)
    # What the sequences are does not depend on the order in which the turns were claimed.
    assert shape(sequences) == shape(to_sequences(sorted(turns, key=lambda turn: turn.number), RL))
