"""The connection to a Tinker service: one session, and calls with time-outs and retries."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from openclaw_rl.aio import in_own_thread
from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.sdk import CallFailed, Kind, LastWarning, read_error
from openclaw_rl.engines.tinker.traits import LogprobProbe, Traits, look_at
from openclaw_rl.http_client import url_without_account

T = TypeVar("T")
BEAT_SECONDS = 5.0
#: Beats in a row after which the server counts as gone.
MAX_MISSED_BEATS = 3
log = logging.getLogger(__name__)
#: How often a call is tried that may be made again.
TRIALS = 4
#: Seconds before the second trial and the longest pause; each pause is twice the one before.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 20.0
#: A self-hosted server needs no key, but the SDK demands one of this form.
NO_KEY = "tml-self-hosted"
CLOSE_SECONDS = 5.0
#: At the start a user is watching, and the SDK would try for minutes to reach a service that is not there.
SESSION_SECONDS = 45.0


class Heartbeat:
    """Asks a server for its health at intervals; without an address the server is taken to be there."""

    def __init__(self, base_url: str | None) -> None:
        self.base_url = base_url
        self._gone = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.base_url is not None and self._beating is None:
            self._beating = asyncio.create_task(self._beat(self.base_url))

    async def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None

    async def during(self, work: Awaitable[T]) -> T:
        """The result of some work. Raises ConnectionError if the server is gone before it is done."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionError(f"no server answers at {url_without_account(self.base_url or '')}")
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()

    async def _beat(self, base_url: str) -> None:
        missed = 0
        async with httpx.AsyncClient(timeout=BEAT_SECONDS) as client:
            while True:
                missed = 0 if await answers(client.get(f"{base_url.rstrip('/')}/api/v1/healthz")) else missed + 1
                self._gone.set() if missed >= MAX_MISSED_BEATS else self._gone.clear()
                await asyncio.sleep(BEAT_SECONDS)


async def answers(call: Coroutine[Any, Any, httpx.Response]) -> bool:
    """Whether a server is there. Any answer counts, and a server that is too busy to answer is there too."""
    try:
        await call
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        pass
    return True


@dataclass(frozen=True, slots=True)
class Account:
    """The address of the service, and the key to it."""

    base_url: str | None
    """None: Tinker's cloud."""
    key: str
    timeout: float
    """Seconds that a call may take."""


