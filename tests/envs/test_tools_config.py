"""A user's own tools: what the file may say, how tools are run, and how their tasks are rewarded."""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Environment, Task
from openclaw_rl.envs.calls import ToolFailed
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.envs.toolcall.user_config import read_tools_config
from openclaw_rl.envs.toolcall.user_toolbox import UserToolbox, fill_in
from openclaw_rl.sandbox.command import missing_fences
from support.policies import attempt, calls, says

needs_fences = pytest.mark.skipif(bool(missing_fences()), reason=f"commands cannot be confined: {missing_fences()}")

FUNCTIONS = """
import asyncio, time
from openclaw_rl.envs.base import EnvFailed

def count_words(text, at_least=0):
    return len([word for word in text.split() if len(word) >= at_least])

async def shout(text):
    return text.upper()

def fail(text):
    raise KeyError(text)

def broken(text):
    raise EnvFailed("the database is gone")

def hang(text):
    time.sleep(3600)

async def slow(text):
    await asyncio.sleep(60)

def is_loud(task, calls, answer):
    assert (task["data"]["wanted"], task["question"], task["id"]) == ("HI", "Shout hi.", "loud")
    task["data"].clear()
    return 0.5 * bool(calls and not calls[0]["error"]) + 0.5 * (answer == "HI")

def nan(task, calls, answer):
    return float("nan")

NUMBER = 3
"""
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def tool(name: str = "count_words", parameters: Any = TEXT, **run: Any) -> dict[str, Any]:
    limits = {key: run.pop(key) for key in ("timeout", "max_output") if key in run}
    return {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": parameters},
        "run": run or {"python": f"tools.py:{name}"},
        **limits,
    }


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes tools.yaml with its functions and tasks; returns its path."""

    def write_files(
        *tools: Any, tasks: Any = ({"question": "?", "answer": 2},), name: str = "t.yaml", **more: Any
    ) -> Path:
        (tmp_path / "tools.py").write_text(FUNCTIONS)
        lines = tasks if isinstance(tasks, str) else "\n".join(map(json.dumps, tasks))
        (tmp_path / "tasks.jsonl").write_text(lines)
        content = {"tools": list(tools) or [tool()], "tasks": "tasks.jsonl", **more}
        dump = json.dumps if name.endswith("json") else yaml.safe_dump
        (tmp_path / name).write_text(dump(content))
        return tmp_path / name

    return write_files


def task_of(environment: Environment, split: str = "train") -> Task:
    return next(environment.tasks(split, 0))


async def run(path: Path, name: str, **arguments: Any) -> str:
    toolbox = UserToolbox(read_tools_config(path).tools)
    try:
        return await toolbox.run(name, arguments)
    finally:
        await toolbox.close()


@pytest.mark.parametrize("name", ["t.yaml", "t.yml", "t.json"])
async def test_a_task_with_a_function_is_solved(write: Any, name: str) -> None:
    task = {"question": "How many words are in 'a b'?", "answer": 2, "split": "train"}
    environment = make_environment(
        "toolcall", {"tools_config": write(tool(), tasks=[task], name=name, system="Use tools.")}
    )
    episode = environment.open(task_of(environment))
    assert episode.tools == [{"type": "function", "function": tool()["function"]}]
    assert [message["role"] for message in await episode.start()] == ["system", "user"]
    answers = [calls(("count_words", {"text": "a b"})), says("Answer: 2")]
    steps, outcome = await attempt(episode, lambda messages, turn: answers[turn])
    assert steps[0].messages == [{"role": "tool", "tool_call_id": "call0", "content": "2"}]
    assert (outcome.reward, outcome.solved) == (1.0, True)


async def test_expected_calls_give_partial_credit(write: Any) -> None:
    wanted = [{"name": "count_words", "arguments": {"text": "a b"}}]
    path = write(tasks=[{"question": "?", "calls": wanted, "answer": 2, "split": "train"}])
    environment = make_environment("toolcall", {"tools_config": path})
    answers = [calls(("count_words", {"text": "a"})), calls(("count_words", {"text": "a b"})), says("Answer: 2")]
    steps, outcome = await attempt(environment.open(task_of(environment)), lambda messages, turn: answers[turn])
    assert 'must be "a b", not "a"' in steps[0].hint
    assert (0 < outcome.reward < 1, outcome.solved) == (True, False)


async def test_a_checker_gives_the_reward(write: Any) -> None:
    line = {
        "question": "Shout hi.",
        "checker": "tools.py:is_loud",
        "data": {"wanted": "HI"},
        "split": "train",
        "id": "loud",
    }
    environment = make_environment("toolcall", {"tools_config": write(tool("shout"), tool("fail"), tasks=[line])})
    for answers, reward in (
        ([calls(("shout", {"text": "hi"})), says("HI")], 1.0),
        ([calls(("shout", {"text": 3})), says("HI")], 0.5),
        ([calls(("fail", {"text": "hi"})), says("HI")], 0.5),
        ([says("")], 0.0),
    ):
        _, outcome = await attempt(environment.open(task_of(environment)), lambda messages, turn, a=answers: a[turn])
        assert (outcome.reward, outcome.solved) == (reward, reward == 1.0)


async def test_a_checker_that_gives_no_number_is_the_environments_fault(write: Any) -> None:
    path = write(tasks=[{"question": "?", "checker": "tools.py:nan", "split": "train"}])
    environment = make_environment("toolcall", {"tools_config": path})
    with pytest.raises(EnvFailed, match="gave nan"):
        await attempt(environment.open(task_of(environment)), lambda messages, turn: says(""))


async def test_failures_of_functions_are_results_and_faults_are_not(write: Any) -> None:
    path = write(tool("fail"), tool("slow", python="tools.py:slow", timeout=0.05), tool("broken"))
    with pytest.raises(ToolFailed, match="KeyError: 'a'"):
        await run(path, "fail", text="a")
    with pytest.raises(ToolFailed, match=r"did not finish within 0\.05 seconds"):
        await run(path, "slow", text="a")
    with pytest.raises(EnvFailed, match="the database is gone"):
        await run(path, "broken", text="a")


def test_functions_that_hang_delay_neither_others_nor_the_end_of_the_process(write: Any) -> None:
    path = write(tool("hang", python="tools.py:hang", timeout=0.05), tool())
    program = f"""
