"""Random failures and kills."""

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.types import State
from support.learning_run import a_run, flat, forever


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.more) for seed in (3, 4, 5))])
async def test_whatever_breaks_whenever_every_turn_is_trained_on_once(tmp_path: Path, seed: int) -> None:
    """Random failures of the learner, of publishing and of the disk, and kills of the whole server.

    The test waits for calls, never for seconds, so a slow machine cannot fail it.
    """
    draw = random.Random(seed)
    share = draw.choice([0.0, math.inf])
    async with a_run(
        tmp_path / "run", save_interval=draw.choice([1, 3]), recovery_share=share, max_staleness=1000
    ) as run:
        turns: list[int] = []
        calls, hangs = 0, False

        def trouble(*_arguments: Any) -> Any:
            nonlocal calls, hangs
            calls += 1
            roll = draw.random()
            if roll < 0.08:
                raise EngineUnavailable("It died.")
            if roll < 0.12:
                raise OSError(28, "No space left on device")
            hangs = hangs or roll < 0.17
            return forever() if roll < 0.17 else None

        async def let_it_learn(until: int) -> None:
            """Let a number of calls happen, or all that can happen, and stop at an arbitrary point after them."""
            while calls < until and not hangs and not run.resting():
                await asyncio.sleep(0.001)
            for _ in range(draw.randint(0, 20)):
                await asyncio.sleep(0)

        for _ in range(8):
            hangs = False
            await run.start()
            for name in ("write_policy", "save", "save_recovery", "load", "start", "undo"):
                run.learner.hooks[name] = trouble
            run.sampler.hook = trouble
            for _ in range(draw.randint(1, 4)):
                turns += run.judged(draw.randint(1, 3))
                await let_it_learn(calls + draw.randint(0, 6))
            await run.kill()
        await run.start()
        turns += run.judged(2 if len(turns) % 2 == 0 else 1)
        await run.rest()
        assert run.states(turns) == {State.APPLIED}
        run.check()
        assert sorted(flat(run.learner.policy)) == sorted(turns)
