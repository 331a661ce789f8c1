"""The judge that repeats explicit feedback."""

from openclaw_rl.judge.case import Case
from openclaw_rl.judge.judges.base import Opinion, Questions
from openclaw_rl.judge.reader import instruct
from openclaw_rl.judge.votes import MIN_HINT
from openclaw_rl.types import Source


class Explicit:
    """Gives the last feedback that somebody sent about this turn. It is never down."""

    source = Source.EXPLICIT
    down = None
    answered = 0

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        if not case.feedback:
            return Opinion()
        last = case.feedback[-1]
        hints: tuple[str, ...] | None = () if last.score > 0 else None
        if hints is None and last.source is Source.EXPLICIT:
            hint = instruct(" ".join(last.text.split()), case.response)
            hints = (hint,) if len(hint) > MIN_HINT else None
        return Opinion(last.score, hints, source=last.source)
