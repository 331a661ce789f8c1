"""An environment whose rewards differ for any model: two answers are asked for, and a digest of them decides."""

import zlib
from collections.abc import Iterator, Sequence
from itertools import count

from openclaw_rl.envs.base import Message, Outcome, Step, Task, Tool


class Varied:
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return (Task(f"{split} {seed} {number}") for number in count())

    def open(self, task: Task) -> "VariedEpisode":
        return VariedEpisode()


class VariedEpisode:
    tools: Sequence[Tool] = ()

    def __init__(self) -> None:
        self.said: list[str] = []

    async def start(self) -> list[Message]:
        return [{"role": "user", "content": "Say something."}]

    async def step(self, answer: Message) -> Step:
        self.said.append(answer["content"] or "")
        return Step([{"role": "user", "content": "Go on."}], done=len(self.said) == 2)

    async def outcome(self) -> Outcome:
        reward = zlib.crc32("".join(self.said).encode()) % 97 / 96
        return Outcome(reward, reward == 1)

    async def close(self) -> None:
        """Nothing to close."""
