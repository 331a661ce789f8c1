"""One attempt at a task: from the first messages of the environment to the outcome."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.client import ServerError
from openclaw_rl.envs.base import EnvFailed, Outcome, Step, Task
from openclaw_rl.envs.connection import EpisodeAnswer, PolicyServer, Sampling
from openclaw_rl.envs.host import EnvironmentHost
from openclaw_rl.envs.hosted_episode import HostedEpisode


class AttemptFailed(Exception):
    """The attempt does not count, neither as success nor as failure of the policy. The message says why."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an attempt may take, and how answers are drawn."""

    max_turns: int
    turn_seconds: float
    episode_seconds: float
    sampling: Sampling
    evaluates: bool = False


@dataclass(slots=True)
class AttemptRecord:
    """What happened in an attempt."""

    answers: list[EpisodeAnswer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outcome: Outcome | None = None
    seconds: float = 0.0

    def reward_body(self) -> dict[str, Any]:
        """The reward as the server takes it: the outcome, and the steps that have a reward or a hint of their own."""
        assert self.outcome is not None
        body: dict[str, Any] = {"reward": self.outcome.reward, "solved": self.outcome.solved}
        if self.outcome.hint:
            body["text"] = self.outcome.hint
        if steps := [
            step_body(answer.id, step)
            for answer, step in zip(self.answers, self.steps, strict=True)
            if step.reward is not None or step.hint
        ]:
            body["steps"] = steps
        return body


def step_body(answer: str, step: Step) -> dict[str, Any]:
    body: dict[str, Any] = {"id": answer}
    if step.reward is not None:
        body["reward"] = float(step.reward)
    if step.hint:
        body["text"] = step.hint
    return body


class Attempt:
    """Runs one attempt in a session of its own.

    - The assistant's messages are sent back as they were received, so the server recognises its own tokens.
    - Everything that the environment or the server does wrong raises AttemptFailed.
    - The episode is closed, whatever happened.
    """

    def __init__(self, host: EnvironmentHost, server: PolicyServer, limits: EpisodeLimits) -> None:
        self.host, self.server, self.limits = host, server, limits

    async def run(self, task: Task, session: str, seed: str) -> AttemptRecord:
        """`seed` decides how answers are drawn, together with the policy. Raises AttemptFailed and UserError."""
        began = time.monotonic()
        record = AttemptRecord()
        episode = HostedEpisode(self.host, self.limits.turn_seconds)
        limit = asyncio.timeout(self.limits.episode_seconds)
        try:
            async with limit:
                try:
                    await self._play(episode, record, task, session, random.Random(seed))
                    record.outcome = await episode.finish()
                finally:
                    await episode.close()
        except (EnvFailed, ServerError) as error:
            raise AttemptFailed(str(error)) from error
        except TimeoutError:
            if not limit.expired():
                raise
            raise AttemptFailed(f"the episode took longer than {self.limits.episode_seconds:g} seconds") from None
        record.seconds = time.monotonic() - began
        return record

    async def _play(
        self, episode: HostedEpisode, record: AttemptRecord, task: Task, session: str, draws: random.Random
    ) -> None:
        limits = self.limits
        tools, messages = await episode.start(task, session)
        while len(record.answers) < limits.max_turns:
            try:
                answer = await self.server.answer(
                    session,
                    messages,
                    tools,
                    limits.sampling,
                    seed=draws.getrandbits(31),
                    evaluates=limits.evaluates,
                    seconds=limits.turn_seconds,
                )
            except ServerError as error:
                # Before the first answer, nothing that the policy wrote can be the reason.
                if not error.is_too_long or not record.answers:
                    raise
                return
            step = await episode.step(answer.message)
            record.answers.append(answer)
            record.steps.append(step)
            if step.done:
                return
            messages += [answer.message, *step.messages]
