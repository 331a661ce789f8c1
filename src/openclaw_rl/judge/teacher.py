"""Scores a response again, to be learned from: with a teacher that knows a hint, or after the prompt without notes.

The teacher scores the recorded ids of the response, end of turn included, after the recorded ids of the prompt with the
hint in the last user message that the client keeps in its history. Recorded ids are never tokenised again.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openclaw_rl.aio import gather_or_cancel
from openclaw_rl.engines.base import EngineError, EngineUnavailable, Sampler, VersionGone
from openclaw_rl.judge.answer_checks import HintCheck, ignores_request, repeats_question, says_enough, words_of
from openclaw_rl.judge.judges.base import JudgeDown, last_request
from openclaw_rl.ledger.notes import why_personal
from openclaw_rl.ledger.packing import common_prefix
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.methods.base import ONE_HINT, TeacherRequest
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message, content_text
from openclaw_rl.rendering.clients import is_passing
from openclaw_rl.types import Hint, Ids, Numbers, ScoreRequest, Source, StoredTurn, TopTokens, Verdict

#: The last user message with a hint.
HINTED = "{words}\n\n[user's hint / instruction]\n{hint}"


class NotTaught(ValueError):
    """The teacher gives nothing to learn from; the message says why."""


class NoHintedPrompt(ValueError):
    """The hint cannot be inserted into this turn's prompt; the message says why."""


class Teacher:
    """Scores responses with a sampler that has the policy's vocabulary."""

    def __init__(
        self,
        sampler: Sampler,
        renderer: ChatRenderer,
        wanted: TeacherRequest = ONE_HINT,
        policy: Sampler | None = None,
        hint_check: HintCheck | None = None,
    ) -> None:
        """`policy` is the sampler that answered the turns, if it is not the teacher.

        `hint_check`, if given, refuses hints under which the teacher itself answers badly.
        """
        self.sampler, self.renderer, self.wanted = sampler, renderer, wanted
        self.policy, self.hint_check = policy or sampler, hint_check
        self.down: str | None = None
        """Why it could not be asked the last time; None if it could."""

    async def consider(self, turn: StoredTurn, hints: Sequence[Hint]) -> tuple[Hint, ...]:
        """The same hints; those that the teacher is asked about have its log-probs. Raises JudgeDown."""
        # Concurrently, so that the prompts share the prefill before the hint.
        taught = await gather_or_cancel([self.teach(turn, text) for text in self.wanted.chosen(hints)])
        by_text = {hint.text: hint for hint in taught}
        return tuple(by_text.get(hint.text, hint) for hint in hints)

    async def teach(self, turn: StoredTurn, hint: str) -> Hint:
        """The hint with the teacher's log-probs, or with the reason why it has none. Raises JudgeDown."""
        try:
            taught = await self._teach(turn, hint)
        except EngineUnavailable as error:
            self.down = str(error)
            raise JudgeDown(str(error)) from error
        except (NoHintedPrompt, NotTaught, EngineError) as error:
            return Hint(hint, problem=str(error))
        self.down = None
        return taught

    async def _teach(self, turn: StoredTurn, hint: str) -> Hint:
        top = self.wanted.top
        prompt = hinted_prompt(self.renderer, turn, hint)
        if self.hint_check is not None:
            alone = hint_alone(self.renderer, hint)
            if problem := await self.hint_check.problem(prompt, alone, hint, turn.session.owner):
                raise NotTaught(problem)
        targets = top_tokens(turn.top, top, "the policy's top tokens were not recorded") if top else None
        request = ScoreRequest(
            [*prompt, *turn.response_ids],
            len(turn.response_ids),
            top_k=top,
            targets=targets,
            owner=turn.session.owner,
        )
        scores = await self.sampler.score(request)
        if len(scores.logprobs) != len(turn.response_ids) or not all(map(math.isfinite, scores.logprobs)):
            raise NotTaught("the teacher's log-probs are not one finite number per token")
        if not top:
            return Hint(hint, scores.logprobs)
        teacher_top = top_tokens(scores.top, top, "the teacher's engine does not return its top tokens")
        policy_scores = await self._policy_scores(turn, teacher_top) if self.wanted.policy_scores else None
        return Hint(hint, scores.logprobs, top=scores.top, of_policy_top=scores.targets, policy_scores=policy_scores)

    async def _policy_scores(self, turn: StoredTurn, targets: Ids) -> Numbers:
        """The log-probs that the policy which answered gives to these tokens."""
        ids = [*turn.prompt_ids, *turn.response_ids]
        request = ScoreRequest(ids, len(turn.response_ids), turn.version, targets=targets, owner=turn.session.owner)
        try:
            scores = await self.policy.score(request)
        except VersionGone as error:
            # A version that is gone does not come back.
            raise NotTaught(f"the policy that answered is no longer loaded: {error}") from error
        if scores.targets is None:
            raise NotTaught("the policy's engine does not give log-probs of chosen tokens, as subset teacher needs")
        return scores.targets


