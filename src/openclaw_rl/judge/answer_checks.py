"""Whether an answer makes sense as an answer to its request, as far as words and log-probs show it.

What fails here is not learned from, whoever was content with it: "Great question, how do vaccines work?" is kind, and
no answer. A small teacher that is told "Start with a kind word." may forget the question, so its own answers under a
hint are checked too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.aio import gather_or_cancel
from openclaw_rl.engines.base import Sampler
from openclaw_rl.judge.rules.comparison import content_words
from openclaw_rl.judge.rules.phrases import WORD, ends_with_question
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION, Priority, SampledToken, SampleRequest, SamplingParams, ScoreRequest

#: An answer to a request is likelier after it than without it: its log-prob is higher by at least this.
MIN_GAIN = 12.0
#: Fewer words, such as "Yes.", say too little to tell what they answer.
_LEAST_TELLING_WORDS = 2
#: Shorter answers are not checked for repeated words. Of a longer one, this share of its runs of words is distinct.
_LEAST_WORDS, _RUN, _MIN_DISTINCT_RUNS = 8, 4, 0.5
#: The least share of an answer's content words that neither the question nor an instruction has.
_MIN_NEW = 0.25
#: Tokens of an own answer: enough to see what it is about.
MAX_TOKENS = 48
#: Own answers are drawn as those of users are: the likeliest one is better than most.
TEMPERATURE = 0.7
#: Own answers to each turn that is looked at.
LOOKS_PER_TURN = 4
#: Own answers after which a hint is trusted or refused without another one, and after which it can be refused.
MOST_LOOKS, FEWEST_LOOKS = 24, 12
#: The share of bad own answers, to a turn or with a hint, above which it is refused.
MOST_BAD = 1 / 3
#: Hints that are remembered, the last ones.
_MOST_HINTS = 256


def words_of(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def fault_of(words: Sequence[str]) -> str:
    """What is wrong with the words of an answer, whatever was asked; empty if nothing is."""
    if not words:
        return "is empty"
    runs = [tuple(words[place : place + _RUN]) for place in range(len(words) - _RUN + 1)]
    if len(words) >= _LEAST_WORDS and len(set(runs)) < _MIN_DISTINCT_RUNS * len(runs):
        return "repeats itself"
    return ""


def repeats_question(answer: str, request: str, instruction: str) -> bool:
    """Whether an answer to a question adds nothing to it, apart from what an instruction made it say.

    Answers to other requests may consist of their words: summaries, corrections.
    """
    said = content_words(answer) if ends_with_question(request) else frozenset()
    # An answer without content words may be "Yes.".
    return bool(said) and len(said - content_words(request) - content_words(instruction)) < _MIN_NEW * len(said)


async def ignores_request(
    sampler: Sampler, ids: Sequence[int], logprobs: Sequence[float], without: Sequence[int], version: int, owner: str
) -> bool:
    """Whether an answer is hardly likelier after its request than after a prompt `without` it. Raises EngineError.

    `logprobs` are those of the answer after its request, under the policy `version`.
    """
    scores = await sampler.score(ScoreRequest([*without, *ids], len(ids), version, owner=owner))
    return sum(logprobs) - sum(scores.logprobs) < MIN_GAIN


def says_enough(words: Sequence[str]) -> bool:
    """Whether an answer has enough words to tell what it answers."""
    return len(words) >= _LEAST_TELLING_WORDS


@dataclass(slots=True)
class HintRecord:
    """What is known about a hint."""

    looks: int = 0
    bad: int = 0

    @property
    def refused(self) -> bool:
        return self.looks >= FEWEST_LOOKS and self.bad > MOST_BAD * self.looks


class HintCheck:
    """Asks the teacher for its own answers under hints, and refuses hints under which they are bad.

    An answer is bad if it is empty, repeats itself, or does not depend on the request: it is hardly likelier after the
    conversation than after the hint alone.

    - A turn is refused if more than a third of the teacher's own answers to it are bad.
    - A hint with which more than a third of at least twelve answers were bad is refused in all turns.
    - At most 24 answers of 48 tokens are sampled and scored for a hint, four to a turn, as background work.
    """

    def __init__(self, sampler: Sampler, renderer: ChatRenderer) -> None:
        self.sampler, self.renderer = sampler, renderer
        self._records: OrderedDict[str, HintRecord] = OrderedDict()

    async def problem(self, prompt: Sequence[int], hint_alone: Sequence[int], hint: str, owner: str) -> str:
        """Why a hint must not be taught in a turn of an owner; empty if it may. Raises EngineError.

        `prompt` is the turn's prompt with the hint, `hint_alone` a prompt that has nothing else.
        """
        record = self._record(hint)
        faults: list[str] = []
        if record.looks < MOST_LOOKS and not record.refused:
            answers = await self._answers(prompt, record.looks, owner)
            found = await gather_or_cancel([self._fault(answer, hint_alone, owner) for answer in answers])
            faults = [fault for fault in found if fault]
            record.looks += len(answers)
            record.bad += len(faults)
        if record.refused:
            return f"{record.bad} of {record.looks} own answers of the teacher with this hint are bad"
        if len(faults) > MOST_BAD * LOOKS_PER_TURN:
            return f"{len(faults)} of {LOOKS_PER_TURN} own answers of the teacher are bad: one {faults[0]}"
        return ""

    def _record(self, hint: str) -> HintRecord:
        record = self._records.setdefault(hint, HintRecord())
        self._records.move_to_end(hint)
        if len(self._records) > _MOST_HINTS:
            self._records.popitem(last=False)
        return record

    async def _answers(self, prompt: Sequence[int], seed: int, owner: str) -> list[list[SampledToken]]:
        room = self.sampler.limits.max_context_tokens - len(prompt)
        stops = frozenset(self.renderer.tokenizer.eos_ids)
        params = SamplingParams(min(MAX_TOKENS, max(1, room)), TEMPERATURE, seed=seed, stop_token_ids=stops)
        request = SampleRequest(
            list(prompt), params, LOOKS_PER_TURN, version=BASE_VERSION, priority=Priority.BACKGROUND, owner=owner
        )
        answers: list[list[SampledToken]] = [[] for _ in range(LOOKS_PER_TURN)]
        async for tokens in self.sampler.sample(request):
            for token in tokens:
                answers[token.index].append(token)
        return answers

    async def _fault(self, answer: Sequence[SampledToken], hint_alone: Sequence[int], owner: str) -> str:
        ids = [token.token_id for token in answer]
        words = words_of(self.renderer.tokenizer.backend.decode(ids, skip_special_tokens=True))
        fault = fault_of(words)
        if fault or not says_enough(words):
            return fault
        logprobs = [token.logprob for token in answer]
        ignores = await ignores_request(self.sampler, ids, logprobs, hint_alone, BASE_VERSION, owner)
        return "does not depend on the request" if ignores else ""
