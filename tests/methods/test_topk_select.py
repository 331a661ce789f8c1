"""Top-k distillation: the choice of hint and tokens, against the definition written out token by token."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.learn.samples import to_sequences
from openclaw_rl.ledger import verdicts
from openclaw_rl.methods.base import Baseline, NoSignal
from openclaw_rl.methods.distillation import distil
from openclaw_rl.methods.options import TopK
from openclaw_rl.methods.topk_select import TopkSelect
from openclaw_rl.types import Hint, SampleKind, State, StoredTurn, TopTokens, Verdict
from support.methods import a_method, topk_method
from support.records import Book

SELECTIONS = ("sequence_optimal", "token_optimal", "shortest")
SUBSETS = ("student", "teacher", "overlap")
VOCABULARY = 9
K = 3
Distribution = list[float]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> StoredTurn:
    """A turn of three tokens as the ledger gives it, which tests change as they need."""
    book = Book(tmp_path_factory.mktemp("run"))
    number = book.put(State.READY, response_ids=[4, 5, 6], logprobs=[-1.0, -1.0, -1.0])
    assert book.change(verdicts.record, number, Verdict(score=-1.0), SampleKind.OPD_RL, "", 0)
    turn = book.read(number)
    book.close()
    return turn


def normalised(weights: Sequence[float]) -> Distribution:
    total = math.log(sum(map(math.exp, weights)))
    return [weight - total for weight in weights]


#: Halves make ties, which are where choices go wrong.
distribution = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=VOCABULARY, max_size=VOCABULARY).map(
    normalised
)
response = st.lists(distribution, min_size=3, max_size=3)


def top(distributions: Sequence[Distribution], k: int) -> list[list[int]]:
    """The k likeliest tokens of each."""
    return [sorted(range(len(own)), key=lambda token: -own[token])[:k] for own in distributions]


def numbers(distributions: Sequence[Distribution], ids: Sequence[Sequence[int]]) -> Any:
    return np.array([[own[id] for id in row] for own, row in zip(distributions, ids, strict=True)])


def top_tokens(distributions: Sequence[Distribution], k: int) -> TopTokens:
    ids = top(distributions, k)
    return TopTokens(np.array(ids), numbers(distributions, ids))


def taught(
    turn: StoredTurn,
    policy: Sequence[Distribution],
    teachers: Sequence[tuple[str, Sequence[Distribution]]],
    *,
    targets: bool = True,
    width: int = K,
) -> StoredTurn:
    """The turn as a policy and a teacher with these distributions would have left it."""
    hints = [
        Hint(
            text,
            logprobs=[-1.0] * len(own),
            top=top_tokens(own, width),
            of_policy_top=numbers(own, top(policy, K)) if targets else None,
            policy_scores=numbers(policy, top(own, K)),
        )
        for text, own in teachers
    ]
    assert turn.verdict is not None
    return replace(turn, top=top_tokens(policy, K), verdict=replace(turn.verdict, hints=tuple(hints)))


def reference(
    policy: Sequence[Distribution],
    teachers: Sequence[tuple[str, Sequence[Distribution]]],
    selection: str,
    subset: str,
    clip: float,
    w_opd: float,
) -> list[dict[int, float]]:
    """For each token, the advantage of each token that counts: the definition, with sets."""
    teachers = sorted(teachers, key=lambda pair: len(pair[0]))
    sq = [set(row) for row in top(policy, K)]
    sp = [[set(row) for row in top(own, K)] for _, own in teachers]
    overlap = [[len(sq[i] & sp[h][i]) for i in range(len(policy))] for h in range(len(teachers))]

    def best(values: list[int]) -> int:
        return values.index(max(values))

    whole = 0 if selection == "shortest" else best([sum(row) for row in overlap])
    found = []
    for i, old in enumerate(policy):
        h = best([row[i] for row in overlap]) if selection == "token_optimal" else whole
        chosen = {"student": sq[i], "teacher": sp[h][i], "overlap": sq[i] & sp[h][i]}[subset]
        total = sum(math.exp(old[v]) for v in chosen)
        gaps = {v: teachers[h][1][i][v] - old[v] for v in chosen}
        if clip > 0:
            gaps = {v: max(-clip, min(clip, gap)) for v, gap in gaps.items()}
        found.append({v: w_opd * gap * math.exp(old[v]) / total for v, gap in gaps.items()})
    return found


def found_in(turn: StoredTurn, settings: TopK, w_opd: float) -> list[dict[int, float]]:
    """What the learner is given; what does not count has advantage 0."""
    (sequence,) = to_sequences([turn], topk_method(settings, w_opd, w_rl=0.0, max_advantage=0.0))
    others = sequence.spans[0].alternatives
    assert others is not None
    rows = zip(others.ids.tolist(), others.advantages.tolist(), strict=True)
    return [dict(zip(ids, own, strict=True)) for ids, own in rows]


def alike(found: list[dict[int, float]], expected: list[dict[int, float]]) -> bool:
    return all(
        math.isclose(row.get(id, 0.0), other.get(id, 0.0), abs_tol=1e-6)
        for row, other in zip(found, expected, strict=True)
        for id in row | other
    )


@pytest.mark.more
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("subset", SUBSETS)
@given(
    policy=response,
    teachers=st.lists(response, min_size=1, max_size=3),
    lengths=st.permutations([11, 12, 30]),
    clip=st.sampled_from([1.0, 0.25, 0.0, -1.0]),
    w_opd=st.sampled_from([1.0, 0.25, 3.0]),
)
def test_every_mode_is_its_definition(
    plain: StoredTurn,
    selection: str,
    subset: str,
    policy: list[Distribution],
    teachers: list[list[Distribution]],
    lengths: list[int],
    clip: float,
    w_opd: float,
) -> None:
    named = [("x" * length, own) for length, own in zip(lengths, teachers, strict=False)]
    expected = reference(policy, named, selection, subset, clip, w_opd)
    turn = taught(plain, policy, named)
    settings = TopK(K, 3, selection, subset, clip)
    if not any(any(row.values()) for row in expected):
        with pytest.raises(NoSignal, match="every signal in it is zero"):
            topk_method(settings, w_opd, w_rl=0.0).lesson(turn)
        return
    assert alike(found_in(turn, settings, w_opd), expected)


@given(policy=response, teachers=st.lists(response, min_size=3, max_size=3))
def test_the_order_of_hints_of_one_length_matters_for_ties_alone(
    plain: StoredTurn, policy: list[Distribution], teachers: list[list[Distribution]]
) -> None:
    named = [(letter * 12, own) for letter, own in zip("abc", teachers, strict=True)]
    sums = []
    for order in permutations(named):
        found = distil(taught(plain, policy, order), TopK(K, 3))
        by_text = dict(zip(found.hints, found.overlaps.sum(1).tolist(), strict=True))
        sums.append((by_text, by_text[found.hints[found.chosen[0]]]))
    assert all(own == sums[0] for own in sums)


def test_a_teacher_that_is_the_policy_teaches_nothing(plain: StoredTurn) -> None:
    policy = [normalised([float(n * i % 5) for n in range(VOCABULARY)]) for i in range(1, 4)]
    turn = taught(plain, policy, [("the very same", policy)])
    for subset in SUBSETS:
        settings = TopK(K, subset=subset)
        assert not distil(turn, settings).gaps.any()
        assert to_sequences([turn], topk_method(settings))[0].spans[0].advantages == [-1.0] * 3


def test_where_nothing_is_common_nothing_is_learned_there(plain: StoredTurn) -> None:
    low, high = normalised([9, 9, 9, 0, 0, 0, 0, 0, 0]), normalised([0, 0, 0, 0, 0, 0, 9, 9, 9])
    turn = taught(plain, [low, low, high], [("a hint of some length", [high, low, high])])
    found = distil(turn, TopK(K, subset="overlap"))
    assert found.counts.sum(1).tolist() == [0, 3, 3]
    assert found.weights.sum(1).tolist() == pytest.approx([0, 1, 1])
    assert found.left_out == 0
    method = topk_method(TopK(K, subset="overlap"))
    assert method.metrics([turn]) == {"overlap": pytest.approx(2 / 3), "left_out": 0.0}
    record = method.record(turn)
    assert record is not None
    assert (record["overlaps"], record["chosen"]) == ([[0, 3, 3]], [0, 0, 0])
    # A turn that teaches nothing at all must not count as a sample: its step would follow the optimiser's momentum.
    apart = taught(plain, [low] * 3, [("a hint of some length", [high] * 3)])
    with pytest.raises(NoSignal, match="every signal in it is zero"):
        topk_method(TopK(K, subset="overlap"), w_rl=0.0).lesson(apart)


@given(policy=response, teacher=response, width=st.integers(K, VOCABULARY), clip=st.sampled_from([1.0, 0.0]))
def test_what_an_engine_does_not_say_is_bounded_or_left_out(
    plain: StoredTurn, policy: list[Distribution], teacher: list[Distribution], width: int, clip: float
) -> None:
    """With the teacher's likeliest tokens alone, what is learned is the same wherever it is known at all."""
    named = [("a hint of some length", teacher)]
    full = distil(taught(plain, policy, named), TopK(K, clip=clip))
    part = distil(taught(plain, policy, named, targets=False, width=width), TopK(K, clip=clip))
    known = part.counts.all(1)
    assert part.left_out == (~known).sum()
    assert not part.counts[~known].any()
    assert part.gaps[known] == pytest.approx(full.gaps[known])
    assert part.weights[known] == pytest.approx(full.weights[known])
    for i, own in enumerate(teacher):
        inside = set(top([own], width)[0])
        last = min(own[id] for id in inside)
        reachable = [id in inside or (clip > 0 and last - policy[i][id] <= -clip) for id in top(policy, K)[i]]
        assert known[i] == all(reachable)


