"""Constraints on servers of other projects: how they take them, and what they do not say about an answer.

They do not say its raw log-probs, nor which tokens were forced.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from openclaw_rl.engines.base import ConstraintRefused
from openclaw_rl.engines.constraints import COMPILE_SECONDS, Automaton, Compiler
from openclaw_rl.engines.remote.dialect import SampledPiece, ServerScores
from openclaw_rl.types import Constraint, JsonForm, SampledToken, SampleRequest, ScoreRequest, Thinking

#: The line breaks that models write after their reasoning.
GAP = {"type": "regex", "pattern": "\\n?\\n?"}
#: Without a bound, a small model may write whitespace until its answer is cut off. Old versions ignore the bound.
MAX_WHITESPACE = 1
END_OF_THOUGHT = "</think>"


def structural_tag(constraint: Constraint) -> str:
    """A constraint as JSON."""
    answers = [] if constraint.content is None else [tag(constraint.content)]
    if constraint.calls:
        answers.append(triggered(constraint) if constraint.trigger else calls(constraint))
    body = either(answers)
    match constraint.thinking:
        case Thinking.NONE:
            whole = body
        case Thinking.BEGUN:
            whole = after_thought("", body)
        case Thinking.OPTIONAL:
            whole = either([after_thought("<think>", body), body])
    return json.dumps({"type": "structural_tag", "format": whole})


def calls(constraint: Constraint) -> dict[str, Any]:
    """One call, or several."""
    tags = [tag(form) for form in constraint.calls]
    if constraint.separator is None:
        return either(tags)
    return {"type": "tags_with_separator", "tags": tags, "separator": constraint.separator, "at_least_one": True}


def triggered(constraint: Constraint) -> dict[str, Any]:
    """Free text with calls in it."""
    return {
        "type": "triggered_tags",
        "triggers": [constraint.trigger],
        "tags": [tag(form) for form in constraint.calls],
        "at_least_one": False,
        "stop_after_first": constraint.separator is None,
    }


def tag(form: JsonForm) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": json.loads(form.schema), "max_whitespace_cnt": MAX_WHITESPACE}
    return {"type": "tag", "begin": form.before, "content": schema, "end": form.after}


def after_thought(opening: str, body: dict[str, Any]) -> dict[str, Any]:
    thought = {"type": "tag", "begin": opening, "content": {"type": "any_text"}, "end": "</think>"}
    return {"type": "sequence", "elements": [thought, GAP, body]}


def either(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


class ConstrainedCompletions:
    """Follows constrained completions with automata of our own.

    * A schema that we cannot compile within bounds never reaches the server.
    """

    def __init__(self, model: Path) -> None:
        self._compiler = Compiler(model, any_whitespace=True)

    def prepare(self) -> None:
        """Read the vocabulary, which takes a second."""
        self._compiler.prepare()

    def close(self) -> None:
        self._compiler.close()

    async def follow(self, request: SampleRequest) -> "ConstrainedCompletion | None":
        """Follow one completion; None if the request is not constrained. Raises ConstraintRefused."""
        if request.constraint is None:
            return None
        compiled = asyncio.shield(asyncio.wrap_future(self._compiler.future(request.constraint)))
        try:
            automaton = await asyncio.wait_for(compiled, COMPILE_SECONDS)
        except TimeoutError:
            raise ConstraintRefused(f"The schema was not compiled within {COMPILE_SECONDS:.0f} seconds.") from None
        return ConstrainedCompletion(request, automaton.copy(request.params.stop_token_ids))


class ConstrainedCompletion:
    """One completion, whose tokens come in order.

    * Servers compute log-probs after they have ruled tokens out. So tokens are held back until the completion has
      ended and has been scored again.
    * Free text before a call is not held back, and neither is reasoning that the prompt has begun: only control tokens
      were ruled out there.
    * Forced tokens are marked. Where the server's grammar allows more than ours, the rest is not marked.
    * Tokens whose raw log-probs cannot be known are marked as forced too, so that they teach nothing: all that are held
      if the server's weights were replaced meanwhile, and the last part of what ends free text, if that is several
      tokens.
    """

    def __init__(self, request: SampleRequest, automaton: Automaton) -> None:
        assert request.constraint is not None
        self._request = request
        self._automaton = automaton
        self._is_followed = True
        thinks = request.constraint.thinking is Thinking.BEGUN
        self._ends_free_text = (request.constraint.trigger or (END_OF_THOUGHT if thinks else "")).encode()
        self._is_free = bool(self._ends_free_text)
        self._free_text = b""
        self._drawn_by: set[str] = set()
        self._ids = list(request.prompt_ids)
        self.held: list[SampledToken] = []
        """Tokens whose log-probs are not the raw ones yet."""

    def add(self, piece: SampledPiece) -> list[SampledToken]:
        """Take the next tokens. Returns those that need not be held back."""
        self._drawn_by.update(piece.weights)
        passed = []
        for token in piece.tokens:
            forced = self._is_forced(token.token_id)
            self._ids.append(token.token_id)
            if self._is_free:
                passed.append(replace(token, forced=forced or self._ends_in_parts(token.token_id)))
            else:
                self.held.append(replace(token, forced=forced))
        return passed

    def scoring(self) -> ScoreRequest:
        """The request for the raw log-probs of the tokens that are held."""
        top_k = self._request.params.top_logprobs
        owner = self._request.owner
        priority = self._request.priority
        return ScoreRequest(self._ids, len(self.held), top_k=top_k, owner=owner, priority=priority)

    def scored(self, answer: ServerScores) -> list[SampledToken]:
        """The tokens that are held, with their raw log-probs."""
        scores = answer.scores
        is_of_others = bool(self._drawn_by and answer.weights) and self._drawn_by != set(answer.weights)
        top: list[tuple[tuple[int, float], ...]] = [()] * len(self.held)
        if scores.top is not None:
            rows = zip(scores.top.ids.tolist(), scores.top.logprobs.tolist(), strict=True)
            top = [tuple(zip(*row, strict=True)) for row in rows]
        raw = zip(self.held, scores.logprobs, top, strict=True)
        return [
            replace(token, logprob=logprob, top=likeliest, forced=token.forced or is_of_others)
            for token, logprob, likeliest in raw
        ]

    def _ends_in_parts(self, token: int) -> bool:
        """Whether a token is the last part of what ends free text. Others that go on wrongly were ruled out."""
        spelling = self._automaton.spelling(token)
        self._free_text += spelling
        self._is_free = self._ends_free_text not in self._free_text
        # The next token may complete what has begun.
        self._free_text = self._free_text[-len(self._ends_free_text) :]
        return not self._is_free and self._ends_free_text not in spelling

    def _is_forced(self, token: int) -> bool:
        if not self._is_followed:
            return False
        try:
            allowed = self._automaton.allowed()
        except ConstraintRefused:
            self._is_followed = False
            return False
        self._is_followed = self._automaton.accept(token)
        return allowed.forced and bool(allowed.mask[token])
