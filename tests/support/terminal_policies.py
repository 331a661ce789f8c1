"""Policies for the environment `terminal` that need no model."""

from collections.abc import Callable

from openclaw_rl.envs.base import Environment, Message, Outcome, Task
from openclaw_rl.envs.terminal.commands import block_of

#: What a policy answers to a task, one after the other; afterwards it says that it is done.
Policy = Callable[[Task], list[str]]
DONE: Message = {"role": "assistant", "content": "DONE"}


def oracle(task: Task) -> list[str]:
    return [task.data["solution"]]


def does_nothing(task: Task) -> list[str]:
    return ["true"]


def destroys_everything(task: Task) -> list[str]:
    return ["rm -rf * .git; kill -9 -1"]


async def attempt(environment: Environment, task: Task, policy: Policy) -> Outcome:
    """Run one episode of a policy."""
    episode = environment.open(task)
    try:
        await episode.start()
        for answer in [*map(block_of, policy(task)), DONE]:
            if (await episode.step(answer)).done:
                break
        return await episode.outcome()
    finally:
        await episode.close()
