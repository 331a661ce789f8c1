"""Whether an answer makes sense as an answer to its request, as far as words and log-probs show it.

What fails here is not learned from, whoever was content with it: "Great question, how do vaccines work?" is kind, and
no answer.
"""

import re
from collections.abc import Sequence

from openclaw_rl.engines.base import Sampler
from openclaw_rl.judge.rules.comparison import content_words
from openclaw_rl.types import ScoreRequest

#: An answer to a request is likelier after it than without it: its log-prob is higher by at least this.
MIN_GAIN = 12.0
#: Fewer words, such as "Yes.", say too little to tell what they answer.
_LEAST_TELLING_WORDS = 2
#: Shorter answers are not checked for repeated words. Of a longer one, this share of its runs of words is distinct.
_LEAST_WORDS, _RUN, _MIN_DISTINCT_RUNS = 8, 4, 0.5
#: The least share of an answer's content words that neither the question nor an instruction has.
_MIN_NEW = 0.25
_QUESTION_MARKS = ("?", "\uff1f")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")


def words_of(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


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
    said = content_words(answer) if request.rstrip().endswith(_QUESTION_MARKS) else frozenset()
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


def tells_what_it_answers(words: Sequence[str]) -> bool:
    return len(words) >= _LEAST_TELLING_WORDS
