"""A learning run that practises notes, with a scripted model."""

import asyncio
import contextlib
import re
import sqlite3
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from openclaw_rl.learn.practiser import PracticeSettings, Practiser
from openclaw_rl.ledger import examples, notes, practices
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.sense import lacks_code
from openclaw_rl.types import Note, Practice, SampleRequest
from support.learning_run import LearningRun
from support.records import a_turn

SHOWN = ("Well, bees make honey from nectar.", "Well, the moon shines because of the sun.")


def usual(question: str) -> str:
    """The scripted model's answer without the note."""
    return f"{question} Nobody knows for sure.{code_for(question)}"


def wished(question: str) -> str:
    """Its answer with the note."""
    return f"Well, {question} Nobody.{code_for(question)}"


def code_for(question: str) -> str:
    """Code, where it was asked for."""
    return "\n```\nprint(1)\n```" if lacks_code("", question) else ""


def question_in(prompt: str) -> str:
    """What was asked last; empty in a prompt that is no chat."""
    asked = re.findall(r"user\n(.*?)<", prompt, re.DOTALL)
    return asked[-1].strip() if asked else ""


def hash_of(text: str) -> int:
    """A number of a text, the same in every run."""
    return zlib.crc32(text.encode())


class AnyVersion:
    """Every version can be asked."""

    def find(self, version: int | None) -> tuple[int, None]:
        return version or 0, None


class Practising:
    """A learning run whose model answers as a script says, and a note with two examples."""

    def __init__(self, run: LearningRun, renderer: ChatRenderer, **settings: Any) -> None:
        self.run = run
        self.renderer = renderer
        given = {"automatic": False, "steps": 3, "idle_seconds": 0.0, "on_policy": False, "several_users": False}
        self.settings = PracticeSettings(
            **{**given, "personal": False, "seed": 0, "poll_seconds": 0.01, "resume_seconds": 0.0, **settings}
        )
        self.answer: Callable[[SampleRequest, str], str] = self.follow
        self.task: asyncio.Task[None] | None = None
        self.prompts: list[str] = []

    @property
    def book(self) -> Any:
        return self.run.book

    def follow(self, request: SampleRequest, prompt: str) -> str:
        """The model keeps to the note with its examples, and once it was trained also without them."""
        keeps = SHOWN[0] in prompt or (request.version or 0) > 0
        return wished(question_in(prompt)) if keeps else usual(question_in(prompt))

    def script(self, request: SampleRequest, _index: int) -> Sequence[int]:
        prompt = self.renderer.tokenizer.backend.decode(list(request.prompt_ids), skip_special_tokens=False)
        self.prompts.append(prompt)
        end = min(self.renderer.tokenizer.eos_ids)
        return [*self.renderer.tokenizer.backend.encode(self.answer(request, prompt)).ids, end]

    async def start(self) -> None:
        await self.run.start()
        self.run.sampler.script = self.script
        self.run.sampler.versions = AnyVersion()  # type: ignore[assignment]
        self.practiser = Practiser(
            self.book.ledger, self.run.loop, self.run.sampler, self.renderer, lambda _note, _text: None, self.settings
        )
        self.task = asyncio.create_task(self.practiser.run())

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.run.kill()

    def teach(self, owner: str = "me", text: str = "Begin with Well.", **given: Any) -> Note:
        """A note, and two answers that its owner corrected."""
        note: Note = self.book.change(lambda db: notes.add(db, owner, text, **given))
        for place, answer in enumerate(SHOWN):
            asked = [{"role": "user", "content": f"What about thing number {place}?"}]
            turn = self.book.capture(a_turn(f"{owner}-{place}", owner, messages=asked))
            self.book.change(examples.keep_correction, turn, answer)
        # As if all had been said in one session.
        self.book.change(show, note.number, owner)
        return note

    def ask_for(self, note: Note) -> Practice:
        practice: Practice = self.book.change(practices.request, note.number)
        return practice

    async def ended(self, practice: Practice) -> Practice:
        def load() -> Practice:
            found: Practice = self.book.ledger.read(practices.load, practice.number)
            return found

        await self.run.until(lambda: load().ended is not None)
        return load()

    def under_way(self) -> list[Practice]:
        return [practice for practice in self.book.ledger.read(practices.load_all) if practice.is_under_way]

    def note(self, number: int) -> Note:
        found: Note = self.book.ledger.read(notes.load, number)
        return found


def show(db: sqlite3.Connection, note: int, owner: str) -> None:
    """Let all examples of an owner show a note."""
    db.execute(
        "INSERT INTO example_notes SELECT number, ? FROM notes WHERE question != '' AND owner = ?", (note, owner)
    )


def react(db: sqlite3.Connection, turn: int, note: int, kept: bool) -> None:
    """Record how an answer with a note was received, in the far future, so that it counts."""
    db.execute("INSERT INTO note_outcomes VALUES (?, ?, 1, ?, 2e9)", (turn, note, kept))


@contextlib.asynccontextmanager
async def practising(run: LearningRun, renderer: ChatRenderer, **settings: Any) -> AsyncIterator[Practising]:
    server = Practising(run, renderer, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
