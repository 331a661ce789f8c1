"""What a method is, and what all methods share.

A method turns the verdict on a turn into one advantage for each response token. The score is a reward that every
token gets. A hint becomes a distillation advantage: the teacher's log-prob of the token, once it knows the hint, minus
the log-prob recorded while sampling.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import LearnerCapabilities, SamplerCapabilities
from openclaw_rl.errors import UserError
from openclaw_rl.methods.options import MethodOptions, TopK
from openclaw_rl.types import Alternatives, Hint, Question, SampleKind, StoredTurn, TurnEpisode, Verdict


class NoSignal(ValueError):
    """The turn cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What each signal is measured from."""

    gap: float = 0.0
    score: float = 0.0


NO_BASELINE = Baseline()


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a turn's response teaches."""

    advantages: list[float]
    """One number for each token that was sampled."""
    alternatives: Alternatives | None = None
    """What is learned about tokens that were not sampled."""


@dataclass(frozen=True, slots=True)
class TeacherRequest:
    """What a method asks of the teacher."""

    hints: int = 1
    """How many of a turn's hints the teacher reads."""
    shortest_first: bool = False
    """Read the shortest hints first; otherwise the most informative ones."""
    top: int = 0
    """How many of its likeliest tokens the teacher gives at each position; it also scores as many of the policy's."""
    policy_scores: bool = False
    """Whether the policy scores the teacher's likeliest tokens too."""

    def chosen(self, hints: Sequence[Hint]) -> list[str]:
        """The hints that the teacher reads, each text once. `hints` has the most informative first."""
        texts = list(dict.fromkeys(hint.text for hint in hints))
        return (sorted(texts, key=len) if self.shortest_first else texts)[: self.hints]


ONE_HINT = TeacherRequest()


