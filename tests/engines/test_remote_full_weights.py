"""Servers of other projects whose weights are all replaced: failures on the way, and what is refused at the start."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.app.checks import check
from openclaw_rl.app.config import load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineUnavailable, PolicyRef, VersionGone, WeightForm
from openclaw_rl.engines.factory import sampler_factory
from openclaw_rl.engines.remote.full_weights import FullWeightSampler
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.model_folder import UnusableModel, check_model_folder, has_tied_head
from openclaw_rl.engines.remote.replica import ReplicaTimes
from openclaw_rl.engines.remote.sampler import RemoteOptions
from openclaw_rl.engines.remote.vllm import VllmDialect
from openclaw_rl.types import SampledToken, SampleRequest, SamplingParams, ScoreRequest
from support.inference_servers import ServerDouble
from support.tiny_models import save_tiny_model

#: Health is looked at more often than in earnest.
QUICK = ReplicaTimes(health=0.05, health_answer=0.3, retry=0.02, max_pause=0.05)


@pytest.fixture
async def servers(tiny_model: Path) -> AsyncIterator[list[ServerDouble]]:
    servers = [ServerDouble(model=tiny_model), ServerDouble(model=tiny_model)]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


def sampler_of(
    servers: list[ServerDouble], model: Path, folder: Path, times: ReplicaTimes = QUICK
) -> FullWeightSampler:
    options = RemoteOptions(model, None, 16, 16, 2, 0, folder, times=times)
    return FullWeightSampler(VllmDialect(), [(InferenceServer(server.url), None) for server in servers], options)


@pytest.fixture
async def sampler(servers: list[ServerDouble], tiny_model: Path, tmp_path: Path) -> AsyncIterator[FullWeightSampler]:
    sampler = sampler_of(servers, tiny_model, tmp_path / "policies")
    await sampler.start()
    yield sampler
    await sampler.close()


@pytest.fixture
def policy(tiny_model: Path, tmp_path: Path) -> Callable[[int], PolicyRef]:
    """Model folders, which the doubles tell apart by the number in their names."""

    def make(number: int) -> PolicyRef:
        folder = tmp_path / "policies" / f"v{number}"
        shutil.copytree(tiny_model, folder)
        return PolicyRef(WeightForm.MODEL, folder)

    return make


async def ask(sampler: FullWeightSampler, tokens: int = 2, **given: Any) -> list[SampledToken]:
    request = SampleRequest([1], SamplingParams(tokens), **given)
    return [token async for batch in sampler.sample(request) for token in batch]


async def answering_weights(sampler: FullWeightSampler) -> int:
    """The number of the policy whose weights answer."""
    return (await ask(sampler))[0].token_id // 100


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0.005)


def loaded(servers: list[ServerDouble]) -> list[int]:
    return [server.model.loaded for server in servers]


async def test_requests_that_run_finish_on_the_old_version_and_those_that_come_wait_for_the_new_one(
    sampler: FullWeightSampler, servers: list[ServerDouble], policy: Callable[[int], PolicyRef]
) -> None:
    for server in servers:
        server.model.pause_seconds = 0.02
    running = [sampler.sample(SampleRequest([n], SamplingParams(8))) for n in range(4)]
    publishing = asyncio.create_task(sampler.publish(1, policy(1), candidate=True))
    await until(lambda: not sampler._settled.is_set())
    waiting = [sampler.sample(SampleRequest([n], SamplingParams(2))) for n in range(4)]
    scoring = asyncio.create_task(sampler.score(ScoreRequest([1, 2, 3], 1, version=1)))
    waiting[0].close()
    # Nobody has read the first answers yet: a client that reads slowly does not delay the new version.
    await publishing
    assert loaded(servers) == [1, 1]
    for stream in running:
        assert [token.token_id async for batch in stream for token in batch] == list(range(8))
        assert stream.version == 0
    assert sampler.newest_version == 0
    sampler.promote(1)
    for stream in waiting[1:]:
        assert [token.token_id async for batch in stream for token in batch] == [100, 101]
        assert stream.version == 1
    assert len((await scoring).logprobs) == 1
    assert sampler.stats().active + sampler.stats().waiting == 0
    with pytest.raises(VersionGone, match="version 0 is not loaded"):
        await ask(sampler, version=0)


@pytest.mark.parametrize("damage", ["gone", "no weights", "cut off", "other shape", "missing weight", "no config"])
async def test_a_folder_is_checked_before_any_server_is_told_of_it(
    damage: str,
    sampler: FullWeightSampler,
    servers: list[ServerDouble],
    policy: Callable[[int], PolicyRef],
) -> None:
    made = policy(1)
    weights, config = made.folder / "model.safetensors", made.folder / "config.json"
    if damage == "gone":
        shutil.rmtree(made.folder)
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut off":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif damage == "no config":
        config.unlink()
    elif damage == "other shape":
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 3}))
    else:
        content = weights.read_bytes()
        weights.write_bytes(content.replace(b"model.norm.weight", b"model.norm.wrong!", 1))
    with pytest.raises(EngineUnavailable, match=r"Policy version 1 could not be loaded: .*/v1"):
        await sampler.publish(1, made)
    assert loaded(servers) == [0, 0]
    assert all(replica.up for replica in sampler.replicas)
    assert await answering_weights(sampler) == 0
    # The number was given to no policy.
    shutil.rmtree(made.folder, ignore_errors=True)
    await sampler.publish(1, policy(1))
    assert sampler.newest_version == 1


async def test_a_version_that_one_of_two_servers_cannot_load_is_on_none(
    sampler: FullWeightSampler, servers: list[ServerDouble], policy: Callable[[int], PolicyRef]
) -> None:
    await sampler.publish(1, policy(1))
    servers[1].model.refuses = 1
    with pytest.raises(EngineUnavailable, match=r"version 2 could not be loaded: .* failed with 500"):
        await sampler.publish(2, policy(2))
    assert sampler.newest_version == 1
    assert {await answering_weights(sampler) for _ in range(8)} == {1}
    await until(lambda: all(replica.up for replica in sampler.replicas))
    assert loaded(servers) == [1, 1]
    await sampler.publish(3, policy(3))
    assert loaded(servers) == [3, 3]


async def test_a_server_that_cannot_load_twice_gets_no_requests_until_it_holds_the_version(
    sampler: FullWeightSampler, servers: list[ServerDouble], policy: Callable[[int], PolicyRef]
) -> None:
    await sampler.publish(1, policy(1))
    # The new version, vLLM's own model after that, and the version before.
    servers[1].model.refuses = 3
    with pytest.raises(EngineUnavailable, match="version 2 could not be loaded"):
        await sampler.publish(2, policy(2))
    assert {await answering_weights(sampler) for _ in range(8)} == {1}
    await until(lambda: all(replica.up for replica in sampler.replicas))
    assert loaded(servers) == [1, 1]


async def test_a_server_that_dies_while_it_loads_comes_back_with_the_version_that_serves(
    sampler: FullWeightSampler,
    servers: list[ServerDouble],
    policy: Callable[[int], PolicyRef],
) -> None:
    await sampler.publish(1, policy(1))
    stopped = asyncio.Event()

    async def die() -> None:
        await servers[1].stop()
        stopped.set()

    servers[1].on_reload = die
    with pytest.raises(EngineUnavailable, match="version 2 could not be loaded"):
        await sampler.publish(2, policy(2))
    assert {await answering_weights(sampler) for _ in range(4)} == {1}
    servers[1].on_reload = None
    await stopped.wait()
    await servers[1].start()
    await until(lambda: all(replica.up for replica in sampler.replicas))
    assert loaded(servers) == [1, 1]
    assert sampler.newest_version == 1


async def test_a_server_that_was_away_catches_up(
    sampler: FullWeightSampler, servers: list[ServerDouble], policy: Callable[[int], PolicyRef]
) -> None:
    await servers[1].stop()
    await until(lambda: not sampler.replicas[1].up)
    await sampler.publish(1, policy(1))
    assert await answering_weights(sampler) == 1
    await servers[1].start()
    await until(lambda: sampler.replicas[1].up)
    assert loaded(servers) == [1, 1]


@pytest.mark.parametrize("scores", [False, True])
async def test_an_answer_of_other_weights_is_never_recorded_under_the_version(
    scores: bool,
    servers: list[ServerDouble],
    tiny_model: Path,
    tmp_path: Path,
    policy: Callable[[int], PolicyRef],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that was started again so quickly that nobody noticed has its own model."""
    sampler = sampler_of(servers[:1], tiny_model, tmp_path / "policies", replace(QUICK, health=60.0))
    await sampler.start()
    await sampler.publish(1, policy(1))
    servers[0].model.loaded, servers[0].model.weights = 0, "default"
    request = ScoreRequest([1, 2, 3], 1, version=1)
    with pytest.raises(EngineUnavailable, match="Please send it again"):
        await (sampler.score(request) if scores else ask(sampler))
    assert await answering_weights(sampler) == 1
    assert len((await sampler.score(request)).logprobs) == 1
    await sampler.close()


