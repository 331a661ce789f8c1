"""Episodes in a real Chromium: tasks are solved side by side, and although it dies. See `make test-browser`."""

import asyncio
import base64
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Task
from openclaw_rl.envs.browser.actions import BrowserAction
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.environment import BrowserEnvironment, make_browser
from openclaw_rl.envs.browser.site_pages import ModelPage
from openclaw_rl.envs.browser.site_tasks import FAMILIES, LEVELS
from openclaw_rl.envs.connection import EpisodeAnswer, Sampling
from openclaw_rl.envs.driver import Driver, EpisodeLimits, RolloutPlan
from openclaw_rl.envs.host import EnvironmentHost
from support.browsing import browsers, drivers, kill, needs_browser
from support.environments import InstantPolicy, Unwatched
from support.judging import until
from support.policies import attempt, says
from support.web_pages import destroys_everything, oracle

pytestmark = needs_browser
PNG = b"\x89PNG\r\n"
has_miniwob = pytest.mark.skipif(importlib.util.find_spec("miniwob") is None, reason="there is no miniwob")


async def play_in_both(env: BrowserEnvironment, task: Task) -> tuple[list[Step], Outcome]:
    """Solve a task in Chromium and without it; both must show the same at every step."""
    episode = env.open(task)
    model = ModelPage(FAMILIES[task.data["family"]](task.data["content"]))
    solve = oracle(task, episode)

    def answer(messages: Sequence[Message], turn: int) -> Message:
        assert episode.view.text() == model.view().text(), task
        said = solve(messages, turn)
        kind, number, *text = said["content"].split(" ", 2)
        model.act(BrowserAction(kind, int(number), "".join(text)), model.view().element(int(number)))
        return said

    return await attempt(episode, answer)


async def test_chromium_shows_the_pages_as_they_were_made_and_an_oracle_solves_them() -> None:
    env = make_browser(levels=list(LEVELS))
    tasks = list(islice(env.tasks("train", 3), 36))
    slots = asyncio.Semaphore(4)

    async def play(task: Task) -> None:
        async with slots:
            steps, outcome = await play_in_both(env, task)
        assert outcome.solved, task
        assert not any(step.hint for step in steps)

    await asyncio.gather(*map(play, tasks))
    assert {(task.data["family"], task.data["level"]) for task in tasks} == {(f, n) for f in FAMILIES for n in LEVELS}
    await env.close()
    assert not browsers()


async def test_a_policy_that_destroys_everything_solves_nothing() -> None:
    env = make_browser(levels=[2, 3])

    async def play(task: Task) -> None:
        episode = env.open(task)
        _, outcome = await attempt(episode, destroys_everything(episode))
        assert not outcome.solved

    await asyncio.gather(*map(play, islice(env.tasks("train", 0), 8)))
    await env.close()


class ClickServer(InstantPolicy):
    """A server that always clicks the first element, and kills the browser once."""

    def __init__(self, kills: bool) -> None:
        super().__init__()
        self.answers, self.kills = 0, kills

    async def answer(self, session: str, messages: Sequence[Message], *_: Any, **__: Any) -> EpisodeAnswer:
        self.answers += 1
        if self.kills and self.answers == 6:
            kill(browsers)
        return EpisodeAnswer("chatcmpl-1", says("click 1"), 0)


@pytest.mark.parametrize("kills", [False, True])
async def test_the_driver_runs_episodes_although_the_browser_dies(kills: bool) -> None:
    host = EnvironmentHost(make_browser())
    server: Any = ClickServer(kills)
    limits = EpisodeLimits(4, turn_seconds=60, episode_seconds=120, sampling=Sampling(16))
    plan = RolloutPlan("browser", "train", 0, tasks=8, group=2, parallel=4, limits=limits)
    tally = await Driver(host, server, plan, Unwatched()).run()
    await host.close()
    assert len(tally.results) == 16
    assert not tally.failures
    assert bool(tally.retries) is kills
    assert not browsers()


