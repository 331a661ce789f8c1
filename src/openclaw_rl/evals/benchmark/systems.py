"""What is measured: an endpoint at an address, or a baseline that is started here."""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from openclaw_rl.aio import start_process
from openclaw_rl.client import ApiClient, probe
from openclaw_rl.config.general import PERSONAL, TEAM
from openclaw_rl.evals.arguments import Machine
from openclaw_rl.evals.benchmark.person import OrdinaryChat, PastingChat
from openclaw_rl.evals.chat import MIN_OUTPUT_TOKENS, TIMEOUT_SECONDS, Chat, opened
from openclaw_rl.evals.trial import is_learning
from openclaw_rl.evals.wishes.measurement import practised
from openclaw_rl.http_client import url_without_account
from openclaw_rl.lab.server import (
    LOG,
    MAX_STATE_SECONDS,
    WATCHER,
    RunningServer,
    ServerFailed,
    is_judging,
    run_server,
    wait_while,
)

#: How long a server of this package may take to read what was said, and to learn from it.
SETTLE_SECONDS = 180.0
#: How long an endpoint may take for its first answer: it may load its model first.
FIRST_SECONDS = 120.0
#: The header with which a server of this package answers without what it was told.
WITHOUT_NOTES = {"X-Notes": "off"}


class NotOffered(Exception):
    """The endpoint cannot be scored here. The text is a sentence that says why."""


@dataclass(slots=True)
class Venue:
    """An endpoint as one item uses it."""

    people: Sequence[OrdinaryChat]
    settle: Callable[[], Awaitable[None]]
    """Waits until the endpoint has read the last session, and has made the training steps that follow from it."""
    learn: Callable[[float], Awaitable[None]]
    """Lets it do what it does when nobody talks to it for at most so many seconds."""
    steps: Callable[[], Awaitable[int | None]]
    """How many training steps the first person's answers come from; None if it does not train, or does not say."""
    teaching: dict[str, Any] = field(default_factory=dict)
    """Further settings of every `Teaching`."""
    bare_headers: Mapping[str, str] | None = None
    """With these, the endpoint answers without what it remembers; None: it does not offer that."""
    forget: Callable[[int], Awaitable[None]] | None = None
    """Deletes all that one of the people has said; None: it does not offer that."""