async def test_a_server_whose_answers_are_empty_replaces_its_weights(
    tiny_model: Path, tmp_path: Path, policy: Callable[[int], PolicyRef]
) -> None:
    server = ServerDouble(model=tiny_model, empty_answers=True)
    await server.start()
    sampler = sampler_of([server], tiny_model, tmp_path / "policies")
    await sampler.start()
    await sampler.publish(1, policy(1))
    assert await answering_weights(sampler) == 1
    await sampler.close()
    await server.stop()


@pytest.mark.parametrize("stored", [True, False])
def test_the_head_may_be_left_out_only_where_it_is_the_embedding(stored: bool, tmp_path: Path) -> None:
    untied, tied = save_tiny_model(tmp_path / "untied"), tmp_path / "tied"
    headless = shutil.copytree(untied, tmp_path / "headless")
    weights = headless / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"lm_head.weight", b"no_head.weight", 1))
    with pytest.raises(UnusableModel, match=r"it has no lm_head\.weight"):
        check_model_folder(headless, untied)
    # The configuration says it, whether the head is stored too or not.
    shutil.copytree(untied if stored else headless, tied)
    for folder in (tied, headless):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert has_tied_head(tied)
    if stored:
        check_model_folder(headless, tied)
    with pytest.raises(UnusableModel, match="tie_word_embeddings differs"):
        check_model_folder(untied, tied)


