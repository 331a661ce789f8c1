"""Draws follow the distribution that the parameters describe, row by row, and report the raw log-probs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from openclaw_rl.engines.local.sampling.draw import NUCLEUS_CANDIDATES, Draws, draw
from openclaw_rl.types import SamplingParams
from support.properties import examples

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
PLAIN = SamplingParams(max_tokens=1)
GREEDY = replace(PLAIN, temperature=0.0)

# More tokens than are sorted to find a nucleus, and fewer.
vocabularies = st.sampled_from((2, 7, 100, NUCLEUS_CANDIDATES, 1500))
truncations = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from((0.3, 0.7, 1.0, 1.9)),
    top_p=st.sampled_from((1.0, 0.999, 0.95, 0.5, 0.01)),
    top_k=st.sampled_from((0, 1, 3, 50, 600, 1500, 5000)),
)
parameters = truncations | truncations.map(lambda p: replace(p, temperature=0.0))
uniforms = st.floats(0, 1, exclude_max=True) | st.sampled_from((0.0, ALMOST_ONE))


def random_logits(vocabulary: int, seed: int, scale: float = 3.0) -> Tensor:
    """Logits without ties, so that every ranking has one answer."""
    rng = np.random.default_rng(seed)
    spread = (rng.permutation(vocabulary) + rng.random(vocabulary) * 0.5) / vocabulary
    return torch.tensor(scale * (spread + rng.normal() * 0.1), dtype=torch.float32)


def one(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    return draw(logits[None], [params], [uniform]).tokens[0]


def sweep(logits: Tensor, params: SamplingParams, points: int) -> np.ndarray:
    """The share of each token when the uniform number takes evenly spread values."""
    grid = [(n + 0.5) / points for n in range(points)]
    drawn = draw(logits.expand(points, -1), [params] * points, grid).tokens
    return np.bincount(drawn, minlength=len(logits)) / points


def distribution(logits: Tensor, params: SamplingParams) -> tuple[np.ndarray, float]:
    """softmax(logits / T) cut to top_k, then top_p; and how close the nucleus' border is to a token's edge."""
    scaled = logits.numpy().astype(np.float64) / params.temperature
    order = np.argsort(-scaled)
    probs = np.exp(scaled[order] - scaled.max())
    probs /= probs.sum()
    if params.top_k:
        probs[params.top_k :] = 0
        probs /= probs.sum()
    before = np.cumsum(probs) - probs
    margin = np.abs(before - params.top_p)[1:].min() if params.top_p < 1 else 1.0
    if params.top_p < 1:
        probs[before >= params.top_p] = 0
        probs /= probs.sum()
    out = np.zeros_like(probs)
    out[order] = probs
    return out, margin


@given(vocabularies, st.integers(0, 1000), truncations)
@examples(150)
def test_a_sweep_of_the_uniform_reproduces_the_distribution(vocabulary: int, seed: int, params: SamplingParams) -> None:
    logits = random_logits(vocabulary, seed)
    expected, margin = distribution(logits, params)
    assume(margin > 1e-5)
    points = 400
    shares = sweep(logits, params, points)
    assert np.abs(shares - expected).max() < 1.01 / points
    assert not shares[expected == 0].any(), "a token that was cut off was drawn"


@pytest.mark.parametrize("top_p", [0.99, 0.5])
def test_a_nucleus_larger_than_the_candidates_is_exact(top_p: float) -> None:
    """Nearly flat over 2000 tokens: the nucleus holds far more than are sorted at first."""
    params = replace(PLAIN, top_p=top_p)
    logits = random_logits(2000, 1, scale=0.01)
    expected, _ = distribution(logits, params)
    assert np.count_nonzero(expected) > NUCLEUS_CANDIDATES
    shares = sweep(logits, params, points=4000)
    assert np.array_equal(shares > 0, expected > 0)
    assert np.abs(shares - expected).max() < 1.01 / 4000


@given(vocabularies, st.integers(0, 1000), uniforms)
def test_greedy_takes_the_likeliest(vocabulary: int, seed: int, uniform: float) -> None:
    logits = random_logits(vocabulary, seed)
    assert one(logits, GREEDY, uniform) == logits.argmax()
    assert one(logits, replace(GREEDY, top_p=0.5, top_k=3), uniform) == logits.argmax()


@given(st.lists(st.tuples(st.integers(0, 1000), parameters, uniforms), min_size=1, max_size=5), vocabularies)
@examples(100)
def test_log_probs_are_of_the_raw_distribution(rows: list[tuple[int, SamplingParams, float]], vocabulary: int) -> None:
    logits = torch.stack([random_logits(vocabulary, seed) for seed, _, _ in rows])
    draws = draw(logits, [params for _, params, _ in rows], [uniform for _, _, uniform in rows])
    raw = logits.log_softmax(-1)
    expected = [raw[row, token].item() for row, token in enumerate(draws.tokens)]
    assert draws.logprobs == pytest.approx(expected, abs=1e-5)


Row = tuple[int, SamplingParams, float]


def draw_rows(logits: Sequence[Tensor], rows: Sequence[Row]) -> Draws:
    return draw(torch.stack(list(logits)), [params for _, params, _ in rows], [u for _, _, u in rows])


batches = st.lists(st.tuples(st.integers(0, 1000), parameters, uniforms), min_size=2, max_size=6)


@given(batches, vocabularies, st.sampled_from((3.0, 0.01)))
@examples(150)
def test_a_row_draws_the_same_alone_and_in_any_batch(rows: list[Row], vocabulary: int, scale: float) -> None:
    logits = [random_logits(vocabulary, seed, scale) for seed, _, _ in rows]
    together = draw_rows(logits, rows)
    for n, row in enumerate(rows):
        alone = draw_rows([logits[n]], [row])
        assert alone.tokens == [together.tokens[n]]


COMPANY = {
    "a flat row with a large nucleus": (torch.zeros(1500), replace(PLAIN, top_p=0.99)),
    "a row with a large top_k": (random_logits(1500, 7), replace(PLAIN, top_k=1000)),
    "an untruncated row": (random_logits(1500, 7), PLAIN),
}


@pytest.mark.parametrize("company", COMPANY.values(), ids=COMPANY.keys())
@pytest.mark.parametrize("params", [replace(PLAIN, top_p=0.3), replace(PLAIN, top_k=40)], ids=["top_p", "top_k"])
def test_ties_break_the_same_alone_and_in_company(
    params: SamplingParams, company: tuple[Tensor, SamplingParams]
) -> None:
    """Logits that were computed in bfloat16 have many equal values; who is first among them must not vary."""
    logits = random_logits(1500, 0, scale=3.0).round()
    grid = [n / 20 for n in range(20)]
    alone = [one(logits, params, uniform) for uniform in grid]
    rows = torch.stack([company[0], logits])
    assert [draw(rows, [company[1], params], [0.5, uniform]).tokens[1] for uniform in grid] == alone


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.sampled_from((50, 1500)), st.integers(0, 1000))
def test_top_log_probs_are_as_many_as_each_row_asked_for(wanted: list[int], vocabulary: int, seed: int) -> None:
    logits = torch.stack([random_logits(vocabulary, seed + row) for row in range(len(wanted))])
    params = [replace(PLAIN, top_logprobs=count, temperature=0.5, top_k=2) for count in wanted]
    draws = draw(logits, params, [0.5] * len(wanted))
    raw = logits.log_softmax(-1)
    for row, count in enumerate(wanted):
        likeliest = raw[row].argsort(descending=True)[:count].tolist()
        assert [token for token, _ in draws.top[row]] == likeliest
        assert [value for _, value in draws.top[row]] == pytest.approx(raw[row][likeliest].tolist(), abs=1e-5)


@given(st.integers(0, 1000), truncations)
def test_the_ends_of_the_uniform_are_the_ends_of_the_distribution(seed: int, params: SamplingParams) -> None:
    """0 is the first token that can be drawn and just below 1 the last, by id."""
    logits = random_logits(100, seed)
    expected, margin = distribution(logits, params)
    assume(margin > 1e-5)
    possible = np.flatnonzero(expected)
    assert one(logits, params, 0.0) == possible[0]
    assert one(logits, params, ALMOST_ONE) == possible[-1]


@given(truncations, uniforms, st.sets(st.integers(0, 29), min_size=1, max_size=29))
def test_what_is_impossible_is_never_drawn(params: SamplingParams, uniform: float, impossible: set[int]) -> None:
    logits = random_logits(30, 0)
    logits[list(impossible)] = -torch.inf
    assert one(logits, params, uniform) not in impossible
    assert one(logits, replace(params, temperature=0), uniform) not in impossible


@pytest.mark.parametrize("tiny", [1e-3, 1e-30, 1e-38, 1e-45, 1e-60])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_the_smallest_values_leave_the_likeliest_token(name: str, tiny: float) -> None:
    """Also those that float32 rounds to 0."""
    params: SamplingParams = replace(PLAIN, **{name: tiny})
    logits = torch.tensor([1.0, 5.0, 3.0, 0.0])
    for uniform in (0.0, 0.5, ALMOST_ONE):
        assert one(logits, params, uniform) == 1
        assert one(logits, replace(params, top_k=3), uniform) == 1


@examples(60)
@given(
    vocabulary=vocabularies,
    seed=st.integers(0, 50),
    params=parameters,
    uniform=uniforms,
    share=st.sampled_from((0.0, 0.01, 0.5)),
)
def test_a_mask_changes_the_token_of_its_row_and_nothing_else(
    vocabulary: int, seed: int, params: SamplingParams, uniform: float, share: float
) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random(vocabulary) < share
    mask[rng.integers(vocabulary)] = True
    logits = torch.stack([random_logits(vocabulary, seed), random_logits(vocabulary, seed + 1)])
    params = replace(params, top_logprobs=2)
    free = draw(logits, [params] * 2, [uniform] * 2)
    both = draw(logits, [params] * 2, [uniform] * 2, {0: mask})
    assert both.tokens[1] == free.tokens[1]
    assert both.top == free.top
    assert mask[both.tokens[0]]
    if params.temperature == 0:
        assert both.tokens[0] == max(mask.nonzero()[0], key=lambda id: float(logits[0, id]))
    assert both.logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[both.tokens[0]]), abs=1e-5)