def test_at_most_so_many_hints_are_looked_at_the_shortest(plain: StoredTurn) -> None:
    policy = [normalised([5, 4, 3, 0, 0, 0, 0, 0, 0])] * 3
    away = [normalised([0, 0, 0, 0, 0, 0, 5, 4, 3])] * 3
    named = [("the longest of the hints", policy), ("a short hint", away), ("the middle hint", away)]
    turn = taught(plain, policy, named)
    assert distil(turn, TopK(K, 2)).hints == ("a short hint", "the middle hint")
    assert distil(turn, TopK(K, 3)).chosen.tolist() == [2, 2, 2]


def test_scores_count_on_the_sampled_tokens_and_the_batch_is_measured_from_its_mean(plain: StoredTurn) -> None:
    policy = [normalised([5, 4, 3, 0, 0, 0, 0, 0, 0])] * 3
    other = [normalised([3, 4, 5, 0, 0, 0, 0, 0, 0])] * 3
    turn = taught(plain, policy, [("a hint of some length", other)])
    method = topk_method(TopK(K, clip=0.5), 0.5, 2.0)
    (sequence,) = to_sequences([turn], method)
    assert sequence.spans[0].advantages == [-2.0] * 3
    centred = topk_method(TopK(K, clip=0.5), 0.5, 2.0, baseline="batch")
    assert centred.baseline([turn]) == Baseline()
    agreeing = replace(taught(plain, policy, [("a hint of some length", policy)]), number=turn.number + 1)
    base = centred.baseline([turn, agreeing])
    assert base.score == -1.0
    assert base.gap == pytest.approx(distil(turn, TopK(K, clip=0.5)).expected().mean() / 2)
    spans = [span for sequence in to_sequences([turn, agreeing], centred) for span in sequence.spans]
    sums = [span.alternatives.advantages.sum(1) for span in spans if span.alternatives is not None]
    assert len(sums) == 2
    assert (sums[0] + sums[1]).tolist() == pytest.approx([0.0] * 3, abs=1e-6)
    with pytest.raises(NoSignal, match="equal"):
        to_sequences([replace(agreeing, sample=SampleKind.RL), replace(turn, sample=SampleKind.RL)], centred)
    # What is shown about a sampled token: its score, and what is distilled about it if it is among the likeliest.
    distilled = distil(turn, TopK(K, clip=0.5))
    taught_about_2 = float((distilled.weights * distilled.gaps)[0, distilled.ids[0].tolist().index(2)])
    shown = method.token_values(replace(turn, response_ids=[2, 2, 7]))
    assert shown == pytest.approx([-2.0 + 0.5 * taught_about_2] * 2 + [-2.0])
    assert taught_about_2 > 0