async def test_a_candidate_that_is_retracted_gives_way_to_the_version_before(
    sampler: FullWeightSampler, servers: list[ServerDouble], policy: Callable[[int], PolicyRef]
) -> None:
    await sampler.publish(1, policy(1))
    await sampler.publish(2, policy(2), candidate=True)
    waiting = asyncio.create_task(answering_weights(sampler))
    assert [token.token_id for token in await ask(sampler, version=2)] == [200, 201]
    sampler.retract(2)
    assert await waiting == 1
    assert loaded(servers) == [1, 1]
    # A version that came in between is served, whatever becomes of the candidate.
    await sampler.publish(3, policy(3), candidate=True)
    await sampler.publish(4, policy(4))
    sampler.promote(3)
    sampler.retract(3)
    assert (sampler.newest_version, await answering_weights(sampler)) == (4, 4)


async def test_a_version_whose_folder_is_gone_gives_way_to_the_base_model_when_a_server_comes_back(
    sampler: FullWeightSampler, servers: list[ServerDouble], policy: Callable[[int], PolicyRef]
) -> None:
    made = policy(1)
    await sampler.publish(1, made)
    shutil.rmtree(made.folder)
    await servers[0].stop()
    await until(lambda: not sampler.replicas[0].up)
    await servers[0].start()
    await until(lambda: sampler.newest_version == 0 and all(replica.up for replica in sampler.replicas))
    assert {await answering_weights(sampler) for _ in range(4)} == {0}
    assert loaded(servers) == [0, 0]


