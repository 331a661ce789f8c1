"""Decides whether a loss that a message tells of is harm: "the contract is gone" is, unless the request wanted that."""

from collections.abc import Sequence

from openclaw_rl.judge.reader.lexicon import lexicon_for
from openclaw_rl.judge.reader.relevance import names
from openclaw_rl.judge.reader.signals import Sentence
from openclaw_rl.judge.reader.text import normalise, shorten


def settle_losses(said: Sequence[Sentence], request: str) -> None:
    """Count a loss as harm, or as a doubt if the request asked for it or the message asks what to do about it.

    It was asked for if the request asks to remove something and the sentence names a thing of the request.
    """
    asks = any(sentence.has("question") for sentence in said)
    for sentence in said:
        lost = sentence.found.pop("loss", None)
        asked_for = lost is not None and wants_removal(request) and bool(names(sentence.plain) & names(request))
        if asks and sentence.has("harm"):
            lost = sentence.found.pop("harm")
        if lost is not None:
            sentence.found.setdefault("doubt" if asked_for or asks else "harm", lost)


def wants_removal(request: str) -> bool:
    """Whether a request asks to delete, empty or clean something."""
    plain = normalise(shorten(request))
    return lexicon_for(plain).find("removal", plain) is not None
