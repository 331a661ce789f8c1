"""The sampler on Tinker, against a double of the service with the SDK's own types: streams, versions, faults."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from openclaw_rl.engines.base import EngineAway, EngineError, EngineUnavailable, PolicyRef, policy_in
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.tinker import connection as module
from openclaw_rl.engines.tinker.connection import Account, Connection
from openclaw_rl.engines.tinker.sampler import SamplerOptions, TinkerSampler
from openclaw_rl.engines.tinker.training_run import PolicyRecord
from openclaw_rl.types import (
    FinishReason,
    Priority,
    SampledToken,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)
from support.tinker_double import (
    ALPHA,
    NEW_SDK,
    RANK,
    Cloud,
    Training,
    failed_request,
    response,
    sequence,
    status_error,
    tinker,
)

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def cloud(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    cloud = Cloud(tiny_model, tmp_path / "cloud")
    monkeypatch.setattr(tinker, "ServiceClient", cloud.service)
    return cloud


def a_sampler(folder: Path, **given: Any) -> TinkerSampler:
    values: dict[str, Any] = {
        "model": "tiny/model",
        "folder": folder,
        "max_context": None,
        "max_sequences": 4,
        "max_queue": 4,
        "stream_chunk": 8,
        "policies": 2,
    }
    connection = Connection(Account(None, "tml-key", timeout=60.0))
    connection.first_pause = 0.01
    return TinkerSampler(connection, SamplerOptions(**{**values, **given}))


@pytest_asyncio.fixture
async def sampler(cloud: Cloud, tiny_model: Path) -> AsyncIterator[TinkerSampler]:
    sampler = a_sampler(tiny_model)
    await sampler.start()
    yield sampler
    await sampler.close()
    await sampler.connection.close()


def request(tokens: int = 20, n: int = 1, **given: Any) -> SampleRequest:
    named = {name: given.pop(name) for name in ("version", "priority") if name in given}
    return SampleRequest(PROMPT, SamplingParams(**{"max_tokens": tokens, "seed": 7, **given}), n=n, **named)


async def collect(sampler: TinkerSampler, job: SampleRequest) -> list[SampledToken]:
    return [token async for batch in sampler.sample(job) for token in batch]


async def put_policy(cloud: Cloud, folder: Path, seed: int = 1) -> PolicyRef:
    """A policy that is not the base model, as the service keeps it, with its record in a folder."""
    client = Training(cloud, seed)
    shape = cloud.decoder.shape
    client.lora = LoraWeights.create(shape, RANK, ALPHA, seed=seed)
    for factor in client.lora.b.values():
        factor.data.normal_(0, 0.3)
    saved = await (await client.save_weights_for_sampler_async(f"policy-{seed}"))
    folder.mkdir()
    PolicyRecord("tiny/model", RANK, saved.path, None).write(folder)
    return policy_in(folder)


async def test_an_answer_comes_in_pieces_that_continue_from_the_exact_ids(cloud: Cloud, sampler: TinkerSampler) -> None:
    batches = [batch async for batch in sampler.sample(request(20))]
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert cloud.prompts == [(5, 1, 8), (13, 1, 8), (21, 1, 4)]
    tokens = [token for batch in batches for token in batch]
    assert [token.finish for token in tokens] == [None] * 19 + [FinishReason.LENGTH]
    ids = [token.token_id for token in tokens]
    scores = await sampler.score(ScoreRequest([*PROMPT, *ids], 20))
    assert [token.logprob for token in tokens] == pytest.approx(scores.logprobs, abs=1e-4)
    assert ids == [token.token_id for token in await collect(sampler, request(20))]
    assert ids != [token.token_id for token in await collect(sampler, request(20, seed=8))]


async def test_pieces_say_what_the_whole_says(cloud: Cloud, sampler: TinkerSampler, tiny_model: Path) -> None:
    pieces = await collect(sampler, request(20, temperature=0.0))
    whole = await collect(sampler, request(20, temperature=0.0, priority=Priority.BACKGROUND))
    assert [token.token_id for token in pieces] == [token.token_id for token in whole]
    assert cloud.prompts[-1] == (5, 1, 20)


async def test_a_stop_token_ends_a_completion_wherever_it_comes(cloud: Cloud, sampler: TinkerSampler) -> None:
    free = [token.token_id for token in await collect(sampler, request(20, temperature=0.0))]
    for place in (0, 7, 8, 12):
        end = free[place]
        expected = free[: free.index(end) + 1]
        tokens = await collect(sampler, request(20, temperature=0.0, stop_token_ids=frozenset([end])))
        assert [token.token_id for token in tokens] == expected
        assert tokens[-1].finish is FinishReason.STOP


async def test_completions_share_the_first_reading_and_are_dropped_alone(cloud: Cloud, sampler: TinkerSampler) -> None:
    stream = sampler.sample(request(24, n=3))
    seen: dict[int, int] = {0: 0, 1: 0, 2: 0}
    async for batch in stream:
        for token in batch:
            seen[token.index] += 1
        stream.drop(1)
    assert cloud.prompts[0] == (5, 3, 8)
    assert seen == {0: 24, 1: 8, 2: 24}
    assert sampler.stats().active == 0


async def test_who_leaves_is_not_sampled_for_any_more(cloud: Cloud, sampler: TinkerSampler) -> None:
    stream = sampler.sample(request(200))
    async for _ in stream:
        break
    stream.close()
    await asyncio.sleep(0.05)
    asked = len(cloud.prompts)
    await asyncio.sleep(0.1)
    assert len(cloud.prompts) == asked < 5
    assert sampler.stats().active == 0


async def test_a_new_policy_serves_new_requests_and_others_end_on_theirs(
    cloud: Cloud, sampler: TinkerSampler, tmp_path: Path
) -> None:
    whole = await collect(sampler, request(24, temperature=0.0))
    stream = sampler.sample(request(24, temperature=0.0))
    tokens = []
    async for batch in stream:
        tokens += batch
        if sampler.newest_version == 0:
            await sampler.publish(1, await put_policy(cloud, tmp_path / "p1"))
    assert (stream.version, sampler.newest_version) == (0, 1)
    assert [token.token_id for token in tokens] == [token.token_id for token in whole]
    after = sampler.sample(request(24, temperature=0.0))
    assert after.version == 1
    assert [t.token_id async for b in after for t in b] != [token.token_id for token in whole]


async def test_candidates_wait_and_old_versions_go(cloud: Cloud, sampler: TinkerSampler, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        await sampler.publish(version, await put_policy(cloud, tmp_path / str(version), version), candidate=True)
        assert sampler.newest_version == version - 1
        assert await collect(sampler, request(4, version=version))
        sampler.promote(version)
    with pytest.raises(EngineUnavailable, match="version 1 is not loaded"):
        sampler.sample(request(version=1))
    with pytest.raises(EngineUnavailable, match="not newer"):
        await sampler.publish(3, policy_in(tmp_path / "3"))
    sampler.retract(3)
    assert sampler.newest_version == 2


async def test_scores_are_those_of_the_tokens_their_rivals_and_chosen_ones(
    cloud: Cloud, sampler: TinkerSampler
) -> None:
    ids = [*PROMPT, 9, 10, 11]
    plain = await sampler.score(ScoreRequest(ids, 3))
    ranked = await sampler.score(ScoreRequest(ids, 3, top_k=2))
    assert plain.logprobs == pytest.approx(ranked.logprobs)
    chosen = np.array([[1, 2], [3, 3], [4, 5]])
    expected = cloud.scores(ids, 3, 0, top_k=2, targets=chosen)
    assert ranked.top is not None
    assert ranked.top.ids.tolist() == expected.top.ids.tolist()
    both = await sampler.score(ScoreRequest(ids, 3, top_k=2, targets=chosen))
    assert both.top is not None
    if NEW_SDK:
        assert both.targets == pytest.approx(expected.targets, abs=1e-4)
        assert both.top.ids.shape == (3, 2)
    else:
        # What cannot be asked for may be among more of the likeliest.
        assert both.targets is None
        assert both.top.ids.shape == (3, 20)
    with pytest.raises(EngineError, match="context holds"):
        await sampler.score(ScoreRequest([1] * 600, 3))


async def test_rivals_of_sampled_tokens_where_the_sdk_can_tell(sampler: TinkerSampler) -> None:
    tokens = await collect(sampler, request(10, top_logprobs=3))
    assert {len(token.top) for token in tokens} == {3 if NEW_SDK else 0}


async def test_a_server_without_top_k_says_so_once(
    cloud: Cloud, sampler: TinkerSampler, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.knows_top_k = False
    for _ in range(2):
        assert (await sampler.score(ScoreRequest([*PROMPT, 9], 1, top_k=4))).top is None
    assert sum("top-k" in record.message for record in caplog.records) == 1


@pytest.mark.skipif(not NEW_SDK, reason="this SDK always scores whole prompts")
async def test_an_older_server_that_scores_whole_prompts_is_asked_so(cloud: Cloud, sampler: TinkerSampler) -> None:
    cloud.fail("sample", RuntimeError("it may predate this feature"), *[RuntimeError("again")] * 3)
    first = await sampler.score(ScoreRequest([*PROMPT, 9], 1))
    cloud.calls.clear()
    assert (await sampler.score(ScoreRequest([*PROMPT, 9], 1))).logprobs == first.logprobs
    assert cloud.calls == ["sample"]


@pytest.mark.parametrize(
    "fault",
    [
        status_error(429),
        status_error(500),
        status_error(503, "overloaded"),
        failed_request("server"),
        tinker.APITimeoutError(None),
        TimeoutError(),
    ],
    ids=["429", "500", "503", "failed", "timeout", "ours"],
)
async def test_what_passes_by_itself_is_tried_again(cloud: Cloud, sampler: TinkerSampler, fault: Exception) -> None:
    before = await collect(sampler, request(10, temperature=0.0))
    cloud.fail("sample", fault, fault)
    assert await collect(sampler, request(10, temperature=0.0)) == before
    assert sampler.stats().ready


async def test_what_stays_broken_is_told_and_healed_by_the_next_success(cloud: Cloud, sampler: TinkerSampler) -> None:
    cloud.fail("sample", *[status_error(503, "overloaded")] * 4)
    with pytest.raises(EngineAway, match="overloaded"):
        await collect(sampler, request())
    assert not sampler.stats().ready
    assert "overloaded" in sampler.stats().detail
    assert len(await collect(sampler, request(5))) == 5
    assert sampler.stats().ready


async def test_a_key_that_is_not_accepted_is_told_at_once(cloud: Cloud, sampler: TinkerSampler) -> None:
    cloud.fail("sample", status_error(401, "expired"))
    with pytest.raises(EngineAway, match=r"expired.*TINKER_API_KEY"):
        await collect(sampler, request())
    assert cloud.calls.count("sample") == 1


async def test_who_gets_no_answer_does_not_wait_for_ever_and_hears_why(cloud: Cloud, tiny_model: Path) -> None:
    sampler = a_sampler(tiny_model)
    await sampler.start()
    patient = sampler.connection.account
    sampler.connection.account = replace(patient, timeout=0.3)
    cloud.fail("sample", 30.0)
    waiting = asyncio.create_task(collect(sampler, request(5)))
    await asyncio.sleep(0.1)
    # While the SDK waits by itself, only its log says what for.
    logging.getLogger("tinker.lib").warning("The job is paused due to billing status.")
    with pytest.raises(EngineAway, match=r"no answer in 0.3.* s; the SDK said: The job is paused"):
        await waiting
    sampler.connection.account = patient
    assert len(await collect(sampler, request(5))) == 5
    await sampler.connection.close()


async def test_a_server_that_is_gone_is_noticed_long_before_the_sdk_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    heartbeat = module.Heartbeat(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    heartbeat.start()
    assert await heartbeat.during(asyncio.sleep(0.3, "done")) == "done"
    server.close()
    with pytest.raises(ConnectionError, match="no server answers at"):
        await heartbeat.during(asyncio.sleep(30))
    await heartbeat.stop()


async def test_a_failure_in_the_middle_ends_the_stream_with_an_error(cloud: Cloud, sampler: TinkerSampler) -> None:
    batches = aiter(sampler.sample(request(24)))
    assert len(await anext(batches)) == 8
    cloud.fail("sample", failed_request("user"))
    with pytest.raises(EngineUnavailable, match="it did not work"):
        [batch async for batch in batches]
    assert sampler.stats().active == 0


def without_logprobs(answer: Any) -> Any:
    return response([sequence(s.tokens, None, s.stop_reason) for s in answer.sequences])


def too_few_logprobs(answer: Any) -> Any:
    return response([sequence(s.tokens, s.logprobs[:-1], s.stop_reason) for s in answer.sequences])


def no_numbers(answer: Any) -> Any:
    return response([sequence(s.tokens, [float("nan")] * len(s.tokens), s.stop_reason) for s in answer.sequences])


@pytest.mark.parametrize("fault", [without_logprobs, too_few_logprobs, no_numbers])
async def test_logprobs_that_are_missing_or_wrong_are_asked_for(
    cloud: Cloud, sampler: TinkerSampler, fault: Any
) -> None:
    right = await collect(sampler, request(8))
    cloud.fail("sample", fault)
    told = await collect(sampler, request(8))
    assert [token.token_id for token in told] == [token.token_id for token in right]
    assert [token.logprob for token in told] == pytest.approx([token.logprob for token in right], abs=1e-4)


SHAPED: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.1},
    {"top_p": 0.9},
    {"top_k": 5},
]


async def assert_raw(cloud: Cloud, tokens: list[SampledToken], top_k: int = 0, slot: int = 0) -> None:
    """Log-probs of a completion, and of the likeliest tokens beside it, are the model's own."""
    ids = [token.token_id for token in tokens]
    expected = cloud.scores([*PROMPT, *ids], len(ids), slot, top_k=max(1, top_k))
    assert [token.logprob for token in tokens] == pytest.approx(expected.logprobs, abs=1e-4)
    if top_k and NEW_SDK:
        assert [[id for id, _ in token.top] for token in tokens] == expected.top.ids.tolist()
        told = np.array([[value for _, value in token.top] for token in tokens])
        assert told == pytest.approx(expected.top.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("shape", "shows_drawn"),
    [
        *((shape, True) for shape in SHAPED),
        (SHAPED[0], False),
        *(pytest.param(shape, False, marks=pytest.mark.more) for shape in SHAPED[1:]),
    ],
    ids=str,
)
async def test_logprobs_are_raw_whatever_was_drawn_from(
    cloud: Cloud, sampler: TinkerSampler, shape: dict[str, Any], shows_drawn: bool
) -> None:
    plain = await collect(sampler, request(20, top_logprobs=3, **shape))
    cloud.shows_drawn = shows_drawn
    other = a_sampler(sampler.options.folder)
    await other.start()
    batches = [batch async for batch in other.sample(request(20, top_logprobs=3, **shape))]
    await other.connection.close()
    tokens = [token for batch in batches for token in batch]
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert [token.token_id for token in tokens] == [token.token_id for token in plain]
    await assert_raw(cloud, tokens, top_k=3)


