"""Items of a run: what is shared, what goes on, what is shown and written, however the run ends."""

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openclaw_rl.client import ServerError
from openclaw_rl.evals.items import ItemGroup, RunItem, run_items
from openclaw_rl.evals.result_log import ResultLog
from openclaw_rl.lab import commands as module
from openclaw_rl.lab.commands import RunProgress


def a_console(**given: Any) -> Console:
    return Console(file=io.StringIO(), width=100, **given)


def lines(console: Console) -> list[str]:
    """With no sign in them that only a terminal understands."""
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.fullmatch(r"[^\x00-\x09\x0b-\x1f\x7f]*", shown), shown
    return shown.splitlines()


class Clock:
    """A second goes by whenever somebody looks."""

    def __init__(self) -> None:
        self._seconds = count()

    def monotonic(self) -> float:
        return float(next(self._seconds))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", Clock())


class Recorded:
    """A group of items a, b, c …, and what happened to it."""

    def __init__(self, names: str, path: Path | None = None, fails: str = "", before: Callable[[], None] = print):
        self.events: list[str] = []
        self.fails, self.before = fails, before
        log = None if path is None else ResultLog(path, {"seed": 1}, ["seed"])
        parts = [RunItem((name,), partial(self._measure, name)) for name in names]
        self.group = ItemGroup(parts, self._shared, log)

    @contextlib.asynccontextmanager
    async def _shared(self) -> AsyncIterator[str]:
        self.events.append("started")
        yield "server"
        self.events.append("stopped")

    async def _measure(self, name: str, shared: str) -> tuple[Mapping[str, Any], str]:
        self.events.append(f"{name} on {shared}")
        await asyncio.sleep(0)
        if name in self.fails:
            self.before()
            raise ServerError("it is gone")
        return {"item": name}, f"{name}: done [1]"


def run(*groups: Recorded, at_once: int = 1, console: Console | None = None, shown: list[str] | None = None) -> None:
    progress = RunProgress(console or a_console(), "items", sum(len(one.group.left) for one in groups))
    run_items(
        [one.group for one in groups], at_once, progress, lambda: (shown if shown is not None else []).append("x")
    )


def test_items_share_what_is_started_with_the_first_and_stopped_after_the_last() -> None:
    first, second = Recorded("abc"), Recorded("de")
    console = a_console()
    run(first, second, console=console)
    assert first.events == ["started", "a on server", "b on server", "c on server", "stopped"]
    assert second.events == ["started", "d on server", "e on server", "stopped"]
    assert lines(console)[0] == "a: done [1] (1 of 5 items)"
    assert lines(console)[-1] == "e: done [1] (5 of 5 items)"


def test_a_run_goes_on_with_the_items_that_have_no_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    broken = Recorded("abcd", path, fails="c")
    with pytest.raises(ServerError, match="it is gone"):
        run(broken)
    assert broken.events[-2:] == ["c on server", "stopped"], "no item begins after another has failed"
    again = Recorded("abcd", path)
    run(again)
    assert again.events == ["started", "c on server", "d on server", "stopped"]
    done = Recorded("abcd", path)
    run(done)
    assert not done.events, "nothing is started for nothing"
    assert len(path.read_text().splitlines()) == 5


def test_an_item_that_fails_stops_those_that_run_beside_it() -> None:
    endless = Recorded("")

    async def waits(_: str) -> tuple[Mapping[str, Any], str]:
        try:
            await asyncio.sleep(3600)
        finally:
            endless.events.append("cancelled")
        return {}, ""

    endless.group = ItemGroup([RunItem(("w",), waits)], endless._shared)
    with pytest.raises(ServerError):
        run(endless, Recorded("ab", fails="b"), at_once=2)
    assert endless.events == ["started", "cancelled", "stopped"]


def test_a_file_gets_a_line_now_and_then_of_cases_of_different_sizes() -> None:
    console = a_console()
    with RunProgress(console, "cases", 53, 23 * 10 + 30 * 60) as progress:
        progress.log("step-7: starting a server")
        progress.begin()
        for done in range(1, 24):
            progress.advance("step-7: coding", 10)
            if done % 10 == 0:
                progress.log(progress.with_time(f"step-7: coding: {done} of 23 cases"))
        progress.say("step-7: coding: done")
    assert lines(console) == [
        "step-7: starting a server",
        # 10 cases of 10 tokens took 10 seconds; 13 of 10 and 30 of 60 are left.
        "step-7: coding: 10 of 23 cases, about 3 min left",
        "step-7: coding: 20 of 23 cases, about 3 min left",
        "step-7: coding: done (23 of 53 cases, about 3 min left)",
    ]


def test_the_time_left_is_that_of_all_cases() -> None:
    progress = RunProgress(a_console(), "cases", 11, 10 * 10 + 1 * 50)
    for done in range(4):
        progress.advance(size=10)
        assert not progress.time_left, f"{done + 1} cases tell too little"
    progress.advance(size=10)
    assert progress.time_left == "about 10 s left"
    progress.begin()
    for _ in range(5):
        progress.advance(size=10)
    assert progress.time_left == "about 5 s left"
    progress.advance(size=50)
    assert not progress.time_left


def test_a_terminal_has_a_bar_for_what_goes_on() -> None:
    console = a_console(force_terminal=True)
    with RunProgress(console, "cases", 21) as progress:
        for _ in range(20):
            progress.advance("coding")
        progress.log("not said twice")
        progress.bar.refresh()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "20/21 coding, about 1 s left" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "not said twice" not in shown
