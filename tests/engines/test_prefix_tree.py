"""Sequences that begin alike are read once, and nothing else changes: not a loss, not a gradient, not their order."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.base import PassResult, SpanLogprobs
from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.training import packing
from openclaw_rl.engines.local.training.full_weights import FullWeights
from openclaw_rl.engines.local.training.packed_attention import attention_by_segment, packed_attention
from openclaw_rl.engines.local.training.packing import (
    MIN_SHARED_TOKENS,
    Segment,
    Tree,
    grow,
    micro_batches,
    shared_lengths,
)
from openclaw_rl.engines.local.training.trainer import TrainedWeights, Trainer
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import Span, TrainingSequence
from support.decoders import FAMILIES
from support.trainers import InProcessLearner, batch, fresh, options, state, trained_lora
from support.training_sequences import ragged, relatives

CPU = torch.device("cpu")
#: Bytes in which all activations of these tests fit.
PLENTY = 1 << 40


def stretched(blocks: list[int]) -> list[int]:
    """Tokens that differ where blocks do; some blocks are too short to be shared."""
    return [block for block in blocks for _ in range(MIN_SHARED_TOKENS if block % 2 else 3)]


sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(stretched), min_size=1, max_size=8)


def attended(segments: Sequence[Segment]) -> Tensor:
    """[tokens, tokens]: whether the token of the row attends to the token of the column."""
    size = segments[-1].stop
    mask = torch.zeros(size, size, dtype=torch.bool)
    for start, stop, reach in segments:
        mask[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        mask[stop:reach, start:stop] = True
    return mask


@given(sequences)
def test_every_token_attends_to_its_sequence_up_to_itself(given_sequences: list[list[int]]) -> None:
    ordered = sorted(given_sequences)
    tree = grow(ordered, shared_lengths(ordered))
    mask = attended(tree.segments)
    assert [segment.start for segment in tree.segments] == [0, *(segment.stop for segment in tree.segments[:-1])]
    for sequence, places in zip(ordered, tree.places, strict=True):
        assert [tree.ids[place] for place in places] == sequence
        assert [tree.positions[place] for place in places] == list(range(len(sequence)))
        own = torch.zeros_like(mask[: len(places)])
        own[:, places] = torch.ones(len(places), len(places), dtype=torch.bool).tril()
        assert own.equal(mask[places])


@given(sequences)
def test_long_common_beginnings_are_shared_and_short_ones_are_not(given_sequences: list[list[int]]) -> None:
    ordered = sorted(given_sequences)
    shared = shared_lengths(ordered)
    for (one, other), length in zip(pairwise(ordered), shared[1:], strict=True):
        common = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert common - MIN_SHARED_TOKENS < length <= common
    assert all(length == 0 or length >= MIN_SHARED_TOKENS for length in shared)
    tree: Tree = grow(ordered, shared)
    assert all(reach == stop or stop - start >= MIN_SHARED_TOKENS for start, stop, reach in tree.segments)


def test_turns_that_extend_each_other_are_a_tree_too() -> None:
    turns = [list(range(MIN_SHARED_TOKENS * (n + 1))) for n in range(30)]
    shared = shared_lengths(turns)
    assert shared == [0, *(len(turn) for turn in turns[:-1])]
    assert len(grow(turns, shared).ids) == len(turns[-1])


def attempts(count: int, prompt: int, response: int) -> list[TrainingSequence]:
    draw = random.Random(0)
    ids = [draw.randrange(200) for _ in range(prompt)]
    spans = [Span(n, prompt, prompt + response, [-5.0] * response, [1.0] * response) for n in range(count)]
    return [TrainingSequence([*ids, *(draw.randrange(200) for _ in range(response))], [span]) for span in spans]


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (172, [100 + 8 * 9]),
        # Each part has the prompt.
        (120, [100 + 6 * 9, 100 + 2 * 9]),
        # Beside the prompt there is room for half the budget.
        (40, [100 + 2 * 9] * 4),
        (1, [109] * 8),
    ],
)
def test_a_group_shares_its_prompt_within_the_micro_batches_bound(budget: int, sizes: list[int]) -> None:
    group = attempts(8, 100, 10)
    found = micro_batches(group, budget, CPU)
    assert [len(part.ids) for part in found] == sizes
    assert sorted(i for part in found for i in part.indices) == list(range(8))


def test_a_short_common_beginning_makes_no_micro_batch_larger() -> None:
    assert [len(part.ids) for part in micro_batches(attempts(3, 70, 80), 150, CPU)] == [149] * 3


def test_the_order_of_the_sequences_changes_no_shape() -> None:
    one, other = (micro_batches(given, 150, CPU) for given in (relatives(), relatives()[::-1]))
    assert [part.segments for part in one] == [part.segments for part in other]


@pytest.mark.parametrize(("budget", "copies"), [(1, 1), (500, 1), (2000, 2), (10_000, 11)])
def test_copies_of_a_sequence_make_no_more_targets_than_fit(budget: int, copies: int) -> None:
    (one,) = attempts(1, 100, 900)
    parts = micro_batches([one] * 64, budget, CPU)
    assert {len(part.ids) for part in parts} == {999}
    assert max(len(part.rows) for part in parts) == copies * 900
    assert sum(len(part.indices) for part in parts) == 64


def test_families_are_packed_by_their_targets_too() -> None:
    one, other = attempts(1, 100, 900)[0], attempts(1, 101, 900)[0]
    different = TrainingSequence([199 - token for token in other.ids], other.spans)
    parts = micro_batches([one, one, different, different], 3500, CPU)
    assert sorted(len(part.rows) for part in parts) == [1800, 1800]


def separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED_TOKENS", 10**9)


@pytest.mark.parametrize("make", [packed_attention, lambda segments, *_: attention_by_segment(segments)])
def test_attention_over_a_tree_is_attention_with_its_mask(make: Callable[..., Callable[..., Tensor]]) -> None:
    """In double precision: results and gradients."""
    ordered = sorted(list(one.ids) for one in relatives())
    tree = grow(ordered, shared_lengths(ordered))
    torch.manual_seed(0)
    size = len(tree.ids)
    inputs = [torch.randn(size, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2)]
    weights = torch.randn(size, 6 * 16, dtype=torch.float64)
    found = make(tree.segments, CPU, torch.float64)(*inputs)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    q, k, v = (heads.transpose(0, 1) for heads in inputs)
    scores = q @ k.repeat_interleave(3, 0).transpose(1, 2) / 4
    plain = scores.masked_fill(~attended(tree.segments), -np.inf).softmax(-1) @ v.repeat_interleave(3, 0)
    expected = plain.transpose(0, 1).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for one, other in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_rocm_does_not_use_the_kernel_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    segments = [Segment(0, 4, 6), Segment(4, 6, 6)]
    heads = torch.randn(6, 2, 8, dtype=torch.bfloat16)
    found = packed_attention(segments, torch.device("cuda"), torch.bfloat16)(heads, heads, heads)
    assert found.equal(attention_by_segment(segments)(heads, heads, heads))


def passed(
    decoder: Decoder, weights: TrainedWeights, free: int = PLENTY
) -> tuple[PassResult, SpanLogprobs, list[Tensor]]:
    """A pass with a penalty for leaving the base model, base scores, and the gradients of a mixed batch."""
    trainer = Trainer(decoder, weights, PolicyLoss(kl_coef=0.1), 220, free=lambda _: free)
    mixed = [*relatives(), *ragged(), *relatives(1)]
    result = trainer.forward_backward(mixed)
    return result, trainer.score(mixed, base=True), [p.grad for p in weights.parameters() if p.grad is not None]


@pytest.fixture(scope="module", params=["llama-biased-tied", "qwen3", "smollm3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(folder)
    return load_decoder(folder, torch.float32, CPU)


@pytest.mark.more
@pytest.mark.parametrize(("every_weight", "free"), [(False, PLENTY), (False, 0), (True, PLENTY)])
def test_losses_and_gradients_are_those_of_separate_sequences(
    family: Decoder, every_weight: bool, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights() -> TrainedWeights:
        return FullWeights.create(family, Path()) if every_weight else trained_lora(family)

    together, base, gradients = passed(family, weights(), free)
    separately(monkeypatch)
    apart, base_apart, expected = passed(family, weights(), free)
    assert together.tokens < 0.6 * apart.tokens
    assert (together.response_tokens, together.clipped) == (apart.response_tokens, apart.clipped)
    assert (together.loss, together.kl_base) == pytest.approx((apart.loss, apart.kl_base), rel=1e-5)
    for shared, alone in ((together.logprobs, apart.logprobs), (base, base_apart)):
        assert shared == [[pytest.approx(span, abs=1e-5) for span in spans] for spans in alone]
    assert len(gradients) == len(expected) > 4
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).norm() < 2e-5 * other.norm()


def test_a_resumed_run_makes_the_same_steps_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    given_options = options(dropout=0.1, micro_batch_tokens=150)
    learner, resumed = (InProcessLearner(decoder, given_options) for _ in range(2))
    learner.step(batch(learner))
    learner.save(tmp_path / "saved")
    siblings = fresh(learner, relatives())
    learner.step(siblings)
    resumed.load(tmp_path / "saved")
    resumed.step(siblings)
    assert state(resumed, tmp_path / "one") == state(learner, tmp_path / "other")
