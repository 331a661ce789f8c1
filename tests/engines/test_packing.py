"""Packing: whole sequences, within the budget, nothing lost; and the tensors say what the sequences say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engines.local.training.packing import by_span, micro_batches, pack, signals
from openclaw_rl.types import Alternatives, Span, TrainingSequence

CPU = torch.device("cpu")
lengths = st.lists(st.integers(1, 120), max_size=40)


@given(lengths=lengths, budget=st.integers(1, 200))
def test_every_sequence_is_in_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = pack(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or sum(lengths[i] for i in group) <= budget for group in groups)


@given(lengths=lengths, budget=st.integers(120, 200))
def test_no_two_micro_batches_could_be_one(lengths: list[int], budget: int) -> None:
    totals = sorted(sum(lengths[i] for i in group) for group in pack(lengths, budget))
    assert len(totals) < 2 or totals[0] + totals[1] > budget


def test_long_ones_first_fill_better_than_as_they_come() -> None:
    assert len(pack([40, 40, 60, 60], 100)) == 2


@given(lengths=lengths)
def test_the_order_of_the_sequences_does_not_change_the_shapes(lengths: list[int]) -> None:
    shapes = [[lengths[i] for i in group] for group in pack(lengths, 150)]
    backwards = lengths[::-1]
    assert shapes == [[backwards[i] for i in group] for group in pack(backwards, 150)]


def sequence(ids: list[int], *spans: tuple[int, int]) -> TrainingSequence:
    def values(start: int, stop: int, factor: float) -> list[float]:
        return [factor * ids[i] for i in range(start, stop)]

    own = [
        Span(n, start, stop, values(start, stop, -1), values(start, stop, 0.5)) for n, (start, stop) in enumerate(spans)
    ]
    return TrainingSequence(ids, own)


def test_tensors_line_up_token_by_token() -> None:
    first, second = sequence([1, 2, 3, 4, 5, 6], (2, 4), (5, 6)), sequence([7, 8, 9], (1, 2))
    (batch,) = micro_batches([second, first], 100, CPU)
    learn = signals([second, first], batch)
    assert batch.indices == (1, 0)
    assert batch.segments == ((0, 5, 5), (5, 6, 6))
    # Nothing after the last span is read, nor its last token.
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert batch.rows.tolist() == [1, 2, 4, 5]
    assert batch.targets.tolist() == [[3], [4], [6], [8]]
    assert learn.old_logprobs.tolist() == [[-3], [-4], [-6], [-8]]
    assert learn.advantages.tolist() == [[1.5], [2], [3], [4]]
    torch.testing.assert_close(learn.weights, torch.tensor([1 / 6, 1 / 6, 1 / 3, 1 / 3]))
    assert by_span([0.1, 0.2, 0.3], first.spans) == [[0.1, 0.2], [0.3]]


def some(ids: list[list[int]], old: list[list[float]], advantages: list[list[float]]) -> Alternatives:
    return Alternatives(np.array(ids), np.array(old), np.array(advantages))


def test_alternatives_stand_beside_their_token_and_what_is_not_there_has_no_advantage() -> None:
    others = some([[7, 8], [9, 0]], [[-1, -2], [-5, 0]], [[0.5, -0.5], [1, 0]])
    batch = [TrainingSequence([1, 2, 3], [Span(0, 1, 3, [-3.0, -4.0], [1.0, 2.0], others)]), sequence([4, 5], (1, 2))]
    (packed,) = micro_batches(batch, 100, CPU)
    learn = signals(batch, packed)
    assert packed.targets.tolist() == [[2, 7, 8], [3, 9, 0], [5, 0, 0]]
    assert learn.old_logprobs.tolist() == [[-3, -1, -2], [-4, -5, 0], [-5, 0, 0]]
    assert learn.advantages.tolist() == [[1, 0.5, -0.5], [2, 1, 0], [2.5, 0, 0]]


def test_alternatives_of_different_numbers_stand_in_one_batch() -> None:
    wide, narrow = some([[7, 8]], [[-1, -2]], [[0.5, -0.5]]), some([[9]], [[-3]], [[1.5]])
    spans = [Span(number, 1, 2, [-4.0], [1.0], others) for number, others in enumerate((wide, narrow))]
    batch = [TrainingSequence([1, 2], [span]) for span in spans]
    (packed,) = micro_batches(batch, 100, CPU)
    learn = signals(batch, packed)
    assert packed.targets.tolist() == [[2, 7, 8], [2, 9, 0]]
    assert learn.old_logprobs.tolist() == [[-4, -1, -2], [-4, -3, 0]]
    assert learn.advantages.tolist() == [[1, 0.5, -0.5], [1, 1.5, 0]]


@pytest.mark.parametrize(
    "others",
    [
        some([[7]], [[-1.0]], [[1.0]]),
        some([[7], [8]], [[-1.0]], [[1.0], [1.0]]),
        some([[7], [8]], [[-1.0], [-1.0]], [[1.0, 2.0], [1.0, 2.0]]),
    ],
)
def test_alternatives_that_do_not_fit_are_refused(others: Alternatives) -> None:
    bad = [TrainingSequence([1, 2, 3, 4], [Span(7, 2, 4, [-1.0, -1.0], [1.0, 1.0], others)])]
    with pytest.raises(ValueError, match="turn 7: every alternative"):
        signals(bad, micro_batches([TrainingSequence([1, 2, 3, 4], [Span(7, 2, 4, [], [])])], 10, CPU)[0])


def test_weights_are_of_the_whole_batch_whatever_the_micro_batches() -> None:
    batch = [sequence(list(range(10, 30)), (4, 9), (12, 15)), sequence(list(range(40, 50)), (2, 4)), sequence([1, 2])]
    weights = [signals(batch, part).weights for part in micro_batches(batch, 1, CPU)]
    assert len(weights) == 2
    assert torch.cat(weights).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("spans", [[(0, 2)], [(2, 2)], [(2, 5)], [(1, 3), (2, 4)], [(2, 3), (1, 2)]])
def test_spans_that_do_not_fit_are_refused(spans: list[tuple[int, int]]) -> None:
    bad = TrainingSequence([1, 2, 3, 4], [Span(7, *span, [], []) for span in spans])
    with pytest.raises(ValueError, match="turn 7"):
        micro_batches([bad], 10, CPU)


@pytest.mark.parametrize(("old", "advantages"), [([-1.0], [1.0, 1.0]), ([-1.0, -1.0], [1.0]), ([], [])])
def test_signals_that_do_not_fit_are_refused(old: list[float], advantages: list[float]) -> None:
    bad = [TrainingSequence([1, 2, 3, 4], [Span(7, 2, 4, old, advantages)])]
    (batch,) = micro_batches(bad, 10, CPU)
    with pytest.raises(ValueError, match="turn 7"):
        signals(bad, batch)
