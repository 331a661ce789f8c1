"""Runs episodes of a verifiers environment. The interpreter that has verifiers runs this file; it imports nothing of ours.

The first line of standard input is a JSON object with the settings. Every further line allows one more group to begin.
Standard output has one JSON object a line: first `{"ready": true}`, then one for each attempt that ended, with the
session that the server knows it by and a reward or an error. Everything else that is printed goes to standard error.
The program and all that it started end when standard input closes.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_environment

#: The variable that holds the server's key. A key does not belong into arguments, which others can read.
KEY_VARIABLE = "OPENCLAW_RL_API_KEY"


class Results:
    """The lines that our side reads. Whatever the environment prints must not get between them."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()


def environment(settings: dict[str, Any]) -> Any:
    """The environment by its name, with every agent on this machine and the plain chat loop where none is named."""
    kind = environment_class(settings["name"])
    config_kind = concrete_type(kind, EnvConfig) or EnvConfig
    roles = agent_config_fields(config_kind.model_validate({"taskset": {"id": settings["name"]}}))
    agent = {"runtime": {"type": "subprocess"}, "max_turns": settings["max_turns"]}
    agents = {name: agent if role.harness else agent | {"harness": {"id": "null"}} for name, role in roles.items()}
    timeout = {"episode": settings["episode_timeout"]}
    return load_environment(
        config_kind.model_validate({"taskset": {"id": settings["name"]}, "timeout": timeout, **agents})
    )


def tasks(env: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """The tasks to attempt: shuffled by the seed where there is an end, and from the start again if there are too few."""
    taskset, count = env.taskset, settings["tasks"]
    if not taskset.bounded:
        return itertools.islice(iter(taskset), count)
    return itertools.islice(itertools.cycle(list(taskset.shuffle(seed=settings["seed"]))), count)


def result(trace: Any, group: str, several: bool) -> dict[str, Any]:
    """What became of one agent's attempt. An error is never a reward. Several agents are several groups."""
    data = trace.task.data
    ended = {"session": trace.id, "task": data.id or data.name or str(data.idx)}
    if not trace.agent.trainable:
        return ended | {"error": "this environment does not train the agent"}
    ended["group"] = f"{group}-{trace.agent.name}" if several else group
    if trace.ok and trace.rewards and all(reward is not None for reward in trace.rewards.values()):
        return ended | {"reward": float(trace.reward)}
    errors = [error.message for error in trace.errors] or ["it was not scored"]
    return ended | {"error": errors[-1]}


async def attempt(env: Any, slot: Any, context: ModelContext, group: str, results: Results) -> None:
    episode = await env.run_slot(slot, context)
    for trace in episode.traces:
        results.write(result(trace, group, several=len(agent_config_fields(env.config)) > 1))
    if not episode.traces:
        errors = [error.message for error in episode.errors] or ["no agent ran"]
        results.write({"session": None, "group": group, "error": errors[-1]})


async def run(settings: dict[str, Any], results: Results) -> None:
    """Attempt the tasks, each as often as a group is large. A group begins when our side allows it."""
    allowed = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    threading.Thread(target=listen, args=(lambda: loop.call_soon_threadsafe(allowed.release),), daemon=True).start()
    env = environment(settings)
    client = EvalClientConfig(base_url=settings["url"], api_key_var=KEY_VARIABLE, headers=settings["headers"])
    sampling = {name: settings[name] for name in ("temperature", "max_tokens") if settings[name] is not None}
    context = ModelContext(settings["model"], client, SamplingConfig.model_validate(sampling))
    free = asyncio.Semaphore(settings["parallel"])

    async def bounded(slot: Any, group: str) -> None:
        try:
            await attempt(env, slot, context, group, results)
        finally:
            free.release()

    async with env.serving(), asyncio.TaskGroup() as running:
        results.write({"ready": True})
        for number, task in enumerate(tasks(env, settings)):
            await allowed.acquire()
            for slot in env.slots(task, settings["group"]):
                await free.acquire()
                running.create_task(bounded(slot, f"{settings['run']}-{number}"))


def listen(allow: Callable[[], object]) -> None:
    """Read what our side allows. If it is gone or wants this to stop, standard input closes: end at once."""
    for _line in sys.stdin:
        allow()
    os.killpg(0, signal.SIGTERM)


def main() -> None:
    results = Results()
    asyncio.run(run(json.loads(sys.stdin.readline()), results))


if __name__ == "__main__":
    main()