import asyncio, pathlib
from openclaw_rl.envs.calls import ToolFailed
from openclaw_rl.envs.toolcall.user_config import read_tools_config
from openclaw_rl.envs.toolcall.user_toolbox import UserToolbox

async def main():
    toolbox = UserToolbox(read_tools_config(pathlib.Path({str(path)!r})).tools)
    hanging = [toolbox.run("hang", {{"text": "a"}}) for _ in range(40)]
    failures = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(failure, ToolFailed) for failure in failures)
    print(await toolbox.run("count_words", {{"text": "a b"}}))

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr


async def test_a_failure_is_shown_to_the_model_and_becomes_a_hint(write: Any) -> None:
    path = write(tool("fail"), tasks=[{"question": "?", "answer": 1, "split": "train"}])
    environment = make_environment("toolcall", {"tools_config": path})
    answers = [calls(("fail", {"text": "a"})), says("Answer: 1")]
    steps, _ = await attempt(environment.open(task_of(environment)), lambda messages, turn: answers[turn])
    assert json.loads(steps[0].messages[0]["content"]) == {"error": "KeyError: 'a'"}
    assert steps[0].hint == "KeyError: 'a'"


async def test_long_results_are_cut_with_a_note(write: Any) -> None:
    path = write(tool("shout", python="tools.py:shout", max_output=5))
    assert await run(path, "shout", text="abcdefgh") == "ABCDE\n[cut: only the first 5 characters are shown]"
    assert await run(path, "shout", text="abcde") == "ABCDE"


@needs_fences
async def test_commands_get_arguments_as_json_or_in_place(write: Any) -> None:
    place = tool("place", command=["printf", "%s|", "-", "--", "{text}", "n={text}"])
    path = write(tool("whole", command=["cat"]), place, tool("bad", command=["sh", "-c", "echo no >&2; exit 3"]))
    assert json.loads(await run(path, "whole", text="a'b")) == {"text": "a'b"}
    assert await run(path, "place", text="$(id) 'x'") == "-|--|$(id) 'x'|n=$(id) 'x'|"
    with pytest.raises(ToolFailed, match="ended with status 3: no"):
        await run(path, "bad", text="")


