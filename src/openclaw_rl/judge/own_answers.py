"""Looks at the teacher's own answers under a hint: a teacher that answers badly has nothing to teach.

A small teacher that is told "Be warm, kind and encouraging." may forget the question. The policy would learn that.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.engines.base import Sampler
from openclaw_rl.judge.case import as_text, last_request
from openclaw_rl.judge.reader.relevance import names
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION, Priority, SampleRequest, SamplingParams, StoredTurn

#: Tokens of an own answer: enough to see what it is about.
MAX_TOKENS = 48
#: Own answers are drawn as those of users are: the likeliest one is better than most.
TEMPERATURE = 0.7
#: Own answers after which a hint is trusted or refused without another one, and after which it can be refused.
MOST_LOOKS, FEWEST_LOOKS = 16, 12
#: The share of bad own answers above which a hint is refused.
MOST_BAD = 1 / 3
#: Hints that are remembered, the last ones.
_MOST_HINTS = 256
#: The share of content words, of the smaller set, that an answer has in common with the request and the response.
_MIN_OVERLAP = 0.15
#: An answer that has this share of the request's content words is about it, also if it has little else in common.
_MIN_NAMED = 0.5
#: Texts with fewer content words are about anything.
_LEAST_NAMES = 3
#: Shorter answers are not checked for repeated words. Of a longer one, this share of its runs of words is distinct.
_LEAST_WORDS, _RUN, _MIN_DISTINCT_RUNS = 8, 4, 0.5
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")


@dataclass(slots=True)
class HintRecord:
    """What is known about a hint."""

    looks: int = 0
    bad: int = 0

    @property
    def refused(self) -> bool:
        return self.looks >= FEWEST_LOOKS and self.bad > MOST_BAD * self.looks


class OwnAnswers:
    """Asks the teacher for its own answers under hints, and refuses hints under which they are bad.

    - A turn is refused if the teacher's own answer to it is empty, repeats itself or is about something else.
    - A hint with which that happened in more than a third of at least twelve turns is refused in all turns.
    - At most sixteen answers of 48 tokens are sampled for a hint, as background work.
    """

    def __init__(self, sampler: Sampler, renderer: ChatRenderer) -> None:
        self.sampler, self.renderer = sampler, renderer
        self._records: OrderedDict[str, HintRecord] = OrderedDict()

    async def problem(self, prompt: Sequence[int], turn: StoredTurn, hint: str) -> str:
        """Why a hint must not be taught in a turn; empty if it may. `prompt` has the hint. Raises EngineError."""
        record = self._record(hint)
        fault = ""
        if record.looks < MOST_LOOKS and not record.refused:
            answer = await self._answer(prompt, turn, record.looks)
            fault = fault_of(answer, last_request(turn.messages), as_text(turn.message))
            record.looks += 1
            record.bad += bool(fault)
        if record.refused:
            return f"the teacher's own answers with this hint are bad in {record.bad} of {record.looks} turns"
        return f"the teacher's own answer with the hint {fault}" if fault else ""

    def _record(self, hint: str) -> HintRecord:
        record = self._records.setdefault(hint, HintRecord())
        self._records.move_to_end(hint)
        if len(self._records) > _MOST_HINTS:
            self._records.popitem(last=False)
        return record

    async def _answer(self, prompt: Sequence[int], turn: StoredTurn, seed: int) -> str:
        room = self.sampler.limits.max_context_tokens - len(prompt)
        stops = frozenset(self.renderer.tokenizer.eos_ids)
        params = SamplingParams(min(MAX_TOKENS, max(1, room)), TEMPERATURE, seed=seed, stop_token_ids=stops)
        request = SampleRequest(
            list(prompt), params, version=BASE_VERSION, priority=Priority.BACKGROUND, owner=turn.session.owner
        )
        ids = [token.token_id async for tokens in self.sampler.sample(request) for token in tokens]
        return self.renderer.tokenizer.backend.decode(ids, skip_special_tokens=True)


def fault_of(answer: str, request: str, response: str) -> str:
    """What is wrong with an answer to `request`, to which `response` was given before; empty if nothing is."""
    words = [word.lower() for word in _WORD.findall(answer)]
    if not words:
        return "is empty"
    runs = [tuple(words[place : place + _RUN]) for place in range(len(words) - _RUN + 1)]
    if len(words) >= _LEAST_WORDS and len(set(runs)) < _MIN_DISTINCT_RUNS * len(runs):
        return "repeats itself"
    said, asked = names(answer), names(request)
    about = asked | names(response)
    smaller = min(len(said), len(about))
    named = bool(asked) and len(said & asked) >= _MIN_NAMED * len(asked)
    if smaller >= _LEAST_NAMES and len(said & about) < _MIN_OVERLAP * smaller and not named:
        return "is about something else"
    return ""