class Method:
    """One way to learn from verdicts: a subclass in a file of its own, and a line in `methods.options.BUILT_IN`.

    - Other parts ask the method what it needs; none of them compares its name.
    - A signal with weight 0 is neither asked for nor trained on.
    - `lesson` gives one finite number for each sampled token, or raises NoSignal with the reason.
    - A token that a constraint forced teaches nothing, whatever the method: the policy did not choose it.
    - No sample teaches more than --max-advantage per token on average.
    """

    name: ClassVar[str]
    learns_from: ClassVar[str]
    """What it learns from, in a few words: "learns from …"."""
    metric_names: ClassVar[tuple[str, ...]] = ()
    """What `metrics` returns."""

    distils_notes: ClassVar[bool] = False
    """Whether answers that were accepted under notes are trained on without the notes (`SampleKind.NOTES`)."""

    topk: TopK | None = None
    """How likeliest tokens are distilled, if they are."""
    w_rl: float = 0.0
    """Weight of the score."""
    w_opd: float = 0.0
    """Weight of the hint."""

    def __init__(self, options: MethodOptions) -> None:
        self.options = options
        self.centred = options.baseline == "batch"
        """Whether signals are measured from their mean over the batch."""
        self.compares = options.baseline == "group"
        """Whether an episode's reward is measured from the mean of its group."""
        self.max_advantage = options.max_advantage or math.inf

    @classmethod
    def check(cls, options: MethodOptions) -> None:
        """Refuse options that this method cannot use. Raises ConfigError."""
        if options.eval_mode:
            raise ConfigError(f"--eval-mode belongs to --method opd; {cls.name} does not use it.")

    # What it asks of others.

    @property
    def questions(self) -> frozenset[Question]:
        """What the judge must answer about each turn."""
        wanted = ((Question.SCORE, self.w_rl), (Question.HINT, self.w_opd))
        return frozenset(question for question, weight in wanted if weight)

    @property
    def teacher_request(self) -> TeacherRequest | None:
        """What the teacher is asked about a turn with hints; None if the method needs no teacher."""
        return ONE_HINT if self.w_opd else None

    @property
    def recorded_top(self) -> int:
        """How many likeliest tokens the sampler records at each token of a turn."""
        return 0

    @property
    def rewards_best_turn(self) -> bool:
        """Whether the best turn of a session without a good one counts as +1."""
        return False

    def check_sampler(self, sampler: SamplerCapabilities) -> None:
        """Refuse a sampler that cannot record what the method needs. Raises UserError."""
        most = sampler.max_top_logprobs
        if most is not None and self.recorded_top > most:
            advice = f" {sampler.advice[0].upper()}{sampler.advice[1:]}." if sampler.advice else ""
            raise UserError(
                f"--method {self.name} needs the {self.recorded_top} likeliest tokens of each sampled token, and this "
                f"sampler gives at most {most}: use another --method or --sampler.{advice}"
            )

    def check_learner(self, learner: LearnerCapabilities) -> None:
        """Refuse a learner that cannot use what the method teaches. Raises UserError."""
        if self.topk is not None and not learner.alternatives:
            raise UserError(
                f"--method {self.name} also trains on tokens that were not sampled, and this learner cannot: use "
                "--method rl, opd or combine."
            )

    # What it makes of a verdict.

    def sample_kind(self, verdict: Verdict, episode: TurnEpisode | None = None) -> tuple[SampleKind | None, str]:
        """Which signals of a judged turn are trained on; None with the reason if there are none.

        A reward of 0 is a signal where it is measured from others.
        """
        taught = bool(self.w_opd) and any(hint.logprobs for hint in verdict.hints)
        is_relative = episode is not None and (self.centred or self.is_compared(episode))
        scored = bool(self.w_rl) and (verdict.score is not None if is_relative else bool(verdict.score))
        if taught:
            return SampleKind.OPD_RL if scored else SampleKind.OPD, ""
        return (SampleKind.RL, "") if scored else (None, self._why_nothing(verdict))

    def is_compared(self, episode: TurnEpisode) -> bool:
        """Whether an episode's reward is measured from the mean of its group."""
        return self.compares and episode.group is not None

    def why_untrained(self, episode: TurnEpisode) -> str:
        """Why the reward of a turn in a settled group teaches nothing; empty if it teaches something."""
        if not self.is_compared(episode) or group_advantage(episode, self.options.step_reward_coef):
            return ""
        return no_advantage(episode)

    def prepared(self, turn: StoredTurn) -> StoredTurn:
        """The turn as it is trained on: with the prompt and the old log-probs of its sample. Raises NoSignal."""
        return turn

    def lesson(self, turn: StoredTurn, baseline: Baseline = NO_BASELINE) -> Lesson:
        """What each response token learns. Raises NoSignal; whether it does never depends on the baseline."""
        check_recorded(turn)
        return bounded(without_forced(self.signals(turn, baseline), turn), self.max_advantage)

    def signals(self, turn: StoredTurn, baseline: Baseline) -> Lesson:
        """What a turn's signals say about each response token; `lesson` leaves forced tokens out. Raises NoSignal."""
        gaps = self.gaps(turn)
        score = self.score(turn)
        check_signals(turn, gaps or (), score)
        reward = self._reward(score, baseline)
        if gaps is None:
            return Lesson([reward] * len(turn.response_ids))
        return Lesson([self.w_opd * (gap - baseline.gap) + reward for gap in gaps])

    def baseline(self, turns: Sequence[StoredTurn]) -> Baseline:
        """What the signals of a batch are measured from: means over its samples, if --baseline batch asks for them.

        A gap is first averaged over its own response, because the loss is a mean of means.
        """
        if not self.centred:
            return NO_BASELINE
        gaps = [fmean(gaps) for turn in turns if (gaps := self.mean_gaps(turn))]
        scores = [score for turn in turns if (score := self.score(turn)) is not None]
        return Baseline(mean_of_several(gaps), mean_of_several(scores))

    def score(self, turn: StoredTurn) -> float | None:
        """The turn's score within --max-advantage, if it is trained on; in a group its advantage. Raises NoSignal."""
        if turn.sample not in (SampleKind.RL, SampleKind.OPD_RL) or not self.w_rl:
            return None
        if turn.episode is not None and self.is_compared(turn.episode):
            return clip(self._compared(turn.episode, alone=turn.sample is SampleKind.RL), self.max_advantage)
        score = turn.verdict.score if turn.verdict else None
        if score is None:
            raise NoSignal("it has no score")
        # Before any mean: one large score would move the baseline of all others.
        return clip(score, self.max_advantage)

    def reward(self, turn: StoredTurn, baseline: Baseline = NO_BASELINE) -> float:
        """The part of a turn's advantages that all its tokens share. Raises NoSignal."""
        return self._reward(self.score(turn), baseline)

    def gaps(self, turn: StoredTurn) -> list[float] | None:
        """The teacher's log-prob minus the policy's at each sampled token, if a hint is trained on; 0 where forced.

        Raises NoSignal.
        """
        if not self.w_opd or not is_hinted(turn):
            return None
        limit = self.options.opd_clip or math.inf
        triples = zip(teacher_logprobs(turn), turn.logprobs, forced_tokens(turn), strict=True)
        return [0.0 if forced else clip(teacher - policy, limit) for teacher, policy, forced in triples]

    def mean_gaps(self, turn: StoredTurn) -> list[float]:
        """The gap at each token that is distilled about; empty if there is none."""
        gaps = self.gaps(turn) or []
        return [gap for gap, forced in zip(gaps, forced_tokens(turn), strict=bool(gaps)) if not forced]

    # What people see.

    def token_values(self, turn: StoredTurn) -> list[float]:
        """What each sampled token learns, to be shown. Raises NoSignal."""
        return self.lesson(turn).advantages

    def metrics(self, turns: Sequence[StoredTurn]) -> dict[str, float]:
        """Numbers about a step's batch that only this method has, by `metric_names`."""
        return {}

    def record(self, turn: StoredTurn) -> Mapping[str, Any] | None:
        """What a sample taught in full, for --record; None if there is nothing to write."""
        return None

    def _compared(self, episode: TurnEpisode, *, alone: bool) -> float:
        """The advantage of a turn in a group. Raises NoSignal if it is 0 and the turn's only signal."""
        if episode.group_mean is None:
            raise NoSignal("its group is not complete")
        advantage = group_advantage(episode, self.options.step_reward_coef)
        if alone and not advantage:
            raise NoSignal(no_advantage(episode))
        return advantage

    def _reward(self, score: float | None, baseline: Baseline) -> float:
        return 0.0 if score is None else self.w_rl * (score - baseline.score)

    def _why_nothing(self, verdict: Verdict) -> str:
        """Why a turn is not trained on; only a few different sentences, so that they can be counted."""
        problems = [hint.problem for hint in verdict.hints if hint.problem] if self.w_opd else []
        if problems:
            return f"no teacher for the hint: {problems[0]}"
        if verdict.score is None if self.w_rl else verdict.source is None:
            return f"the judge abstained: {verdict.reason or 'no reason given'}"
        return "the judge is neutral" if self.w_rl else "no hint in what came next"


