"""Practice: the policy learns to answer without a note and its examples as the base model does with them.

- An answer of the base model is imitated: each of its tokens gets the same advantage, and its end a larger one.
- The policy's own answer has a score, measured from the mean of its step: does it keep to the note, and make sense?
- Or its own answer is distilled: each token gets the base model's log-prob, with note and examples, minus the
  policy's. That gap is clipped and measured from its mean over the answer, so that no answer is pushed away as a whole.
"""

from collections.abc import Sequence
from statistics import fmean

from openclaw_rl.methods.base import Baseline, Lesson, Method, NoSignal, clip, teacher_logprobs
from openclaw_rl.methods.options import MethodOptions
from openclaw_rl.types import StoredTurn

#: The largest gap of a token.
MAX_GAP = 1.0
#: The advantage of an imitated answer's last token. A policy that misses the end where it learned to say something
#: ("Confidence: high") says it again and again.
END_ADVANTAGE = 2.0


class PracticeMethod(Method):
    """Learns from practised answers. It runs beside the method that learns from people, and is not chosen by name."""

    name = "practice"
    learns_from = "answers that the base model gives with notes and examples"

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        # Imitated answers are the lesson, whatever the others of their batch are.
        self.centred = False
        self.compares = False

    def baseline(self, turns: Sequence[StoredTurn]) -> Baseline:
        scores = [turn.verdict.score for turn in turns if turn.verdict and turn.verdict.score is not None]
        return Baseline(0.0, fmean(scores) if scores else 0.0)

    def signals(self, turn: StoredTurn, baseline: Baseline) -> Lesson:
        if turn.verdict is None:
            raise NoSignal("it is not practised")
        if turn.verdict.score is not None:
            return Lesson([turn.verdict.score - baseline.score] * len(turn.response_ids))
        if not turn.verdict.hints:
            return Lesson([*[1.0] * (len(turn.response_ids) - 1), END_ADVANTAGE])
        pairs = zip(teacher_logprobs(turn), turn.logprobs, strict=True)
        gaps = [clip(teacher - policy, MAX_GAP) for teacher, policy in pairs]
        mean = fmean(gaps)
        return Lesson([gap - mean for gap in gaps])