class System(Protocol):
    """Something that is measured."""

    name: str

    @property
    def one_at_a_time(self) -> bool:
        """Whether items would disturb each other, because they are the same person to it."""
        ...

    @property
    def one_per_server(self) -> bool:
        """Whether each item at the same time needs a server of its own, so that few should be measured at once."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What results say about it, without secrets."""
        ...

    def started(self, people: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Around all items, which need so many people together."""
        ...

    def venue(self, item: str, first: int, people: int) -> contextlib.AbstractAsyncContextManager[Venue]:
        """Around one item, whose people are those from `first` on. Raises NotOffered."""
        ...


async def nothing(_seconds: float = 0.0) -> None:
    """Where there is nothing to wait for."""


async def have_settled(url: str, keys: Sequence[str]) -> bool:
    """Wait until a server of this package has read what people said and learned from it; whether it is one."""
    for key in keys:
        if "queue" not in await wait_while(is_settling, partial(probe, url, key, MAX_STATE_SECONDS), SETTLE_SECONDS):
            return False
    return True


def is_settling(state: Mapping[str, Any]) -> bool:
    return is_judging(state) or is_learning(state)


async def steps_of(url: str, key: str) -> int | None:
    """The training steps in the policy of a key's owner, if this is a server of this package that trains."""
    state = await probe(url, key, MAX_STATE_SECONDS)
    coming = (state.get("next_step") or {}).get("step")
    return coming - 1 if isinstance(coming, int) else None


@dataclass(slots=True)
class EndpointSystem:
    """An endpoint at an address. Its people are told apart by their keys, or by OpenAI's field `user`."""

    url: str
    keys: Sequence[str] = ("",)
    model: str = ""
    wire: str = "chat"
    by_user: bool = False
    pause: float = 0.0
    """Seconds after each session, for an endpoint that does not say when it has read it."""
    forget_url: str = ""
    """Where `DELETE` deletes all that the key's owner said; `{user}` stands for the person."""
    bare_headers: Mapping[str, str] | None = None
    teaching: dict[str, Any] = field(default_factory=dict)
    name: str = "endpoint"
    _said: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """What each person has said in all items."""
    one_per_server = False

    @property
    def one_at_a_time(self) -> bool:
        return not self.by_user

    @property
    def facts(self) -> dict[str, Any]:
        told = "user" if self.by_user else f"{len(self.keys)} keys"
        return {"url": url_without_account(self.url), "model": self.model, "wire": self.wire, "people_by": told}

    @contextlib.asynccontextmanager
    async def started(self, people: int) -> AsyncIterator[None]:
        """Raises ServerError if it does not answer a first question: nothing else would have a score either."""
        for key in self.keys:
            async with Chat(self.url, model=self.model, key=key, wire=self.wire, timeout=FIRST_SECONDS) as chat:
                await chat.ask([{"role": "user", "content": "Hello!"}], max_tokens=MIN_OUTPUT_TOKENS)
        yield

    @contextlib.asynccontextmanager
    async def venue(self, item: str, first: int, people: int) -> AsyncIterator[Venue]:
        if people > len(self.keys) and not self.by_user:
            raise NotOffered("The endpoint knows one person only: give a --key for each, or --by-user.")
        numbers = range(first, first + people)
        keys = [self.keys[number % len(self.keys)] for number in numbers]
        users = [f"person-{number}" for number in numbers]
        ask = partial(OrdinaryChat, self.url, model=self.model, wire=self.wire)
        fields = [{"user": user} if self.by_user else None for user in users]
        async with opened(ask(key=key, fields=one) for key, one in zip(keys, fields, strict=True)) as chats:
            for chat, person in zip(chats, zip(keys, users, strict=True), strict=True):
                chat.said = self._said.setdefault(person if self.by_user else (person[0], ""), set())

            async def settle() -> None:
                if not await have_settled(chats[0].url, keys):
                    await asyncio.sleep(self.pause)

            async def forget(number: int) -> None:
                await delete(self.forget_url.replace("{user}", users[number]), keys[number])

            steps = partial(steps_of, chats[0].url, keys[0])
            forgets = forget if self.forget_url else None
            yield Venue(chats, settle, nothing, steps, self.teaching, self.bare_headers, forgets)


async def delete(url: str, key: str) -> None:
    """Raises ServerError."""
    api = ApiClient(url, key, through_proxy=True)
    try:
        await api.call("DELETE", "", seconds=TIMEOUT_SECONDS)
    finally:
        await api.close()


@dataclass(frozen=True, slots=True)
class BaselineKind:
    """A system that this package starts."""

    about: str
    flags: tuple[str, ...]
    trains: bool = False
    """Then a server has one item at a time: what one person teaches must not wait for another's steps."""
    practises: bool = False
    notes: bool = False
    forgets: bool = True
    chat: type[OrdinaryChat] = OrdinaryChat


_BARE = ("--no-capture", "--no-notes", "--max-steps", "0")
_PRESET, _TEAM = ("--preset", PERSONAL), ("--preset", TEAM)
#: Items have few sessions, so a step is made for every second judged turn. The preset waits for eight that differ.
#: The guard is off: on a CPU it examines each policy longer than an item takes.
_TRAINING = (*_PRESET, "--no-notes", "--no-guard", "--batch-size", "2", "--baseline", "none", "--method")
BASELINES = {
    "bare": BaselineKind("the model alone", _BARE, forgets=False),
    "history": BaselineKind("all that was said before in its prompt", _BARE, chat=PastingChat),
    "notes": BaselineKind("notes and examples, without training", (*_PRESET, "--max-steps", "0"), notes=True),
    "preset": BaselineKind("notes and training, as make run has", _PRESET, trains=True, notes=True),
    "team": BaselineKind("the same, a policy for each person", _TEAM, trains=True, notes=True),
    "practice": BaselineKind("the same, notes practised at once", _PRESET, trains=True, practises=True, notes=True),
    "combine": BaselineKind("training alone: scores and hints", (*_TRAINING, "combine"), trains=True),
    "topk-select": BaselineKind("training alone: top-k selection", (*_TRAINING, "topk-select"), trains=True),
}
#: Options of every server that is started.
SERVER_FLAGS = ("--proxy-host", "127.0.0.1", "--kv-cache-gib", "1")
#: With it, people on one server learn as if each had a server of their own.
SEPARATE = "--policy-per-user"


class BaselineSystem:
    """A baseline. Its server has all items, each with people of its own.

    If it trains, each person has a policy of their own there, and it has one item at a time: there are as many servers
    as items at once. People whose answers are compared share the policy of another server, except in `team`.
    """

    one_at_a_time = False

    def __init__(
        self, name: str, machine: Machine, folder: Path, teaching: dict[str, Any], server: Sequence[str], wire: str
    ) -> None:
        """`server` are further options of its servers, which run in `folder`."""
        self.name, self._machine, self._folder, self._teaching, self._wire = name, machine, folder, teaching, wire
        self._baseline = BASELINES[name]
        self._flags = (*machine.model_flags, *SERVER_FLAGS, *self._baseline.flags, *server)
        self._people = 0
        self._servers = contextlib.AsyncExitStack()
        self._free: list[RunningServer] = []

    @property
    def one_per_server(self) -> bool:
        return self._baseline.trains

    @property
    def facts(self) -> dict[str, Any]:
        return {"about": self._baseline.about, "model": self._machine.policy_name, "wire": self._wire}

    @contextlib.asynccontextmanager
    async def started(self, people: int) -> AsyncIterator[None]:
        async with self._servers:
            self._people = people
            if not self.one_per_server:
                self._free = [await self._servers.enter_async_context(self._server(range(people)))]
            yield

    def _server(self, people: Sequence[int], *flags: str) -> contextlib.AbstractAsyncContextManager[RunningServer]:
        """A new server: one from before a run was stopped knows half of an item already."""
        run_dir = self._folder / secrets.token_hex(3)
        return run_server(run_dir, *self._flags, *flags, people=[*map(person_name, people)])

    @contextlib.asynccontextmanager
    async def _place(self, people: Sequence[int]) -> AsyncIterator[RunningServer]:
        """The server on which these people are measured."""
        if not self.one_per_server:
            yield self._free[0]
        elif len(people) > 1 and self._baseline.flags != _TEAM:
            async with self._server(people) as own:
                yield own
        else:
            everybody = self._server(range(self._people), SEPARATE)
            free = self._free.pop() if self._free else await self._servers.enter_async_context(everybody)
            try:
                yield free
            finally:
                self._free.append(free)

    @contextlib.asynccontextmanager
    async def venue(self, item: str, first: int, people: int) -> AsyncIterator[Venue]:
        numbers = range(first, first + people)
        names, chat = [*map(person_name, numbers)], self._baseline.chat
        async with (
            self._place(numbers) as server,
            opened(chat(server.url, key=server.keys[name], wire=self._wire) for name in names) as chats,
        ):
            own = [server.keys[name] for name in names]

            async def settle() -> None:
                await have_settled(server.url, own)

            async def practise(seconds: float) -> None:
                async for _ in practised(server.run_dir, seconds, names):
                    pass

            async def forget(number: int) -> None:
                await chats[number].forget()
                if self._baseline.chat is OrdinaryChat:
                    await forget_person(server, names[number])

            bare = WITHOUT_NOTES if self._baseline.notes else None
            waits = settle if self._baseline.flags != _BARE else nothing
            learn = practise if self._baseline.practises else nothing
            forgets = forget if self._baseline.forgets else None
            yield Venue(chats, waits, learn, partial(steps_of, server.url, own[0]), self._teaching, bare, forgets)


def person_name(number: int) -> str:
    return f"person-{number}"


async def forget_person(server: RunningServer, name: str) -> None:
    """Delete all that somebody said, and what was trained on it, as an operator would. Raises ServerFailed."""
    operator = f"{WATCHER}={server.key}"
    words = ["forget", "--run-dir", str(server.run_dir), "--user", name, "--retrain", "--api-key", operator]
    with (server.run_dir / LOG).open("ab") as log:
        process = await start_process(sys.executable, "-m", "openclaw_rl", *words, stdout=log, stderr=log)
        if await process.wait():
            raise ServerFailed(f"What {name} said could not be deleted: see {server.run_dir / LOG}.")
