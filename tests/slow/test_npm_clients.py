"""Real clients from npm against our server with a scripted model. Run by `make test-clients`.

Each client is configured by `openclaw-rl connect`, is given a task, calls a tool, answers, and is told that its answer
was too long. The server must see one session of three main turns, whatever else the client asks for itself, and score
the answer -1, also if the client compacts its history before it sends the feedback, and also if the server is in front
of another API.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import main
from openclaw_rl.judge.judges.base import Case
from openclaw_rl.judge.rules import read_reply
from openclaw_rl.types import SampleRequest, StoredTurn, TurnKind
from support.harness import MODEL, running
from support.measure import sign
from support.recording import Recording
from support.tiny_models import save_tiny_model
from support.upstream_front import Front

CLIENTS = os.environ.get("OPENCLAW_RL_CLIENTS", "")
pytestmark = pytest.mark.skipif(not CLIENTS, reason="make test-clients runs it")

#: How long one call of a client may take: a start of the largest takes half a minute on a busy machine.
MAX_SECONDS = 240
#: One token a byte or so: the prompts of agents have up to 150 KB.
CONTEXT = 400_000
FILE, SECRET = "numbers.txt", "4711"
TASK = f"Which number is in the file {FILE}? Read it."
FEEDBACK = "Too long. Only the number, please."
ANSWER, SHORT_ANSWER = f"The number in the file is {SECRET}.", f"{SECRET}."
#: What a client asks for itself, without tools or without a task, gets this answer.
TITLE = "Numbers"


@dataclass(frozen=True)
class Client:
    """How a client is called without a terminal. `{folder}` stands for the folder that it works in."""

    name: str
    """As `openclaw-rl connect` and the folder of its package name it."""
    first: tuple[str, ...]
    """The command, to which the task is added."""
    again: tuple[str, ...]
    """The command that goes on with the same session."""
    calls: Mapping[str, Mapping[str, Any]]
    """Tools that read the file, by preference, with their arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    compact: tuple[tuple[str, ...], ...] = ()
    """Commands after the task that compact the history and go on; the last one is given the feedback."""


