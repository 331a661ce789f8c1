"""Binary RL: every response token gets the turn's score."""

from openclaw_rl.methods.base import Method


class Rl(Method):
    """Learns from scores."""

    name = "rl"
    learns_from = "scores"
    w_rl = 1.0

    @property
    def rewards_best_turn(self) -> bool:
        return self.options.at_least_one
