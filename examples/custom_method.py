"""A custom method: openclaw-rl serve --method examples/custom_method.py:LikedOnly

Learns only from liked answers. An answer with a score below 0 is dropped instead of being made less likely.
"""

from openclaw_rl.methods.base import Method
from openclaw_rl.types import SampleKind, TurnEpisode, Verdict


class LikedOnly(Method):
    name = "liked-only"
    learns_from = "liked answers"
    w_rl = 1.0

    def sample_kind(self, verdict: Verdict, episode: TurnEpisode | None = None) -> tuple[SampleKind | None, str]:
        if verdict.score is not None and verdict.score < 0:
            return None, "it was not liked"
        return super().sample_kind(verdict, episode)