@needs_fences
async def test_commands_of_an_episode_share_a_folder_which_is_deleted(write: Any) -> None:
    path = write(
        tool("keep", command=["tee", "kept"]), tool("show", command=["cat", "kept"]), tool("where", command=["pwd"])
    )
    toolbox = UserToolbox(read_tools_config(path).tools)
    await toolbox.run("keep", {"text": "a"})
    assert await toolbox.run("show", {}) == '{"text": "a"}'
    folder = Path((await toolbox.run("where", {})).strip())
    assert folder.is_dir()
    await toolbox.close()
    assert not folder.exists()
    with pytest.raises(ToolFailed):
        await run(path, "show")


@needs_fences
async def test_commands_are_ended_and_cut(write: Any) -> None:
    path = write(tool("slow", command=["sleep", "60"], timeout=0.3), tool("flood", command=["yes"], max_output=10))
    with pytest.raises(ToolFailed, match=r"did not finish within 0\.3 seconds"):
        await run(path, "slow")
    assert await run(path, "flood") == "y\n" * 5 + "\n[cut: only the first 10 characters are shown]"


@needs_fences
async def test_a_command_with_a_long_error_has_failed(write: Any) -> None:
    path = write(
        tool("long", command=["sh", "-c", "head -c 1000 /dev/zero | tr '\\0' e >&2; exit 3"], max_output=10),
        tool("result", command=["sh", "-c", "head -c 1000 /dev/zero | tr '\\0' r; exit 3"], max_output=10),
        tool("flood", command=["sh", "-c", "yes >&2"], max_output=10),
    )
    with pytest.raises(ToolFailed, match="ended with status 3: eee"):
        await run(path, "long")
    with pytest.raises(ToolFailed, match="ended with status 3: rrr"):
        await run(path, "result")
    with pytest.raises(ToolFailed, match="wrote too many errors"):
        await run(path, "flood")


@needs_fences
async def test_a_command_that_cannot_be_started_is_not_the_models_fault(write: Any, tmp_path: Path) -> None:
    program = Path(tempfile.mkdtemp(prefix="openclaw-test-")) / "program"
    program.write_text("#!/no/such/interpreter\n")
    for path, mode in ((program.parent, 0o755), (program, 0o755)):
        path.chmod(mode)
    try:
        with pytest.raises(EnvFailed, match="cannot be started"):
            await run(write(tool("gone", command=[str(program)])), "gone")
    finally:
        shutil.rmtree(program.parent)


@needs_fences
def test_commands_are_looked_up_where_the_sandbox_does(write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "mine").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="there is no program mine in /usr/local/bin"):
        read_tools_config(write(tool(command=["mine"])))


@needs_fences
async def test_arguments_that_are_too_long_are_refused(write: Any, address: str) -> None:
    path = write(tool("echo", command=["echo", "{text}"]), tool("get", http=address, http_method="GET"))
    with pytest.raises(ToolFailed, match="too long for a command"):
        await run(path, "echo", text="a" * 3_000_000)
    with pytest.raises(ToolFailed, match=r"cannot be sent: URL .*too long"):
        await run(path, "get", text="a" * 100_000)


def test_arguments_cannot_become_options_or_end_early() -> None:
    with pytest.raises(ToolFailed, match="'path' must not begin with a hyphen"):
        fill_in(["cat", "{path}"], {"path": "-n"})
    assert fill_in(["cat", "--", "{path}"], {"path": "-n"}) == (["cat", "--", "-n"], b"")
    assert fill_in(["x", "--at={n}", "{missing}"], {"n": 3}) == (["x", "--at=3"], b"")
    assert fill_in(["x", "{a}"], {"a": "{b}", "b": "c"}) == (["x", "{b}"], b"")
    with pytest.raises(ToolFailed, match="null character"):
        fill_in(["cat", "{path}"], {"path": "a\0b"})


