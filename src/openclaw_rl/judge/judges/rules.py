"""The judge that reads the next state by rules."""

from openclaw_rl.judge.case import Case
from openclaw_rl.judge.judges.base import Opinion, Questions
from openclaw_rl.judge.rules import ReplyKind, instruct, read_reply, ready
from openclaw_rl.judge.votes import MIN_HINT
from openclaw_rl.types import UNREAD, Source

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
