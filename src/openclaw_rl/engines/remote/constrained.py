"""What a server does not say about a constrained completion: its raw log-probs, and which tokens were forced."""

import asyncio
from dataclasses import replace
from pathlib import Path

from openclaw_rl.engines.constraints.automaton import Automaton
from openclaw_rl.engines.constraints.compiler import COMPILE_SECONDS, Compiler
from openclaw_rl.engines.errors import ConstraintRefused
from openclaw_rl.types import SampledToken, SampleRequest, ScoreRequest, Scores


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
    * Free text before a call is not held back: only control tokens were ruled out there.
    * Forced tokens are marked. Where the server's grammar allows more than ours, the rest is not marked.
    """

    def __init__(self, request: SampleRequest, automaton: Automaton) -> None:
        assert request.constraint is not None
        self._request, self._automaton = request, automaton
        self._is_followed = True
        self._trigger = request.constraint.trigger.encode()
        self._is_free = bool(self._trigger)
        self._free_text = b""
        self._ids = list(request.prompt_ids)
        self.held: list[SampledToken] = []
        """Tokens whose log-probs are not the raw ones yet."""

    def add(self, tokens: list[SampledToken]) -> list[SampledToken]:
        """Take the next tokens. Returns those that need not be held back."""
        passed = []
        for token in tokens:
            marked = replace(token, forced=self._is_forced(token.token_id))
            self._ids.append(token.token_id)
            if self._is_free:
                passed.append(marked)
                self._look_for_trigger(token.token_id)
            else:
                self.held.append(marked)
        return passed

    def scoring(self) -> ScoreRequest:
        """The request for the raw log-probs of the tokens that are held."""
        top_k, owner, priority = self._request.params.top_logprobs, self._request.owner, self._request.priority
        return ScoreRequest(self._ids, len(self.held), top_k=top_k, owner=owner, priority=priority)

    def scored(self, scores: Scores) -> list[SampledToken]:
        """The tokens that are held, with their raw log-probs."""
        top: list[tuple[tuple[int, float], ...]] = [()] * len(self.held)
        if scores.top is not None:
            rows = zip(scores.top.ids.tolist(), scores.top.logprobs.tolist(), strict=True)
            top = [tuple(zip(*row, strict=True)) for row in rows]
        raw = zip(self.held, scores.logprobs, top, strict=True)
        return [replace(token, logprob=logprob, top=likeliest) for token, logprob, likeliest in raw]

    def _look_for_trigger(self, token: int) -> None:
        self._free_text += self._automaton.spelling(token)
        self._is_free = self._trigger not in self._free_text
        # The next token may complete a trigger that has begun.
        self._free_text = self._free_text[-len(self._trigger) :]

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
