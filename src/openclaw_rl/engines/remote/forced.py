"""Which tokens a constraint forced, where the server that sampled them does not say."""

import asyncio
from dataclasses import replace
from pathlib import Path

from openclaw_rl.engines.constraints.automaton import Automaton
from openclaw_rl.engines.constraints.compiler import COMPILE_SECONDS, Compiler
from openclaw_rl.engines.errors import ConstraintRefused
from openclaw_rl.types import SampledToken, SampleRequest


class ForcedTokens:
    """Follows constrained completions with an automaton of our own.

    * A schema that we cannot compile within bounds never reaches the server.
    * Where the server's grammar allows more than ours, such as whitespace, the rest of the completion is not marked.
    """

    def __init__(self, model: Path) -> None:
        self._compiler = Compiler(model)

    def prepare(self) -> None:
        """Read the vocabulary, which takes a second."""
        self._compiler.prepare()

    def close(self) -> None:
        self._compiler.close()

    async def marker(self, request: SampleRequest) -> "Marker | None":
        """What marks the tokens of a completion; None if the request is not constrained. Raises ConstraintRefused."""
        if request.constraint is None:
            return None
        compiled = asyncio.shield(asyncio.wrap_future(self._compiler.future(request.constraint)))
        try:
            automaton = await asyncio.wait_for(compiled, COMPILE_SECONDS)
        except TimeoutError:
            raise ConstraintRefused(f"The schema was not compiled within {COMPILE_SECONDS:.0f} seconds.") from None
        return Marker(automaton.copy(request.params.stop_token_ids))


class Marker:
    """Marks the tokens of one completion, which come in order."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton: Automaton | None = automaton

    def mark(self, tokens: list[SampledToken]) -> list[SampledToken]:
        return [replace(token, forced=self._is_forced(token.token_id)) for token in tokens]

    def _is_forced(self, token: int) -> bool:
        if self._automaton is None:
            return False
        try:
            allowed = self._automaton.allowed()
        except ConstraintRefused:
            self._automaton = None
            return False
        if not self._automaton.accept(token):
            self._automaton = None
        return allowed.forced and bool(allowed.mask[token])
