"""On-policy distillation: each response token learns what the teacher thinks of it once it knows the hint."""

from openclaw_rl.methods.base import Method
from openclaw_rl.methods.options import MethodOptions
from openclaw_rl.types import Question


class Opd(Method):
    """Learns from hindsight hints. With --eval-mode turns are scored too, for monitoring."""

    name = "opd"
    learns_from = "hindsight hints"
    w_opd = 1.0

    @classmethod
    def check(cls, options: MethodOptions) -> None:
        """All options are fine."""

    @property
    def questions(self) -> frozenset[Question]:
        return super().questions | ({Question.SCORE} if self.options.eval_mode else set())