def top_tokens(top: TopTokens | None, k: int, problem: str) -> Ids:
    """The first k ids at each position. Raises NotTaught with the problem if there are fewer."""
    if top is None or top.ids.shape[1] < k:
        raise NotTaught(problem)
    return top.ids[:, :k]


def hinted_prompt(renderer: ChatRenderer, turn: StoredTurn, hint: str) -> list[int]:
    """The ids of a turn's prompt with a hint in its last user message. Raises NoHintedPrompt."""
    if not turn.response_ids:
        raise NoHintedPrompt("the response is empty")
    tools = [tool for message in turn.messages if message["role"] == "tools" for tool in message["tools"]]
    messages = [message for message in turn.messages if message["role"] != "tools"]
    try:
        plain = renderer.prompt(renderer.text(messages, tools)).ids
        hinted = renderer.prompt(renderer.text(with_hint(messages, hint), tools)).ids
    except ChatError as error:
        raise NoHintedPrompt(str(error)) from error
    return graft(turn.prompt_ids, plain, hinted)


def hint_alone(renderer: ChatRenderer, hint: str) -> list[int]:
    """The ids of a prompt in which a user says nothing but a hint. Raises NoHintedPrompt."""
    try:
        return list(renderer.prompt(renderer.text([hint_message("", hint)], [])).ids)
    except ChatError as error:
        raise NoHintedPrompt(str(error)) from error


def with_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    """A conversation with the hint at the end of its last user message, context that the client adds aside."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user" and not is_passing(message)]
    if not users:
        raise NoHintedPrompt("there is no user message for the hint")
    words = content_text(messages[users[-1]].get("content"))
    changed: dict[str, Any] = {**messages[users[-1]], **hint_message(words, hint)}
    return [*messages[: users[-1]], changed, *messages[users[-1] + 1 :]]


def hint_message(words: str, hint: str) -> Message:
    """What a user says, with a hint."""
    return {"role": "user", "content": HINTED.format(words=words, hint=hint)}


def graft(recorded: Sequence[int], plain: Sequence[int], hinted: Sequence[int]) -> list[int]:
    """Apply to `recorded` the change from `plain` to `hinted`.

    `recorded` and `plain` may differ elsewhere (recorded history, template options), but must agree around the change.
    """
    before = common_prefix(plain, hinted)
    after = min(common_suffix(plain, hinted), len(plain) - before, len(hinted) - before)
    new = hinted[before : len(hinted) - after]
    # At least one token beside the change must agree, to locate it.
    if common_prefix(plain, recorded) >= max(1, len(plain) - after):
        return [*recorded[:before], *new, *recorded[len(plain) - after :]]
    if common_suffix(plain, recorded) >= min(len(plain), len(plain) - before + 1):
        shift = len(recorded) - len(plain)
        return [*recorded[: before + shift], *new, *recorded[len(plain) - after + shift :]]
    raise NoHintedPrompt("the conversation no longer renders to the recorded prompt")


def common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    return common_prefix(one[::-1], other[::-1])


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
