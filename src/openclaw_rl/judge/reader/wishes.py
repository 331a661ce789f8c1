"""Reads from a user's message what they want of answers: "shorter, please", "call me Sam", "always in metric".

A wish is an imperative, or a part of one, about how to answer. A request to do something is none. Code, quotations,
material that a message brings along and words for a judge yield none.
"""

from openclaw_rl.judge.reader.hints import make_hint
from openclaw_rl.judge.reader.instructions import instruct
from openclaw_rl.judge.reader.material import before_material
from openclaw_rl.judge.reader.parts import without_request
from openclaw_rl.judge.reader.text import own_words, shorten
from openclaw_rl.judge.reader.users import is_for_a_judge, read_text
from openclaw_rl.types import Wish

MAX_CHARACTERS = 200


def read_wishes(message: str, request: str = "", response: str = "") -> list[Wish]:
    """The wishes in a user's message, at most one for each topic.

    `request` and `response` are the turn before the message, if there was one. A message that repeats the request with
    a wish complains about the answer.
    """
    if is_for_a_judge(message):
        return []
    words = own_words(shorten(message)).strip()
    words = without_request(words, request) or words
    if (before := before_material(words, reports=False)) is not None:
        words = before
    wishes = []
    for sentence in read_text(words).said:
        if sentence.has("wish"):
            instruction = instruct(make_hint(words[sentence.start : sentence.end]), response)[:MAX_CHARACTERS]
            wishes.append(Wish(instruction, "format", lasting=True))
    return wishes[:1]
