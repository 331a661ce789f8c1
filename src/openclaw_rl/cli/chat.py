"""`openclaw-rl chat`: a conversation with the running server, in the terminal.

It is a client like any other: the server learns from what is said next, as it does with every client.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.client import Client, ServerError
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.run_dir import server_url
from openclaw_rl.terminal import WordWriter, console, on_terminal

DOC = "talk to the running server, which learns from what you say"
PROMPT = "you: "
#: What can be typed instead of a message.
COMMANDS = {
    "/good": "rate the last answer as good; words after it say why",
    "/bad": "rate the last answer as bad; words after it say why",
    "/edit": "write the last answer as you want it: after the command, in $EDITOR, or line by line",
    "/undo": "take back the note that was just written, else your last message and its answer",
    "/new": "start a new conversation, which is given your notes",
    "/notes": "show what the model is told of your wishes",
    "/help": "show this list",
    "/quit": "leave, as Ctrl-D does",
}
#: How long a new conversation waits for the judge.
JUDGE_SECONDS = 5.0
#: Begins a message that begins with a slash.
ESCAPED = "//"


def add(commands: Any) -> None:
    add_command(commands, "chat", DOC, run, (*RUN_OPTIONS, "api_key"))


def run(options: argparse.Namespace) -> int:
    """Talk until the input ends."""
    config = run_config(options)
    server = server_url(config.run.folder)
    if not server:
        raise UserError(
            f"No server runs in {config.run.run_dir.absolute()}: start one in another terminal, with make run or "
            "openclaw-rl serve, or give its --run-dir."
        )
    with Client(server, config.server.user_key) as client:
        Conversation(client).hold()
    return 0


class Conversation:
    """The messages so far, and how they are shown.

    - A line that begins with a slash is a command and never sent; two slashes begin a message with one.
    - Ctrl-C stops an answer. What was shown of it stays in the conversation, so that one can complain about it.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.messages: list[dict[str, str]] = []
        self.out = console()
        self._rated_id = ""
        """The id of the last answer, if it was complete."""
        self._answer = ""
        self._shown_progress = ""
        self._notes: dict[int, str] = {}
        """The user's notes, by their number."""
        self._new_notes: list[int] = []
        """The notes that were announced since the last message."""

    def hold(self) -> None:
        self._notes = self._read_notes()
        self._say("Your next message is feedback on the last answer. /help: commands; Ctrl-D: quit")
        for line in lines():
            if line.startswith("/") and not line.startswith(ESCAPED):
                if not self._obey(line):
                    return
            elif line:
                self._exchange(line.removeprefix("/") if line.startswith(ESCAPED) else line)
            self._show_new_notes()
            self._show_progress()

    def _obey(self, line: str) -> bool:
        """Carry out a command. False if it ends the conversation."""
        command, _, words = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/new":
                self.messages = []
                self._rated_id = ""
                self._wait_for_judge()
                self._show_new_notes()
                self._say("A new conversation.")
            case "/notes":
                self._wait_for_judge()
                self._show_new_notes()
                self._say("\n".join(self._notes.values()) or "There is no note yet: say how you want your answers.")
            case "/undo":
                self._undo()
            case "/edit":
                self._edit(words.strip())
            case "/good" | "/bad":
                self._rate("up" if command == "/good" else "down", words.strip())
            case "/help":
                self._show_help()
            case _:
                self._say(f"There is no command {command}. /help lists them; // begins a message with a slash.")
        return True

    def _show_help(self) -> None:
        grid = Table.grid(padding=(0, 2))
        for name, about in COMMANDS.items():
            grid.add_row(name, about, style="dim")
        self.out.print(grid)

    def _undo(self) -> None:
        if new := {number: text for number in self._new_notes if (text := self._notes.pop(number, None))}:
            for number, text in new.items():
                if self._send(partial(self.client.ask, "DELETE", f"/v1/notes/{number}")):
                    self._say(f"Taken back: {text}")
            self._new_notes = []
            return
        if not self.messages:
            self._say("There is nothing to take back.")
            return
        last = max(index for index, message in enumerate(self.messages) if message["role"] == "user")
        self._say(f"Taken back: {self.messages[last]['content']}")
        self.messages = self.messages[:last]
        self._rated_id = ""

    def _rate(self, thumb: str, words: str) -> None:
        if not self._rated_id:
            self._say("There is no complete answer to rate.")
        elif self._send(lambda: self.client.rate(self._rated_id, thumb, words)):
            self._say("Recorded.")

    def _edit(self, wanted: str) -> None:
        """Tell the server which answer was wanted."""
        if not self._rated_id:
            self._say("There is no complete answer to edit.")
            return
        answer = self._answer
        try:
            wanted = wanted or (in_editor(answer) if sys.stdin.isatty() else self._typed())
        except UserError as error:
            self._say(str(error), style="yellow")
            return
        if not wanted or wanted == answer:
            self._say("Nothing was changed.")
            return
        kept: list[bool] = []
        if self._send(lambda: kept.append(self.client.correct(self._rated_id, wanted))):
            self._say("Kept as an example, from your next conversation on (/new)." if kept[0] else "Recorded.")

    def _typed(self) -> str:
        """Lines that are typed, up to one that is only a full stop."""
        self._say("Type the answer as you want it, and then a line with only a full stop.")
        typed = []
        for line in sys.stdin:
            if line.strip() == ".":
                break
            typed.append(line)
        return "".join(typed).strip()

    def _send(self, request: Callable[[], object]) -> bool:
        """Send feedback. False if the server refuses it, which is then shown."""
        try:
            request()
        except ServerError as error:
            if not error.is_refusal:
                raise
            self._say(str(error), style="yellow")
            return False
        return True

    def _exchange(self, text: str) -> None:
        """One message and its answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        self._rated_id = ""
        self._new_notes = []
        writer = WordWriter(self.out, self.out.width if on_terminal() else None)
        try:
            for delta in self.client.chat(messages):
                content = delta.get("content") or ""
                # Reasoning is shown, but is not part of the conversation.
                writer.write(delta.get("reasoning_content") or "", style="dim")
                writer.write(content)
                answer += content
            self._rated_id = self.client.answer_id
        except KeyboardInterrupt:
            writer.write(" …")
        except ServerError as error:
            writer.end()
            if not error.is_refusal:
                raise
            self._say(str(error), style="yellow")
            return
        writer.end()
        self._answer = answer
        self._say(self._rated_id or "stopped; what is shown stays in the conversation")
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _read_notes(self) -> dict[int, str]:
        """The user's notes; none if the server keeps none."""
        try:
            kept = self.client.ask("GET", "/v1/notes")["data"]
            return {note["id"]: note["text"] for note in kept if note["object"] == "note"}
        except ServerError as error:
            if not error.is_refusal:
                raise
            return {}

    def _wait_for_judge(self) -> None:
        """Wait a moment until what was said last has been read: it may become a note."""
        end = time.monotonic() + JUDGE_SECONDS
        while (state := self.client.ready()).get("judge") == "on" and (state.get("queue") or {}).get("to_judge"):
            if time.monotonic() > end:
                self._say("What was said last is still being read.")
                return
            time.sleep(0.1)

    def _show_new_notes(self) -> None:
        known = self._notes
        self._notes = self._read_notes()
        for number, text in self._notes.items():
            if known.get(number) != text:
                self._say(f"Noted, from your next conversation on (/new); /undo takes it back: {text}")
                self._new_notes.append(number)

    def _show_progress(self) -> None:
        """Say which policy answers and what the next step still needs, if that has changed."""
        state = self.client.ready()
        step = state.get("next_step")
        progress = f"policy {state.get('policy_version', 0)}"
        if step:
            progress += f" · {step['samples']} of {step['needed']} judged answers for step {step['step']}"
        if progress != self._shown_progress:
            self._say(progress)
        self._shown_progress = progress

    def _say(self, words: str, style: str = "dim") -> None:
        self.out.print(Text(words, style=style))


def in_editor(text: str) -> str:
    """The text as somebody leaves it in their editor ($VISUAL, $EDITOR, or vi). Raises UserError."""
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.txt"
        path.write_text(text, "utf-8")
        try:
            # A file of the user's own terminal, opened by the program that the user chose.
            subprocess.run([*shlex.split(command), str(path)], check=True)
            return path.read_text("utf-8").strip()
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"The editor {command!r} failed: {error}. Set EDITOR, or type /edit and the answer."
            ) from None


def lines() -> Iterator[str]:
    """What is typed, until the input ends; from a pipe, its lines."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines with it)
    while True:
        try:
            yield input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