def check_recorded(turn: StoredTurn) -> None:
    """Raise NoSignal unless each response token has its recorded log-prob."""
    if turn.is_text:
        raise NoSignal("it was recorded as text, without tokens")
    if len(turn.logprobs) != len(turn.response_ids):
        raise NoSignal("its log-probs were not recorded")


def forced_tokens(turn: StoredTurn) -> list[bool]:
    """For each response token, whether a constraint forced it."""
    return turn.forced or [False] * len(turn.response_ids)


def without_forced(lesson: Lesson, turn: StoredTurn) -> Lesson:
    """A lesson in which forced tokens teach nothing. Raises NoSignal if all tokens were forced."""
    if not any(turn.forced):
        return lesson
    if all(turn.forced):
        raise NoSignal("a constraint forced every token of it")
    advantages = [0.0 if forced else x for x, forced in zip(lesson.advantages, turn.forced, strict=True)]
    others = lesson.alternatives
    if others is not None:
        kept = np.where(np.array(turn.forced)[:, None], np.float32(0), others.advantages)
        others = replace(others, advantages=kept)
    return Lesson(advantages, others)


def bounded(lesson: Lesson, limit: float) -> Lesson:
    """A lesson whose tokens learn at most `limit` on average; a larger one is scaled down as a whole."""
    others = lesson.alternatives
    sizes = np.abs(np.array(lesson.advantages))
    if others is not None:
        sizes = np.maximum(sizes, np.abs(others.advantages).max(axis=1, initial=0.0))
    mean = float(sizes.mean()) if len(sizes) else 0.0
    if mean <= limit or not math.isfinite(mean):
        return lesson
    factor = limit / mean
    if others is not None:
        others = replace(others, advantages=others.advantages * np.float32(factor))
    return Lesson([factor * advantage for advantage in lesson.advantages], others)


