"""The judges that read feedback: explicit scores, and what came next as the rules read it. They are never down."""

from openclaw_rl.judge.judges.base import MIN_HINT, Case, Opinion, Questions
from openclaw_rl.judge.rules import ReplyKind, instruct, read_reply, ready
from openclaw_rl.types import UNREAD, Source

#: A longer text of an environment is cut in the middle, because the beginning and the end say most.
MAX_HINT_CHARACTERS = 2000
#: The score of the response before each kind of reply. A rejection does not say what would be better.
READINGS: dict[ReplyKind, float] = {
    ReplyKind.ACKNOWLEDGEMENT: 1.0,
    ReplyKind.MOVING_ON: 1.0,
    ReplyKind.TOOL_SUCCESS: 1.0,
    ReplyKind.CORRECTION: -1.0,
    ReplyKind.CHANGE_REQUEST: -1.0,
    ReplyKind.REJECTION: -1.0,
    ReplyKind.REPETITION: -1.0,
    ReplyKind.TOOL_ERROR: -1.0,
}
#: Replies whose hints may be wishes about form. A tool's message may sound like a wish but is none.
ABOUT_FORM = (ReplyKind.CHANGE_REQUEST, ReplyKind.CORRECTION)


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


class FeedbackReader:
    """Reads what came next by rules. It is never down."""

    source = Source.FEEDBACK
    down = None
    answered = 0

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        if not case.next_state:
            return Opinion(reason="nothing came next")
        await ready()
        reading = read_reply(case.request, case.response, case.next_state)
        score = READINGS.get(reading.kind)
        if score is None:
            return Opinion(reason=UNREAD)
        hint = instruct(reading.hint, case.response) if reading.kind in ABOUT_FORM else reading.hint
        hints = (hint,) if len(hint) > MIN_HINT else () if score > 0 else None
        return Opinion(score, hints, reason=str(reading.kind))
