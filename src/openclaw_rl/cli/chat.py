"""A conversation with a running server, in the terminal: `openclaw-rl chat`.

Nothing is special about it: it is a client like any other, and what is said next is the feedback on the answer before.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
from rich.text import Text

from openclaw_rl.app.config import Config
from openclaw_rl.cli.commands import ask_ready
from openclaw_rl.cli.rolling_back import GIVE_KEY
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.lock import read_server
from openclaw_rl.terminal import console

PROMPT = "you: "
#: Typed instead of a message, it begins a new conversation.
ANEW = "/new"
#: A small model on a laptop may be busy for so long before its first word.
SECONDS = 600.0
#: Begins a line of a stream that holds something.
DATA = "data: "


class NoAnswer(Exception):
    """The server does not answer this; the message is its own."""


def chat(config: Config, options: argparse.Namespace) -> int:
    """Talk until the input ends. Raises UserError."""
    server = read_server(config.run_dir.expanduser()).get("url")
    if not server:
        raise UserError(
            f"No server runs in {config.run_dir.absolute()}: start one in another terminal, with make run or "
            "openclaw-rl serve, or give its --run-dir."
        )
    key = {"Authorization": f"Bearer {config.api_keys[0].secret}"} if config.api_keys else {}
    # Never by way of a proxy: the server is on this machine.
    with httpx.Client(base_url=server, headers=key, timeout=SECONDS, trust_env=False) as client:
        try:
            Conversation(client).hold()
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise UserError(f"The server at {server} does not answer any more: {what}.") from None
    return 0


class Conversation:
    """What was said so far, and who said the last of it."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.messages: list[dict[str, str]] = []
        self.out = console()
        self._told = ""

    def hold(self) -> None:
        self._note(f"What you say next is feedback on what it said. {ANEW} begins anew, Ctrl-D ends.")
        for line in lines():
            if line == ANEW:
                self.messages.clear()
            elif line:
                self._exchange(line)
            self._progress()

    def _exchange(self, text: str) -> None:
        """One message and its answer. Ctrl-C breaks the answer off, and takes the message back."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for delta in self._answer(asked):
                said = delta.get("content") or ""
                # What it thinks is shown, but is no part of the conversation.
                self._write(delta.get("reasoning_content") or "", style="dim")
                self._write(said)
                answer += said
        except KeyboardInterrupt:
            self._note(" …")
            return
        except NoAnswer as error:
            self.out.print(Text(str(error), style="yellow"))
            return
        self.out.print()
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        """An answer as it is written. Raises NoAnswer, and UserError where a key is needed."""
        body = {"messages": messages, "stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                refusal = json.loads(response.read())["error"]["message"]
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    raise UserError(f"{refusal} {GIVE_KEY}")
                raise NoAnswer(refusal)
            for line in response.iter_lines():
                if line.startswith(DATA + "{"):
                    yield from deltas(json.loads(line.removeprefix(DATA)))

    def _progress(self) -> None:
        """Say which policy answers and how far the next step is, when that has changed."""
        told = ask_ready(str(self.client.base_url).rstrip("/"))
        step = told.get("next_step")
        words = f"policy {told.get('policy_version', 0)}"
        if step:
            words += f" · {step['samples']} of {step['needed']} judged answers for step {step['step']}"
        if words != self._told:
            self._note(words)
        self._told = words

    def _write(self, words: str, style: str = "") -> None:
        if words:
            self.out.print(Text(words, style=style), end="", soft_wrap=True)

    def _note(self, words: str) -> None:
        self.out.print(Text(words, style="dim"))


def deltas(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a piece of a stream adds. Raises NoAnswer."""
    if "error" in event:
        raise NoAnswer(event["error"]["message"])
    for choice in event["choices"]:
        yield choice["delta"]


def lines() -> Iterator[str]:
    """What is typed, until the input ends; of a pipe, what it holds."""
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