def check_signals(turn: StoredTurn, gaps: ArrayLike, score: float | None) -> None:
    """Raise NoSignal unless there is something to learn, and all numbers are finite."""
    if not np.any(gaps) and not score:
        raise NoSignal("every signal in it is zero with this method")
    # One such number would spoil the whole batch.
    if not all(np.isfinite(numbers).all() for numbers in (gaps, score or 0.0, turn.logprobs)):
        raise NoSignal("a log-prob in it is not finite")


def mean_of_several(values: Sequence[float]) -> float:
    """The mean; 0 for a single value, which its own mean would cancel."""
    return fmean(values) if len(values) > 1 else 0.0


def is_hinted(turn: StoredTurn) -> bool:
    """Whether the turn is trained on a hint."""
    return turn.sample in (SampleKind.OPD, SampleKind.OPD_RL)


def clip(value: float, limit: float) -> float:
    """A number within [-limit, limit]; NaN is kept as NaN."""
    return min(max(value, -limit), limit) if math.isfinite(value) else value


def teacher_logprobs(turn: StoredTurn) -> list[float]:
    """The teacher's log-prob of each response token, under the first hint that it scored. Raises NoSignal."""
    hints = turn.verdict.hints if turn.verdict else ()
    scored = next((hint for hint in hints if hint.logprobs), None)
    if scored is None or len(scored.logprobs) != len(turn.response_ids):
        raise NoSignal("no teacher has scored it")
    return list(scored.logprobs)


#: A mean is rounded. A distance from it that is this small compared with the reward is none.
MAX_ROUNDING = 1e-9


def group_advantage(episode: TurnEpisode, step_reward_coef: float) -> float:
    """The advantage of each token of a turn in a settled group."""
    outcome = distance(episode.reward, episode.group_mean)
    step = step_reward_coef * distance(episode.step_reward, episode.step_mean)
    return rounded(outcome + step, outcome)


def distance(reward: float | None, mean: float | None) -> float:
    """How far a reward is above the mean; 0 without a reward or without others to compare it with."""
    if reward is None or mean is None:
        return 0.0
    return rounded(reward - mean, reward)


def rounded(difference: float, number: float) -> float:
    """A difference from a number, or 0 if it is only rounding."""
    return difference if abs(difference) > MAX_ROUNDING * max(1.0, abs(number)) else 0.0


def shown_advantage(episode: TurnEpisode, options: MethodOptions) -> float | None:
    """The advantage of a turn over its group, to be shown; None if it is not measured from its group."""
    compared = options.baseline == "group" and episode.reward is not None and episode.group_mean is not None
    return group_advantage(episode, options.step_reward_coef) if compared else None


def no_advantage(episode: TurnEpisode) -> str:
    """Why a turn in a settled group has no advantage."""
    if episode.rewarded < 2:
        return "fewer than two attempts of its group were rewarded"
    if episode.is_constant:
        return "all attempts of its group got the same reward"
    return "its reward is the mean of its group"
