"""The judging metrics on `/metrics`."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from openclaw_rl.judge.votes import agreement
from openclaw_rl.types import Question, Verdict, Vote

#: From a rule to a reasoning model.
LATENCY_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class JudgeMetrics:
    """Counters and histograms of judging, in a shared registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._verdicts = Counter(
            "openclaw_verdicts", "Verdicts by source and sign.", ["source", "score"], registry=registry
        )
        self._abstentions = Counter(
            "openclaw_abstentions", "Turns without a score although one was asked for.", ["reason"], registry=registry
        )
        self._agreement = Histogram(
            "openclaw_vote_agreement",
            "The winner's share of the valid votes on the score.",
            buckets=(0.34, 0.5, 0.67, 0.8, 1.0),
            registry=registry,
        )
        self._seconds = Histogram(
            "openclaw_judge_seconds", "Time to a verdict.", buckets=LATENCY_BUCKETS, registry=registry
        )
        self._tokens = Counter("openclaw_judge_tokens", "Tokens read and written by the judge.", registry=registry)
        self.failures = Counter("openclaw_judge_failures", "Trials that gave no verdict.", registry=registry)
        self._saved = Counter(
            "openclaw_judge_calls_saved",
            "Answers of a language model that cheaper judges made needless.",
            registry=registry,
        )

    def count(self, verdict: Verdict, scored: bool, saved: int) -> None:
        """Count a verdict. `scored`: a score was asked for. `saved`: votes of a model that were not needed."""
        if verdict.score is not None:
            sign = "good" if verdict.score > 0 else "bad" if verdict.score < 0 else "neutral"
            self._verdicts.labels(str(verdict.source), sign).inc()
        elif scored:
            # The full reason would make one time series per message.
            self._abstentions.labels(verdict.reason.partition(" failed:")[0] or "no reason given").inc()
        share = agreement([vote for vote in verdict.votes if vote.question is Question.SCORE])
        if share is not None:
            self._agreement.observe(share)
        self._seconds.observe(verdict.seconds)
        self._tokens.inc(tokens_of(verdict.votes))
        self._saved.inc(saved)


def tokens_of(votes: tuple[Vote, ...]) -> int:
    return sum(vote.tokens for vote in votes)
