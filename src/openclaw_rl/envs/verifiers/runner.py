"""Runs episodes of a verifiers environment. It imports nothing of ours: the interpreter that has verifiers runs it.

The first line of standard input is a JSON object with the settings. Then each line `group` allows one more group to
begin, and `end` says that no more will. Standard output has one JSON object a line: one for each attempt that ended,
with the session that the server knows it by and a reward or an error, and one for each group that ended. Everything
else that is printed goes to standard error. The program and all that it started end when standard input closes.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_environment

#: Standard input without a buffer: the lock of Python's own would be held when the process ends, which would abort it.
ORDERS = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process runs
#: Longer errors are cut.
MAX_ERROR_CHARACTERS = 1000


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
    """The tasks to attempt. A taskset with an end is shuffled by the seed, and repeated if it has too few tasks."""
    taskset = env.taskset
    count = settings["tasks"]
    if not taskset.bounded:
        return itertools.islice(iter(taskset), count)
    return itertools.islice(itertools.cycle(list(taskset.shuffle(seed=settings["seed"]))), count)


def result(trace: Any, index: int, group: str) -> dict[str, Any]:
    """What became of one agent's attempt. An error is never a reward. Each agent has its own group."""
    data = trace.task.data
    ended = {
        "session": trace.id,
        "index": index,
        "task": data.id or data.name or str(data.idx),
        "turns": trace.num_turns,
    }
    if not trace.agent.trainable:
        return ended | {"error": "the environment does not train this agent", "trained": False}
    ended["group"] = group_of(trace.agent.name, group)
    if trace.ok and trace.rewards and all(reward is not None for reward in trace.rewards.values()):
        return ended | {"reward": float(trace.reward)}
    return ended | {"error": last_error(trace.errors, "it was not scored")}


def group_of(agent: str, group: str) -> str:
    """The group of one agent."""
    return group if agent == "agent" else f"{group}-{agent}"


def last_error(errors: list[Any], otherwise: str) -> str:
    message = errors[-1].message if errors else otherwise
    return str(message)[:MAX_ERROR_CHARACTERS]


class AttemptRunner:
    """Attempts each task as often as a group is large, a bounded number at once."""

    def __init__(self, settings: dict[str, Any], results: Results) -> None:
        self.settings = settings
        self.results = results
        self.env = environment(settings)
        self.agents = list(agent_config_fields(self.env.config)) or ["agent"]
        #: Agents that an episode showed to be untrained. The configuration does not say it.
        self.untrained: set[str] = set()
        client = EvalClientConfig(
            base_url=settings["url"], api_key_var=settings["key_variable"], headers=settings["headers"]
        )
        sampling = {name: settings[name] for name in ("temperature", "max_tokens") if settings[name] is not None}
        self.context = ModelContext(settings["model"], client, SamplingConfig.model_validate(sampling))
        self.free = asyncio.Semaphore(settings["parallel"])

    async def run(self, orders: "asyncio.Queue[str]") -> None:
        async with self.env.serving(), asyncio.TaskGroup() as groups:
            for index, task in enumerate(tasks(self.env, self.settings)):
                if await orders.get() == "end":
                    break
                groups.create_task(self.group(index, task))

    async def group(self, index: int, task: Any) -> None:
        slots = self.env.slots(task, self.settings["group"])
        await asyncio.gather(*(self.attempt(index, slot) for slot in slots))
        self.results.write({"group_ended": True})

    async def attempt(self, index: int, slot: Any) -> None:
        group = f"{self.settings['run']}-{index}"
        episode = await self.env.run_slot(slot, self.context, self.free)
        self.untrained |= {trace.agent.name for trace in episode.traces if not trace.agent.trainable}
        for trace in episode.traces:
            self.results.write(result(trace, index, group))
        if not episode.traces:
            # Each trained agent has a group, which would wait for this attempt.
            failed = {"session": None, "index": index, "error": last_error(episode.errors, "no agent ran")}
            for agent in self.agents:
                if agent not in self.untrained:
                    self.results.write(failed | {"group": group_of(agent, group)})


def listen(order: Callable[[str], object]) -> None:
    """Read orders. When our side is gone or wants this to stop, standard input closes: end at once."""
    for line in ORDERS:
        order(line.decode().strip())
    kill_descendants()
    os.killpg(0, signal.SIGKILL)


def kill_descendants() -> None:
    """Kill every process that this one started, directly or not. verifiers starts agents in sessions of their own.

    They are stopped first, so that none starts another one, or loses its parent, while they are looked for.
    """
    stopped: set[int] = set()
    while found := descendants(os.getpid()) - stopped:
        send(signal.SIGSTOP, found)
        stopped |= found
    send(signal.SIGKILL, stopped)


def send(number: signal.Signals, processes: set[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def descendants(ancestor: int) -> set[int]:
    """The processes below one. A system without /proc shows none."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the last bracket may contain anything.
            parent = path.read_bytes().rpartition(b")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    below: set[int] = set()
    pending = [ancestor]
    while pending:
        new = children.get(pending.pop(), [])
        below.update(new)
        pending += new
    return below


async def run(settings: dict[str, Any], results: Results) -> None:
    orders: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    order = lambda line: loop.call_soon_threadsafe(orders.put_nowait, line)  # noqa: E731
    threading.Thread(target=listen, args=(order,), daemon=True).start()
    await AttemptRunner(settings, results).run(orders)


def main() -> None:
    results = Results()
    try:
        asyncio.run(run(json.loads(ORDERS.readline()), results))
    finally:
        kill_descendants()


if __name__ == "__main__":
    main()
