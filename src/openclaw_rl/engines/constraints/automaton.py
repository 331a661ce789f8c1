"""Which tokens a constraint allows next, for one completion after the other."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from openclaw_rl.engines.constraints.grammar import grammar_of
from openclaw_rl.engines.errors import ConstraintRefused
from openclaw_rl.models import BadModelFolder
from openclaw_rl.types import Constraint, Thinking

#: Bounds of what a grammar may cost. With them the worst schemas that we know are refused after two seconds and 50 MB,
#: and the worst single token takes 0.1 seconds. Ordinary schemas need less than a hundredth of it.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
#: The longest part of the library's explanation that is passed on to a client.
MAX_REASON_CHARACTERS = 200
REFUSED = "The schema cannot be enforced"
NOTHING_FITS = "no answer fits it"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may come next."""

    mask: NDArray[np.bool_]
    """One entry for each token of the vocabulary."""
    forced: bool
    """Whether there is only one token, or only tokens that end the completion."""


class Vocabulary:
    """A model's tokens as llguidance needs them. Making one takes a second, during which no other thread runs."""

    def __init__(self, folder: Path, size: int | None) -> None:
        """`size`: the number of the model's logits, which may be more than its tokens; None if it is not known."""
        try:
            text = (folder / "tokenizer.json").read_text()
            special = [token["id"] for token in json.loads(text)["added_tokens"] if token["special"]]
            # The library wants to know the token that ends a text. Each request has its own, so any control token does.
            self.tokens = LLTokenizer(text, n_vocab=size, eos_token=special[:1] or None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadModelFolder(f"The tokenizer.json in {folder} cannot be read: {error}.") from error
        self.size = self.tokens.vocab_size


class Automaton:
    """The state of one completion: what it has written, and what it may write next.

    * Text that is certain is written with the tokens that the tokenizer uses for it.
    * Every method raises ConstraintRefused when the schema has become too complex to go on.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, stop_ids: Collection[int]) -> None:
        self._vocabulary, self._matcher, self._stop_ids = vocabulary, matcher, list(stop_ids)

    @classmethod
    def compile(cls, vocabulary: Vocabulary, constraint: Constraint, *, any_whitespace: bool = False) -> "Automaton":
        """The state before the first token. Other threads run meanwhile. Raises ConstraintRefused."""
        automaton = cls._begin(vocabulary, replace(constraint, thinking=Thinking.NONE), any_whitespace)
        # Every text may be reasoning. So what comes after it was looked at alone first.
        return automaton if constraint.thinking is Thinking.NONE else cls._begin(vocabulary, constraint, any_whitespace)

    @classmethod
    def _begin(cls, vocabulary: Vocabulary, constraint: Constraint, any_whitespace: bool) -> "Automaton":
        grammar = grammar_of(constraint, any_whitespace=any_whitespace)
        automaton = cls(vocabulary, LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=LIMITS), ())
        # Much of the work is done for the first token.
        automaton.allowed()
        return automaton

    def copy(self, stop_ids: Collection[int]) -> "Automaton":
        """The same state, for another completion, which ends with one of these tokens."""
        return Automaton(self._vocabulary, self._matcher.deep_copy(), stop_ids)

    def allowed(self) -> Allowed:
        end, size = self._vocabulary.tokens.eos_token, self._vocabulary.size
        certain = self._matcher.compute_ff_tokens()
        if certain:
            mask = np.zeros(size, np.bool_)
            mask[certain[0]] = True
            return Allowed(mask, True)
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
        may_end, mask[end] = bool(mask[end]), False
        others = int(mask.sum())
        if not others and not may_end:
            raise ConstraintRefused(f"{REFUSED}: {NOTHING_FITS}.")
        if may_end:
            mask[self._stop_ids] = True
        return Allowed(mask, others == 0 or (others == 1 and not may_end))

    def accept(self, token: int) -> bool:
        """Add the completion's next token. False if the constraint does not allow it; the completion is then over."""
        return token in self._stop_ids or self._matcher.consume_token(token)

    def spelling(self, token: int) -> bytes:
        """The text of one token, which may end within a character."""
        text: bytes = self._vocabulary.tokens.decode_bytes([token])
        return text

    def _check(self) -> None:
        if problem := self._matcher.get_error():
            raise ConstraintRefused(f"{REFUSED}: {reason_of(problem)}.")


def reason_of(problem: str) -> str:
    """The library's explanation as the end of a sentence, without the grammar that it quotes."""
    line = problem.partition("\n")[0].rpartition("failed to compile JSON schema: ")[2]
    if line.startswith("NoExtension"):
        return NOTHING_FITS
    return line.strip().rstrip(".")[:MAX_REASON_CHARACTERS] or "it is too complex"
