"""Lines of policies on Tinker, against its double: a training run for each, and each sampled by its own reference."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from openclaw_rl.engines.base import EngineAway, EngineError, EngineUnavailable, PolicyRef, StepRefused, policy_in
from openclaw_rl.engines.tinker import connection as connection_module
from openclaw_rl.engines.tinker.connection import Account, Connection
from openclaw_rl.engines.tinker.learner import TinkerLearner
from openclaw_rl.engines.tinker.sampler import SamplerOptions, TinkerSampler
from openclaw_rl.engines.tinker.training_run import LINE_SECONDS, PolicyRecord
from openclaw_rl.engines.tinker.traits import Traits
from openclaw_rl.types import SHARED, SampleRequest, SamplingParams
from support.tinker_double import RANK, Cloud, Sampling, Training, failed_request, status_error, tinker, types
from support.tinker_learners import a_learner, batch, saved

PEOPLE = ("anna", "ben", "carl")


@pytest.fixture
def cloud(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    cloud = Cloud(tiny_model, tmp_path / "cloud")
    monkeypatch.setattr(tinker, "ServiceClient", cloud.service)
    return cloud


@pytest_asyncio.fixture
async def learner(cloud: Cloud, tiny_model: Path) -> AsyncIterator[TinkerLearner]:
    learner = await a_learner(tiny_model)
    yield learner
    await learner.primitives.connection.close()


async def state(cloud: Cloud, line: Any, folder: Path) -> Any:
    """Everything that the next step of a line depends on, once it is saved in a folder."""
    folder.mkdir(exist_ok=True)
    await line.save(folder)
    return saved(cloud, folder)


async def test_lines_learn_as_if_each_were_alone(cloud: Cloud, learner: TinkerLearner, tmp_path: Path) -> None:
    batches = {name: batch(cloud, seed) for seed, name in enumerate(("anna", "ben"))}
    alone = {}
    for name, own in batches.items():
        await learner.reset()
        for _ in range(3):
            await learner.step(own)
        alone[name] = await state(cloud, learner, tmp_path / "alone")
    assert alone["anna"] != alone["ben"]
    lines = {name: learner.for_line(name) for name in batches}
    for line in lines.values():
        await line.reset()
    for _ in range(2):
        for name, line in lines.items():
            await line.step(batches[name])
    # A line that makes room goes on from what it saved. A step that is taken back is not in it.
    await state(cloud, lines["anna"], tmp_path / "anna")
    await learner.drop_line("anna")
    with pytest.raises(EngineUnavailable, match="holds no policy"):
        await lines["anna"].step(batches["anna"])
    await lines["ben"].step(batches["anna"])
    await lines["ben"].undo()
    await lines["anna"].load(tmp_path / "anna")
    for name, line in lines.items():
        await line.step(batches[name])
        assert await state(cloud, line, tmp_path / name) == alone[name]
        await learner.drop_line(name)
    assert cloud.clients(Training) == 1, "only the learner without a line holds a training run"


def not_finite(_answer: Any) -> Any:
    return types.OptimStepResponse(metrics={"grad_norm": float("nan")})


@pytest.mark.parametrize(
    ("fault", "error", "lost"), [(not_finite, StepRefused, False), (status_error(401), EngineAway, True)]
)
async def test_a_step_that_fails_in_one_line_leaves_the_others(
    cloud: Cloud, learner: TinkerLearner, tmp_path: Path, fault: Any, error: type[Exception], *, lost: bool
) -> None:
    anna, ben = (learner.for_line(name) for name in ("anna", "ben"))
    for line in (anna, ben):
        await line.reset()
        await line.step(batch(cloud, 1))
    before = [await state(cloud, anna, tmp_path / "anna"), await state(cloud, ben, tmp_path / "ben")]
    assert before[0] == before[1]
    cloud.fail("optim_step", fault)
    with pytest.raises(error):
        await anna.step(batch(cloud, 2))
    assert await state(cloud, ben, tmp_path / "ben") == before[1]
    await ben.undo()
    if lost:
        await anna.load(tmp_path / "anna")
    assert await state(cloud, anna, tmp_path / "anna") == before[0]


async def test_a_new_line_begins_from_the_shared_policy_and_a_bad_batch_of_it_is_set_aside(
    cloud: Cloud, learner: TinkerLearner, tmp_path: Path
) -> None:
    shared, anna = learner.for_line(SHARED), learner.for_line("anna")
    await shared.reset()
    await shared.step(batch(cloud))
    begun = await state(cloud, shared, tmp_path / "shared")
    await anna.load(tmp_path / "shared")
    # The service has made a step of this kind, so the batch is to blame, also if it is the first one of a line.
    cloud.fail("forward_backward", failed_request("user", "the sequence is too long"))
    with pytest.raises(StepRefused, match="too long"):
        await anna.step(batch(cloud))
    assert await state(cloud, anna, tmp_path / "anna") == begun
    await anna.step(batch(cloud, 1))
    assert await state(cloud, shared, tmp_path / "shared") == begun


async def test_what_a_line_saves_outlasts_an_absence_of_its_owner(
    cloud: Cloud, learner: TinkerLearner, tmp_path: Path
) -> None:
    line = learner.for_line("anna")
    await line.reset()
    await line.save(tmp_path, lasting=False)
    assert set(cloud.kept_seconds.values()) == {LINE_SECONDS}


async def test_what_the_files_of_a_line_name_is_deleted_at_the_service_and_nothing_else(
    cloud: Cloud, learner: TinkerLearner, tmp_path: Path
) -> None:
    kept, gone = tmp_path / "anna", tmp_path / "ben"
    for folder in (kept, gone):
        line = learner.for_line(folder.name)
        await line.reset()
        await line.step(batch(cloud))
        for name in ("checkpoints", "policies"):
            (folder / name).mkdir(parents=True)
        await line.save(folder / "checkpoints")
        await line.write_policy(folder / "policies")
    (gone / "policies" / "v2").mkdir()
    (gone / "policies" / "v2" / "tinker.json").write_bytes(b"damaged \xff")
    # A state from which both began.
    (gone / "learner.json").write_text((kept / "checkpoints" / "learner.json").read_text())
    (gone / "guard.json").write_text((kept / "policies" / "tinker.json").read_text())
    paths = {*cloud.states, *cloud.slots}
    cloud.fail("delete", status_error(401, "key expired"))
    with pytest.raises(EngineAway, match="key expired"):
        await learner.erase(gone, tmp_path)
    # Whoever asked for it asks again. What is gone already is no error.
    await learner.erase(gone, tmp_path)
    deleted = paths - {*cloud.states, *cloud.slots}
    named = "".join(path.read_text() for path in [*gone.rglob("learner.json"), *gone.glob("*/tinker.json")])
    assert len(deleted) == 3
    assert all(path in named for path in deleted)
    assert saved(cloud, kept / "checkpoints")


def a_sampler(model: Path, policies: int = 2) -> TinkerSampler:
    connection = Connection(Account(None, "tml-key", timeout=60.0))
    connection.first_pause = 0.01
    return TinkerSampler(connection, SamplerOptions("tiny/model", model, None, 4, 8, 0, policies, lines=True))


@pytest_asyncio.fixture
async def sampler(cloud: Cloud, tiny_model: Path, adapters: list[Path], tmp_path: Path) -> AsyncIterator[TinkerSampler]:
    """Of three people with a policy each, of which two are loaded at a time."""
    sampler = a_sampler(tiny_model)
    await sampler.start()
    for version, name in enumerate(PEOPLE, start=1):
        await sampler.publish(version, put_policy(cloud, adapters[version - 1], tmp_path / name), line=name)
    yield sampler
    await sampler.close()
    await sampler.connection.close()


def put_policy(cloud: Cloud, adapter: Path, folder: Path) -> PolicyRef:
    folder.mkdir()
    PolicyRecord("tiny/model", RANK, cloud.keep(adapter), None).write(folder)
    return policy_in(folder)


async def ask(sampler: TinkerSampler, line: str) -> tuple[int, list[int]]:
    stream = sampler.sample(SampleRequest([1, 2, 3], SamplingParams(max_tokens=12, temperature=0), line=line))
    return stream.version, [token.token_id async for batch in stream for token in batch]


async def test_each_line_is_sampled_by_its_own_reference_and_a_bounded_number_is_open(
    cloud: Cloud, sampler: TinkerSampler
) -> None:
    assert cloud.clients(Sampling) == 1, "a line's policy is opened when somebody asks for it"
    everybody = [*PEOPLE, "dora", SHARED]
    answers = {name: await ask(sampler, name) for name in everybody}
    assert {name: version for name, (version, _) in answers.items()} == {
        "anna": 1,
        "ben": 2,
        "carl": 3,
        "dora": 0,
        SHARED: 0,
    }
    assert len({tuple(tokens) for _, tokens in answers.values()}) == 4
    again = await asyncio.gather(*(ask(sampler, name) for name in everybody * 2))
    assert again == [*answers.values()] * 2
    assert cloud.clients(Sampling) == 1 + sampler.options.policies
    sampler.retract(2)
    assert (sampler.versions_of("ben"), sampler.newest_of("ben")) == ([], 0)
    assert await ask(sampler, "carl") == answers["carl"]


async def test_who_is_served_already_does_not_wait_for_a_line_that_is_opened(
    cloud: Cloud, sampler: TinkerSampler
) -> None:
    cloud.fail("create_sampling", 30.0)
    waiting = asyncio.create_task(ask(sampler, "anna"))
    while "create_sampling" not in cloud.calls[1:]:
        await asyncio.sleep(0)
    assert (await ask(sampler, SHARED))[0] == 0
    assert not waiting.done()
    waiting.cancel()


async def test_a_line_that_cannot_be_opened_fails_its_request_and_the_next_one_tries_again(
    cloud: Cloud, sampler: TinkerSampler
) -> None:
    before = await ask(sampler, "ben")
    cloud.fail("create_sampling", failed_request("user", "no room"))
    with pytest.raises(EngineError, match="no room"):
        await ask(sampler, "anna")
    assert await ask(sampler, "ben") == before
    assert (await ask(sampler, "anna"))[0] == 1


@pytest.mark.parametrize(
    "traits", [Traits("SkyRL tx", samples_over_training=True), Traits("SkyRL", pins_versions=False)]
)
async def test_a_server_that_mixes_policies_up_is_refused_at_the_start(
    cloud: Cloud, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, traits: Traits
) -> None:
    async def found(_url: str | None) -> Traits:
        return traits

    monkeypatch.setattr(connection_module, "look_at", found)
    sampler = a_sampler(tiny_model)
    with pytest.raises(EngineUnavailable, match=rf"^--policy-per-user needs .*and {traits.name} does not"):
        await sampler.start()
    await sampler.connection.close()
