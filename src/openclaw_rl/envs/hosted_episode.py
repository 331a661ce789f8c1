"""An episode as the driver calls it: in the environment's thread, within time, and with results that were checked."""

import contextlib
from dataclasses import replace
from functools import partial

from openclaw_rl.envs.base import EnvFailed, Episode, Message, Outcome, Step, Task, Tool
from openclaw_rl.envs.checks import checked_messages, checked_outcome, checked_step, checked_tools
from openclaw_rl.envs.host import CLOSE_SECONDS, EnvironmentHost, guarded


class HostedEpisode:
    """One episode of a hosted environment. Every call raises EnvFailed for whatever the environment does wrong.

    - Results are checked in the environment's thread too, so an odd value cannot stop the driver.
    - An episode that was opened is closed, also if the driver is stopped while it is being opened.

    Calls that follow each other go to the thread together: a change of threads takes longer than most calls.
    """

    def __init__(self, host: EnvironmentHost, seconds: float) -> None:
        """`seconds` is how long one call of the environment may take."""
        self.host, self.seconds = host, seconds
        self._episode: Episode | None = None
        self._begun = self._closed = False

    async def start(self, task: Task, session: str = "") -> tuple[list[Tool], list[Message]]:
        """Open the episode; its tools and first messages."""

        async def begin() -> tuple[list[Tool], list[Message]]:
            def open_episode() -> Episode:
                return self.host.environment.open(replace(task, session=session))

            opened: Episode = await guarded("open", open_episode, self.seconds)
            self._episode = opened
            if self._closed:
                await self._close()
                raise EnvFailed("the episode was closed while it was being opened")
            tools = checked_tools(await guarded("tools", lambda: opened.tools, self.seconds))
            return tools, checked_messages("start", await guarded("start", opened.start, self.seconds))

        self._begun = True
        tools, messages = await self.host.call("start", begin, 3 * self.seconds)
        return tools, messages

    async def step(self, answer: Message) -> Step:
        """What the environment says to an answer."""

        async def take() -> Step:
            assert self._episode is not None
            return checked_step(await guarded("step", partial(self._episode.step, answer), self.seconds))

        step: Step = await self.host.call("step", take, self.seconds)
        return step

    async def finish(self) -> Outcome:
        """The outcome; the episode is closed."""

        async def end() -> Outcome:
            assert self._episode is not None
            outcome = checked_outcome(await guarded("outcome", self._episode.outcome, self.seconds))
            await self._close()
            return outcome

        outcome: Outcome = await self.host.call("outcome", end, self.seconds + CLOSE_SECONDS)
        return outcome

    async def close(self) -> None:
        """Close the episode, if it is open. An environment that cannot is left alone: nothing depends on it."""
        if self._begun and not self._closed:
            with contextlib.suppress(EnvFailed):
                await self.host.call("close", self._close, min(CLOSE_SECONDS, self.seconds))

    async def _close(self) -> None:
        self._closed = True
        episode, self._episode = self._episode, None
        if episode is not None:
            with contextlib.suppress(EnvFailed):
                await guarded("close", episode.close, min(CLOSE_SECONDS, self.seconds))