async def test_a_sampler_that_closes_fails_the_requests_that_wait(
    sampler: FullWeightSampler, policy: Callable[[int], PolicyRef]
) -> None:
    await sampler.publish(1, policy(1), candidate=True)
    waiting = asyncio.create_task(ask(sampler))
    scoring = asyncio.create_task(sampler.score(ScoreRequest([1, 2, 3], 1)))
    await asyncio.sleep(0)
    await sampler.close()
    for task in (waiting, scoring):
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await task


async def test_a_server_that_was_left_in_the_middle_of_a_change_is_put_right_at_the_start(
    servers: list[ServerDouble], tiny_model: Path, tmp_path: Path
) -> None:
    servers[0].model.loaded = 7
    await servers[0].model.pause()
    sampler = sampler_of(servers[:1], tiny_model, tmp_path)
    async with asyncio.timeout(180):
        await sampler.start()
    assert await answering_weights(sampler) == 0
    await sampler.close()


@pytest.mark.parametrize(
    ("given", "refuses", "sentence"),
    [
        ({"dev_mode": False}, 0, r"cannot load the model from .*404.* The server needs VLLM_SERVER_DEV_MODE=1"),
        ({}, 1, r"cannot load the model from .*500.* has to see the same path"),
    ],
)
async def test_a_server_that_cannot_replace_its_weights_is_refused_at_the_start_and_keeps_its_own(
    given: dict[str, Any], refuses: int, sentence: str, tiny_model: Path, tmp_path: Path
) -> None:
    server = ServerDouble(model=tiny_model, **given)
    server.model.refuses = refuses
    await server.start()
    sampler = sampler_of([server], tiny_model, tmp_path)
    with pytest.raises(EngineUnavailable, match=sentence):
        await sampler.start()
    await sampler.close()
    assert not server.model.is_half_loaded
    assert server.model.weights == "default"
    await server.stop()


async def test_a_server_that_would_keep_the_old_head_of_a_model_is_refused_at_the_start(tmp_path: Path) -> None:
    """vLLM on a CPU, which is known by what it scores."""
    model = save_tiny_model(tmp_path / "model", tied=True)
    server = ServerDouble(model=model, scores_targets=False)
    await server.start()
    sampler = sampler_of([server], model, tmp_path / "policies")
    with pytest.raises(EngineUnavailable, match=r"would keep the old head .* Train an adapter"):
        await sampler.start()
    await sampler.close()
    await server.stop()


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "opd"}, "--lora-rank 0 .* one policy version .* teacher of --method opd cannot use the base model"),
        ({"method": "rl", "judge": "llm"}, "one policy version .* the judge cannot use the base model"),
        ({"method": "rl", "judge": "feedback", "gate": "GATE"}, "so --gate cannot examine a candidate"),
        ({"method": "opd", "teacher_model_name": "other/model"}, "servers of the policy's model"),
    ],
)
def test_what_needs_several_versions_is_refused_in_a_sentence(
    name: str, given: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate.jsonl"
    gate.write_text('{"prompt": "hello", "contains": "hello"}\n')
    given = {key: str(gate) if value == "GATE" else value for key, value in given.items()}
    options = {"sampler": name, f"{name}_url": "http://127.0.0.1:9", "lora_rank": 0, "run_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=sentence):
        check(load({**options, **given}, {}).config)
    allowed = {"method": "rl", "judge": "feedback"}
    check(load({**options, **allowed}, {}).config)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_of_our_own_is_started_without_adapters(name: str) -> None:
    settings = load({"sampler": name, "lora_rank": 0, f"{name}_python": "/opt/python"}, {}).config.engine_settings
    factory: Any = sampler_factory(name)
    command = " ".join(factory.start_commands(settings)[0])
    assert "lora" not in command.lower()
    assert ("VLLM_SERVER_DEV_MODE=1" in command) == (name == "vllm")
