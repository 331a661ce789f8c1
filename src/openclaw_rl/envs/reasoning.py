"""The generators of `reasoning-gym` as an environment: endless questions whose answers are checked by a program.

Needs the extra `openclaw-rl[reasoning]`. One question is one turn. The reward is the score of the generator's own
checker, from 0 to 1; an attempt is solved if it is 1.

- The same split and seed give the same questions. A question belongs to one split, by a digest of its text.
- Generators whose checker runs the answer as code (`eval`, or SymPy's parser, which uses it) are refused: a model's
  answer could do anything on this machine.
"""

import hashlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Task, Tool
from openclaw_rl.envs.calls import answer_text
from openclaw_rl.envs.choices import checked_split

PACKAGE = "reasoning_gym"
MISSING = "The environment reasoning needs the package reasoning-gym: pip install 'openclaw-rl[reasoning]'"
#: Short questions with short answers, which small models can begin to learn.
DEFAULT_DATASETS = ("basic_arithmetic", "chain_sum", "count_bits", "letter_counting", "spell_backward")
#: What makes a checker dangerous: it gives an answer to something that runs code.
RUNS_ANSWER = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(\s*\w*(?:answer|solution|response)")
ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
MAX_EXAMPLES = 8
INSTRUCTION = "Answer the question. Write the final answer, and nothing else, between <answer> and </answer>."
#: One question of so many is held out, and one more is used for examples only.
SPLIT_ONE_IN = 5
#: A generator's question is a function of its seed plus the question's index, so one seed is enough.
SEED, QUESTIONS = 0, 2**31
#: Questions that are drawn before a generator is said to have none for a split.
MAX_DRAWS = 1000


class Reasoning:
    """Questions of one or several generators, with examples in the conversation."""

    def __init__(
        self,
        datasets: str | Sequence[str] = DEFAULT_DATASETS,
        examples: int = 2,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`config` holds settings of the generators, such as {"max_digits": 2}; with it, give one generator."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(MISSING)
        self._names = tuple(datasets.split(",") if isinstance(datasets, str) else datasets)
        if not isinstance(examples, int) or not 0 <= examples <= MAX_EXAMPLES:
            raise ConfigError(f"The number of examples of reasoning is from 0 to {MAX_EXAMPLES}, not {examples}.")
        if config and len(self._names) != 1:
            raise ConfigError("With config, reasoning takes one dataset, because each has settings of its own.")
        self._examples, self._config = examples, dict(config or {})
        self._datasets = {name: self._checked(name) for name in self._names}

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        checked_split("reasoning", split)
        return (self._task(split, Random(f"reasoning {split} {seed} {index}")) for index in count())

    def open(self, task: Task) -> "ReasoningEpisode":
        dataset = self._datasets[task.data["dataset"]]
        return ReasoningEpisode(dataset, dataset[task.data["index"]], task.data["messages"])

    def _task(self, split: str, random: Random) -> Task:
        name = random.choice(self._names)
        index, entry = self._draw(name, split, random)
        messages: list[Message] = [{"role": "system", "content": INSTRUCTION}]
        for _ in range(self._examples):
            _, shown = self._draw(name, "examples", random)
            messages.append({"role": "user", "content": shown["question"]})
            messages.append({"role": "assistant", "content": f"<answer>{shown['answer']}</answer>"})
        messages.append({"role": "user", "content": entry["question"]})
        return Task(f"reasoning/{split}/{name}-{index}", {"dataset": name, "index": index, "messages": messages})

    def _draw(self, name: str, split: str, random: Random) -> tuple[int, dict[str, Any]]:
        """A question of a generator that belongs to a split, and its index, from which it can be made again."""
        for _ in range(MAX_DRAWS):
            index = random.randrange(QUESTIONS)
            entry: dict[str, Any] = self._datasets[name][index]
            # Some generators have a checker and no reference answer, which an example needs.
            if split_of(entry["question"]) == split and (split != "examples" or entry["answer"] is not None):
                return index, entry
        raise ConfigError(f"The dataset {name} has no {split}: it makes too few questions, or none with an answer.")

    def _checked(self, name: str) -> Any:
        """A dataset. Refuses one that does not exist, does not take the settings, or has a dangerous checker."""
        from reasoning_gym.factory import DATASETS, create_dataset

        if name not in DATASETS:
            raise ConfigError(f"reasoning-gym has no dataset {name}; see reasoning_gym.factory.DATASETS for all.")
        if runs_answers(DATASETS[name][0]):
            raise ConfigError(f"The dataset {name} is refused: its checker runs the model's answer as code.")
        try:
            return create_dataset(name, seed=SEED, **self._config)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"The dataset {name} does not take these settings: {error}.") from None


class ReasoningEpisode:
    """One question and its answer."""

    tools: Sequence[Tool] = ()

    def __init__(self, dataset: Any, entry: Mapping[str, Any], messages: Sequence[Message]) -> None:
        self._dataset, self._entry, self._messages = dataset, entry, messages
        self._reward = 0.0

    async def start(self) -> Sequence[Message]:
        return self._messages

    async def step(self, answer: Message) -> Step:
        found = ANSWER.findall(answer_text(answer))
        self._reward = self._score(found[-1].strip()) if found else 0.0
        expected = self._entry["answer"]
        if self._reward == 1.0:
            return Step(done=True)
        problem = "The answer is wrong." if found else "There is no <answer>."
        return Step(
            hint=f"{problem} Write: <answer>{expected}</answer>" if expected is not None else problem, done=True
        )

    async def outcome(self) -> Outcome:
        return Outcome(self._reward, self._reward == 1.0)

    async def close(self) -> None:
        """Nothing to close."""

    def _score(self, answer: str) -> float:
        try:
            score = float(self._dataset.score_answer(answer, self._entry))
        except Exception as error:
            raise EnvFailed(f"reasoning-gym's checker failed: {type(error).__name__}: {error}.") from error
        if not math.isfinite(score):
            raise EnvFailed(f"reasoning-gym's checker gave {score}.")
        return min(max(score, 0.0), 1.0)


def runs_answers(dataset: type) -> bool:
    """Whether a generator's module runs a model's answer as code, by its source."""
    return bool(RUNS_ANSWER.search(inspect.getsource(sys.modules[dataset.__module__])))


def split_of(question: str) -> str:
    """The split that a question belongs to."""
    digest = int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big")
    return {0: "held-out", 1: "examples"}.get(digest % SPLIT_ONE_IN, "train")
