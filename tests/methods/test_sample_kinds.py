"""What is asked about a turn, and what a verdict makes of it, for each method."""

import pytest

from openclaw_rl.methods.base import Method
from openclaw_rl.types import Hint, Question, SampleKind, Source, Verdict
from support.methods import a_method

RL = a_method("rl")
OPD = a_method("opd")
BOTH = a_method("combine")
SCORE, HINT = Question.SCORE, Question.HINT

TAUGHT = (Hint("Give it in kilometres.", [-0.5, -0.25]), Hint("Be brief."))
UNTAUGHT = (Hint("Give it in kilometres.", problem="the prompt is too long"),)


@pytest.mark.parametrize(
    ("options", "questions"),
    [
        ({"method": "rl"}, {SCORE}),
        ({"method": "opd"}, {HINT}),
        ({"method": "opd", "eval_mode": True}, {SCORE, HINT}),
        ({"method": "combine"}, {SCORE, HINT}),
        ({"method": "combine", "w_rl": 0}, {HINT}),
        ({"method": "combine", "w_opd": 0}, {SCORE}),
        ({"method": "rl", "w_rl": 0}, {SCORE}),
        ({"method": "opd", "w_opd": 0}, {HINT}),
    ],
)
def test_only_what_is_trained_on_or_monitored_is_asked(options: dict, questions: set[Question]) -> None:
    given = dict(options)
    assert a_method(given.pop("method"), **given).questions == questions


@pytest.mark.parametrize(
    ("method", "score", "hints", "kind"),
    [
        (RL, 1.0, (), SampleKind.RL),
        (RL, -1.0, (), SampleKind.RL),
        (RL, 0.3, (), SampleKind.RL),
        (RL, -0.01, (), SampleKind.RL),
        (RL, 0.0, (), None),
        (RL, None, (), None),
        (RL, None, TAUGHT, None),
        (RL, 1.0, TAUGHT, SampleKind.RL),
        (OPD, None, TAUGHT, SampleKind.OPD),
        (OPD, 1.0, TAUGHT, SampleKind.OPD),
        (OPD, 1.0, (), None),
        (OPD, -1.0, UNTAUGHT, None),
        (OPD, None, (), None),
        (BOTH, 1.0, TAUGHT, SampleKind.OPD_RL),
        (BOTH, -1.0, TAUGHT, SampleKind.OPD_RL),
        (BOTH, 0.0, TAUGHT, SampleKind.OPD),
        (BOTH, None, TAUGHT, SampleKind.OPD),
        (BOTH, 1.0, (), SampleKind.RL),
        (BOTH, -1.0, UNTAUGHT, SampleKind.RL),
        (BOTH, 0.0, (), None),
        (BOTH, 0.0, UNTAUGHT, None),
        (BOTH, None, (), None),
    ],
)
def test_what_a_turn_is_trained_on(
    method: Method, score: float | None, hints: tuple[Hint, ...], kind: SampleKind | None
) -> None:
    sample, reason = method.sample_kind(Verdict(score, Source.LLM, hints))
    assert sample == kind
    assert bool(reason) == (kind is None), "a reason for what is dropped, and only for that"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"w_rl": 0}, SampleKind.OPD),
        ({"w_opd": 0}, SampleKind.RL),
        ({"w_rl": 0.5, "w_opd": 0.1}, SampleKind.OPD_RL),
    ],
)
def test_a_signal_that_weighs_nothing_is_none(options: dict, kind: SampleKind) -> None:
    method = a_method("combine", **options)
    assert method.sample_kind(Verdict(1.0, Source.LLM, TAUGHT))[0] == kind


def test_a_score_for_monitoring_is_not_trained_on() -> None:
    method = a_method("opd", eval_mode=True)
    assert method.sample_kind(Verdict(1.0, Source.LLM)) == (None, "no hint in what came next")
    assert method.sample_kind(Verdict(-1.0, Source.LLM, TAUGHT))[0] is SampleKind.OPD


@pytest.mark.parametrize(
    ("method", "verdict", "reason"),
    [
        (RL, Verdict(0.0, Source.LLM), "the judge is neutral"),
        (BOTH, Verdict(0.0, Source.LLM), "the judge is neutral"),
        (RL, Verdict(reason="llm: nothing came next"), "the judge abstained: llm: nothing came next"),
        (BOTH, Verdict(reason="llm: nothing came next"), "the judge abstained: llm: nothing came next"),
        (RL, Verdict(), "the judge abstained: no reason given"),
        (OPD, Verdict(source=Source.LLM), "no hint in what came next"),
        (OPD, Verdict(None, Source.LLM, UNTAUGHT), "no teacher for the hint: the prompt is too long"),
        (BOTH, Verdict(0.0, Source.LLM, UNTAUGHT), "no teacher for the hint: the prompt is too long"),
        (RL, Verdict(0.0, Source.LLM, UNTAUGHT), "the judge is neutral"),
    ],
)
def test_why_a_turn_is_dropped(method: Method, verdict: Verdict, reason: str) -> None:
    assert method.sample_kind(verdict) == (None, reason)


def test_a_judge_that_failed_is_not_said_to_have_seen_no_hint() -> None:
    """With hints alone, too, the reason is that nobody could say, and why."""
    failed = Verdict(reason="3 trials failed: the judge's answer is not JSON")
    assert OPD.sample_kind(failed) == (None, f"the judge abstained: {failed.reason}")
    unreadable = Verdict(reason="llm: no vote on the hint can be read")
    assert OPD.sample_kind(unreadable) == (None, f"the judge abstained: {unreadable.reason}")
