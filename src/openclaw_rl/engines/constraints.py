"""Answers that fit a schema: constraints as grammars for llguidance, and the tokens that they allow next."""

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from openclaw_rl.engines.base import ConstraintRefused
from openclaw_rl.models import BadModelFolder
from openclaw_rl.types import Constraint, JsonForm, Thinking

#: llguidance's settings of how JSON is written.
Style = Mapping[str, str | bool]
#: JSON is written as chat templates write it: one space after a comma or colon, and no other whitespace. So a tool call
#: is rendered again exactly as it was sampled, and the model cannot go on with whitespace for ever.
JSON_STYLE: Style = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
ANY_STYLE: Style = {"whitespace_flexible": True}
#: Reasoning up to its closing tag, and the line breaks that models write after it.
THOUGHT = 'thought[lazy]: /(?s:.*)<\\/think>/\ngap: ("\\n" | "\\n\\n")?\n'
#: Characters that mean something in a regular expression.
SPECIAL_IN_REGEX = re.compile(r"[\\.^$|?*+(){}\[\]/]")
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
#: The longest that a request waits for its constraint, behind others too.
COMPILE_SECONDS = 10.0
#: Constraints that are kept, by the size of their schemas. What is compiled has some hundred times that size.
MAX_CACHED_BYTES = 500_000
#: Constraints that are kept, however small they are.
MAX_CACHED = 128


def grammar_of(constraint: Constraint, control: Mapping[str, int], *, any_whitespace: bool = False) -> str:
    """The grammar of a constraint, in llguidance's dialect of Lark. `any_whitespace`: JSON need not have our style.

    `control` are the ids of the control tokens, by their texts. Texts around JSON are written with them.
    """
    style = ANY_STYLE if any_whitespace else JSON_STYLE
    if constraint.trigger in control:
        return controlled_grammar(constraint, style, control)
    if constraint.trigger:
        return triggered_grammar(constraint, style, control)
    forms = [form for form in (constraint.content, *constraint.calls) if form is not None]
    names = [f"form{number}" for number in range(len(forms))]
    answers = [names.pop(0)] if constraint.content else []
    if names:
        answers.append("calls")
    lines = ["%llguidance {}", f"start: {start_of(constraint.thinking)} ({' | '.join(answers)})"]
    lines += form_rules(forms, style, control)
    if names:
        several = "" if constraint.separator is None else f" ({text(constraint.separator, control)} call)*"
        lines += [f"calls: call{several}", f"call: {' | '.join(names)}"]
    if constraint.thinking is not Thinking.NONE:
        lines.append(THOUGHT)
    return "\n".join(lines) + "\n"


def controlled_grammar(constraint: Constraint, style: Style, control: Mapping[str, int]) -> str:
    """Free text, in which a control token begins one of the calls. Reasoning has no such token, and so is free too."""
    forms = [replace(form, before=form.before.removeprefix(constraint.trigger)) for form in constraint.calls]
    call = f"({' | '.join(f'form{number}' for number in range(len(forms)))})"
    several = "?" if constraint.separator is None else "*"
    start = f"start: (TEXT {text(constraint.trigger, control)} {call}){several} TEXT"
    return "\n".join(["%llguidance {}", start, "TEXT: /(?s:.*)/", *form_rules(forms, style, control)]) + "\n"


def triggered_grammar(constraint: Constraint, style: Style, control: Mapping[str, int]) -> str:
    """Free text, in which whatever begins with the trigger is one of the calls.

    The first lexeme that may end does end. So text before a call must not begin like reasoning, where that is possible:
    a trigger in the reasoning would end it.
    """
    trigger = SPECIAL_IN_REGEX.sub(r"\\\g<0>", constraint.trigger)
    forms = [replace(form, before=form.before.removeprefix(constraint.trigger)) for form in constraint.calls]
    call = f"({' | '.join(f'form{number}' for number in range(len(forms)))})"
    more = f"(lead {call})" + ("?" if constraint.separator is None else "*")
    lines = ["%llguidance {}", f"lead[lazy]: /(?s:.*){trigger}/", f"REST: /(?s:.*)/ & ~/(?s:.*){trigger}(?s:.*)/"]
    match constraint.thinking:
        case Thinking.NONE:
            lines.append(f"start: {more} REST")
        case Thinking.BEGUN:
            lines += [f"start: thought gap {more} REST", THOUGHT]
        case Thinking.OPTIONAL:
            after_first = "" if constraint.separator is None else more
            lines += [f"start: whole_thought gap {more} REST | (first {call} {after_first})? REST", THOUGHT]
            lines += ["first[lazy]: FIRST", f"FIRST: /(?s:.*){trigger}/ & ~/<think>(?s:.*)/"]
            lines.append("whole_thought[lazy]: /<think>(?s:.*)<\\/think>/")
    lines += form_rules(forms, style, control)
    return "\n".join(lines) + "\n"


def start_of(thinking: Thinking) -> str:
    match thinking:
        case Thinking.NONE:
            return ""
        case Thinking.OPTIONAL:
            return '("<think>" thought gap)?'
        case Thinking.BEGUN:
            return "thought gap"


def form_rules(forms: Sequence[JsonForm], style: Style, control: Mapping[str, int]) -> list[str]:
    return [f"form{number}: {form_rule(form, style, control)}" for number, form in enumerate(forms)]


def form_rule(form: JsonForm, style: Style, control: Mapping[str, int]) -> str:
    schema = json.loads(form.schema)
    # `true` accepts every value, as an empty schema does. A client's own settings under this name are replaced.
    settings = {**style, "lenient": not form.strict, "coerce_one_of": not form.strict}
    body = {**({} if schema is True else schema), "x-guidance": settings}
    parts = (text(form.before, control), f"%json {json.dumps(body)}", text(form.after, control))
    return " ".join(filter(None, parts))


