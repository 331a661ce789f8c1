"""Top-k distillation with hint selection.

The score is a reward on the sampled tokens. Hints teach about the likeliest tokens at each position instead of the
sampled one, under the hint that teacher and policy agree on most (`distillation`).
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from openclaw_rl.engines.base import SamplerCapabilities
from openclaw_rl.errors import UserError
from openclaw_rl.methods.base import Baseline, Lesson, NoSignal, TeacherRequest, check_signals, is_hinted
from openclaw_rl.methods.combine import Combine
from openclaw_rl.methods.distillation import Distilled, distil
from openclaw_rl.methods.options import MethodOptions, TopK
from openclaw_rl.types import Alternatives, SampleKind, StoredTurn


class TopkSelect(Combine):
    """Learns from scores, and from the best of several hints about the likeliest tokens."""

    name = "topk-select"
    learns_from = "scores and the best of several hindsight hints, for the likeliest tokens"
    metric_names = ("overlap", "left_out")

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.topk: TopK = TopK(
            options.topk_k,
            options.topk_max_cand,
            options.topk_hint_selection,
            options.topk_subset_mode,
            options.topk_adv_diff_clip,
        )

    @property
    def teacher_request(self) -> TeacherRequest | None:
        if not self.w_opd:
            return None
        return TeacherRequest(
            self.topk.candidates, shortest_first=True, top=self.topk.k, policy_scores=self.topk.subset == "teacher"
        )

    @property
    def recorded_top(self) -> int:
        return self.topk.k if self.w_opd else 0

    def check_sampler(self, sampler: SamplerCapabilities) -> None:
        super().check_sampler(sampler)
        if self.w_opd and self.topk.subset == "teacher" and not sampler.scores_targets:
            raise UserError(
                "--topk-subset-mode teacher needs log-probs of chosen tokens, which this sampler does not give: "
                "use student or overlap, or another --sampler."
            )

    def signals(self, turn: StoredTurn, baseline: Baseline) -> Lesson:
        distilled = self.distilled(turn)
        score = self.score(turn)
        check_signals(turn, () if distilled is None else distilled.gaps, score)
        reward = [self._reward(score, baseline)] * len(turn.response_ids)
        return Lesson(reward, None if distilled is None else self._alternatives(distilled, baseline))

    def gaps(self, turn: StoredTurn) -> None:
        """Sampled tokens learn from the score alone."""

    def mean_gaps(self, turn: StoredTurn) -> list[float]:
        distilled = self.distilled(turn)
        return [] if distilled is None else distilled.expected().tolist()

    def distilled(self, turn: StoredTurn) -> Distilled | None:
        """What the likeliest tokens teach; None if no hint is trained on. Raises NoSignal."""
        if not is_hinted(turn) or not self.w_opd:
            return None
        try:
            return distil(turn, self.topk)
        except NoSignal:
            # It may have been judged under other options. Its score still counts.
            if turn.sample is SampleKind.OPD_RL and self.w_rl:
                return None
            raise

    def token_values(self, turn: StoredTurn) -> list[float]:
        rewards = self.lesson(turn).advantages
        distilled = self.distilled(turn)
        if distilled is None:
            return rewards
        sampled = distilled.ids == np.array(turn.response_ids)[:, None]
        taught = (self.w_opd * distilled.weights * distilled.gaps * sampled).sum(1)
        return [reward + gap for reward, gap in zip(rewards, taught.tolist(), strict=True)]

    def metrics(self, turns: Sequence[StoredTurn]) -> dict[str, float]:
        """The shares of likeliest tokens in common, and of tokens about which the teacher's engine said too little."""
        distilled = [table for turn in turns if (table := self.distilled(turn)) is not None]
        tokens = sum(len(table.chosen) for table in distilled)
        return {
            "overlap": fmean(table.common_share() for table in distilled) if distilled else 0.0,
            "left_out": sum(table.left_out for table in distilled) / tokens if tokens else 0.0,
        }

    def record(self, turn: StoredTurn) -> Mapping[str, Any] | None:
        distilled = self.distilled(turn)
        return None if distilled is None else distilled.as_record()

    def _alternatives(self, distilled: Distilled, baseline: Baseline) -> Alternatives:
        advantages = self.w_opd * distilled.weights * (distilled.gaps - baseline.gap)
        # What does not count may have any log-prob, also NaN.
        old = np.where(distilled.counts, distilled.old_logprobs, 0.0)
        return Alternatives(distilled.ids, old.astype(np.float32), advantages.astype(np.float32))
