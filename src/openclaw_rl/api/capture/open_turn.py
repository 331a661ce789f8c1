"""A request that is being answered and will be recorded."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openclaw_rl.api.capture.prompts import ChosenPrompt
from openclaw_rl.api.metrics import ServerMetrics
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import Message
from openclaw_rl.types import (
    EpisodeMode,
    SampledToken,
    SamplingParams,
    SessionKey,
    TopTokens,
    Turn,
    TurnKind,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnsweredChoice:
    """One choice of an answered request."""

    tokens: Sequence[SampledToken]
    message: Mapping[str, Any]
    finish_reason: str
    details: Mapping[str, Any]
    """How the choice was given, beyond the message."""


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request whose choices have all ended."""

    completion: str
    created: float
    version: int
    sampling: SamplingParams
    choices: Sequence[AnsweredChoice]


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A request that becomes a turn when it is answered, or several turns if it asks for n > 1 choices."""

    ledger: Ledger
    metrics: ServerMetrics
    continued: set[int]
    """The turns that open requests continue; `close` removes this one's parent."""
    chosen: ChosenPrompt
    session: SessionKey
    session_source: str
    kind: TurnKind
    kind_reason: str
    messages: list[Message]
    parent: int | None
    request_key: bytes
    ends_session: bool
    episode: EpisodeMode | None
    details: Mapping[str, Any]
    """What is recorded of the request beyond its messages."""

    async def record(self, answered: AnsweredRequest) -> None:
        """Store the choices. Returns when they are durable, or when storing them has failed; never raises for that."""
        try:
            turns = [self._turn(answered, index) for index in range(len(answered.choices))]
            await self.ledger.capture(
                turns,
                self.session_source,
                self.parent,
                self.chosen.shared_tokens,
                done=self.ends_session,
                episode=self.episode,
            )
            self.metrics.captured_turns[self.kind].inc(len(turns))
        except LedgerError as error:
            log.warning("A turn is not captured: %s", error)
            self.metrics.lost_turns.inc(len(answered.choices))
        except Exception:
            # A bug in capture must not cost the client its answer.
            log.exception("A turn is not captured.")
            self.metrics.lost_turns.inc(len(answered.choices))

    def close(self) -> None:
        """The request is over, answered or not."""
        if self.parent is not None:
            self.continued.discard(self.parent)

    def _turn(self, answered: AnsweredRequest, index: int) -> Turn:
        choice = answered.choices[index]
        return Turn(
            completion=answered.completion,
            choice=index,
            session=self.session,
            kind=self.kind,
            kind_reason=self.kind_reason,
            version=answered.version,
            messages=self.messages,
            message=choice.message,
            prompt_ids=self.chosen.prompt.ids,
            response_ids=[token.token_id for token in choice.tokens],
            logprobs=[token.logprob for token in choice.tokens],
            sampling=answered.sampling,
            finish_reason=choice.finish_reason,
            continuation=self.chosen.continuation,
            parent=self.parent,
            request_key=self.request_key,
            end_key=history.extend(self.request_key, choice.message),
            top=top_tokens(choice.tokens, answered.sampling.top_logprobs),
            forced=[token.forced for token in choice.tokens],
            notes=self.chosen.notes,
            notes_from=self.chosen.notes_from,
            plain_ids=self.chosen.plain_ids,
            created=answered.created,
            details={**self.details, **choice.details},
        )


def top_tokens(tokens: Sequence[SampledToken], k: int) -> TopTokens | None:
    """The k likeliest tokens at each position; None if they were not asked for or the sampler did not return them."""
    if not k or not tokens or any(len(token.top) < k for token in tokens):
        return None
    numbers = np.array([token.top[:k] for token in tokens])
    return TopTokens(numbers[:, :, 0].astype(np.int32), numbers[:, :, 1].astype(np.float32))
