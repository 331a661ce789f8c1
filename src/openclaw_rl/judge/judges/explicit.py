"""The judge that repeats explicit feedback."""

from openclaw_rl.judge.case import Case
from openclaw_rl.judge.judges.base import Opinion, Questions
from openclaw_rl.judge.rules import instruct, ready
from openclaw_rl.judge.votes import MIN_HINT
from openclaw_rl.types import Source

#: A longer text of an environment is cut in the middle, because the beginning and the end say most.
MAX_HINT_CHARACTERS = 2000


class Explicit:
    """Gives the last feedback that somebody sent about this turn. It is never down.

    In an episode that is the reward, and the environment's text about the turn is the hint. Nobody else is asked.
    """

    source = Source.EXPLICIT
    down = None
    answered = 0

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        if not case.feedback:
            return Opinion()
        last = case.feedback[-1]
        if case.in_episode:
            return Opinion(last.score, environment_hints(last.text), source=last.source)
        hints: tuple[str, ...] | None = () if last.score > 0 else None
        if hints is None and last.source is Source.EXPLICIT and last.text:
            await ready()
            hint = instruct(" ".join(last.text.split()), case.response)
            hints = (hint,) if len(hint) > MIN_HINT else None
        return Opinion(last.score, hints, source=last.source)


def environment_hints(text: str) -> tuple[str, ...]:
    hint = " ".join(text.split())
    if len(hint) > MAX_HINT_CHARACTERS:
        half = MAX_HINT_CHARACTERS // 2
        hint = f"{hint[:half]} … {hint[-half:]}"
    return (hint,) if len(hint) > MIN_HINT else ()
