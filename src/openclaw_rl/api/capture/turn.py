"""A request that is being answered and will be recorded: its turn, and its prompt with recorded tokens and notes."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from openclaw_rl.api.capture.classify import FROM_HISTORY, kind_of, truthy
from openclaw_rl.api.capture.note_giver import NO_NOTES, NoteGiver, RequestNotes, takes_notes
from openclaw_rl.api.reader import IncomingRequest
from openclaw_rl.api.server_metrics import ServerMetrics
from openclaw_rl.api.wire import TextRequest, TranslatedRequest
from openclaw_rl.ledger import packing, turns
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.packing import common_prefix
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import Ancestor
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import ChatRenderer, Message, RenderedPrompt, Renderer, tools_message
from openclaw_rl.rendering.response import AssistantMessage, ResponseParser
from openclaw_rl.types import (
    Continuation,
    ConversationNote,
    SampledToken,
    SamplingParams,
    SessionKey,
    TopTokens,
    Turn,
    TurnKind,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Choice:
    """One of the n answers to a request, as far as it has been sampled."""

    parser: ResponseParser | None = None
    """Reads its tokens; None if it comes as text."""
    message: AssistantMessage = field(default_factory=AssistantMessage)
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did and it is known."""
        return self.parser.stop_string if self.parser else None


@dataclass(slots=True)
class OpenTurn:
    """A request that becomes a turn when it is answered, or several turns if it asks for n > 1 choices.

    `Capture` finds out where it belongs, and `PromptMaker` chooses what the model is given.
    """

    ledger: Ledger
    metrics: ServerMetrics
    continued: set[int]
    """The turns that open requests continue; `close` removes this one's ancestor."""
    incoming: IncomingRequest
    session: SessionKey
    session_source: str
    kind: TurnKind
    kind_reason: str
    request_key: bytes
    ancestor: Ancestor | None
    """The recorded turn that it continues."""
    prompt: RenderedPrompt
    continuation: Continuation = Continuation.NEW
    shared_tokens: int = 0
    """How many tokens the prompt shares with the ancestor, from the start."""
    ids_without_notes: list[int] | None = None
    """The prompt without notes, if it has notes."""
    notes: Sequence[ConversationNote] = ()
    """The notes of a conversation that begins with this turn."""
    notes_from: int | None = None
    """The turn with which the conversation's notes began, if it was an earlier one."""

    @property
    def is_named(self) -> bool:
        """Whether the client named the session; otherwise the session was recognised by its history."""
        return self.session_source != FROM_HISTORY

    @property
    def is_chat(self) -> bool:
        """Whether it is a main turn of a chat, and not a text that is continued."""
        return self.kind is TurnKind.MAIN and not isinstance(self.incoming.request, TextRequest)

    @property
    def parent(self) -> int | None:
        return self.ancestor.number if self.ancestor else None

    def answered(
        self,
        index: int,
        choice: Choice,
        *,
        completion: str,
        created: float,
        version: int,
        sampling: SamplingParams,
        cached_tokens: int,
        usage: Mapping[str, int] | None = None,
    ) -> Turn:
        """The turn with one of its choices, which has ended. `usage` are the tokens of one that came as text."""
        request = self.incoming.request
        message = choice.message.body()
        given = {"cached_tokens": cached_tokens, "order": choice.message.order, "usage": usage}
        details = request.details if isinstance(request, TranslatedRequest) else {}
        return Turn(
            completion=completion,
            choice=index,
            session=self.session,
            kind=self.kind,
            kind_reason=self.kind_reason,
            version=version,
            messages=self._messages(),
            message=message,
            prompt_ids=self.prompt.ids,
            response_ids=[token.token_id for token in choice.tokens],
            logprobs=[token.logprob for token in choice.tokens],
            sampling=sampling,
            finish_reason=str(choice.finish_reason),
            continuation=self.continuation,
            parent=self.parent,
            request_key=self.request_key,
            end_key=history.extend(self.request_key, message),
            top=top_tokens(choice.tokens, sampling.top_logprobs),
            forced=[token.forced for token in choice.tokens],
            notes=self.notes,
            notes_from=self.notes_from,
            plain_ids=self.ids_without_notes,
            created=created,
            details={**details, **{name: value for name, value in given.items() if value}},
        )

    def _messages(self) -> list[Message]:
        """The messages as they are recorded: tools are the first of them."""
        messages, tools, _options = self.incoming.chat
        return [tools_message(tools), *messages] if tools else list(messages)

    async def record(self, turns: Iterable[Turn]) -> None:
        """Store the answered turns.

        Returns when they are durable, or when making or storing them has failed; never raises for that.
        """
        incoming = self.incoming
        try:
            answered = list(turns)
            await self.ledger.capture(
                answered,
                self.session_source,
                self.parent,
                self.shared_tokens,
                done=truthy(incoming.headers.get("x-session-done")) or bool(incoming.request.session_done),
                episode=incoming.episode,
            )
            self.metrics.captured_turns[self.kind].inc(len(answered))
        except LedgerError as error:
            log.warning("A turn is not captured: %s", error)
            self.metrics.lost_turns.inc(incoming.request.n or 1)
        except Exception:
            # A bug in capture must not cost the client its answer.
            log.exception("A turn is not captured.")
            self.metrics.lost_turns.inc(incoming.request.n or 1)

    def close(self) -> None:
        """The request is over, answered or not."""
        if self.ancestor is not None:
            self.continued.discard(self.ancestor.number)


