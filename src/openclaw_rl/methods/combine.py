"""Both signals: the weighted sum of reward and distillation advantage.

A sample without a hint has no distillation term; one without a score has no reward term.
"""

from openclaw_rl.config.options import ConfigError
from openclaw_rl.methods.base import Method
from openclaw_rl.methods.options import MethodOptions


class Combine(Method):
    """Learns from scores and hints, each with its own weight."""

    name = "combine"
    learns_from = "scores and hindsight hints"

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.w_rl = options.w_rl
        self.w_opd = options.w_opd

    @classmethod
    def check(cls, options: MethodOptions) -> None:
        super().check(options)
        if options.w_opd == options.w_rl == 0:
            raise ConfigError("--w-opd and --w-rl are both 0, so there would be nothing to learn from.")
