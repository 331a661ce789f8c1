"""Notes in judging: what users wish, and answers under notes as lessons for the policy alone."""

import math
from collections.abc import Sequence
from dataclasses import replace

from openclaw_rl.engines.base import EngineError, EngineUnavailable, Sampler, VersionGone
from openclaw_rl.judge.case import Case, last_request
from openclaw_rl.judge.errors import JudgeDown
from openclaw_rl.judge.rules import read_wishes
from openclaw_rl.judge.sense import ignores_request, repeats_question, tells_what_it_answers, words_of
from openclaw_rl.ledger.note_keeper import NoteKeeper
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, content_text
from openclaw_rl.rendering.clients import is_passing, message_words
from openclaw_rl.types import HeardWishes, ScoreRequest, Source, StoredTurn, Verdict, Wish


def wishes_around(turn: StoredTurn) -> HeardWishes:
    """The lasting wishes in what the user said after a turn, in explicit feedback on it, and as the conversation began.

    Results of tools yield none, and neither do episodes, where an environment speaks.
    """
    if turn.episode is not None:
        return HeardWishes()
    case = Case.of(turn)
    said = [content_text(message.get("content")) for message in case.next_state if message.get("role") == "user"]
    said += [word.text for word in case.feedback if word.source is Source.EXPLICIT and word.text]
    replied = [wish for text in said for wish in read_wishes(text, case.request, case.response)]
    began = [] if any(message["role"] == "assistant" for message in turn.messages) else turn.messages
    openings = [message_words(message) for message in began if message["role"] == "user" and not is_passing(message)]
    asked = [wish for text in openings for wish in read_wishes(text)]
    return HeardWishes(last_of_each(asked), last_of_each(replied))


def last_of_each(wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """The lasting ones among wishes. What was said last counts."""
    kept: list[Wish] = []
    for wish in wishes:
        if wish.lasting:
            kept = [*(older for older in kept if not wish.replaces(older)), wish]
    return tuple(kept)


def topic_of(text: str) -> str:
    """What a note is about that somebody wrote; empty if it cannot be read as one wish."""
    wishes = read_wishes(text)
    return wishes[0].topic if len(wishes) == 1 else ""


class NoteDistiller:
    """Prepares answers that were accepted under notes for training without them.

    The policy that answered scores the response after the prompt without notes. A training step then starts from these
    log-probs, as it does from those recorded while sampling.

    - A note that is one user's own is not distilled where there are several users, unless `personal`.
    - An answer that only repeats the question, or is hardly likelier after it than after the notes alone, is not
      distilled, and its score becomes 0 unless the user gave it explicitly: the policy would learn to keep to the
      notes and to forget what was asked.
    - An answer that cannot be scored is not distilled, and the verdict says why.
    """

    def __init__(
        self, notes: NoteKeeper, policy: Sampler, renderer: ChatRenderer, *, personal: bool, several: bool
    ) -> None:
        """`several`: whether the server has keys for several users."""
        self.notes, self.policy, self.renderer = notes, policy, renderer
        self.personal, self.several = personal, several
        self.down: str | None = None
        """Why the policy could not be asked the last time; None if it could."""

    async def consider(self, turn: StoredTurn, verdict: Verdict) -> Verdict:
        """The verdict with the policy's log-probs, or with the reason why it has none. Raises JudgeDown."""
        if turn.plain_ids is None or not turn.response_ids or verdict.score is None or verdict.score <= 0:
            return verdict
        reason = "" if self.personal else self.notes.why_personal(turn.number, several=self.several)
        if reason:
            return replace(verdict, plain_problem=reason)
        try:
            if reason := await self._fault(turn):
                # An explicit score is the user's last word. What rules and models made of a reply is not.
                score = verdict.score if verdict.source is Source.EXPLICIT else 0.0
                return replace(verdict, score=score, plain_problem=reason)
            logprobs = await self._score(turn, turn.plain_ids)
        except ChatError as error:
            return replace(verdict, plain_problem=str(error))
        except VersionGone:
            return replace(verdict, plain_problem="the policy that answered is no longer loaded")
        except EngineUnavailable as error:
            self.down = str(error)
            raise JudgeDown(str(error)) from error
        except EngineError as error:
            return replace(verdict, plain_problem=str(error))
        self.down = None
        if len(logprobs) != len(turn.response_ids) or not all(map(math.isfinite, logprobs)):
            return replace(verdict, plain_problem="the policy's log-probs are not one finite number per token")
        return replace(verdict, plain_logprobs=logprobs)

    async def _fault(self, turn: StoredTurn) -> str:
        """Why an answer is not worth imitating although it was accepted; empty if it is."""
        answer = content_text(turn.message.get("content"))
        if turn.message.get("tool_calls") or not tells_what_it_answers(words_of(answer)):
            return ""
        given = "\n".join(note.text for note in turn.notes if note.given)
        if repeats_question(answer, last_request(turn.messages), given):
            return "the answer only repeats the question"
        alone = self.renderer.prompt(self.renderer.text([{"role": "user", "content": given}], [])).ids
        ids, version, owner = turn.response_ids, turn.version, turn.session.owner
        ignores = await ignores_request(self.policy, ids, turn.logprobs, alone, version, owner)
        return "the answer does not depend on the request" if ignores else ""

    async def _score(self, turn: StoredTurn, prompt: Sequence[int]) -> list[float]:
        ids = [*prompt, *turn.response_ids]
        request = ScoreRequest(ids, len(turn.response_ids), turn.version, owner=turn.session.owner)
        return (await self.policy.score(request)).logprobs
