"""`openclaw-rl chat`: a conversation with the running server, in the terminal.

It is a client like any other: the server learns from what is said next, as it does with every client.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config, user_key
from openclaw_rl.errors import UserError
from openclaw_rl.terminal import console

if TYPE_CHECKING:
    from openclaw_rl.client import Client

DOC = "talk to the running server, which learns from what you say"
PROMPT = "you: "
#: Typed instead of a message, it starts a new conversation.
NEW = "/new"


def add(commands: Any) -> None:
    add_command(commands, "chat", DOC, run, (*RUN_OPTIONS, "api_key"))


def run(options: argparse.Namespace) -> int:
    """Talk until the input ends."""
    from openclaw_rl.client import Client
    from openclaw_rl.ledger.lock import server_url

    config = run_config(options)
    server = server_url(config.run.folder)
    if not server:
        raise UserError(
            f"No server runs in {config.run.run_dir.absolute()}: start one in another terminal, with make run or "
            "openclaw-rl serve, or give its --run-dir."
        )
    with Client(server, user_key(config)) as client:
        Conversation(client).hold()
    return 0


class Conversation:
    """The messages so far, and how they are shown."""

    def __init__(self, client: "Client") -> None:
        self.client = client
        self.messages: list[dict[str, str]] = []
        self.out = console()
        self._shown_progress = ""

    def hold(self) -> None:
        self._note(f"Your next message is feedback on the answer before. {NEW}: new chat; Ctrl-D: quit")
        for line in lines():
            if line == NEW:
                self.messages.clear()
            elif line:
                self._exchange(line)
            self._show_progress()

    def _exchange(self, text: str) -> None:
        """One message and its answer. Ctrl-C stops the answer and takes the message back."""
        from openclaw_rl.client import ServerRefused

        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for delta in self.client.chat(messages):
                content = delta.get("content") or ""
                # Reasoning is shown, but is not part of the conversation.
                self._write(delta.get("reasoning_content") or "", style="dim")
                self._write(content)
                answer += content
        except KeyboardInterrupt:
            self._note(" …")
            return
        except ServerRefused as error:
            self._note(str(error), style="yellow")
            return
        self.out.print()
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _show_progress(self) -> None:
        """Say which policy answers and what the next step still needs, if that has changed."""
        state = self.client.ready()
        step = state.get("next_step")
        progress = f"policy {state.get('policy_version', 0)}"
        if step:
            progress += f" · {step['samples']} of {step['needed']} judged answers for step {step['step']}"
        if progress != self._shown_progress:
            self._note(progress)
        self._shown_progress = progress

    def _write(self, words: str, style: str = "") -> None:
        if words:
            self.out.print(Text(words, style=style), end="", soft_wrap=True)

    def _note(self, words: str, style: str = "dim") -> None:
        self.out.print(Text(words, style=style))


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
