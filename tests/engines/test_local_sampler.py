"""The sampler and its real worker process: streams, limits, versions, and death."""

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from openclaw_rl.engines.base import EngineUnavailable, PolicyRef, WeightForm, policy_in
from openclaw_rl.engines.local.model.packed import has_half_products
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.types import Priority, SampledToken, SampleRequest, SamplingParams, ScoreRequest
from support.rank_processes import FastLauncher
from support.tiny_models import save_tiny_model


def options(model: Path, **changes: object) -> WorkerOptions:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "max_sequences": 4,
        "max_context": None,
        "cache_gib": 0.05,
        "policy_slots": 2,
        "lora_rank": 4,
    }
    return WorkerOptions(model=model, **{**settings, **changes})


# Starting a process takes seconds, so tests that leave their sampler as they found it share one.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model: Path) -> AsyncIterator[LocalSampler]:
    sampler = LocalSampler(options(tiny_model), max_queue=4, launcher=FastLauncher())
    await sampler.start()
    yield sampler
    await sampler.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sampler(tiny_model: Path) -> AsyncIterator[LocalSampler]:
    sampler = LocalSampler(options(tiny_model), max_queue=4, launcher=FastLauncher())
    await sampler.start()
    yield sampler
    await sampler.close()


@pytest.mark.more
@pytest.mark.parametrize("choice", ["on", "half"])
@pytest.mark.parametrize("changes", [{"lora_rank": 0}, {"dtype": "bfloat16"}, {}], ids=["full", "bfloat16", "packed"])
async def test_weights_that_are_not_packed_although_they_should_are_said(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], choice: str
) -> None:
    sampler = LocalSampler(options(tiny_model, pack_weights=choice, **changes), max_queue=4, launcher=FastLauncher())
    await sampler.start()
    await until(lambda: sampler.packed is not None)
    is_packed = "packed in" in sampler.describe()
    await sampler.close()
    if changes.get("dtype") == "bfloat16" and choice == "on":
        assert is_packed == has_half_products()
    else:
        assert not (changes and is_packed)
    assert (f"--pack-weights {choice} has no effect here" in caplog.text) == (not is_packed)


async def test_requests_are_answered_while_weights_are_packed(tiny_model: Path) -> None:
    sampler = LocalSampler(options(tiny_model, pack_weights="on"), max_queue=4, launcher=FastLauncher())
    await sampler.start()
    answers = []
    while sampler.packed is None or not answers:
        answers.append(await collect(sampler, request()))
    answers.append(await collect(sampler, request()))
    await sampler.close()
    assert sampler.packed.dtype == ("float32" if torch.backends.mkldnn.is_available() else "")
    for answer in answers:
        assert [token.token_id for token in answer] == [token.token_id for token in answers[0]]
        assert [t.logprob for t in answer] == pytest.approx([t.logprob for t in answers[0]], abs=1e-4)


def request(
    tokens: int = 10, n: int = 1, version: int | None = None, seed: int = 0, priority: Priority = Priority.USER
) -> SampleRequest:
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed)
    return SampleRequest([1, 2, 3, 4, 5], params, n=n, version=version, priority=priority)


async def collect(sampler: LocalSampler, job: SampleRequest) -> list[SampledToken]:
    return [token async for batch in sampler.sample(job) for token in batch]


async def until(condition: object, seconds: float = 180) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_users_are_answered_at_once_while_background_fills_its_queue(shared: LocalSampler) -> None:
    streams = [shared.sample(request(400, priority=Priority.BACKGROUND)) for _ in range(8)]
    assert len(await collect(shared, request(3))) == 3
    assert all(stream.running for stream in streams)
    for stream in streams:
        stream.close()