def top_tokens(tokens: Sequence[SampledToken], k: int) -> TopTokens | None:
    """The k likeliest tokens at each position; None if they were not asked for or the sampler did not return them."""
    if not k or not tokens or any(len(token.top) < k for token in tokens):
        return None
    numbers = np.array([token.top[:k] for token in tokens])
    return TopTokens(numbers[:, :, 0].astype(np.int32), numbers[:, :, 1].astype(np.float32))


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes the prompts of one server's requests.

    Where the history of a request is a recorded turn, its recorded tokens are used, with notes and without them.
    """

    ledger: Ledger
    renderer: Renderer
    notes: NoteGiver | None

    def choose(self, turn: OpenTurn) -> None:
        """Give an open turn its notes and its prompt, which continues the turn's ancestor."""
        incoming = turn.incoming
        ancestor = turn.ancestor
        notes = self._notes(turn)
        noted: IncomingRequest | None = None
        if self.notes is not None and ancestor is None:
            noted, notes = self.notes.write_fitting(incoming, notes)
        elif self.notes is not None:
            noted = self.notes.write(incoming, notes)
        if ancestor is None:
            turn.notes = notes.notes if noted or not notes.given else ()
            if noted is not None:
                turn.prompt = noted.prompt
                turn.ids_without_notes = incoming.prompt.ids if incoming.prompt.chat is None else None
            return
        turn.notes_from = notes.began
        if not isinstance(self.renderer, ChatRenderer):
            turn.prompt, turn.continuation = (noted or incoming).prompt, Continuation.EXTENDS
            return
        recorded = self._recorded(ancestor, *self.ledger.tokens(ancestor.number))
        without_notes = recorded
        if notes.began is not None:
            plain = self.ledger.read(packing.sequence_without_notes, ancestor.number)
            without_notes = self._recorded(ancestor, plain, [])
        turn.prompt, turn.continuation = self._continue(incoming, ancestor.depth, without_notes)
        if noted is not None:
            turn.ids_without_notes = turn.prompt.ids
            turn.prompt = noted.prompt
            turn.continuation = Continuation.FORKED
            # If the ancestor was answered without notes, there are no recorded tokens that have them.
            if self.notes is not None and without_notes is not recorded and without_notes.ids != recorded.ids:
                change = partial(self.notes.messages, notes=notes)
                earlier = self._recorded(ancestor, recorded.prompt, recorded.response, change)
                added = len(noted.chat.messages) - len(incoming.chat.messages)
                turn.prompt, turn.continuation = self._continue(noted, ancestor.depth + added, earlier)
        begins_so = turn.continuation is not Continuation.FORKED and (noted is not None or without_notes is recorded)
        turn.shared_tokens = recorded.length if begins_so else common_prefix(turn.prompt.ids, recorded.ids)

    def unrecorded(self, incoming: IncomingRequest) -> RenderedPrompt:
        """The prompt of a request that is not recorded: with the owner's notes of today."""
        kind, _reason = kind_of(incoming.headers, incoming.request, incoming.chat.messages)
        if self.notes is not None and takes_notes(incoming, kind):
            with contextlib.suppress(LedgerError):
                noted, _notes = self.notes.write_fitting(incoming, self.notes.begin(incoming, probes=False))
                if noted is not None:
                    return noted.prompt
        return incoming.prompt

    def _notes(self, turn: OpenTurn) -> RequestNotes:
        """The notes of the turn's conversation."""
        if self.notes is None:
            return NO_NOTES
        used = takes_notes(turn.incoming, turn.kind)
        if turn.ancestor is not None:
            return replace(self.notes.proceed(turn.ancestor.number), used=used)
        return self.notes.begin(turn.incoming) if used else NO_NOTES

    def _continue(
        self, incoming: IncomingRequest, covered: int, turn: history.RecordedTurn
    ) -> tuple[RenderedPrompt, Continuation]:
        """The prompt of a request whose first `covered` messages end with a recorded turn's response."""
        assert isinstance(self.renderer, ChatRenderer)
        prompt, continuation = history.continue_turn(self.renderer, incoming.chat, incoming.prompt, covered, turn)
        if continuation is Continuation.REALIGNED and len(prompt.ids) >= incoming.max_context_tokens:
            # The record includes thoughts that the client left out; with them there is no room for an answer.
            return incoming.prompt, Continuation.FORKED
        return prompt, continuation

    def _recorded(
        self,
        ancestor: Ancestor,
        prompt: list[int],
        response: list[int],
        change: Callable[[Sequence[Message]], list[Message]] = list,
    ) -> history.RecordedTurn:
        """A recorded turn with these tokens; `change` is made to the messages of its request."""

        def request() -> list[Message]:
            messages = self.ledger.read(turns.request, ancestor.number)
            tools = messages[:1] if messages[0]["role"] == "tools" else []
            return [*tools, *change(messages[len(tools) :])]

        return history.RecordedTurn(
            prompt=prompt,
            response=response,
            responses=lambda: self.ledger.read(packing.responses, ancestor.number),
            request=request,
        )
