"""Reads what a user or a tool says after a response."""

from openclaw_rl.judge.rules import Reading, read_reply


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def tool(text: str) -> list[dict[str, str]]:
    return [{"role": "tool", "content": text}]


def read(text: str, request: str = "Write a poem about the sea.", response: str = "The sea is wide.") -> Reading:
    return read_reply(request, response, user(text))
