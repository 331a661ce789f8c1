"""What is asked about a turn, and what a verdict makes of it, by the method that learns from it."""

from dataclasses import dataclass

from openclaw_rl.app.config import BOTH_SIGNALS, Config
from openclaw_rl.judge.judges.base import Questions
from openclaw_rl.types import Question, SampleKind, Verdict


@dataclass(frozen=True, slots=True)
class Signals:
    """Which signals the method trains on; one that weighs nothing is none."""

    rl: bool
    opd: bool
    monitor: bool = False
    """Whether turns are scored although scores are not trained on."""
    rescue: bool = True
    """Whether, with scores alone, a session without a good turn gets one: its best."""

    @classmethod
    def of(cls, config: Config) -> "Signals":
        if config.method in BOTH_SIGNALS:
            return cls(rl=config.w_rl > 0, opd=config.w_opd > 0, rescue=False)
        return cls(config.method == "rl", config.method == "opd", config.eval_mode, config.at_least_one)

    @property
    def at_least_one(self) -> bool:
        return self.rescue and self.rl and not self.opd

    @property
    def questions(self) -> Questions:
        asked = [Question.SCORE] if self.rl or self.monitor else []
        return frozenset([*asked, Question.HINT] if self.opd else asked)


def dispatch(signals: Signals, verdict: Verdict) -> tuple[SampleKind | None, str]:
    """What a judged turn is trained on; None with the reason if on nothing."""
    taught = signals.opd and any(hint.logprobs for hint in verdict.hints)
    scored = signals.rl and bool(verdict.score)
    if taught:
        return SampleKind.OPD_RL if scored else SampleKind.OPD, ""
    return (SampleKind.RL, "") if scored else (None, why_nothing(signals, verdict))


def why_nothing(signals: Signals, verdict: Verdict) -> str:
    """Why a turn has nothing to train on; few different sentences, so that they can be counted."""
    problems = [hint.problem for hint in verdict.hints if hint.problem] if signals.opd else []
    if problems:
        return f"no teacher for the hint: {problems[0]}"
    if verdict.score is None if signals.rl else verdict.source is None:
        return f"the judge abstained: {verdict.reason or 'no reason given'}"
    return "the judge is neutral" if signals.rl else "no hint in what came next"
