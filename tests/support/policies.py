"""Scripted policies for environments: functions from an episode's messages to the next answer."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from openclaw_rl.envs.base import Episode, Message, Outcome, Step

#: Gives the next answer of an attempt; `turn` counts from 0.
Policy = Callable[[Sequence[Message], int], Message]
#: No attempt of these tests needs more.
MAX_TURNS = 40


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*made: tuple[str, Any]) -> Message:
    """An answer with calls; arguments that are text are sent as they are."""
    written = [(name, arguments if isinstance(arguments, str) else json.dumps(arguments)) for name, arguments in made]
    tool_calls = [
        {"id": f"call{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(written)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


async def attempt(episode: Episode, policy: Policy) -> tuple[list[Step], Outcome]:
    """Run an episode to its end."""
    messages = list(await episode.start())
    steps: list[Step] = []
    while not steps or not steps[-1].done:
        assert len(steps) < MAX_TURNS, "the episode does not end"
        answer = policy(messages, len(steps))
        steps.append(await episode.step(answer))
        messages += [answer, *steps[-1].messages]
    outcome = await episode.outcome()
    await episode.close()
    return steps, outcome
