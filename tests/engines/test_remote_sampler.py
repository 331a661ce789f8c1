"""Servers of other projects as one sampler: routing, death and return, and what is found out at the start."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.app.checks import check
from openclaw_rl.app.config import load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineUnavailable, PolicyRef, WeightForm
from openclaw_rl.engines.factory import sampler_factory
from openclaw_rl.engines.remote.dialect import SampledPiece, ServerTraits
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.process import ServerProcess
from openclaw_rl.engines.remote.replica import BLOCK_TOKENS, ReplicaTimes
from openclaw_rl.engines.remote.sampler import RemoteOptions, RemoteSampler
from openclaw_rl.engines.remote.sglang import SglangDialect
from openclaw_rl.engines.remote.vllm import VllmDialect
from openclaw_rl.types import FinishReason, SampledToken, SampleRequest, SamplingParams, ScoreRequest
from support.inference_servers import ServerDouble
from support.server_program import ROOT

#: Health is looked at more often than in earnest.
QUICK = ReplicaTimes(health=0.05, health_answer=0.3, retry=0.02, max_pause=0.05)


@pytest.fixture
async def servers() -> AsyncIterator[list[ServerDouble]]:
    servers = [ServerDouble(), ServerDouble()]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


def sampler_of(
    servers: list[ServerDouble], model: Path, folder: Path, rank: int = 4, times: ReplicaTimes = QUICK
) -> RemoteSampler:
    options = RemoteOptions(model, None, 16, 16, 2, rank, folder, times=times)
    return RemoteSampler(VllmDialect(), [(InferenceServer(server.url), None) for server in servers], options)


@pytest.fixture
async def sampler(servers: list[ServerDouble], tiny_model: Path, tmp_path: Path) -> AsyncIterator[RemoteSampler]:
    sampler = sampler_of(servers, tiny_model, tmp_path)
    await sampler.start()
    for server in servers:
        server.model.asked.clear()
    yield sampler
    await sampler.close()


def set_times(sampler: RemoteSampler, **seconds: float) -> None:
    for replica in sampler.replicas:
        replica.times = replace(replica.times, **seconds)


async def ask(sampler: RemoteSampler, prompt: list[int], tokens: int = 2, **given: Any) -> list[SampledToken]:
    request = SampleRequest(prompt, SamplingParams(tokens), **given)
    return [token async for batch in sampler.sample(request) for token in batch]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0.005)


def adapter(folder: Path) -> PolicyRef:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    return PolicyRef(WeightForm.PEFT, folder)


def versions(server: ServerDouble) -> set[str]:
    """The versions that a server holds; their names begin with something that differs in each run."""
    return {name.rpartition("-")[2] for name in server.model.slots}


async def test_a_session_stays_where_its_prefix_is_and_sessions_are_spread(
    sampler: RemoteSampler, servers: list[ServerDouble]
) -> None:
    sessions = [[number] * BLOCK_TOKENS for number in range(8)]
    for _turn in range(3):
        for session in sessions:
            await ask(sampler, session)
            session += range(BLOCK_TOKENS // 2)
    where = [{request.prompt_ids[0] for request in server.model.asked} for server in servers]
    assert where[0] | where[1] == set(range(8))
    assert not where[0] & where[1]
    assert {len(ids) for ids in where} == {4}


async def test_requests_one_after_another_use_the_same_connection(
    sampler: RemoteSampler, servers: list[ServerDouble]
) -> None:
    for server in servers:
        server.client_ports.clear()
    for number in range(8):
        await ask(sampler, [number])
        # The rest of the answer is read after the last token.
        await until(lambda: not any(replica.running for replica in sampler.replicas))
    # One for requests and one for health checks, on each server.
    assert all(len(server.client_ports) <= 2 for server in servers)


async def test_a_server_with_far_more_to_do_gets_no_more(sampler: RemoteSampler, servers: list[ServerDouble]) -> None:
    for server in servers:
        server.model.pause_seconds = 0.05
    prompt = list(range(BLOCK_TOKENS))
    await asyncio.gather(*(ask(sampler, prompt) for _ in range(16)))
    assert sorted(len(server.model.asked) for server in servers)[0] >= 3


async def test_a_version_is_on_all_servers_before_it_serves_and_goes_from_all(
    sampler: RemoteSampler, servers: list[ServerDouble], tmp_path: Path
) -> None:
    await sampler.publish(1, adapter(tmp_path / "v1"), candidate=True)
    assert [versions(server) for server in servers] == [{"v1"}, {"v1"}]
    assert sampler.newest_version == 0
    sampler.promote(1)
    assert [token.token_id for token in await ask(sampler, [1])] == [100, 101]
    sampler.retract(1)
    await until(lambda: not any(server.model.slots for server in servers))


async def test_more_lines_than_adapters_take_turns_on_all_servers(
    sampler: RemoteSampler, servers: list[ServerDouble], tmp_path: Path
) -> None:
    people = [f"person-{number}" for number in range(5)]
    for number, name in enumerate(people):
        await sampler.publish(10 + number, adapter(tmp_path / name), line=name)
    assert not any(server.model.slots for server in servers), "they are loaded when somebody asks"

    async def version_of(line: str) -> int:
        stream = sampler.sample(SampleRequest([1], SamplingParams(2), line=line))
        assert [token.token_id async for batch in stream for token in batch]
        return stream.version

    at_once = [*people, *people[:3], "nobody"]
    assert await asyncio.gather(*map(version_of, at_once)) == [10, 11, 12, 13, 14, 10, 11, 12, 0]
    for server in servers:
        assert len(versions(server)) == 2
    assert len((await sampler.score(ScoreRequest([1, 2, 3], 2, version=10))).logprobs) == 2
    for version in sampler.versions_of("person-1"):
        sampler.retract(version)
    assert await version_of("person-1") == 0


async def test_a_retracted_version_is_unloaded_when_its_last_request_ends(
    sampler: RemoteSampler, servers: list[ServerDouble], tmp_path: Path
) -> None:
    await sampler.publish(1, adapter(tmp_path / "v1"))
    for server in servers:
        server.model.pause_seconds = 0.05
    running = asyncio.create_task(ask(sampler, [1], tokens=4))
    await until(lambda: any(server.model.asked for server in servers))
    sampler.retract(1)
    await sampler.publish(2, adapter(tmp_path / "v2"))
    assert [versions(server) for server in servers] == [{"v1", "v2"}] * 2
    assert len(await running) == 4
    await until(lambda: [versions(server) for server in servers] == [{"v2"}] * 2)


async def test_a_foreign_server_keeps_nothing_of_a_run_that_ended_or_was_killed(
    servers: list[ServerDouble], tiny_model: Path, tmp_path: Path
) -> None:
    mine, other = (tmp_path / run / "policies" for run in ("mine", "other"))
    killed, neighbour = (sampler_of(servers, tiny_model, folder) for folder in (mine, other))
    for sampler in (killed, neighbour):
        await sampler.start()
    await killed.publish(1, adapter(mine / "v1"))
    await killed.publish(2, adapter(tmp_path / "mine" / "line"), candidate=True, line="ben")
    await neighbour.publish(1, adapter(other / "v1"))
    left = {name for name in servers[0].model.slots if name.startswith(killed._prefix)}
    assert len(left) == 2
    again = sampler_of(servers, tiny_model, mine)
    await again.start()
    assert not any(left & server.model.slots.keys() for server in servers)
    await again.publish(1, PolicyRef(WeightForm.PEFT, mine / "v1"))
    assert all(len(server.model.slots) == 2 for server in servers)
    assert not any(left & server.model.slots.keys() for server in servers)
    await again.close()
    await neighbour.close()
    assert not any(server.model.slots for server in servers)
    await killed.close()


async def test_an_adapter_stands_for_the_base_model_where_adapters_would_change_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    """On a CPU, vLLM computes requests for the base model with the adapter of another request."""
    server = ServerDouble(scores_targets=False)
    await server.start()
    sampler = sampler_of([server], tiny_model, tmp_path)
    await sampler.start()
    await sampler.publish(1, adapter(tmp_path / "v1"))
    assert versions(server) == {"base", "v1"}

    async def slots() -> list[int]:
        return [(await ask(sampler, [1], version=version))[0].token_id // 100 for version in (0, 1)]

    assert await slots() == [1, 2]
    await server.stop()
    await until(lambda: not sampler.replicas[0].up)
    await server.start()
    await until(lambda: sampler.replicas[0].up)
    assert versions(server) == {"base", "v1"}
    assert await slots() == [1, 2]
    await sampler.close()
    assert not server.model.slots
    await server.stop()


async def test_a_version_that_one_server_refuses_is_on_none(
    sampler: RemoteSampler, servers: list[ServerDouble], tmp_path: Path
) -> None:
    servers[1].options.max_lora_rank = 2
    with pytest.raises(EngineUnavailable, match=r"version 1 could not be loaded: .*rank 4 is greater"):
        await sampler.publish(1, adapter(tmp_path / "v1"))
    assert [versions(server) for server in servers] == [set(), set()]
    assert sampler.newest_version == 0


async def test_a_server_that_dies_is_left_out_and_taken_back_with_its_versions(
    sampler: RemoteSampler, servers: list[ServerDouble], tmp_path: Path
) -> None:
    await sampler.publish(1, adapter(tmp_path / "v1"))
    for server in servers:
        server.model.pause_seconds = 0.05
    running = [asyncio.create_task(ask(sampler, [number], tokens=20)) for number in range(4)]
    await until(lambda: all(len(server.model.asked) == 2 for server in servers))
    await servers[0].stop()
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert sum(isinstance(outcome, EngineUnavailable) for outcome in outcomes) == 2
    assert sum(isinstance(outcome, list) and len(outcome) == 20 for outcome in outcomes) == 2
    await until(lambda: not sampler.replicas[0].up)
    assert sampler.stats().ready
    assert servers[0].url in sampler.stats().detail
    for server in servers:
        server.model.pause_seconds = 0
    assert len(await ask(sampler, [9])) == 2
    await sampler.publish(2, adapter(tmp_path / "v2"))
    await servers[0].start()
    await until(lambda: sampler.replicas[0].up)
    assert versions(servers[0]) == {"v1", "v2"}
    assert sampler.stats().detail == ""


async def test_a_server_that_was_started_again_unnoticed_gets_its_versions_back(
    servers: list[ServerDouble], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(servers[:1], tiny_model, tmp_path, times=replace(QUICK, health=60.0))
    await sampler.start()
    await sampler.publish(1, adapter(tmp_path / "v1"))
    servers[0].model.slots.clear()
    with pytest.raises(EngineUnavailable):
        await ask(sampler, [1])
    assert [token.token_id for token in await ask(sampler, [1])] == [100, 101]
    await sampler.close()


async def test_a_server_whose_password_is_in_the_url_is_named_without_it(
    servers: list[ServerDouble], tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = servers[0].url.replace("http://", "http://me:secret@")
    options = RemoteOptions(tiny_model, None, 16, 16, 2, 4, tmp_path, times=QUICK)
    sampler = RemoteSampler(VllmDialect(), [(InferenceServer(url), None)], options)
    await sampler.start()
    said = [sampler.describe(), str(sampler.stats())]
    await servers[0].stop()
    await until(lambda: not sampler.replicas[0].up and not sampler.replicas[0].comes_back)
    with pytest.raises(EngineUnavailable, match="is not up") as refused:
        await ask(sampler, [1])
    assert servers[0].url in said[0]
    assert "secret" not in "".join([*said, str(sampler.stats()), str(refused.value), caplog.text])
    await sampler.close()


async def test_a_silent_server_does_not_block_a_new_version(
    sampler: RemoteSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    set_times(sampler, load=0.05)
    with monkeypatch.context() as patched:
        patched.setattr(VllmDialect, "load", silent)
        with pytest.raises(EngineUnavailable, match=r"does not answer within 0\.05 s"):
            await asyncio.wait_for(sampler.publish(1, adapter(tmp_path / "v1")), 30)
    set_times(sampler, load=30.0)
    await sampler.publish(2, adapter(tmp_path / "v2"))
    assert sampler.newest_version == 2


@pytest.mark.parametrize("failure", ["silent", "unexpected"])
async def test_a_server_comes_back_after_whatever_kept_it_from_it(
    failure: str, sampler: RemoteSampler, servers: list[ServerDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    set_times(sampler, probe=0.05)

    async def fail(*_: object) -> ServerTraits:
        failed.set()
        if failure == "silent":
            await asyncio.Event().wait()
        raise RuntimeError("unexpected")

    with monkeypatch.context() as patched:
        patched.setattr(VllmDialect, "probe", fail)
        await servers[0].stop()
        await until(lambda: not sampler.replicas[0].up)
        await servers[0].start()
        await asyncio.wait_for(failed.wait(), 180)
        await until(lambda: sampler.replicas[0]._failed_starts > 0)
    set_times(sampler, probe=30.0)
    await until(lambda: sampler.replicas[0].up)


async def test_a_server_that_hangs_counts_as_dead(sampler: RemoteSampler, servers: list[ServerDouble]) -> None:
    for server in servers:
        server.model.pause_seconds = 3600
    running = asyncio.create_task(ask(sampler, [1]))
    await until(lambda: any(server.model.asked for server in servers))
    for replica in sampler.replicas:
        replica._down("It hangs.")
    with pytest.raises(EngineUnavailable, match="stopped while it was working"):
        await running


async def test_without_any_server_requests_are_refused_at_once(
    sampler: RemoteSampler, servers: list[ServerDouble]
) -> None:
    for server in servers:
        await server.stop()
    await until(lambda: not any(replica.up or replica.comes_back for replica in sampler.replicas))
    with pytest.raises(EngineUnavailable, match=r"http://127.0.0.1:\d+ is not up"):
        sampler.sample(SampleRequest([1], SamplingParams(1)))
    assert not sampler.stats().ready


class OddDialect(VllmDialect):
    """A server whose answers have the wrong form, or end too early."""

    def __init__(self) -> None:
        self.pieces: list[SampledPiece | Exception] = []

    async def sample(
        self, server: InferenceServer, traits: ServerTraits, model: str, request: SampleRequest, index: int
    ) -> AsyncIterator[SampledPiece]:
        if not self.pieces:
            async for piece in super().sample(server, traits, model, request, index):
                yield piece
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([SampledPiece([SampledToken(0, 1, -0.5)], None)], "ended its answer without a last token"),
        ([KeyError("token_ids")], "in a form that this program does not know"),
        ([TypeError("None")], "in a form that this program does not know"),
    ],
)
async def test_whatever_a_server_answers_the_request_ends(
    pieces: list[SampledPiece | Exception],
    sentence: str,
    servers: list[ServerDouble],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    dialect = OddDialect()
    options = RemoteOptions(tiny_model, None, 16, 16, 2, 4, tmp_path, times=QUICK)
    sampler = RemoteSampler(dialect, [(InferenceServer(servers[0].url), None)], options)
    await sampler.start()
    dialect.pieces = pieces
    async with asyncio.timeout(180):
        with pytest.raises(EngineUnavailable, match=sentence):
            await ask(sampler, [1])
    dialect.pieces = []
    assert len(await ask(sampler, [1])) == 2
    await sampler.close()


class Events:
    """In place of a server: the events of one answer."""

    def __init__(self, *events: Any) -> None:
        self.events = events

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        for event in self.events:
            yield event


def choice(logprob: float, finish: str | None = None) -> dict[str, Any]:
    content = [{"logprob": logprob, "rank": 1, "top_logprobs": []}]
    return {"choices": [{"token_ids": [7], "finish_reason": finish, "logprobs": {"content": content}}]}


async def read_events(*events: Any) -> list[SampledToken]:
    traits = ServerTraits("vLLM", "base", 100, None, False, False)
    request = SampleRequest([1], SamplingParams(2))
    pieces = VllmDialect().sample(Events(*events), traits, "base", request, 0)  # type: ignore[arg-type]
    return [token async for piece in pieces for token in piece.tokens]


async def test_a_server_that_does_not_count_tokens_gives_the_last_one_too() -> None:
    counted = {"choices": [], "usage": {"prompt_tokens": 1}}
    for more in ([], [counted]):
        tokens = await read_events(choice(-0.5), choice(-0.25, "length"), *more)
        assert [token.logprob for token in tokens] == [-0.5, -0.25]
        assert [token.finish for token in tokens] == [None, FinishReason.LENGTH]


async def test_a_log_prob_that_vllm_could_not_compute_is_never_recorded() -> None:
    with pytest.raises(EngineUnavailable, match="no log-prob"):
        await read_events(choice(-9999.0))


async def test_a_version_that_cannot_be_loaded_displaces_no_other(
    sampler: RemoteSampler, servers: list[ServerDouble], tmp_path: Path
) -> None:
    for version in (1, 2):
        await sampler.publish(version, adapter(tmp_path / f"v{version}"))
    (tmp_path / "v3").mkdir()
    with pytest.raises(EngineUnavailable, match="version 3 could not be loaded"):
        await sampler.publish(3, PolicyRef(WeightForm.PEFT, tmp_path / "v3"))
    assert [versions(server) for server in servers] == [{"v1", "v2"}] * 2
    assert len(await ask(sampler, [1], version=1)) == 2


async def test_a_version_whose_folder_is_gone_is_given_up_when_a_server_comes_back(
    sampler: RemoteSampler, servers: list[ServerDouble], tmp_path: Path
) -> None:
    for version in (1, 2):
        await sampler.publish(version, adapter(tmp_path / f"v{version}"))
    shutil.rmtree(tmp_path / "v2")
    await servers[0].stop()
    await until(lambda: not sampler.replicas[0].up)
    await servers[0].start()
    await until(lambda: sampler.replicas[0].up)
    assert sampler.newest_version == 1
    assert [token.token_id for token in await ask(sampler, [1])] == [100, 101]


async def test_a_server_of_another_kind_is_said_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    server = ServerDouble()
    await server.start()
    options = RemoteOptions(tiny_model, None, 16, 16, 2, 4, tmp_path, times=QUICK)
    sampler = RemoteSampler(SglangDialect(), [(InferenceServer(server.url), None)], options)
    with pytest.raises(EngineUnavailable, match=server.url):
        await sampler.start()
    await sampler.close()
    await server.stop()


async def test_a_server_of_our_own_that_cannot_be_started_again_refuses_requests_without_its_log(
    tiny_model: Path, tmp_path: Path, servers: list[ServerDouble]
) -> None:
    """The URL belongs to a server that answers; the process beside it is what is watched."""
    flag = tmp_path / "may-run"
    flag.touch()
    program = f"import os, sys, time; print('secret'); os.path.exists('{flag}') or sys.exit(1); time.sleep(600)"
    process = ServerProcess("vllm", [sys.executable, "-c", program], {})
    options = RemoteOptions(tiny_model, None, 16, 16, 2, 4, tmp_path, times=QUICK)
    sampler = RemoteSampler(VllmDialect(), [(InferenceServer(servers[0].url), process)], options)
    await sampler.start()
    flag.unlink()
    await servers[0].stop()
    await process.stop()
    waiting = asyncio.create_task(ask(sampler, [1]))
    async with asyncio.timeout(60):
        with pytest.raises(EngineUnavailable):
            await waiting
        await until(lambda: not sampler.replicas[0].comes_back)
    with pytest.raises(EngineUnavailable) as refused:
        sampler.sample(SampleRequest([1], SamplingParams(1)))
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)
    await sampler.close()


@pytest.mark.parametrize(
    ("options", "heat", "rank", "sentence"),
    [
        ({"enable_scale_out": False}, 1.0, 4, "does not take token ids .* start it with --enable-scale-out"),
        ({}, 2.0, 4, "log-probs that depend on the temperature.* --logprobs-mode raw_logprobs"),
        ({"max_lora_rank": 8}, 1.0, 16, "cannot load adapters of rank 16 .* --max-lora-rank"),
    ],
)
async def test_a_server_that_lacks_something_is_refused_at_the_start_with_what_it_needs(
    options: dict[str, Any], heat: float, rank: int, sentence: str, tiny_model: Path, tmp_path: Path
) -> None:
    server = ServerDouble(**options)
    server.model.heat = heat
    await server.start()
    sampler = sampler_of([server], tiny_model, tmp_path, rank)
    with pytest.raises(EngineUnavailable, match=sentence):
        await sampler.start()
    await sampler.close()
    await server.stop()


async def test_a_server_that_is_not_there_is_said_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    sampler = sampler_of([ServerDouble()], tiny_model, tmp_path)
    with pytest.raises(EngineUnavailable, match="No vllm server answers at http://127"):
        await sampler.start()
    await sampler.close()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sampler": "vllm", "vllm_url": "localhost:8000"}, "--vllm-url localhost:8000 is not a server's URL"),
        ({"sampler": "vllm", "vllm_url": "http://"}, "--vllm-url http: is not a server's URL"),
        ({"sampler": "vllm", "vllm_url": "http://h:99999"}, "its host or its port is not valid"),
        ({"sampler": "vllm", "vllm_url": "http://me:se/cret@h"}, "--vllm-url http://h is not a server's URL"),
        ({"sampler": "vllm", "vllm_url": "http://h", "vllm_key": "a\nb"}, "--vllm-key holds a character"),
        ({"sampler": "vllm", "vllm_python": "/no/python"}, "--vllm-python /no/python is not a program"),
        ({"sampler": "sglang"}, "has no sglang: give the interpreter that has it with --sglang-python"),
        ({"sampler": "vllm", "vllm_args": "--a 'b"}, "--vllm-args .* cannot be read"),
        ({"sampler": "vllm", "rollout_gpus": "cuda:1"}, "give a count of GPUs such as 4, or their numbers"),
    ],
)
def test_options_that_cannot_work_are_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(load(given, {}).config)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_command_of_a_server_of_our_own_says_what_the_options_say(name: str) -> None:
    given = {"sampler": name, "max_context_tokens": 512, "lora_rank": 24, "rollout_gpus": "0,1"}
    given |= {f"{name}_args": "--own 'two words'", f"{name}_python": "/opt/python"}
    settings = load(given, {}).config.engine_settings
    factory: Any = sampler_factory(name)
    command = " ".join(factory.command(settings, "/model", 8123, 2))
    assert command.startswith(f"/opt/python -m {name}.")
    assert command.endswith("--own two words")
    for part in ("--host 127.0.0.1 --port 8123", "--enable-lora", "--lora-target-modules", "513", "/model"):
        assert part in command
    assert f"--max-lora-rank {32 if name == 'vllm' else 24}" in command
    assert ("--tensor-parallel-size 2" if name == "vllm" else "--tp-size 2") in command
    (shown,) = factory.start_commands(settings)
    assert shown[0] == "env"
    assert "CUDA_VISIBLE_DEVICES=0,1" in shown
    assert "/opt/python" in shown


#: It has a child as vLLM has, which lets nobody but itself end it, and ends that when it is asked to end.
SERVER_WITH_CHILD = """
import os, signal, subprocess, sys, time
hold = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
child.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), os._exit(0)))
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


