"""Separates the part of a message that reacts to the response from the part that asks for something new.

In "No bold, please. Next question: why is the sky blue?" only the first sentence is a complaint.
"""

from collections.abc import Sequence

from openclaw_rl.judge.reader.lexicon import Lexicon
from openclaw_rl.judge.reader.relevance import names
from openclaw_rl.judge.reader.signals import Sentence

_VERDICTS = ("change", "wish", "correction", "rejection", "praise", "thanks")
#: A question with fewer names ("really?", "are you sure?") may be about the response.
_LEAST_NAMES = 2
#: A shorter request may occur in a message by chance.
_LEAST_LETTERS = 12


def reacting(said: Sequence[Sentence], lexicon: Lexicon) -> Sequence[Sentence]:
    """The sentences before the first one that announces or asks something new; all if there is none."""
    new = (n for n, sentence in enumerate(said) if n and begins_something(sentence, lexicon))
    return said[: next(new, len(said))]


def begins_something(sentence: Sentence, lexicon: Lexicon) -> bool:
    """Whether a sentence leaves the response: "Next question: ...", or a question or request without a verdict."""
    if sentence.has("announcement"):
        return True
    if sentence.has(*_VERDICTS) or lexicon.find("tag", sentence.plain):
        return False
    doubts = any(lexicon.find(signal, sentence.plain) for signal in ("trouble", "refers"))
    names_something = len(names(sentence.plain)) >= _LEAST_NAMES and not doubts
    asked = sentence.has("question") or (sentence.asks and (sentence.has("next") or names_something))
    return asked or lexicon.find("fresh", sentence.plain) is not None


def settle_wishes(said: Sequence[Sentence], lexicon: Lexicon, same_topic: bool) -> None:
    """Count wishes about form as changes, but not those that come after a new request: they are its conditions."""
    if not any(sentence.has("wish") for sentence in said):
        return
    requested = False
    for sentence in said:
        if "wish" not in sentence.found:
            requested = requested or (not same_topic and begins_something(sentence, lexicon))
        elif requested:
            del sentence.found["wish"]
            sentence.found.pop("change", None)
        else:
            wish = sentence.found["wish"]
            sentence.found["change"] = min(wish, sentence.found.get("change", wish))


def without_request(words: str, request: str) -> str:
    """The rest of a message that repeats the whole request; empty if it does not."""
    asked, lower = request.strip(" \n.!?").lower(), words.lower()
    # If lower-casing changes the length, positions do not correspond.
    if not _LEAST_LETTERS <= len(asked) <= len(words) or len(lower) != len(words):
        return ""
    before, found, after = lower.partition(asked)
    rest = words[len(words) - len(after) :].lstrip(" .!?")
    return f"{words[: len(before)]}\n{rest}".strip(" \n:") if found else ""