def text(literal: str, control: Mapping[str, int]) -> str:
    """A literal text in a grammar; nothing for an empty one."""
    longest_first = sorted(filter(literal.__contains__, control), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", literal) if longest_first else [literal]
    return " ".join(f"<[{control[piece]}]>" if piece in control else json.dumps(piece) for piece in pieces if piece)


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
            special = {t["content"]: t["id"] for t in json.loads(text)["added_tokens"] if t["special"]}
            # The library wants to know the token that ends a text. Each request has its own, so any control token does.
            self.tokens = LLTokenizer(text, n_vocab=size, eos_token=list(special.values())[:1] or None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadModelFolder(f"The tokenizer.json in {folder} cannot be read: {error}.") from error
        self.size = self.tokens.vocab_size
        self.control = special


class Automaton:
    """The state of one completion: what it has written, and what it may write next.

    * Text that is certain is written with the tokens that the tokenizer uses for it.
    * Every method raises ConstraintRefused when the schema has become too complex to go on.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, stop_ids: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._stop_ids = list(stop_ids)

    @classmethod
    def compile(cls, vocabulary: Vocabulary, constraint: Constraint, *, any_whitespace: bool = False) -> "Automaton":
        """The state before the first token. Other threads run meanwhile. Raises ConstraintRefused."""
        automaton = cls._begin(vocabulary, replace(constraint, thinking=Thinking.NONE), any_whitespace)
        # Every text may be reasoning. So what comes after it was looked at alone first.
        return automaton if constraint.thinking is Thinking.NONE else cls._begin(vocabulary, constraint, any_whitespace)

    @classmethod
    def _begin(cls, vocabulary: Vocabulary, constraint: Constraint, any_whitespace: bool) -> "Automaton":
        grammar = grammar_of(constraint, vocabulary.control, any_whitespace=any_whitespace)
        automaton = cls(vocabulary, LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=LIMITS), ())
        # Much of the work is done for the first token.
        automaton.allowed()
        return automaton

    def copy(self, stop_ids: Collection[int]) -> "Automaton":
        """The same state, for another completion, which ends with one of these tokens."""
        return Automaton(self._vocabulary, self._matcher.deep_copy(), stop_ids)

    def allowed(self) -> Allowed:
        end = self._vocabulary.tokens.eos_token
        size = self._vocabulary.size
        certain = self._matcher.compute_ff_tokens()
        if certain:
            mask = np.zeros(size, np.bool_)
            mask[certain[0]] = True
            return Allowed(mask, True)
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
        may_end = bool(mask[end])
        mask[end] = False
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


class Compiler:
    """Compiles constraints for one model.

    * The caller never waits: `has_result` is false until the result is there, and `woken` is called then.
    * A constraint that is compiled already is there at once, as long as it is in the cache.
    * Constraints are compiled one at a time, and a request waits at most `compile_seconds`.
    """

    def __init__(
        self,
        folder: Path,
        size: int | None = None,
        woken: Callable[[], None] = lambda: None,
        *,
        any_whitespace: bool = False,
    ) -> None:
        """`any_whitespace`: for completions of engines that write JSON with whitespace as they like."""
        self._folder = folder
        self._size = size
        self._woken = woken
        self._any_whitespace = any_whitespace
        self.compile_seconds = COMPILE_SECONDS
        self.max_cached_bytes = MAX_CACHED_BYTES
        self.max_cached = MAX_CACHED
        self._vocabulary: Vocabulary | None = None
        self._results: OrderedDict[Constraint, tuple[Future[Automaton], float]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")

    def prepare(self) -> None:
        """Read the vocabulary now, which takes a second, rather than when the first constraint comes."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._folder, self._size)

    def has_result(self, constraint: Constraint) -> bool:
        """Whether `automaton` has a result. Begins to compile it if it is new."""
        result, deadline = self._result(constraint)
        return result.done() or time.monotonic() > deadline

    def automaton(self, constraint: Constraint) -> Automaton:
        """The compiled constraint. Raises ConstraintRefused if it cannot be compiled, or not in time."""
        result, _deadline = self._result(constraint)
        if not result.done():
            raise ConstraintRefused(f"The schema was not compiled within {self.compile_seconds:.0f} seconds.")
        return result.result()

    def future(self, constraint: Constraint) -> "Future[Automaton]":
        """The result, for callers that can wait."""
        return self._result(constraint)[0]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _result(self, constraint: Constraint) -> "tuple[Future[Automaton], float]":
        if constraint in self._results:
            self._results.move_to_end(constraint)
        else:
            self._make_room(size_of(constraint))
            result = self._thread.submit(self._compile, constraint)
            result.add_done_callback(lambda _result: self._woken())
            self._results[constraint] = result, time.monotonic() + self.compile_seconds
        return self._results[constraint]

    def _compile(self, constraint: Constraint) -> Automaton:
        self.prepare()
        assert self._vocabulary is not None
        return Automaton.compile(self._vocabulary, constraint, any_whitespace=self._any_whitespace)

    def _make_room(self, size: int) -> None:
        """Forget the constraints that were not used for longest. Those that are being compiled stay."""
        kept = sum(map(size_of, self._results))
        for constraint, (result, _deadline) in list(self._results.items()):
            if kept + size <= self.max_cached_bytes and len(self._results) < self.max_cached:
                return
            if result.done():
                del self._results[constraint]
                kept -= size_of(constraint)


def size_of(constraint: Constraint) -> int:
    """The size of a constraint's schemas."""
    return sum(len(form.schema) for form in (constraint.content, *constraint.calls) if form is not None)
