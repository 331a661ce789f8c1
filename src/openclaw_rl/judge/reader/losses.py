"""Decides whether a loss that a message tells of is harm: "the contract is gone" is, unless the request wanted that."""

from collections.abc import Sequence

from openclaw_rl.judge.reader.lexicon import lexicon_for
from openclaw_rl.judge.reader.relevance import names
from openclaw_rl.judge.reader.signals import Sentence
from openclaw_rl.judge.reader.text import normalise, shorten


def settle_losses(said: Sequence[Sentence], request: str) -> None:
    """Count a loss as harm, or as a doubt if the request asked to remove something that the sentence names."""
    for sentence in said:
        if (place := sentence.found.pop("loss", None)) is not None:
            asked_for = wants_removal(request) and bool(names(sentence.plain) & names(request))
            sentence.found.setdefault("doubt" if asked_for else "harm", place)


def wants_removal(request: str) -> bool:
    """Whether a request asks to delete, empty or clean something."""
    plain = normalise(shorten(request))
    return lexicon_for(plain).find("removal", plain) is not None