def test_a_sample_without_a_hint_has_its_score_alone(plain: StoredTurn) -> None:
    turn = replace(plain, sample=SampleKind.RL)
    (sequence,) = to_sequences([turn], topk_method(TopK(K)))
    assert sequence.spans[0].alternatives is None
    assert sequence.spans[0].advantages == [-1.0] * 3


def test_numbers_for_people_cover_samples_with_and_without_a_hint(plain: StoredTurn) -> None:
    policy = [normalised([5, 4, 3, 0, 0, 0, 0, 0, 0])] * 3
    half_common = [normalised([5, 4, 0, 3, 0, 0, 0, 0, 0])] * 3
    hinted = taught(plain, policy, [("a hint of some length", half_common)])
    scored = replace(plain, sample=SampleKind.RL)
    method = topk_method(TopK(K, clip=0.5))
    assert method.metrics([hinted, scored]) == {"overlap": pytest.approx(2 / 3), "left_out": 0.0}
    assert method.metrics([scored]) == {"overlap": 0.0, "left_out": 0.0}
    assert method.token_values(scored) == [-1.0] * 3
    assert method.record(scored) is None
    record = method.record(hinted)
    assert record is not None
    assert record["overlaps"] == [[2, 2, 2]]


@pytest.mark.parametrize("subset", SUBSETS)
def test_only_the_teachers_tokens_need_the_policys_log_probs(subset: str) -> None:
    request = topk_method(TopK(K, candidates=2, subset=subset)).teacher_request
    assert request is not None
    assert (request.policy_scores, request.top, request.hints) == (subset == "teacher", K, 2)
    assert request.chosen([Hint("the longest of them"), Hint("short"), Hint("shorter one")]) == ["short", "shorter one"]


