"""Runs episodes of a verifiers environment: its own agents talk to the server, and its rewards come back by session."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from openclaw_rl.envs.base import EnvFailed
from openclaw_rl.envs.connection import MAX_ERROR_CHARACTERS, MAX_TASK_CHARACTERS, PolicyServer, report
from openclaw_rl.envs.driver import Pacer, RolloutPlan, RolloutWatcher, give_up, run_name
from openclaw_rl.envs.host import check_number
from openclaw_rl.envs.tally import AttemptResult, Tally
from openclaw_rl.envs.verifiers.process import RunnerProcess

#: verifiers has no word for a solved task. Its rewards usually end at 1.
SOLVED_REWARD = 1.0


class VerifiersDriver:
    """Runs a plan with an environment of the verifiers package.

    - The environment is used as it is: its harness, its tools, its judges. Each attempt is a session of the server.
    - An attempt that verifiers calls failed, or that it did not score, is reported as an error and never as a reward.
      So is an attempt whose reward the server refuses.
    - Sessions of agents that the environment does not train are closed, and counted nowhere.
    - No group starts while the server has more than two training steps of turns waiting; evaluations never wait.
    - The process that runs the environment ends with this one, also after kill -9.
    """

    def __init__(self, name: str, python: str, server: PolicyServer, plan: RolloutPlan, watch: RolloutWatcher) -> None:
        self.name = name
        self.python = python
        self.server = server
        self.plan = plan
        self.watch = watch
        self.tally = Tally()
        self._run_name = run_name(name)
        #: How many attempts of each group have ended.
        self._ended: Counter[str] = Counter()
        self._pacer = Pacer(server, self.tally, watch, plan)
        self._free_groups = asyncio.Semaphore(-(-plan.parallel // plan.group))

    async def run(self) -> Tally:
        """Run every group. Raises UserError, also as a group of errors."""
        settings = self._settings(await self.server.model())
        self.tally.start()
        try:
            process = RunnerProcess(self.name, self.python, settings, self.server.key)
            async with process as runner, asyncio.TaskGroup() as both:
                starts = both.create_task(self._start_groups(runner))
                both.create_task(self._read_results(runner, starts))
        finally:
            self.tally.finish()
            await self._give_up()
        return self.tally

    async def _start_groups(self, runner: RunnerProcess) -> None:
        """Let the runner begin groups as places become free and the server keeps up."""
        for _ in range(self.plan.tasks):
            await self._free_groups.acquire()
            if not await self._pacer.may_start(evaluates=self.plan.limits.evaluates):
                break
            self.tally.groups += 1
            await runner.allow_group()
        await runner.end_after_groups()

    async def _read_results(self, runner: RunnerProcess, starts: "asyncio.Task[None]") -> None:
        async for line in runner.lines():
            if line.get("group_ended"):
                self._free_groups.release()
            else:
                await self._record(line)
        starts.cancel()

    async def _record(self, line: Mapping[str, Any]) -> None:
        """Tell the server what became of an attempt."""
        session = line["session"] or f"{self._run_name}-{uuid4().hex[:10]}"
        group = line.get("group")
        reward = line.get("reward")
        error = line.get("error", "")[:MAX_ERROR_CHARACTERS]
        if reward is not None:
            try:
                check_number("the environment", reward)
            except EnvFailed as failure:
                reward = None
                error = str(failure)
        solved = reward is not None and reward >= SOLVED_REWARD
        outcome = {"error": error} if reward is None else {"reward": reward, "solved": solved}
        task = f"{self.name}/{line.get('task', '')}"[:MAX_TASK_CHARACTERS]
        body = {"task": task, **self._group_body(group), **outcome}
        if not line.get("trained", True):
            await report(self.server, session, body)
            return
        # Counted before it is reported: if this is stopped meanwhile, the attempt is not reported a second time.
        number = self._ended[group or ""]
        self._ended[group or ""] += 1
        unrecorded = await report(self.server, session, body)
        result = AttemptResult(
            task,
            line.get("index", 0),
            number,
            None if unrecorded else reward,
            solved=solved and not unrecorded,
            turns=line.get("turns", 0),
            error=error,
            unrecorded=unrecorded,
        )
        self.tally.add(result)
        self.watch.ended(self.tally)

    def _group_body(self, group: str | None) -> dict[str, Any]:
        return {"group": group, "group_size": self.plan.group} if group and self.plan.group > 1 else {}

    async def _give_up(self) -> None:
        unfinished = {
            f"{group}-stopped-{number}": self._group_body(group)
            for group, ended in self._ended.items()
            if group and self.plan.group > 1
            for number in range(ended, self.plan.group)
        }
        await give_up(self.server, unfinished)

    def _settings(self, model: str) -> dict[str, Any]:
        """What the runner is told: everything that it has to know, as JSON values."""
        plan = self.plan
        limits = self.plan.limits
        return {
            "name": self.name,
            "run": self._run_name,
            "url": f"{self.server.url}/v1",
            "model": model,
            "headers": {"X-Episode": "eval" if limits.evaluates else "1"},
            "tasks": plan.tasks,
            "group": plan.group,
            "parallel": plan.parallel,
            "seed": plan.seed,
            "max_turns": limits.max_turns,
            "episode_timeout": limits.episode_seconds,
            "temperature": limits.sampling.temperature,
            "max_tokens": limits.sampling.max_tokens,
        }