async def test_kill_9_fails_what_ran_and_the_next_request_is_served(
    sampler: LocalSampler, adapters: list[Path]
) -> None:
    await sampler.publish(1, policy_in(adapters[0]))
    before = await collect(sampler, request())
    running = [asyncio.create_task(collect(sampler, request(500, seed=i))) for i in range(6)]
    await until(lambda: sampler.stats().active == 4)
    assert sampler.worker_pid is not None
    os.kill(sampler.worker_pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
    # No waiting for the restart here: the request itself waits, and the adapter is back.
    after = await collect(sampler, request())
    assert [t.token_id for t in after] == [t.token_id for t in before]
    assert sampler.stats().restarts == 1
    assert sampler.stats().ready


@pytest.mark.more
async def test_requests_that_wait_for_a_restart_wait_for_a_whole_model_too(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Such a policy is read a piece at a time, here after another one."""
    sampler = LocalSampler(options(tiny_model, lora_rank=0), max_queue=4, launcher=FastLauncher())
    await sampler.start()
    for version in (1, 2):
        await sampler.publish(version, policy_in(save_tiny_model(tmp_path_factory.mktemp("policy"), seed=version)))
    before = await collect(sampler, request())
    assert sampler.worker_pid is not None
    os.kill(sampler.worker_pid, signal.SIGKILL)
    await until(lambda: not sampler.stats().ready)
    scoring = asyncio.create_task(sampler.score(ScoreRequest([1, 2, 3], 2, version=2)))
    answers = await asyncio.gather(*(collect(sampler, request()) for _ in range(3)))
    assert [[t.token_id for t in answer] for answer in answers] == [[t.token_id for t in before]] * 3
    assert len((await scoring).logprobs) == 2
    await sampler.close()


@pytest.mark.more
async def test_old_versions_make_room_but_not_while_they_serve(sampler: LocalSampler, adapters: list[Path]) -> None:
    await sampler.publish(1, policy_in(adapters[0]))
    held = sampler.sample(request(400))
    await sampler.publish(2, policy_in(adapters[1]))
    other = sampler.sample(request(400))
    third = asyncio.create_task(sampler.publish(3, policy_in(adapters[2])))
    await asyncio.sleep(0.1)
    assert not third.done()
    held.close()
    await asyncio.wait_for(third, 60)
    assert sampler.newest_version == 3
    assert len([t async for batch in other for t in batch]) == 400
    with pytest.raises(EngineUnavailable, match="version 1"):
        sampler.sample(request(version=1))


@pytest.mark.more
async def test_more_lines_than_slots_are_loaded_on_demand(sampler: LocalSampler, adapters: list[Path]) -> None:
    people = [f"person-{number}" for number in range(5)]
    for number, name in enumerate(people):
        policy = policy_in(adapters[number % len(adapters)])
        await sampler.publish(10 + number, policy, line=name)
    assert sampler.newest_version == 0, "the shared line is as it was"

    async def version_of(line: str) -> int:
        stream = sampler.sample(replace(request(), line=line))
        _ = [token async for tokens in stream for token in tokens]
        return stream.version

    assert [await version_of(name) for name in people] == [10, 11, 12, 13, 14]
    at_once = [*people, *people[:3]]
    assert await asyncio.gather(*map(version_of, at_once)) == [10, 11, 12, 13, 14, 10, 11, 12]
    assert await version_of("nobody") == 0
    # A policy whose files are gone fails the request that needs it, and no other.
    gone = adapters[0].parent / "gone"
    shutil.copytree(adapters[0], gone)
    await sampler.publish(20, policy_in(gone), line="person-0")
    shutil.rmtree(gone)
    with pytest.raises(EngineUnavailable):
        await version_of("person-0")
    assert await version_of("person-1") == 11
    for version in sampler.versions_of("person-1"):
        sampler.retract(version)
    assert await version_of("person-1") == 0


async def write_on(sampler: LocalSampler, line: str) -> None:
    """Requests of somebody who is never quiet: each ends after the next one has begun."""
    streams = []
    while True:
        streams.append(sampler.sample(replace(request(400), line=line)))
        await asyncio.sleep(0.1)
        if len(streams) == 3:
            streams.pop(0).close()


@contextlib.asynccontextmanager
async def writing_on(sampler: LocalSampler, *lines: str) -> AsyncIterator[None]:
    writers = [asyncio.create_task(write_on(sampler, line)) for line in lines]
    try:
        await asyncio.sleep(0.5)
        yield
        assert not any(writer.done() for writer in writers)
    finally:
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)


@pytest.mark.more
async def test_people_who_are_never_quiet_keep_nobody_from_a_slot(sampler: LocalSampler, adapters: list[Path]) -> None:
    """The requests of two people overlap on both slots; a third person and a new shared policy need one each."""
    for number, name in enumerate(["anna", "ben", "carl"]):
        await sampler.publish(10 + number, policy_in(adapters[number]), line=name)
    async with writing_on(sampler, "anna", "ben"), asyncio.timeout(20):
        assert len(await collect(sampler, replace(request(3), line="carl"))) == 3
        await sampler.publish(30, policy_in(adapters[0]))


@pytest.mark.more
@pytest.mark.parametrize("scores", [False, True])
async def test_work_for_idle_times_gives_its_slot_to_people(
    sampler: LocalSampler, adapters: list[Path], scores: bool
) -> None:
    """It rests while somebody writes, so it would keep its slot until everybody is quiet."""
    for number, name in enumerate(["anna", "ben", "carl"]):
        await sampler.publish(10 + number, policy_in(adapters[number]), line=name)

    async def work() -> None:
        if scores:
            await sampler.score(ScoreRequest([1] * 500, 400, version=10, priority=Priority.IDLE))
        else:
            await collect(sampler, replace(request(400), line="anna", priority=Priority.IDLE))

    async with writing_on(sampler, "ben"), asyncio.timeout(20):
        resting = asyncio.create_task(work())
        await asyncio.sleep(0.3)
        assert not resting.done()
        assert len(await collect(sampler, replace(request(3), line="carl"))) == 3
        with pytest.raises(EngineUnavailable, match="gave its place"):
            await resting


async def test_a_score_for_idle_times_that_waited_for_its_slot_gives_it_to_people(
    sampler: LocalSampler, adapters: list[Path]
) -> None:
    """Somebody waits behind it, while others, whom the shared policy serves, are never quiet."""
    await sampler.publish(5, policy_in(adapters[0]))
    for number, name in enumerate(["anna", "ben", "carl"]):
        await sampler.publish(10 + number, policy_in(adapters[number]), line=name)
    async with writing_on(sampler, "nobody"), asyncio.timeout(20):
        carl = sampler.sample(replace(request(400), line="carl"))
        await asyncio.sleep(0.3)
        score = asyncio.create_task(sampler.score(ScoreRequest([1] * 500, 400, version=10, priority=Priority.IDLE)))
        await asyncio.sleep(0.1)
        ben = asyncio.create_task(collect(sampler, replace(request(3), line="ben")))
        await asyncio.sleep(0.1)
        carl.close()
        assert len(await ben) == 3
        with pytest.raises(EngineUnavailable, match="gave its place"):
            await score


async def test_a_bad_adapter_is_an_error_and_serving_goes_on(shared: LocalSampler, tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="adapter_config"):
        await shared.publish(1, PolicyRef(WeightForm.PEFT, tmp_path))
    assert shared.newest_version == 0
    assert len(await collect(shared, request())) == 10


@pytest.mark.more
async def test_a_model_that_cannot_be_loaded_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    sampler = LocalSampler(options(tmp_path), max_queue=4, launcher=FastLauncher())
    with pytest.raises(EngineUnavailable, match=r"could not be loaded: .* holds no .safetensors files\.$"):
        await sampler.start()
    await sampler.close()


@pytest.mark.more
async def test_a_worker_that_is_killed_while_it_loads_is_said_with_the_signal(tiny_model: Path) -> None:
    sampler = LocalSampler(options(tiny_model), max_queue=4, launcher=FastLauncher())
    starting = asyncio.create_task(sampler.start())
    others = {process.pid for process in multiprocessing.active_children()}
    await until(lambda: {process.pid for process in multiprocessing.active_children()} - others)
    (pid,) = {process.pid for process in multiprocessing.active_children()} - others
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=r"loading the model.*SIGKILL.*memory"):
        await starting
    await sampler.close()


@pytest.mark.more
async def test_a_worker_that_crashes_leaves_the_signal_and_the_place_in_the_log(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tiny_model: Path
) -> None:
    # Not forked: its errors are to come here.
    sampler = LocalSampler(options(tiny_model), max_queue=4)
    await sampler.start()
    running = asyncio.create_task(collect(sampler, request(500)))
    await until(lambda: sampler.stats().active == 1)
    assert sampler.worker_pid is not None
    os.kill(sampler.worker_pid, signal.SIGSEGV)
    with pytest.raises(EngineUnavailable, match=r"Please send it again\.$"):
        await running
    await until(lambda: sampler.stats().ready)
    await sampler.close()
    assert "SIGSEGV" in caplog.text
    assert "worker.py" in capfd.readouterr().err


@pytest.mark.more
async def test_requests_that_wait_for_a_restart_end_when_the_server_does(tiny_model: Path) -> None:
    sampler = LocalSampler(options(tiny_model), max_queue=4, launcher=FastLauncher())
    await sampler.start()
    assert sampler.worker_pid is not None
    os.kill(sampler.worker_pid, signal.SIGKILL)
    await until(lambda: not sampler.stats().ready)
    waiting = asyncio.create_task(collect(sampler, request()))
    await asyncio.sleep(0)
    await sampler.close()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        sampler.sample(request())


@pytest.mark.more
async def test_a_bad_adapter_for_a_full_engine_costs_no_version(sampler: LocalSampler, adapters: list[Path]) -> None:
    await sampler.publish(1, policy_in(adapters[0]))
    await sampler.publish(2, policy_in(adapters[1]))
    with pytest.raises(EngineUnavailable):
        await sampler.publish(3, PolicyRef(WeightForm.PEFT, Path("/nowhere")))
    assert sampler.newest_version == 2
    assert len(await collect(sampler, request(version=1))) == 10
    await sampler.publish(4, policy_in(adapters[2]))
    assert len(await collect(sampler, request())) == 10
    assert sampler.stats().restarts == 0
    with pytest.raises(EngineUnavailable, match="not newer"):
        await sampler.publish(4, policy_in(adapters[2]))


@pytest.mark.more
async def test_an_adapter_that_is_gone_after_a_restart_gives_way_to_the_one_before(
    sampler: LocalSampler, adapters: list[Path], tmp_path: Path
) -> None:
    await sampler.publish(1, policy_in(adapters[0]))
    await sampler.publish(2, policy_in(Path(shutil.copytree(adapters[1], tmp_path / "gone"))))
    first = await collect(sampler, request(version=1))
    shutil.rmtree(tmp_path / "gone")
    assert sampler.worker_pid is not None
    os.kill(sampler.worker_pid, signal.SIGKILL)
    await until(lambda: sampler.newest_version == 1)
    assert [t.token_id for t in await collect(sampler, request())] == [t.token_id for t in first]
    assert sampler.stats().restarts == 1


@pytest.mark.more
async def test_a_worker_that_keeps_dying_is_said_and_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    sampler = LocalSampler(options(folder), max_queue=4, launcher=FastLauncher())
    sampler._worker.max_quick_deaths = 1
    sampler._worker.max_pause = 0.1
    await sampler.start()
    assert sampler.worker_pid is not None
    (folder / "config.json").rename(folder / "config.away")
    os.kill(sampler.worker_pid, signal.SIGKILL)
    await until(lambda: "does not stay up" in sampler.stats().detail)
    with pytest.raises(EngineUnavailable, match="could not be loaded"):
        sampler.sample(request())
    (folder / "config.away").rename(folder / "config.json")
    await until(lambda: sampler.stats().ready)
    assert len(await collect(sampler, request())) == 10
    await sampler.close()


@pytest.mark.more
async def test_scoring_ends_when_the_worker_is_killed_and_works_again(sampler: LocalSampler) -> None:
    assert sampler.worker_pid is not None
    # It does not get to any of them.
    os.kill(sampler.worker_pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(sampler.score(ScoreRequest([1] * 500, 499))) for _ in range(40)]
    await asyncio.sleep(0)
    os.kill(sampler.worker_pid, signal.SIGKILL)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, EngineUnavailable) for result in results)
    assert len((await sampler.score(ScoreRequest([1, 2, 3], 2))).logprobs) == 2


@pytest.mark.more
async def test_nobody_waits_for_a_score_that_was_given_up(shared: LocalSampler) -> None:
    waiting = asyncio.create_task(shared.score(ScoreRequest([1] * 500, 499)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len((await shared.score(ScoreRequest([1, 2, 3], 2))).logprobs) == 2
