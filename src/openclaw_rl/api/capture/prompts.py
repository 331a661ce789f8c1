"""The prompt of a request: what the client sent, the recorded tokens that it continues, and notes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from openclaw_rl.api.capture.notes import NotedChat, NoteGiver, RequestNotes
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.packing import common_prefix
from openclaw_rl.ledger.queries import Ancestor
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import ChatRenderer, Message, RenderedPrompt
from openclaw_rl.types import Continuation, ConversationNote


@dataclass(frozen=True, slots=True)
class ChosenPrompt:
    """What the model is given, and how it continues the turn before."""

    prompt: RenderedPrompt
    continuation: Continuation
    shared_tokens: int
    """How many tokens it shares with the turn before, from the start."""
    plain_ids: list[int] | None = None
    """The prompt without notes, if it has notes."""
    notes: Sequence[ConversationNote] = ()
    """The notes of a conversation that begins with it."""
    notes_from: int | None = None
    """The turn with which the conversation's notes began, if it was an earlier one."""


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes the prompts of one server's requests.

    Where the history of a request is a recorded turn, its recorded tokens are used, with notes and without them.
    """

    ledger: Ledger
    renderer: ChatRenderer
    notes: NoteGiver | None

    def make(
        self,
        chat: history.TemplateInput,
        plain: RenderedPrompt,
        ancestor: Ancestor | None,
        notes: RequestNotes,
        max_tokens: int,
    ) -> ChosenPrompt:
        """The prompt of a chat that continues `ancestor`; `plain` is the chat rendered without notes."""
        noted = self.notes.write(chat, notes, max_tokens) if self.notes else None
        if ancestor is None:
            begins = notes.notes if noted or not notes.texts else ()
            if noted is None:
                return ChosenPrompt(plain, Continuation.NEW, 0, notes=begins)
            return ChosenPrompt(noted.prompt, Continuation.NEW, 0, plain.ids, begins)
        recorded = self.ledger.sequence(ancestor.number)
        plain_ids = recorded if notes.began is None else self.ledger.plain_sequence(ancestor.number)
        turn = self._recorded(ancestor, plain_ids)
        prompt, continuation = self._continue(chat, plain, ancestor.depth, turn, max_tokens)
        if noted is None:
            return ChosenPrompt(prompt, continuation, common_prefix(prompt.ids, recorded), notes_from=notes.began)
        without_notes = prompt.ids
        prompt, continuation = noted.prompt, Continuation.FORKED
        # If this turn was answered without notes, there are no recorded tokens that have them.
        if plain_ids != recorded:
            prompt, continuation = self._continue_noted(chat, noted, notes, ancestor, recorded, max_tokens)
        shared = common_prefix(prompt.ids, recorded)
        return ChosenPrompt(prompt, continuation, shared, without_notes, notes_from=notes.began)

    def _continue_noted(
        self,
        chat: history.TemplateInput,
        noted: NotedChat,
        notes: RequestNotes,
        ancestor: Ancestor,
        recorded: list[int],
        max_tokens: int,
    ) -> tuple[RenderedPrompt, Continuation]:
        assert self.notes is not None
        turn = self._recorded(ancestor, recorded, partial(self.notes.messages, notes=notes))
        added = len(noted.chat.messages) - len(chat.messages)
        return self._continue(noted.chat, noted.prompt, ancestor.depth + added, turn, max_tokens)

    def _continue(
        self,
        chat: history.TemplateInput,
        rendered: RenderedPrompt,
        covered: int,
        turn: history.RecordedTurn,
        max_tokens: int,
    ) -> tuple[RenderedPrompt, Continuation]:
        prompt, continuation = history.continue_turn(self.renderer, chat, rendered, covered, turn)
        if continuation is Continuation.REALIGNED and len(prompt.ids) >= max_tokens:
            # The record includes thoughts that the client left out; with them there is no room for an answer.
            return rendered, Continuation.FORKED
        return prompt, continuation

    def _recorded(
        self, ancestor: Ancestor, ids: list[int], change: Callable[[Sequence[Message]], list[Message]] = list
    ) -> history.RecordedTurn:
        """A recorded turn with these tokens; `change` is made to the messages of its request."""

        def request() -> list[Message]:
            messages = self.ledger.request(ancestor.number)
            tools = messages[:1] if messages[0]["role"] == "tools" else []
            return [*tools, *change(messages[len(tools) :])]

        return history.RecordedTurn(
            ids=ids,
            response=self.ledger.response(ancestor.number),
            request=request,
            earlier=partial(self.ledger.earlier_responses, ancestor.number),
        )
