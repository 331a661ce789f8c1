"""An environment of your own: openclaw-rl rollout --env examples/custom_environment.py:Sums

Asks for a sum and lets the policy try twice. A right answer is worth 1, one at the second try 0.5.
"""

import random
from collections.abc import Iterator, Sequence

from openclaw_rl.envs.base import Message, Outcome, Step, Task, Tool


class Sums:
    """Tasks without end. The held-out sums are those whose numbers add up to a multiple of five."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        rng = random.Random(f"{split} {seed}")
        while True:
            a, b = rng.randint(2, 20), rng.randint(2, 20)
            if ((a + b) % 5 == 0) == (split == "held-out"):
                yield Task(f"{a}+{b}", {"a": a, "b": b})

    def open(self, task: Task) -> "Sum":
        return Sum(task.data["a"], task.data["b"])


class Sum:
    """One attempt."""

    tools: Sequence[Tool] = ()

    def __init__(self, a: int, b: int) -> None:
        self.a, self.b, self.tries, self.solved = a, b, 0, False

    async def start(self) -> list[Message]:
        return [{"role": "user", "content": f"What is {self.a} + {self.b}? Answer with the number alone."}]

    async def step(self, answer: Message) -> Step:
        self.tries += 1
        self.solved = str(self.a + self.b) in (answer["content"] or "").split()
        again: Message = {"role": "user", "content": "That is wrong. Try again."}
        hint = "" if self.solved else f"The answer is {self.a + self.b}."
        return Step([again], hint=hint, done=self.solved or self.tries == 2)

    async def outcome(self) -> Outcome:
        return Outcome(1 / self.tries if self.solved else 0.0, self.solved)

    async def close(self) -> None:
        """Nothing to close."""