class Answering(BaseHTTPRequestHandler):
    """Answers with what it was asked; /error and /redirect answer so."""

    def do_GET(self) -> None:
        self.answer({"asked": self.path})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, content: Any) -> None:
        status = {"/error": 400, "/redirect": 302}.get(self.path, 200)
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def test_addresses_get_arguments_as_a_body_or_a_query(write: Any, address: str) -> None:
    path = write(
        tool("post", http=f"{address}/a"),
        tool("get", http=f"{address}/b", http_method="GET"),
        tool("keyed", http=f"{address}/b?key=1&key=2", http_method="GET"),
        tool("error", http=f"{address}/error"),
        tool("redirect", http=f"{address}/redirect"),
        tool("gone", http="http://127.0.0.1:1/"),
        tool("long", http=f"{address}/a", max_output=3),
    )
    assert json.loads(await run(path, "post", text="a b")) == {"text": "a b"}
    assert json.loads(await run(path, "get", text="a&b=c", n=2)) == {"asked": "/b?text=a%26b%3Dc&n=2"}
    assert json.loads(await run(path, "keyed", text="a", key="3")) == {"asked": "/b?text=a&key=1&key=2"}
    for name in ("post", "get"):
        for wrong in (float("nan"), "\ud800"):
            with pytest.raises(ToolFailed, match="cannot be sent"):
                await run(path, name, text=wrong)
    with pytest.raises(ToolFailed, match="answered with status 400"):
        await run(path, "error", text="a")
    with pytest.raises(ToolFailed, match="answered with status 302"):
        await run(path, "redirect", text="a")
    with pytest.raises(EnvFailed, match=r"http://127\.0\.0\.1:1/ does not answer"):
        await run(path, "gone", text="a")
    assert (await run(path, "long", text="a")).startswith('{"t\n[cut')


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ([tool(python="tools.py:missing")], r"the tool count_words: .*tools\.py has no missing"),
        ([tool(python="none.py:f")], "there is no file"),
        ([tool(python="tools.py")], "must be path/file.py:name"),
        ([tool(python="tools.py:NUMBER")], "NUMBER is not a function"),
        (
            [tool(python="tools.py:count_words", http="http://localhost")],
            "give exactly one of python, command and http",
        ),
        ([{**tool(), "run": {}}], "give exactly one of"),
        ([{**tool(), "run": {"shell": "ls"}}], r"the tool count_words: run\.shell: Extra inputs"),
        ([{**tool(), "timeout": 0}], "the tool count_words: timeout: Input should be greater than 0"),
        ([tool(parameters={"type": "object", "oneof": []})], "the schema uses 'oneof', which is not supported"),
        ([tool(parameters={"type": "string"})], "the type of its parameters must be object"),
        ([tool(parameters={"type": "object", "properties": {}})], "needs 'text', which the schema does not require"),
        (
            [tool(parameters={**TEXT, "properties": {"text": {}, "b": {}}})],
            "count_words does not take 'b', which the schema has",
        ),
        ([tool(), tool()], "defines the tool count_words twice"),
        ([tool("two words")], "needs a name of letters"),
        ([tool(http="http://example.com/x")], r"example\.com is another machine; add allow_remote: true"),
        ([tool(http="http://127.0.0.1.example.com/")], "is another machine"),
        ([tool(http="ftp://localhost/")], "is not an http address"),
        ([tool(http="http://[")], "is not an http address"),
        ([tool(http="http://localhost:99999")], "is not an http address"),
        ([tool(http="http://me:secret@localhost/")], "must not contain a user name or a password"),
        ([], "tools: List should have at least 1 item"),
        (["tool"], "the tool 0: Input should be a valid dictionary"),
    ],
)
def test_mistakes_in_the_file_are_one_sentence(write: Any, tools: list[Any], sentence: str) -> None:
    path = write(tool())
    path.write_text(yaml.safe_dump({"tools": tools, "tasks": "tasks.jsonl"}))
    with pytest.raises(ConfigError, match=sentence) as raised:
        make_environment("toolcall", {"tools_config": path})
    assert "\n" not in str(raised.value)


def test_another_machine_can_be_allowed(write: Any) -> None:
    read_tools_config(write(tool(http="https://example.com/x", allow_remote=True)))


