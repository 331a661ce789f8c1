"""`openclaw-rl serve --sampler upstream` as a user runs it: what it remembers, says and keeps to itself."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from openclaw_rl.app.checks import check
from openclaw_rl.app.config import load
from openclaw_rl.config.options import ConfigError
from support.chat_api import Body, ChatApi, Said, words
from support.harness import wait_for
from support.server_program import SERVE, Program, serving

KEY = "sk-upstream-secret"


def of(url: str) -> dict[str, Any]:
    return {"sampler": "upstream", "upstream_url": url, "upstream_model": "their-model"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"upstream_url": ""}, "--upstream-url"),
        ({"upstream_model": ""}, "--upstream-model"),
        ({"upstream_url": "ftp://x"}, "not a server's URL"),
        ({"upstream_url": "http://x/v1?key=hidden"}, r"^--upstream-url http://x/v1 is not .* after \?"),
        ({"model_name": "Qwen/Qwen3-8B"}, "--model-name needs a model's weights"),
        ({"learner": "local"}, "--learner needs a model's weights"),
        ({"upstream_key": "a\nb"}, "UPSTREAM_API_KEY"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(load(of("http://127.0.0.1:9/v1") | given, {}).config)


def test_the_key_is_shown_to_nobody() -> None:
    loaded = load(of("http://me:hidden@127.0.0.1:9/v1"), {"UPSTREAM_API_KEY": KEY})
    shown = str(loaded.describe()) + str(loaded.config.values()) + str(loaded.config.given())
    assert KEY not in shown
    assert "hidden" not in str(loaded.describe())
    assert not loaded.config.learns
    assert not loaded.config.asks_llm


@pytest.fixture(scope="module")
def api() -> Iterator[ChatApi]:
    api = ChatApi()
    yield api
    api.stop()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def program(api: ChatApi, run_dir: Path) -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UPSTREAM_API_KEY", KEY)
        with started(api, run_dir) as program:
            yield program


def started(api: ChatApi, run_dir: Path) -> Any:
    flags = ("--sampler", "upstream", "--upstream-url", api.url, "--upstream-model", "their-model")
    return serving(SERVE, None, *flags, "--note-probes", "0", "--run-dir", str(run_dir))


def told(api: ChatApi) -> str:
    """What the model was told before the conversation."""
    return "\n".join(str(m["content"]) for m in api.requests[-1]["messages"] if m["role"] == "system")


def say(program: Program, *texts: str) -> openai.types.chat.ChatCompletion:
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return program.client.chat.completions.create(model="their-model", messages=messages)


@pytest.mark.more
def test_what_people_say_is_remembered_and_the_key_stays_here(program: Program, api: ChatApi, run_dir: Path) -> None:
    api.answer = lambda _body: words("A long story about storks.")
    say(program, "Tell me about storks.")
    say(program, "Tell me about storks.", "A long story about storks.", "Too long! Always answer in one sentence.")
    wait_for(lambda: "one short sentence" in told_next(program, api))
    answer = say(program, "What do herons eat?")
    corrected = {"id": answer.id, "correction": "Fish, mostly."}
    assert httpx.post(f"{program.url}/v1/feedback", json=corrected).json()["example"]
    wait_for(lambda: {"role": "assistant", "content": "Fish, mostly."} in messages_next(program, api))
    ready = httpx.get(f"{program.url}/readyz").json()
    assert ready["learner"] == "remembers; the weights are elsewhere"
    page = httpx.get(program.url, headers={"Accept": "text/html"}, follow_redirects=True).text
    assert "remembers; the weights are elsewhere" in page
    status = subprocess.run(
        [sys.executable, "-m", "openclaw_rl", "status", "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "remembers; the weights are elsewhere. 'openclaw-rl serve --continue-from" in " ".join(status.stdout.split())
    assert "--continue-from" in ready["practice"]
    assert api.url in program.log
    assert "which is sent what people say" in program.log
    kept = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert KEY.encode() not in kept
    assert KEY not in program.log
    assert KEY not in page + status.stdout


def told_next(program: Program, api: ChatApi) -> str:
    say(program, "A new conversation.")
    return told(api)


def messages_next(program: Program, api: ChatApi) -> list[Body]:
    say(program, "What do storks eat?")
    return api.requests[-1]["messages"]


@pytest.mark.more
def test_sixty_four_clients_are_served_at_once(program: Program, api: ChatApi) -> None:
    import asyncio

    api.answer = lambda body: words(body["messages"][-1]["content"], silent=0.2)

    async def ask(client: openai.AsyncOpenAI, number: int) -> str | None:
        said = await client.chat.completions.create(
            model="their-model", messages=[{"role": "user", "content": f"n {number}"}]
        )
        return said.choices[0].message.content

    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(all_of_them()) == [f"n {number}" for number in range(64)]


@pytest.mark.more
def test_either_side_may_be_killed(api: ChatApi, tmp_path: Path) -> None:
    api.answer = lambda _body: words("Hello.")
    with started(api, tmp_path) as first:
        say(first, "Please always call me Sam.")
        wait_for(lambda: "Sam" in told_next(first, api))
        first.process.kill()
    with started(api, tmp_path) as second:
        assert "Sam" in told_next(second, api)
        api.stop()
        with pytest.raises(openai.APIStatusError, match="cannot be reached"):
            say(second, "Are you there?")
        api.start()
        assert say(second, "And now?").choices[0].message.content == "Hello."


@pytest.mark.more
def test_the_api_judges_if_its_owner_says_so(api: ChatApi, tmp_path: Path) -> None:
    def judge(body: Body) -> Said:
        asked = "\\boxed" in str(body["messages"][-1]["content"])
        return words("\\boxed{-1}") if asked else words("The capital is Oslo.")

    api.answer = judge
    flags = ("--sampler", "upstream", "--upstream-url", api.url, "--upstream-model", "their-model", "--judge", "llm")
    with serving(SERVE, None, *flags, "--no-notes", "--run-dir", str(tmp_path)) as program:
        say(program, "The capital of Sweden?")
        say(program, "The capital of Sweden?", "The capital is Oslo.", "Hm, and of Norway?")
        metric = 'openclaw_verdicts_total{score="bad",source="llm"}'
        wait_for(lambda: program.metric(metric) == 1)


@pytest.mark.more
def test_our_own_server_is_an_api_like_others(tiny_model: Path, tmp_path: Path) -> None:
    with serving(SERVE, tiny_model, "--max-steps", "0", "--served-model-name", "inner") as inner:
        flags = ("--sampler", "upstream", "--upstream-url", f"{inner.url}/v1", "--upstream-model", "inner")
        with serving(SERVE, None, *flags, "--run-dir", str(tmp_path)) as outer:
            chunks = outer.client.chat.completions.create(
                model="inner", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, stream=True
            )
            assert [chunk for chunk in chunks if chunk.choices[0].finish_reason]
            assert outer.client.models.list().data[0].id == "inner"


@pytest.mark.more
def test_a_local_server_takes_over_what_the_api_s_model_was_taught(
    api: ChatApi, tiny_model: Path, tmp_path: Path
) -> None:
    api.answer = lambda _body: words("A stork.")
    with started(api, tmp_path / "api") as front:
        answer = say(front, "Name a bird. Please always call me Sam.")
        assert httpx.post(f"{front.url}/v1/feedback", json={"id": answer.id, "thumb": "up"}).status_code == 200
        wait_for(lambda: "Sam" in told_next(front, api))
        wait_for(lambda: front.metric('openclaw_verdicts_total{score="good",source="explicit"}') == 1)
    flags = ("--continue-from", str(tmp_path / "api"), "--method", "rl", "--batch-size", "1", "--lora-rank", "4")
    fast = ("--kv-cache-gib", "0.1", "--max-kl", "100", "--run-dir", str(tmp_path / "own"))
    with serving(SERVE, tiny_model, *flags, *fast) as own:
        assert "Sam" in str(httpx.get(f"{own.url}/v1/notes").json()["data"])
        wait_for(lambda: httpx.get(f"{own.url}/readyz").json()["policy_version"] == 1)