class Connection:
    """A session with a Tinker service, which the sampler and the learner share.

    * Calls may be made at the same time, once it is open.
    * No call waits without a bound, and none blocks the event loop.
    * A session that the service has ended is begun again.
    * `close` ends the session.
    """

    def __init__(self, account: Account) -> None:
        self.account = account
        self.first_pause = FIRST_PAUSE
        self.traits = Traits()
        self.models: dict[str, int | None] = {}
        """The models that the service offers, with the longest context if the service names it."""
        self.sampling_trouble = ""
        """Why sampling failed last; empty again once it succeeds."""
        self.logprob_probe = LogprobProbe()
        self.proven = set[bool]()
        """The kinds of steps (weighted or not) that the service has made."""
        self._heartbeat = Heartbeat(account.base_url)
        self._last_warning = LastWarning()
        self._service: Any = None
        self._opening = asyncio.Lock()

    @property
    def service(self) -> Any:
        """The SDK's client, from which others are created."""
        if self._service is None:
            raise EngineUnavailable("There is no session with Tinker.")
        return self._service

    @property
    def types(self) -> Any:
        return sdk.load().types

    async def open(self) -> None:
        """Begin the session, if there is none. Raises EngineUnavailable with the reason."""
        async with self._opening:
            if self._service is None:
                self._service = await self._begin()
                self._heartbeat.start()

    async def renew(self, ended: Any) -> None:
        """Begin another session in place of one that the service has ended, unless another caller already has."""
        async with self._opening:
            if self._service is ended:
                log.warning("The session with Tinker has ended; another one begins.")
                self._service = await self._begin()
                await end_session(ended)

    async def _begin(self) -> Any:
        """A new session, once the service has listed its models."""
        module = await asyncio.to_thread(sdk.load)
        logging.getLogger("tinker").addHandler(self._last_warning)
        self.traits = await look_at(self.account.base_url)
        key = self.account.key or (NO_KEY if self.account.base_url else "")
        settings = {"base_url": self.account.base_url, "api_key": key}
        arguments = {name: value for name, value in settings.items() if value}

        def begin() -> Any:
            service = module.ServiceClient(**arguments)
            # Newer versions begin the session when it is first asked for.
            return service, service.holder

        try:
            end = asyncio.get_running_loop().time() + min(SESSION_SECONDS, self.account.timeout)
            service, _ = await self._trials(lambda: in_own_thread(begin, "tinker"), "begin a session", 1, end)
            answer = await self._trials(service.get_server_capabilities_async, "say what it offers", 2, end)
        except CallFailed as error:
            raise EngineUnavailable(self._no_session(error, module.__version__)) from error
        self.models = {
            str(model.model_name): getattr(model, "max_context_length", None) for model in answer.supported_models
        }
        return service

    def _no_session(self, error: CallFailed, version: str) -> str:
        if error.kind is Kind.LOST and self.account.base_url:
            url = url_without_account(self.account.base_url)
            return (
                f"The server at {url} does not understand version {version} of the SDK ({error}) "
                "Install the version that it was made for; for SkyRL tx 0.3: pip install tinker==0.12.0."
            )
        return str(error)

    def find_model(self, name: str) -> str:
        """The service's name of a model that is given by name or by a folder's path.

        Raises EngineUnavailable with the models that are offered.
        """
        if name in self.models or not self.models:
            return name
        wanted = Path(name).expanduser()
        for offered in self.models:
            if Path(offered).name.lower() == wanted.name.lower():
                return offered
        offers = ", ".join(sorted(self.models))
        raise EngineUnavailable(f"{self.traits.name} does not offer {name}; it offers: {offers}.")

    async def call(self, make: Callable[[], Awaitable[T]], what: str, *, trials: int = TRIALS) -> T:
        """Make a call, and retry it where that may help. Raises CallFailed. `what` completes "could not …".

        The time-out is for all trials together, because a client waits; in `work` it is for each trial.
        """
        deadline = asyncio.get_running_loop().time() + self.account.timeout
        return await self._trials(make, what, trials, deadline)

    async def _trials(
        self, make: Callable[[], Awaitable[T]], what: str, trials: int, deadline: float | None = None
    ) -> T:
        pause = self.first_pause
        for trial in range(1, trials + 1):
            self._last_warning.text = ""
            began = time.monotonic()
            try:
                end = deadline or asyncio.get_running_loop().time() + self.account.timeout
                async with asyncio.timeout_at(end) as limit:
                    return await self._heartbeat.during(make())
            except sdk.failures() as error:
                failure = read_error(error)
                words = self._no_answer(time.monotonic() - began) if limit.expired() else failure.words
                over = trial == trials or (limit.expired() and deadline is not None)
                if over or failure.kind in (Kind.LOCKED, Kind.LOST, Kind.REFUSED):
                    raise CallFailed(failure.kind, what, words) from error
                log.warning("Tinker could not %s (%s); trying again in %.0f s.", what, words, pause)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(LONGEST_PAUSE, 2 * pause)
        raise AssertionError("unreachable")

    def _no_answer(self, seconds: float) -> str:
        waited = f"no answer in {seconds:.3g} s"
        return f"{waited}; the SDK said: {self._last_warning.text}" if self._last_warning.text else waited

    async def create(self, make: Callable[[], Awaitable[T]], what: str) -> T:
        """`call` for calls that create a client: if the session has ended, they are repeated in a new one."""
        service = self._service
        try:
            return await self.work(make, what, trials=TRIALS)
        except CallFailed as error:
            if error.kind is not Kind.LOST:
                raise
        await self.renew(service)
        return await self.work(make, what, trials=TRIALS)

    async def work(self, make: Callable[[], Awaitable[T]], what: str, *, trials: int = 1) -> T:
        """`call` for calls that change the trained weights. A call that takes too long is not cancelled: the SDK and
        the service process calls in order, and would wait for one that is missing."""

        async def uncancelled() -> T:
            work = asyncio.ensure_future(make())
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await asyncio.shield(work)

        return await self._trials(uncancelled, what, trials)

    async def close(self) -> None:
        """End the session. A service that does not answer is not waited for."""
        service = self._service
        self._service = None
        await self._heartbeat.stop()
        logging.getLogger("tinker").removeHandler(self._last_warning)
        if service is not None:
            await end_session(service)


async def end_session(service: Any) -> None:
    with contextlib.suppress(*sdk.failures()):
        async with asyncio.timeout(CLOSE_SECONDS):
            if hasattr(service, "close"):
                await service.close("success")
            else:
                await in_own_thread(service.holder.close, "tinker")
