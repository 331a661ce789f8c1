"""The way to the service: one session for everything, calls with time-outs and trials, what there is to sample from.

Guarantees: no call waits without end, nothing here blocks the event loop, and `close` ends the session.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.errors import CallFailed, Kind, LastWords, read
from openclaw_rl.engines.tinker.heartbeat import Heartbeat
from openclaw_rl.engines.tinker.logprob_probe import LogprobProbe
from openclaw_rl.engines.tinker.traits import Traits, look_at

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How often a call is made that may be made again, and the pause before the second; each is twice the one before.
TRIALS = 4
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 20.0
#: A server of one's own asks for no key, but the SDK does, and for one of this form.
NO_KEY = "tml-self-hosted"
CLOSE_SECONDS = 5.0
#: At the start somebody looks on, and the SDK would try for minutes to reach a service that is not there.
SESSION_SECONDS = 45.0


@dataclass(frozen=True, slots=True)
class Account:
    """Where the service is, and how to be let in."""

    base_url: str | None
    """None: Tinker's own."""
    key: str
    timeout: float
    """Seconds that a call may take."""


class Connection:
    """A session with a Tinker service. Open it once; everybody may then call at the same time."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.traits = Traits()
        self.models: dict[str, int | None] = {}
        """What can be sampled from and trained, with the longest context where the service says it."""
        self.sampling_trouble = ""
        """Why nothing can be sampled, until something is."""
        self.logprob_probe = LogprobProbe()
        self._heartbeat = Heartbeat(account.base_url)
        self._words = LastWords()
        self._service: Any = None
        self._opening = asyncio.Lock()

    @property
    def service(self) -> Any:
        """The SDK's client for everything else."""
        if self._service is None:
            raise EngineUnavailable("There is no session with Tinker.")
        return self._service

    @property
    def types(self) -> Any:
        return sdk.load().types

    async def open(self) -> None:
        """Begin the session, if there is none. Raises EngineUnavailable with a reason."""
        async with self._opening:
            if self._service is None:
                self._service = await self._begin()
                self._heartbeat.start()

    async def renew(self, ended: Any) -> None:
        """Begin another session in place of one that the service has ended, unless somebody has already."""
        async with self._opening:
            if self._service is ended:
                log.warning("The session with Tinker has ended; another one begins.")
                self._service = await self._begin()
                await end_session(ended)

    async def _begin(self) -> Any:
        """A session whose service says what it offers."""
        module = await asyncio.to_thread(sdk.load)
        logging.getLogger("tinker").addHandler(self._words)
        self.traits = await look_at(self.account.base_url)
        key = self.account.key or (NO_KEY if self.account.base_url else "")
        settings = {"base_url": self.account.base_url, "api_key": key}
        given = {name: value for name, value in settings.items() if value}

        def begin() -> Any:
            service = module.ServiceClient(**given)
            # Newer versions begin the session when it is first asked for.
            return service, service.holder

        try:
            end = asyncio.get_running_loop().time() + min(SESSION_SECONDS, self.account.timeout)
            service, _ = await self._trials(lambda: in_thread(begin), "begin a session", 1, end)
            told = await self._trials(service.get_server_capabilities_async, "say what it offers", 2, end)
        except CallFailed as error:
            raise EngineUnavailable(self._no_session(error, module.__version__)) from error
        offered = told.supported_models
        self.models = {str(model.model_name): getattr(model, "max_context_length", None) for model in offered}
        return service

    def _no_session(self, error: CallFailed, version: str) -> str:
        if error.kind is Kind.LOST and self.account.base_url:
            return (
                f"The server at {self.account.base_url} does not understand version {version} of the SDK ({error}) "
                "Install the version that it was made for; for SkyRL tx 0.3: pip install tinker==0.12.0."
            )
        return str(error)

    def find_model(self, name: str) -> str:
        """A model as the service calls it: by its name, or a folder's. Raises EngineUnavailable with all there are."""
        if name in self.models or not self.models:
            return name
        wanted = Path(name).expanduser()
        for offered in self.models:
            if Path(offered).name.lower() == wanted.name.lower():
                return offered
        offers = ", ".join(sorted(self.models))
        raise EngineUnavailable(f"{self.traits.name} does not offer {name}; it offers: {offers}.")

    async def call(self, make: Callable[[], Awaitable[T]], what: str, *, trials: int = TRIALS) -> T:
        """Make a call, and make it again if it may succeed then. Raises CallFailed. `what` goes on from "failed to".

        Time is up once for all trials, since somebody waits; only `work` has it for each.
        """
        deadline = asyncio.get_running_loop().time() + self.account.timeout
        return await self._trials(make, what, trials, deadline)

    async def _trials(
        self, make: Callable[[], Awaitable[T]], what: str, trials: int, deadline: float | None = None
    ) -> T:
        pause = FIRST_PAUSE
        for trial in range(1, trials + 1):
            self._words.text, began = "", time.monotonic()
            try:
                end = deadline or asyncio.get_running_loop().time() + self.account.timeout
                async with asyncio.timeout_at(end) as limit:
                    return await self._heartbeat.during(make())
            except sdk.failures() as error:
                found = read(error)
                words = self._no_answer(time.monotonic() - began) if limit.expired() else found.words
                over = trial == trials or (limit.expired() and deadline is not None)
                if over or found.kind in (Kind.LOCKED, Kind.LOST, Kind.REFUSED):
                    raise CallFailed(found.kind, what, words) from error
                log.warning("Tinker could not %s (%s); trying again in %.0f s.", what, words, pause)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(LONGEST_PAUSE, 2 * pause)
        raise AssertionError("unreachable")

    def _no_answer(self, seconds: float) -> str:
        waited = f"no answer in {seconds:.3g} s"
        return f"{waited}; the SDK said: {self._words.text}" if self._words.text else waited

    async def create(self, make: Callable[[], Awaitable[T]], what: str) -> T:
        """The same for calls that make a client: if the session has ended, in another one."""
        service = self._service
        try:
            return await self.work(make, what, trials=TRIALS)
        except CallFailed as error:
            if error.kind is not Kind.LOST:
                raise
        await self.renew(service)
        return await self.work(make, what, trials=TRIALS)

    async def work(self, make: Callable[[], Awaitable[T]], what: str, *, trials: int = 1) -> T:
        """The same for calls that change what is trained. One that takes too long is not taken back but left alone:
        the SDK and the service go through them in order, and would wait for one that vanished."""

        async def kept() -> T:
            work = asyncio.ensure_future(make())
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await asyncio.shield(work)

        return await self._trials(kept, what, trials)

    async def close(self) -> None:
        """End the session; a service that does not answer is not waited for."""
        service, self._service = self._service, None
        await self._heartbeat.stop()
        logging.getLogger("tinker").removeHandler(self._words)
        if service is not None:
            await end_session(service)


async def end_session(service: Any) -> None:
    with contextlib.suppress(*sdk.failures()):
        async with asyncio.timeout(CLOSE_SECONDS):
            if hasattr(service, "close"):
                await service.close("success")
            else:
                await in_thread(service.holder.close)


async def in_thread(function: Callable[[], T]) -> T:
    """Run what blocks, in a thread that nobody waits for at the program's end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except sdk.failures() as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="tinker").start()
    return await done