# Its sandbox does not start inside another one, and the only command is ours.
CODEX = ("codex", "exec", "--profile", "openclaw-rl", "--skip-git-repo-check", "--sandbox", "danger-full-access")
OPENCLAW = ("openclaw", "agent", "--local", "--agent", "main", "--session-key", "agent:main:try", "-m")
ALL = (
    Client(
        "claude-code",
        ("claude", "-p"),
        ("claude", "-p", "--continue"),
        {"Read": {"file_path": f"{{folder}}/{FILE}"}},
        {"DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1"},
        (("claude", "-p", "--continue", "/compact"), ("claude", "-p", "--continue")),
    ),
    Client(
        "codex",
        CODEX,
        (*CODEX, "resume", "--last"),
        {
            "exec_command": {"cmd": f"cat {FILE}"},
            "shell_command": {"command": f"cat {FILE}"},
            "shell": {"command": ["cat", FILE]},
        },
        compact=((*CODEX, "-c", "model_auto_compact_token_limit=1000", "resume", "--last"),),
    ),
    Client(
        "opencode",
        ("opencode", "run"),
        ("opencode", "run", "--continue"),
        {"read": {"filePath": f"{{folder}}/{FILE}"}},
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    Client(
        "openclaw", OPENCLAW, OPENCLAW, {"read": {"path": f"{{folder}}/{FILE}"}, "exec": {"command": f"cat {FILE}"}}
    ),
)


class Agent(Recording):
    """A model that reads the file, says its number, and is brief when it is told to be."""

    def __init__(self, model: Path, folder: Path, calls: Mapping[str, Any]) -> None:
        super().__init__(model, folder)
        self.sampler.limits = self.sampler.admission.limits(CONTEXT)
        self.calls = calls

    def script(self, request: SampleRequest, index: int) -> list[int]:
        prompt = self.renderer.tokenizer.backend.decode(list(request.prompt_ids), skip_special_tokens=False)
        # A client may want reasoning: then the template begins it.
        self.says = ("\n</think>\n\n" if prompt.endswith("<think>\n") else "") + self.answer_to(prompt)
        return super().script(request, index)

    def answer_to(self, prompt: str) -> str:
        tools = re.search(r"<tools>\n(.*?)</tools>", prompt, re.DOTALL)
        offered = {json.loads(line)["function"]["name"] for line in tools[1].splitlines()} if tools else set()
        name = next((name for name in self.calls if name in offered), None)
        if name is None or (TASK not in prompt and FEEDBACK not in prompt):
            return TITLE
        if FEEDBACK in prompt:
            return SHORT_ANSWER
        if "<|im_start|>tool\n" in prompt:
            return ANSWER
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': self.calls[name]})}\n</tool_call>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=CONTEXT)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The client's home, which is this process's too while it runs `connect`, and the folder it works in."""
    for variable in [name for name in os.environ if name.startswith(("CLAUDE", "CODEX", "OPENC", "ANTHROPIC", "XDG"))]:
        monkeypatch.delenv(variable)
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / FILE).write_text(f"{SECRET}\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def call(client: Client, command: tuple[str, ...], place: Path) -> str:
    """Run a client in its folder, with nothing of ours in its environment and no way out but loopback."""
    installed = Path(CLIENTS)
    programs = [installed / client.name / "node_modules" / ".bin", installed / "node" / "node_modules" / ".bin"]
    path = ":".join([*map(str, programs), "/usr/local/bin", "/usr/bin", "/bin"])
    closed = "http://127.0.0.1:9"
    environment = {
        **{
            "PATH": path,
            "HOME": str(place / "home"),
            "TMPDIR": str(place),
            "TERM": "dumb",
            "CI": "1",
            "LANG": "C.UTF-8",
        },
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), closed),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        **client.environment,
    }
    done = subprocess.run(
        command,
        cwd=place / "work",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture
def agent(request: pytest.FixtureRequest, model: Path, place: Path) -> Iterator[Agent]:
    client: Client = request.param
    if not (Path(CLIENTS) / client.name / "node_modules").is_dir():
        pytest.skip(f"{client.name} could not be installed here")
    calls = json.loads(json.dumps(client.calls).replace("{folder}", str(place / "work")))
    with running(Agent(model, place / "run", calls)) as agent:
        assert isinstance(agent, Agent)
        yield agent
    agent.db.close()
    agent.ledger.close()


@pytest.mark.parametrize(("agent", "client"), [(one, one) for one in ALL], indirect=["agent"], ids=lambda one: one.name)
def test_a_session_with_a_tool_call_and_feedback(agent: Agent, client: Client, place: Path) -> None:
    hold_session(client, agent.url, place)
    check_session(client, agent.turns())


@pytest.mark.parametrize(("agent", "client"), [(one, one) for one in ALL], indirect=["agent"], ids=lambda one: one.name)
def test_a_session_with_a_server_in_front_of_another_api(agent: Agent, client: Client, place: Path) -> None:
    with running(Front([f"{agent.url}/v1"], place / "front", model=MODEL)) as front:
        assert isinstance(front, Front)
        hold_session(client, front.url, place)
        assert all(turn.is_text for turn in front.turns())
        check_session(client, front.turns())
    front.db.close()
    front.ledger.close()


def hold_session(client: Client, url: str, place: Path) -> None:
    """A task, and feedback on the answer."""
    assert main(["connect", client.name, "--yes", "--url", url]) == 0
    assert SECRET in call(client, (*client.first, TASK), place)
    assert SHORT_ANSWER in call(client, (*client.again, FEEDBACK), place)


def check_session(client: Client, turns: list[StoredTurn]) -> None:
    """What a server must have recorded of it."""
    asked, told, corrected = (turn for turn in turns if turn.kind is TurnKind.MAIN)
    print(f"{client.name}: side turns {[turn.kind_reason for turn in side_turns(turns)]}")  # noqa: T201
    assert asked.session == told.session == corrected.session
    assert asked.message["tool_calls"][0]["function"]["name"] in client.calls
    assert any(message["role"] == "tool" and SECRET in said(message) for message in asked.next_state or [])
    assert score(asked) == 1
    assert said(told.message).strip() == ANSWER
    assert [said(message).strip() for message in told.next_state or []] == [FEEDBACK]
    assert score(told) == -1
    assert (said(corrected.message).strip(), corrected.next_state) == (SHORT_ANSWER, None)
    assert all(said(turn.message).strip() == TITLE for turn in side_turns(turns)), (
        "only what the client asks for itself"
    )


@pytest.mark.parametrize(
    ("agent", "client"), [(one, one) for one in ALL if one.compact], indirect=["agent"], ids=lambda one: one.name
)
@pytest.mark.parametrize("words", [TASK, "Name a topic."], ids=["a call", "an answer"])
def test_feedback_after_the_client_has_compacted(agent: Agent, client: Client, place: Path, words: str) -> None:
    """After a call, Claude Code keeps the answer; otherwise it joins its summary with the feedback."""
    assert main(["connect", client.name, "--yes", "--url", agent.url]) == 0
    call(client, (*client.first, words), place)
    *before, last = client.compact
    for command in before:
        call(client, command, place)
    assert SHORT_ANSWER in call(client, (*last, FEEDBACK), place)
    turns = agent.turns()
    *_, told, corrected = (turn for turn in turns if turn.kind is TurnKind.MAIN)
    assert "compaction" in [turn.kind_reason for turn in side_turns(turns)]
    assert [said(message).strip() for message in told.next_state or []] == [FEEDBACK]
    assert score(told) == -1
    assert (said(corrected.message).strip(), corrected.next_state) == (SHORT_ANSWER, None)


def score(turn: StoredTurn) -> int:
    """What the rules make of a turn's next state."""
    case = Case.of(turn)
    return sign(read_reply(case.request, case.response, case.next_state).kind)


def side_turns(turns: list[StoredTurn]) -> list[StoredTurn]:
    return [turn for turn in turns if turn.kind is TurnKind.SIDE]


def said(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