@needs_fences
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["no-such-program"], "there is no program no-such-program"),
        (["cat", "{path}"], r"\{path\} in its command is not one of its parameters"),
        (["{text}"], "the program of its command must be fixed"),
    ],
)
def test_mistakes_in_commands_are_one_sentence(write: Any, command: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_tools_config(write(tool(command=command)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tools: [", "cannot be read: while parsing"),
        ("just text", "the file: Input should be a valid dictionary"),
        ("tools: []", "tools: List should have at least 1 item"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence) as raised:
        read_tools_config(tmp_path / "t.yaml")
    assert "\n" not in str(raised.value)


def test_files_that_are_missing_or_of_another_kind_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("")
    with pytest.raises(ConfigError, match=r"must end with \.json, \.yaml or \.yml"):
        read_tools_config(tmp_path / "t.toml")
    with pytest.raises(ConfigError, match="there is no file"):
        read_tools_config(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        ("", "has no tasks"),
        ("{", "line 1: Invalid JSON"),
        ([{"question": "?"}], "line 1: give an answer, calls or a checker"),
        ([{"answer": 1}], "line 1: give either messages or a question"),
        ([{"question": "?", "messages": [{"role": "user"}], "answer": 1}], "give either messages or a question"),
        ([{"messages": [{"content": "?"}], "answer": 1}], "each message needs a role"),
        ([{"question": "?", "answer": 1}, {"question": "?", "calls": [{"name": "x"}]}], "line 2 expects a call of x"),
        ([{"question": "?", "checker": "tools.py:none"}], r"line 1: .*tools\.py has no none"),
        ([{"question": "?", "checker": "tools.py:nan", "answer": 1}], "a checker replaces answer and calls"),
        ([{"question": "?", "answer": True}], "line 1: answer"),
        ([{"question": "?", "answer": 1, "note": ""}], "line 1: note: Extra inputs"),
        ([{"question": "?", "answer": 1, "split": "test"}], "line 1: split"),
    ],
)
def test_mistakes_in_tasks_name_the_line(write: Any, tasks: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        make_environment("toolcall", {"tools_config": write(tasks=tasks)})
    assert "\n" not in str(raised.value)


def test_tasks_repeat_in_an_order_of_the_seed_and_splits_share_none(write: Any) -> None:
    path = write(tasks=[{"question": f"{n}?", "answer": n} for n in range(40)])
    environment = make_environment("toolcall", {"tools_config": path})
    train, held_out = ({task.id for task in islice(environment.tasks(split, 0), 80)} for split in ("train", "held-out"))
    assert len(train) + len(held_out) == 40
    assert min(len(train), len(held_out)) > 0
    assert not train & held_out
    orders = [[task.id for task in islice(environment.tasks("train", seed), 80)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_split_without_tasks_is_one_sentence(write: Any) -> None:
    environment = make_environment(
        "toolcall", {"tools_config": write(tasks=[{"question": "?", "answer": 1, "split": "train"}])}
    )
    with pytest.raises(ConfigError, match="has no task of the split held-out"):
        environment.tasks("held-out", 0)


@needs_fences
async def test_the_example_is_solved() -> None:
    example = Path(__file__).parent.parent.parent / "examples" / "tools" / "tools.yaml"
    environment = make_environment("toolcall", {"tools_config": example})
    answers = {
        "What does bread cost?": [calls(("price_of", {"article": "bread"})), says("Answer: 3.2")],
        "Which day of the week is 2026-11-16?": [calls(("weekday", {"date": "2026-11-16"})), says("Answer: Monday")],
        "Which is dearer, bread or cheese?": [
            calls(("price_of", {"article": "bread"}), ("price_of", {"article": "cheese"})),
            says("Answer: cheese"),
        ],
    }
    for task in islice(environment.tasks("train", 0), 3):
        given = answers[task.data["messages"][-1]["content"]]
        steps, outcome = await attempt(environment.open(task), lambda messages, turn, given=given: given[turn])
        assert (outcome.reward, outcome.solved) == (1.0, True)
        assert "Monday\n" in [message["content"] for message in steps[0].messages] or "weekday" not in str(given)


def test_settings_of_generated_tasks_do_not_go_with_own_tools(write: Any) -> None:
    with pytest.raises(ConfigError, match="levels is for generated tasks"):
        make_environment("toolcall", {"tools_config": write(), "levels": [1]})