async def test_a_service_that_shows_what_it_drew_from_says_so_once_and_is_asked_for_every_piece(
    cloud: Cloud, sampler: TinkerSampler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.shows_drawn = True
    await sampler.publish(1, await put_policy(cloud, tmp_path / "p"))
    for version, slot in ((0, 0), (1, 1)):
        tokens = await collect(sampler, request(12, n=3, temperature=0.7, version=version))
        for index in range(3):
            await assert_raw(cloud, [token for token in tokens if token.index == index], slot=slot)
    assert sum("scored again" in record.message for record in caplog.records) == 1
    cloud.calls.clear()
    await collect(sampler, request(12))
    assert len(cloud.calls) == 2, "what is drawn as it is needs no other log-probs"


async def test_a_service_with_raw_logprobs_is_looked_at_once(
    cloud: Cloud, sampler: TinkerSampler, tmp_path: Path
) -> None:
    await collect(sampler, request(8))
    assert len(cloud.calls) == 1 + cloud.calls.index("sample"), "nothing is changed, so there is nothing to look for"
    cloud.calls.clear()
    # All at once, of which one looks: a draw and its scores.
    jobs = [request(8, seed=seed, temperature=0.7) for seed in range(4)]
    for tokens in await asyncio.gather(*(collect(sampler, job) for job in jobs)):
        await assert_raw(cloud, tokens)
    assert cloud.calls == ["sample"] * (4 + 2)
    await sampler.publish(1, await put_policy(cloud, tmp_path / "p"))
    cloud.calls.clear()
    for shape in SHAPED:
        await collect(sampler, request(8, **shape))
    assert cloud.calls == ["sample"] * len(SHAPED)


async def test_who_leaves_during_the_look_leaves_it_to_the_next(cloud: Cloud, sampler: TinkerSampler) -> None:
    cloud.shows_drawn = True
    cloud.fail("sample", 30.0)
    first = sampler.sample(request(8, temperature=0.7))
    second = asyncio.create_task(collect(sampler, request(8, temperature=0.7)))
    while not cloud.calls.count("sample"):
        await asyncio.sleep(0)
    first.close()
    await assert_raw(cloud, await second)


async def test_a_server_that_cannot_score_serves_and_says_what_is_not_known(
    cloud: Cloud, sampler: TinkerSampler, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.can_score = False
    for _ in range(2):
        assert len(await collect(sampler, request(8, temperature=0.7))) == 8
    assert sum("cannot be checked" in record.message for record in caplog.records) == 1


@pytest.mark.skipif(not NEW_SDK, reason="this SDK does not tell the likeliest tokens of samples")
async def test_the_likeliest_tokens_come_first_and_once(cloud: Cloud, sampler: TinkerSampler) -> None:
    right = await collect(sampler, request(8, top_logprobs=3))

    def drawn_first(answer: Any) -> Any:
        (own,) = answer.sequences
        both = zip(own.tokens, own.logprobs, own.topk_logprobs, strict=True)
        tops = [[(id, logprob), *reversed(top)] for id, logprob, top in both]
        return response([sequence(own.tokens, own.logprobs, own.stop_reason, tops)])

    cloud.fail("sample", drawn_first)
    assert await collect(sampler, request(8, top_logprobs=3)) == right


async def test_the_teachers_likeliest_tokens_come_first_and_once(cloud: Cloud, sampler: TinkerSampler) -> None:
    job = ScoreRequest([*PROMPT, 9, 10], 2, top_k=4)
    right = (await sampler.score(job)).top

    def given_first(answer: Any) -> Any:
        tops = [top and [top[-1], *top] for top in answer.topk_prompt_logprobs]
        return response(list(answer.sequences), list(answer.prompt_logprobs), tops)

    cloud.fail("sample", given_first)
    found = (await sampler.score(job)).top
    assert right is not None
    assert found is not None
    assert found.ids.tolist() == right.ids.tolist()


async def test_a_prompt_without_logprobs_is_no_zero(cloud: Cloud, sampler: TinkerSampler) -> None:
    for fault in (without_logprobs, lambda a: response(list(a.sequences), [None] * len(PROMPT))):
        cloud.fail("sample", *[fault] * 2)
        with pytest.raises(EngineUnavailable, match="no finite log-prob"):
            await sampler.score(ScoreRequest(PROMPT, 2))
        cloud.faults.clear()


async def test_prompt_logprobs_may_leave_the_first_token_out(cloud: Cloud, sampler: TinkerSampler) -> None:
    expected = (await sampler.score(ScoreRequest(PROMPT, 3))).logprobs
    cloud.fail("sample", lambda a: response(list(a.sequences), list(a.prompt_logprobs)[1:]))
    assert (await sampler.score(ScoreRequest(PROMPT, 3))).logprobs == expected


async def test_more_or_fewer_tokens_than_asked_for(cloud: Cloud, sampler: TinkerSampler) -> None:
    right = await collect(sampler, request(8))
    ids, logprobs = [t.token_id for t in right], [t.logprob for t in right]
    cloud.fail("sample", lambda a: response([sequence([*ids, 1, 2], [*logprobs, -1.0, -1.0], "length")]))
    assert [t.token_id for t in await collect(sampler, request(8))] == ids
    cloud.fail("sample", lambda a: response([sequence(ids[:3], logprobs[:3], "length")]))
    short = await collect(sampler, request(20))
    assert ([t.token_id for t in short], short[-1].finish) == (ids[:3], FinishReason.LENGTH)
    cloud.fail("sample", lambda a: response([sequence([], [], "stop")]), lambda a: response([]))
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await collect(sampler, request(8))


async def test_weights_that_the_service_has_lost_are_loaded_again(
    cloud: Cloud, sampler: TinkerSampler, tmp_path: Path
) -> None:
    await sampler.publish(1, await put_policy(cloud, tmp_path / "p"))
    before = await collect(sampler, request(6))
    cloud.calls.clear()
    cloud.fail("sample", status_error(404, "session not found"))
    assert await collect(sampler, request(6)) == before
    assert cloud.calls == ["sample", "create_sampling", "sample"]


async def test_closing_tells_those_who_wait_and_ends_the_session(cloud: Cloud, tiny_model: Path) -> None:
    sampler = a_sampler(tiny_model)
    await sampler.start()
    cloud.fail("sample", 30.0)
    waiting = asyncio.create_task(collect(sampler, request()))
    await asyncio.sleep(0.05)
    await sampler.close()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await waiting
    with pytest.raises(EngineUnavailable, match="shutting down"):
        sampler.sample(request())
    assert cloud.open_sessions == 1
    await sampler.connection.close()
    assert cloud.open_sessions == 0


async def test_an_unknown_model_is_refused_with_all_there_are(cloud: Cloud, tiny_model: Path) -> None:
    with pytest.raises(EngineUnavailable, match="does not offer Qwen/Qwen3-8B; it offers: tiny/model"):
        await a_sampler(tiny_model, model="Qwen/Qwen3-8B").start()
    named_like_it = a_sampler(tiny_model, model="/models/Model")
    await named_like_it.start()
    assert named_like_it.model == "tiny/model"
    await named_like_it.connection.close()


async def test_the_context_is_the_shortest_that_anybody_names(cloud: Cloud, tiny_model: Path, tmp_path: Path) -> None:
    limits = []
    for folder, given in ((tiny_model, {}), (tiny_model, {"max_context": 100}), (tmp_path, {"max_context": 10**6})):
        sampler = a_sampler(folder, **given)
        await sampler.start()
        limits.append(sampler.limits.max_context_tokens)
        await sampler.connection.close()
    assert limits == ([256, 100, 256] if NEW_SDK else [512, 100, 32768])


async def test_a_session_that_cannot_begin_says_why(
    cloud: Cloud, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.fail("capabilities", status_error(401, "no such key"))
    with pytest.raises(EngineUnavailable, match="no such key"):
        await a_sampler(tiny_model).start()

    def refuses(**given: Any) -> Any:
        raise status_error(404, "client/config not found")

    monkeypatch.setattr(tinker, "ServiceClient", refuses)
    with pytest.raises(EngineUnavailable, match="client/config"):
        await a_sampler(tiny_model).start()