async def pids_in(log: Path, starts: int = 1) -> list[int]:
    """The processes of the servers that write to a log."""
    async with asyncio.timeout(60):
        while len(told := log.read_text().split()) < 2 * starts:
            await asyncio.sleep(0.02)
    return list(map(int, told))


def are_gone(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_a_server_whose_guard_is_killed_ends_before_another_one_is_started() -> None:
    process = ServerProcess("x", [sys.executable, "-c", SERVER_WITH_CHILD], {})
    await process.start()
    pids = await pids_in(process.log)
    assert process.guard_pid is not None
    os.kill(process.guard_pid, signal.SIGKILL)
    await process.wait()
    assert are_gone(pids)
    await process.start()
    pids = await pids_in(process.log, starts=2)
    assert not are_gone(pids)
    await process.stop()
    assert not process.running
    assert are_gone(pids)
    process.remove_log()


@pytest.mark.parametrize("with_guard", [False, True])
def test_a_server_of_our_own_ends_with_us_also_after_kill_9(tmp_path: Path, with_guard: bool) -> None:
    """The parent starts a guarded server, and is killed; the guard too, or not."""
    program = (
        "import asyncio, pathlib, sys\n"
        "from openclaw_rl.engines.remote.process import ServerProcess\n"
        "async def main():\n"
        f"    process = ServerProcess('x', [sys.executable, '-c', {SERVER_WITH_CHILD!r}], {{}})\n"
        f"    process.log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "    await process.start()\n"
        "    print(process.guard_pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    pids = asyncio.run(pids_in(tmp_path / "log"))
    parent.send_signal(signal.SIGSTOP)
    if with_guard:
        os.kill(guard, signal.SIGKILL)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while not are_gone(pids):
        assert time.monotonic() < end
        time.sleep(0.02)