def test_a_bound_that_is_exactly_the_limit_is_known(plain: StoredTurn) -> None:
    """The teacher's engine named its three likeliest tokens; the policy's last one is not among them."""
    ids, logprobs = np.array([[1, 2, 3]] * 3), np.array([[-0.5, -1.0, -3.0]] * 3)
    hint = Hint("a hint of some length", [-1.0] * 3, top=TopTokens(ids, logprobs))
    policy = TopTokens(np.array([[1, 2, 4]] * 3), np.array([[-0.5, -1.0, -1.0]] * 3))
    assert plain.verdict is not None
    turn = replace(plain, top=policy, verdict=replace(plain.verdict, hints=(hint,)))
    distilled = distil(turn, TopK(K, clip=2.0))
    assert distilled.left_out == 0
    assert distilled.gaps.tolist() == [[0.0, 0.0, -2.0]] * 3


def test_what_cannot_be_distilled_still_has_its_score(plain: StoredTurn) -> None:
    """As after a restart with another k, or another method."""
    method = topk_method(TopK(K))
    assert method.lesson(plain).advantages == [-1.0] * 3
    assert to_sequences([plain], method)[0].spans[0].alternatives is None
    with pytest.raises(NoSignal):
        method.lesson(replace(plain, sample=SampleKind.OPD))
    with pytest.raises(NoSignal):
        topk_method(TopK(K), w_rl=0.0).lesson(plain)


