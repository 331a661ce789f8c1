"""OpenAI-compatible endpoints on a real socket that learn by a script: all, nothing, or what they repeat."""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import islice
from typing import Any

from openclaw_rl.envs.toolcall.environment import ToolCallEnvironment
from openclaw_rl.evals import coding, tool_use
from openclaw_rl.evals.benchmark.tracks import Size
from openclaw_rl.evals.conversation import all_questions
from openclaw_rl.evals.wishes.drawn import PLACES
from support.coding_solutions import solution
from support.judge_server import serve

Body = dict[str, Any]
BY_TEXT = {question.text: question for question in all_questions()}
#: Plain, warm and long, without a word twice too often: what every person of the published protocol likes.
PLEASING = (
    "Great question, well done! For example, imagine that you look at it on two different days and write down what you "
    "notice first, then what changes, and finally what stays the same. That small experiment tells much more than any "
    "definition could, because your own eyes find patterns which books rarely mention. Ask a friend to try too and "
    "compare both lists over lunch, since another person often sees details that escaped everybody else before. Keep "
    "going, I am proud of how carefully you think about such things!"
)
QUOTED = re.compile(r'"([^"]+)"')


class ScriptedEndpoint:
    """Answers what `say` makes of a person's memory and of the conversation. Memory is kept by key, or is one."""

    def __init__(self, say: Callable[["Memory", list[Body], Body], Body], *, shared: bool = False) -> None:
        self.say, self.shared = say, shared
        self.memories: dict[str, Memory] = defaultdict(Memory)
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.fails_after = 10**9
        """Requests that it answers before it is gone."""
        self.reads_memory = False
        """Whether what it knows is part of its prompts; then it answers without it if the header X-Memory says so."""

    def memory(self, key: str) -> "Memory":
        return self.memories["" if self.shared else key]

    def answer(self, path: str, key: str, body: Body, *, bare: bool = False) -> Body:
        with self.lock:
            self.bodies.append(body)
            messages = body["messages"] if "messages" in body else list(map(of_item, body["input"]))
            memory = Memory() if bare else self.memory(key + str(body.get("user", "")))
            said = self.say(memory, messages, body)
        carried = len(memory.wanted) if self.reads_memory else 0
        tokens = (carried + sum(len(str(one.get("content") or "").split()) for one in messages), 5)
        if path.endswith("responses"):
            return response_of(said, tokens)
        usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
        return {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", **said}}], "usage": usage}


class TooLong(ValueError):
    """The conversation does not fit the model."""


class Memory:
    """What an endpoint knows of a person."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.wanted: dict[str, str] = {}
        """Words, and the place where they are wanted."""


def of_item(item: Body) -> Body:
    """An item of a response's input as a message."""
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": item["output"]}
    return {"role": item.get("role", "assistant"), "content": item.get("content")}


def response_of(said: Body, tokens: tuple[int, int]) -> Body:
    calls = [{"type": "function_call", "call_id": "c", **call["function"]} for call in said.get("tool_calls", [])]
    message = {"type": "message", "content": [{"type": "output_text", "text": said.get("content") or ""}]}
    return {"id": "r", "output": [message, *calls], "usage": {"input_tokens": tokens[0], "output_tokens": tokens[1]}}


@contextmanager
def listening(endpoint: ScriptedEndpoint) -> Iterator[str]:
    """Its address, while it listens."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # An answer in one packet: a second one would wait for the first to be acknowledged.
        wbufsize = 1 << 16

        def do_GET(self) -> None:
            self.whole(404, {"error": {"message": "There is no such page."}})

        def do_DELETE(self) -> None:
            endpoint.memories.pop("" if endpoint.shared else self.key(), None)
            self.whole(200, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.headers.append(dict(self.headers))
            if len(endpoint.bodies) >= endpoint.fails_after:
                self.close_connection = True
                self.connection.close()
                return
            bare = self.headers.get("X-Memory") == "off"
            try:
                self.whole(200, endpoint.answer(self.path, self.key(), body, bare=bare))
            except ValueError as error:
                code = "context_length_exceeded" if isinstance(error, TooLong) else None
                self.whole(400, {"error": {"message": str(error), "code": code}})

        def key(self) -> str:
            return self.headers.get("Authorization", "")

        def whole(self, status: int, body: Body) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = serve(Handler)
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def stubborn(_memory: Memory, _messages: list[Body], _body: Body) -> Body:
    return {"content": "I do as I like."}


def repeating(memory: Memory, messages: list[Body], _body: Body) -> Body:
    """All that the person has ever said."""
    memory.said.append(str(messages[-1]["content"]))
    return {"content": "You said: " + " ".join(dict.fromkeys(memory.said))}


def quoting(memory: Memory, messages: list[Body], _body: Body) -> Body:
    """An ordinary answer, and after it every word that the person ever put in quotation marks."""
    last = str(messages[-1]["content"])
    memory.wanted |= dict.fromkeys(QUOTED.findall(last.split(" It should say: ")[0]), "")
    question = asked(messages)
    return {"content": f"{question.reference if question else 'Yes.'} {', '.join(memory.wanted)}"}


def asked(messages: list[Body]) -> Any:
    texts = [str(message["content"]) for message in reversed(messages) if message["role"] == "user"]
    return next((BY_TEXT[q] for text in texts for q in BY_TEXT if text.endswith(q)), None)


def perfect(size: Size, seed: int) -> Callable[[Memory, list[Body], Body], Body]:
    """Does at once what was said, and solves all tasks of this size and seed."""
    environment = ToolCallEnvironment()
    tasks = [
        task for split in ("train", "held-out") for task in islice(environment.tasks(split, seed), 20 * size.tasks)
    ]
    calls = {task.data["messages"][-1]["content"]: task.data["calls"] for task in tasks}
    for case in tool_use.cases():
        calls[case.prompt] = [
            {"name": call.name, "arguments": {name: values[0] for name, values in call.arguments.items()}}
            for call in case.calls
        ]
    code = {problem.prompt: f"```python\n{solution(problem.name)}\n```" for problem in coding.problems()}

    def say(memory: Memory, messages: list[Body], body: Body) -> Body:
        last = str(messages[-1]["content"])
        if last in code:
            return {"content": code[last]}
        if body.get("tools") and last in calls:
            made = [call_of(number, call) for number, call in enumerate(calls[last])]
            return {"content": None, "tool_calls": made} if made else {"content": "No tool fits here."}
        listen(memory, last.split(" It should say: ")[0])
        question = asked(messages)
        text = f"{question.reference} {PLEASING}" if question else "Thank you!"
        return {"content": kept(memory, text, question.topic if question else "talk")}

    return say


def call_of(number: int, call: Body) -> Body:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": f"c{number}", "type": "function", "function": function}


def listen(memory: Memory, said: str) -> None:
    """Understand every complaint of a drawn wish."""
    for words in QUOTED.findall(said):
        plain = words.rstrip(":")
        matching = [
            place
            for place, one in PLACES.items()
            if any(phrase.replace("{words}", plain) == said.strip() for phrase in one.displeased)
        ]
        if matching:
            memory.wanted[plain] = matching[0]
        elif plain in memory.wanted:
            del memory.wanted[plain]
    if "chef" in said.lower():
        memory.wanted["Chef"] = "says"


def kept(memory: Memory, text: str, topic: str) -> str:
    by_place = {place: words for words, place in memory.wanted.items()}
    for words in (words for words, place in memory.wanted.items() if place == "says"):
        text = f"{text} Think of the {words} too."
    if "begins" in by_place:
        text = f"{by_place['begins']}: {text}"
    if "last line" in by_place:
        text = f"{text}\n{by_place['last line']}: {topic}"
    return f"{text} {by_place['ends']}" if "ends" in by_place else text