async def test_an_episode_that_is_cancelled_leaves_no_tab_and_no_browser() -> None:
    env = make_browser()
    task = next(env.tasks("train", 0))
    for seconds in (0.05, 0.3, 1.0):
        episode = env.open(task)
        starting = asyncio.create_task(episode.start())  # type: ignore[arg-type]
        await asyncio.sleep(seconds)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await episode.close()
    steps, _ = await attempt(env.open(task), lambda messages, turn: says("click 1"))
    assert steps
    await env.close()
    assert not browsers()


async def test_a_start_that_is_cancelled_leaves_no_browser_and_no_driver() -> None:
    for ready in (drivers, browsers):
        chromium = Chromium()
        opening = asyncio.create_task(chromium.open("http://127.0.0.1:1"))  # type: ignore[arg-type]
        await until(lambda: bool(ready()) or opening.done())  # noqa: B023 - it is called before the next round
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await chromium.close()
        assert not drivers()
        assert not browsers()


async def test_screenshots_are_kept_and_shown_to_models_that_take_images(tmp_path: Path) -> None:
    env = make_browser(images=True, screenshots=str(tmp_path / "shots"))
    task = next(env.tasks("train", 0))
    for session in ("browser-1-0", ""):
        episode = env.open(replace(task, session=session))
        messages = await episode.start()
        text, image = messages[-1]["content"]
        assert text["text"].startswith(task.data["goal"])
        url = image["image_url"]["url"]
        kept = base64.b64decode(url.removeprefix("data:image/png;base64,"))
        assert (image["type"], kept[:6]) == ("image_url", PNG)
        await episode.step(says("click 1"))
        await episode.outcome()
        await episode.close()
    await env.close()
    folders = [tmp_path / "shots" / name for name in ("browser-1-0", re.sub(r"[^\w.-]+", "-", task.id))]
    assert set((tmp_path / "shots").iterdir()) == set(folders)
    assert [file.name for file in sorted(folders[0].iterdir())] == ["000.png", "001.png"]
    assert (folders[1] / "000.png").read_bytes() == kept


async def test_a_browser_that_cannot_start_is_not_the_fault_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CHROMIUM", str(broken))
    env = make_browser()
    episode = env.open(next(env.tasks("train", 0)))
    with pytest.raises(EnvFailed, match="the browser does not start"):
        await episode.start()
    await episode.close()
    await env.close()


# MiniWoB++


@has_miniwob
async def test_pages_of_miniwob_reward_as_they_do_themselves() -> None:
    env = make_browser(miniwob="click-button,click-link,click-dialog,enter-text")
    rewards = set()
    for task in islice(env.tasks("train", 1), 8):
        for wrong in (False, True):
            episode = env.open(task)
            goal = (await episode.start())[-1]["content"].split("\n")[0]
            done = False
            for answer in miniwob_answers(task.data["page"], goal, episode.view, wrong=wrong):
                done = (await episode.step(says(answer))).done
            outcome = await episode.outcome()
            await episode.close()
            rewards.add(outcome.reward)
            assert (outcome.solved, outcome.reward) == ((False, -1.0) if wrong else (True, 1.0)), (task, goal)
            assert done or wrong
    assert rewards == {1.0, -1.0}
    await env.close()


def miniwob_answers(page: str, goal: str, view: Any, *, wrong: bool) -> list[str]:
    """The actions that solve a page, or one that does not."""
    wanted = goal.split('"')[1] if '"' in goal else ""
    if wrong:
        return ["done"]
    first = {one.role: number for number, one in reversed(list(enumerate(view.elements, 1)))}
    if page == "click-dialog":
        return [f"click {first['button']}"]
    if page == "enter-text":
        return [f"type {first['textbox']} {wanted}", f"click {first['button']}"]
    return [f"click {next(n for n, one in enumerate(view.elements, 1) if one.name.strip() == wanted)}"]


@has_miniwob
async def test_splits_of_miniwob_share_no_page_with_the_same_seed() -> None:
    env = make_browser(miniwob="all")
    splits = [{task.id.split("/")[2] for task in islice(env.tasks(split, 0), 300)} for split in ("train", "held-out")]
    assert not splits[0] & splits[1]
    assert len({task.rpartition("-")[0] for task in splits[0]}) > 100