NARROW = TopTokens(np.array([[1, 2]] * 3), np.array([[-1.0, -2.0]] * 3))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"top": None}, "likeliest tokens were not recorded"),
        ({"top": NARROW}, "likeliest tokens were not recorded"),
        ({"hint": {"top": NARROW}}, "fewer than --topk-k"),
        ({"hint": {"of_policy_top": np.full((3, 1), -1.0)}}, "fewer than --topk-k"),
        ({"hint": {"of_policy_top": np.array([[-1.0, math.inf, -1.0]] * 3)}, "clip": 0.0}, "not finite"),
        ({"hint": {"top": None}}, "no teacher has looked"),
        ({"hint": {"policy_scores": None}, "subset": "teacher"}, "were not recorded"),
    ],
)
def test_what_is_missing_is_said(plain: StoredTurn, change: dict[str, Any], problem: str) -> None:
    policy = [normalised([5, 4, 3, 0, 0, 0, 0, 0, 0])] * 3
    turn = taught(plain, policy, [("a hint of some length", [row[::-1] for row in policy])])
    assert turn.verdict is not None
    hint = replace(turn.verdict.hints[0], **change.get("hint", {}))
    turn = replace(turn, top=change.get("top", turn.top), verdict=replace(turn.verdict, hints=(hint,)))
    settings = TopK(K, clip=change.get("clip", 1.0), subset=change.get("subset", "student"))
    with pytest.raises(NoSignal, match=problem):
        distil(turn, settings)


def test_the_ledger_keeps_what_the_teacher_said(tmp_path: Path) -> None:
    book = Book(tmp_path)

    def table(*rows: list[float]) -> Any:
        return np.array(rows, dtype=np.float32)

    hint = Hint(
        "a hint of some length",
        [-0.5, -0.25],
        top=TopTokens(np.array([[7, 8], [1, 2]]), table([-0.5, -1.5], [-0.25, -2.5])),
        of_policy_top=table([-0.5, -4.0], [-8.0, -0.25]),
        policy_scores=table([-1.0, -2.0], [-3.0, -4.0]),
    )
    likely = TopTokens(np.array([[7, 9], [3, 1]]), table([-0.5, -1.0], [-0.25, -2.0]))
    number = book.put(State.READY, response_ids=[7, 1], logprobs=[-0.5, -2.0], top=likely)
    assert book.change(verdicts.record, number, Verdict(hints=(hint, Hint("no teacher"))), SampleKind.OPD, "", 0)
    stored = book.read(number)
    book.close()
    assert stored.verdict is not None
    kept, bare = stored.verdict.hints
    assert (kept.text, kept.logprobs) == (hint.text, hint.logprobs)
    assert (bare.top, bare.of_policy_top, bare.policy_scores) == (None, None, None)
    for one, other in ((kept.top, hint.top), (stored.top, likely)):
        assert one is not None
        assert other is not None
        assert (one.ids.tolist(), one.logprobs.tolist()) == (other.ids.tolist(), other.logprobs.tolist())
    assert kept.of_policy_top is not None
    assert kept.policy_scores is not None
    assert (kept.of_policy_top.tolist(), kept.policy_scores.tolist()) == (
        [[-0.5, -4.0], [-8.0, -0.25]],
        [[-1, -2], [-3, -4]],
    )
    assert distil(stored, TopK(2)).overlaps.tolist() == [[1, 1]]


def test_the_options_say_what_is_distilled() -> None:
    given_ = {"topk_k": 8, "topk_max_cand": 2, "topk_hint_selection": "shortest", "topk_subset_mode": "overlap"}
    method = a_method("topk-select", topk_adv_diff_clip=0.5, w_opd=0.25, w_rl=0.75, **given_)
    assert isinstance(method, TopkSelect)
    assert method.topk == TopK(8, 2, "shortest", "overlap", 0.5)
    assert (method.w_opd, method.w_rl, method.recorded_top) == (0.25, 0.75, 8)
    assert a_method("topk-select", w_opd=0.0).recorded_top == 0
    assert a_method("combine").recorded_top == 0
