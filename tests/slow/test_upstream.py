"""A server of ours in front of real APIs: llama.cpp's own, and another of ours. Run by `make test-upstream`.

Both serve the embedded model. OPENCLAW_RL_GGUF names a Python that has xllamacpp and Ollama's client.
"""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from openclaw_rl.cli import main
from openclaw_rl.evals.benchmark.results import load_results
from openclaw_rl.models import fetch_model
from support.harness import wait_for
from support.llama_server import CONTEXT, MODEL, ApiProcess, llama_command
from support.server_program import SERVE, Program, free_port, serving

PYTHON = os.environ.get("OPENCLAW_RL_GGUF", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-upstream runs it")

CLIENTS = 64
#: How long a note or an example may take to be there on a busy machine.
SECONDS = 120
STORY = "Tell me a long story about a stork that flies from Poland to Africa and back."
#: What Ollama's own client gets: names, an answer whole and in pieces, and what a prompt is continued with.
OLLAMA = """
import json, sys, ollama
client = ollama.Client(host=sys.argv[1])
question = [{"role": "user", "content": "Name a bird."}]
settings = {"model": "small", "options": {"num_predict": 8, "temperature": 0}}
whole = client.chat(messages=question, **settings)
pieces = list(client.chat(messages=question, stream=True, **settings))
said = client.generate(prompt="Name a bird.", **settings)
print(json.dumps({
    "names": [model.model for model in client.list().models],
    "whole": whole.message.content,
    "pieces": [piece.message.content for piece in pieces],
    "tokens": [whole.prompt_eval_count, pieces[-1].prompt_eval_count],
    "generated": said.response,
    "shown": client.show("small").capabilities,
}))
"""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as llama.cpp's file."""
    folder = tmp_path_factory.mktemp("gguf")
    model = fetch_model(None, Path("~/.cache/openclaw-rl").expanduser())
    assert main(["merge", str(model), str(folder / "out"), "--gguf", "q8_0", "--run-dir", str(folder / "run")]) == 0
    return folder / "out" / "model.gguf"


@pytest.fixture(scope="module", params=["llama.cpp", "ours"])
def api(request: pytest.FixtureRequest, gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    port = free_port()
    own = ["--served-model-name", MODEL, "--max-context-tokens", str(CONTEXT), "--max-steps", "0", "--no-notes"]
    folder = str(tmp_path_factory.mktemp("inner"))
    ours = [*SERVE, "--proxy-port", str(port), "--run-dir", folder, *own]
    command = llama_command(PYTHON, gguf, port) if request.param == "llama.cpp" else ours
    with ApiProcess(command, port).running() as process:
        yield process


def in_front(api: ApiProcess, *flags: str) -> contextlib.AbstractContextManager[Program]:
    given = ("--sampler", "upstream", "--upstream-url", api.url, "--upstream-model", MODEL, "--note-probes", "0")
    return serving(SERVE, None, *given, *flags)


@pytest.fixture(scope="module")
def front(api: ApiProcess) -> Iterator[Program]:
    """Without notes: what a model is told is what the client says."""
    with in_front(api, "--no-notes") as program:
        yield program


def conversation(*texts: str) -> Any:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def say(program: Program, *texts: str, **fields: Any) -> openai.types.chat.ChatCompletion:
    settings = {"model": MODEL, "max_tokens": 24, "temperature": 0} | fields
    return program.client.chat.completions.create(messages=conversation(*texts), **settings)


def told(program: Program, text: str) -> int:
    """How many tokens the API says that it was given for a new conversation that begins with this text."""
    # Without a system message, the model's template would write one where there are no notes.
    messages: Any = [{"role": "system", "content": "Be kind."}, *conversation(text)]
    usage = program.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage
    assert usage is not None
    return usage.prompt_tokens


LOOK = {"name": "look", "description": "Look at a place.", "parameters": {"type": "object", "properties": {}}}
TOOL: Any = {"type": "function", "function": LOOK}


def test_openais_client(api: ApiProcess, front: Program) -> None:
    bare = openai.OpenAI(base_url=api.url, api_key="none")
    settings: Any = {"model": MODEL, "messages": conversation("Name a bird."), "max_tokens": 12, "temperature": 0}
    expected = bare.chat.completions.create(**settings)
    whole = front.client.chat.completions.create(**settings)
    assert whole.choices[0].message.content == expected.choices[0].message.content
    assert whole.usage is not None
    assert expected.usage is not None
    assert whole.usage.prompt_tokens == expected.usage.prompt_tokens
    assert whole.usage.completion_tokens == expected.usage.completion_tokens
    chunks = list(front.client.chat.completions.create(**settings, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == expected.choices[0].message.content
    assert len(list(filter(None, pieces))) > 5, "as it comes, not at once"
    response = front.client.responses.create(model=MODEL, input="Name a bird.", max_output_tokens=12, temperature=0)
    assert response.output_text == expected.choices[0].message.content
    schema = {"type": "object", "properties": {"bird": {"type": "string", "enum": ["heron"]}}, "required": ["bird"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answer = front.client.chat.completions.create(**settings | {"max_tokens": 60}, response_format=form)
    assert json.loads(answer.choices[0].message.content or "") == {"bird": "heron"}


def test_fields_that_only_the_api_knows(request: pytest.FixtureRequest, front: Program) -> None:
    if "llama.cpp" not in request.node.name:
        pytest.skip("a field of llama.cpp's own")
    answer = say(front, "Name a bird.", extra_body={"grammar": 'root ::= "emu"'})
    assert answer.choices[0].message.content == "emu"


def test_anthropics_client(front: Program) -> None:
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        settings: Any = {"model": MODEL, "max_tokens": 12, "messages": conversation("Name a bird.")}
        settings["extra_body"] = {"temperature": 0}
        whole = client.messages.create(**settings)
        assert whole.stop_reason in ("end_turn", "max_tokens")
        assert whole.usage.output_tokens > 1
        with client.messages.stream(**settings) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text  # type: ignore[union-attr]


def test_tools(request: pytest.FixtureRequest, front: Program) -> None:
    if "ours" not in request.node.name:
        pytest.skip("llama.cpp makes this model call nothing, also where a call is demanded")
    asked: Any = {"model": MODEL, "max_tokens": 60, "messages": conversation("Look, please.")}
    called = front.client.chat.completions.create(
        **asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert called.finish_reason == "tool_calls"
    assert [call.function.name for call in called.message.tool_calls or ()] == ["look"]
    tool: Any = {"name": "look", "description": "Look at a place.", "input_schema": LOOK["parameters"]}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        used = client.messages.create(**asked, tools=[tool], tool_choice=choice)
    assert used.stop_reason == "tool_use"
    assert [block.name for block in used.content if block.type == "tool_use"] == ["look"]


def test_ollamas_client(front: Program) -> None:
    done = subprocess.run([PYTHON, "-c", OLLAMA, front.url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["names"] == [MODEL]
    assert got["whole"]
    assert "".join(got["pieces"]) == got["whole"] == got["generated"]
    assert len(got["pieces"]) > 3
    assert got["tokens"][0] == got["tokens"][1] > 5
    assert "tools" in got["shown"]


def test_a_session_a_complaint_a_note_a_correction_and_an_example(api: ApiProcess) -> None:
    new, similar = "Good morning to you.", "What do storks eat?"
    with in_front(api) as program:
        before = told(program, new)
        story = say(program, STORY).choices[0].message.content or ""
        say(program, STORY, story, "Too long! Always answer in one sentence.")
        wait_for(lambda: told(program, new) > before, SECONDS)
        notes = httpx.get(f"{program.url}/v1/notes").json()["data"]
        assert ["one short sentence" in str(note) for note in notes] == [True]
        wait_for(lambda: program.metric('openclaw_verdicts_total{score="bad",source="feedback"}') == 1, SECONDS)
        answer = say(program, "What do herons eat?")
        before = told(program, similar)
        corrected = {"id": answer.id, "correction": "Fish, mostly."}
        assert httpx.post(f"{program.url}/v1/feedback", json=corrected).json()["example"]
        wait_for(lambda: told(program, similar) > before, SECONDS)


def test_sixty_four_clients_at_once(front: Program) -> None:
    """Each gets the answer to its own question: the schema of its answer allows no other."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> Any:
        schema = {"type": "string", "enum": [f"n{number}"]}
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
        answer = await client.chat.completions.create(
            model=MODEL, messages=conversation(f"Say n{number}."), response_format=form, max_tokens=20, temperature=0
        )
        return json.loads(answer.choices[0].message.content or "")

    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=4 * SECONDS
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(CLIENTS)))

    assert asyncio.run(all_of_them()) == [f"n{number}" for number in range(CLIENTS)]


def test_either_side_may_be_killed(api: ApiProcess, tmp_path: Path) -> None:
    with in_front(api, "--run-dir", str(tmp_path)) as first:
        before = told(first, "Good morning.")
        say(first, "Please always call me Sam.")
        wait_for(lambda: told(first, "Good morning.") > before, SECONDS)
        begun(first)
        first.process.kill()
    with in_front(api, "--run-dir", str(tmp_path)) as second:
        assert told(second, "Good morning.") > before, "what was learned is still there"
        stream = begun(second)
        api.kill()
        try:
            with pytest.raises(openai.APIError, match="broke off"):
                list(stream)
            with pytest.raises(openai.APIStatusError, match="cannot be reached"):
                say(second, "Are you there?")
            assert httpx.get(f"{second.url}/readyz").status_code == 503
        finally:
            api.start()
        assert say(second, "And now?").choices[0].message.content
        assert httpx.get(f"{second.url}/readyz").status_code == 200


def begun(program: Program) -> Iterator[Any]:
    """A long answer that has begun."""
    stream = program.client.chat.completions.create(
        model=MODEL, messages=conversation(STORY), stream=True, max_tokens=1000
    )
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    return iter(stream)


def test_the_benchmark_scores_the_api_as_it_is(request: pytest.FixtureRequest, api: ApiProcess, tmp_path: Path) -> None:
    """It remembers nothing, so nothing is kept unaided; what it does not offer has a reason."""
    if "llama.cpp" not in request.node.name:
        pytest.skip("the benchmark's own tests score servers of ours")
    tracks = "wishes,two-people,forget,tools"
    given = ["--model", MODEL, "--track", tracks, "--quick", "--seed", "7", "--out", str(tmp_path)]
    assert main(["benchmark", "--url", api.url, *given]) == 0
    (results,) = load_results(tmp_path)
    lines = {line["item"]: line for line in results.lines}
    assert len(lines) == 5
    for name in ("chef", "says-lively-sparrow-capitals"):
        wish = lines[name]
        assert wish["score"]["mean"] == wish["parts"]["unaided"]["mean"] == 0.0
        assert wish["facts"]["carried_tokens"] == 0.0
        assert not wish["cost"]["estimated"]
    assert "give a --key for each" in lines["two people"]["reason"]
    assert "give --forget-url" in next(line["reason"] for line in results.lines if line["track"] == "forget")
    assert lines["toolcall"]["score"] or lines["toolcall"]["reason"]
