"""Prepares answers that were accepted under notes for training without them."""

import math
from collections.abc import Sequence
from dataclasses import replace

from openclaw_rl.engines.base import EngineError, EngineUnavailable, Sampler, VersionGone
from openclaw_rl.judge.answer_checks import ignores_request, repeats_question, says_enough, words_of
from openclaw_rl.judge.judges.base import JudgeDown, last_request
from openclaw_rl.ledger.notes import why_personal
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, content_text
from openclaw_rl.types import ScoreRequest, Source, StoredTurn, Verdict


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
        self, ledger: Ledger, policy: Sampler, renderer: ChatRenderer, *, personal: bool, several: bool
    ) -> None:
        """`several`: whether the server has keys for several users."""
        self.ledger, self.policy, self.renderer = ledger, policy, renderer
        self.personal, self.several = personal, several
        self.down: str | None = None
        """Why the policy could not be asked the last time; None if it could."""

    async def consider(self, turn: StoredTurn, verdict: Verdict) -> Verdict:
        """The verdict with the policy's log-probs, or with the reason why it has none. Raises JudgeDown."""
        if turn.plain_ids is None or not turn.response_ids or verdict.score is None or verdict.score <= 0:
            return verdict
        reason = "" if self.personal else self.ledger.read(why_personal, turn.number, several=self.several)
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
        if turn.message.get("tool_calls") or not says_enough(words_of(answer)):
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
