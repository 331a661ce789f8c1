"""What the policy's base weights (or another teacher) think of a response once they know the hint.

The response's own ids are scored, end of turn included, after the prompt's own ids with the hint put into the last
user message: nothing is tokenised again that was sampled or recorded.
"""

import math
from collections.abc import Sequence
from typing import Any

from openclaw_rl.engines.base import EngineError, EngineUnavailable, Sampler
from openclaw_rl.judge.errors import JudgeDown
from openclaw_rl.ledger.packing import common_prefix
from openclaw_rl.ledger.queries import StoredTurn
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message, content_text
from openclaw_rl.types import Hint, ScoreRequest

#: How a hint is put to the teacher.
HINTED = "{words}\n\n[user's hint / instruction]\n{hint}"


class NoHintedPrompt(ValueError):
    """The hint cannot be put into this turn's prompt; the message says why."""


class Teacher:
    """Scores responses with a sampler that has the policy's vocabulary."""

    def __init__(self, sampler: Sampler, renderer: ChatRenderer) -> None:
        self.sampler, self.renderer = sampler, renderer
        self.down = ""
        """Why it could not be asked the last time, if so."""

    async def teach(self, turn: StoredTurn, hint: str) -> Hint:
        """The hint with the teacher's log-probs, or with the reason why there are none. Raises JudgeDown."""
        try:
            prompt = hinted_prompt(self.renderer, turn, hint)
            scores = await self.sampler.score(ScoreRequest([*prompt, *turn.response_ids], len(turn.response_ids)))
        except EngineUnavailable as error:
            self.down = str(error)
            raise JudgeDown(self.down) from error
        except (NoHintedPrompt, EngineError) as error:
            return Hint(hint, problem=str(error))
        self.down = ""
        if len(scores.logprobs) != len(turn.response_ids) or not all(map(math.isfinite, scores.logprobs)):
            return Hint(hint, problem="the teacher's log-probs are not one finite number a token")
        return Hint(hint, scores.logprobs)


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


def with_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    """A conversation whose last user message goes on with the hint."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise NoHintedPrompt("there is no user message to put the hint into")
    words = content_text(messages[users[-1]].get("content"))
    changed: dict[str, Any] = {**messages[users[-1]], "content": HINTED.format(words=words, hint=hint)}
    return [*messages[: users[-1]], changed, *messages[users[-1] + 1 :]]


def graft(recorded: Sequence[int], plain: Sequence[int], hinted: Sequence[int]) -> list[int]:
    """Make to `recorded` the change that leads from `plain` to `hinted`.

    The two prompts may differ elsewhere (recorded history, options of the template), but where the change is made
    they must agree.
    """
    before = common_prefix(plain, hinted)
    after = min(common_suffix(plain, hinted), len(plain) - before, len(hinted) - before)
    new = hinted[before : len(hinted) - after]
    # Some token beside the change has to be the same, or nothing says where it belongs.
    if common_prefix(plain, recorded) >= max(1, len(plain) - after):
        return [*recorded[:before], *new, *recorded[len(plain) - after :]]
    if common_suffix(plain, recorded) >= min(len(plain), len(plain) - before + 1):
        shift = len(recorded) - len(plain)
        return [*recorded[: before + shift], *new, *recorded[len(plain) - after + shift :]]
    raise NoHintedPrompt("the recorded prompt is not what the conversation renders to now")


def common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    return common_prefix(one[::-1], other[::-1])
