"""What every engine has to do, as tests. `test_conformance.py` runs them over each engine.

Each test leaves the engine as it found it, because all tests of an engine share one.
"""

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from openclaw_rl.engines.base import (
    ConstraintRefused,
    EngineError,
    EngineUnavailable,
    PolicyRef,
    QueueFull,
    Sampler,
    StepRefused,
    VersionGone,
    WeightForm,
    policy_in,
)
from openclaw_rl.types import (
    BASE_VERSION,
    Constraint,
    FinishReason,
    JsonForm,
    Priority,
    SampledToken,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    Span,
    TrainingSequence,
)
from support.engine_harness import MAX_QUEUE, MAX_SEQUENCES, SamplerHarness
from support.learner_harness import LearnerHarness

PROMPT = [1, 2, 3, 4, 5]
ONE_VERSION = "this engine holds one version at a time"
#: More than any test reads before it stops the request.
LONG = 200


def request(
    tokens: int = 12,
    n: int = 1,
    version: int | None = None,
    priority: Priority = Priority.USER,
    seed: int = 7,
    **params: object,
) -> SampleRequest:
    settings = SamplingParams(**{"max_tokens": tokens, "seed": seed, **params})  # type: ignore[arg-type]
    return SampleRequest(PROMPT, settings, n=n, version=version, priority=priority)


async def collect(sampler: Sampler, job: SampleRequest) -> list[SampledToken]:
    return [token async for batch in sampler.sample(job) for token in batch]


def ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def by_completion(tokens: Sequence[SampledToken]) -> dict[int, list[int]]:
    return {index: [t.token_id for t in tokens if t.index == index] for index in {t.index for t in tokens}}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0.01)


class SamplerConformance:
    """The behaviours of a sampler."""

    async def test_tokens_come_in_order_with_one_finish_per_completion(self, engine: SamplerHarness) -> None:
        tokens = await collect(engine.sampler, request(20, n=3))
        for index in range(3):
            completion = [token for token in tokens if token.index == index]
            assert [token.finish for token in completion] == [None] * 19 + [FinishReason.LENGTH]
        assert len(tokens) == 60

    async def test_a_stop_token_ends_its_completion_and_belongs_to_it(self, engine: SamplerHarness) -> None:
        free = ids(await collect(engine.sampler, request(20)))
        stop = free[10]
        ended = await collect(engine.sampler, request(20, stop_token_ids=frozenset([stop])))
        assert ids(ended) == free[: free.index(stop) + 1]
        assert [token.finish for token in ended] == [None] * free.index(stop) + [FinishReason.STOP]

    async def test_a_request_gets_the_same_tokens_alone_and_among_others(self, engine: SamplerHarness) -> None:
        alone = [ids(await collect(engine.sampler, request(seed=seed))) for seed in range(2)]
        jobs = [request(seed=number % 2) for number in range(MAX_SEQUENCES + MAX_QUEUE)]
        together = await asyncio.gather(*(collect(engine.sampler, job) for job in jobs))
        assert [ids(tokens) for tokens in together] == alone * (len(jobs) // 2)
        assert alone[0] != alone[1]

    async def test_logprobs_are_those_of_a_reference_forward(self, engine: SamplerHarness) -> None:
        if not engine.has_model or not engine.sampler.capabilities.raw_logprobs:
            pytest.skip("this engine has no raw log-probs of the model")

        async def check(asked: int, adapter: int | None) -> None:
            tokens = await collect(engine.sampler, request(version=asked, temperature=0.7, top_p=0.9))
            rows = engine.reference([*PROMPT, *ids(tokens)], adapter)[len(PROMPT) - 1 :]
            expected = [float(row[token.token_id]) for row, token in zip(rows, tokens, strict=False)]
            assert [token.logprob for token in tokens] == pytest.approx(expected, abs=1e-4)

        await check(BASE_VERSION, None)
        async with engine.published(1) as version:
            await check(version, 1)
            if engine.sampler.capabilities.keeps_base:
                await check(BASE_VERSION, None)

    async def test_the_likeliest_tokens_are_recorded_the_likeliest_first(self, engine: SamplerHarness) -> None:
        most = engine.sampler.capabilities.max_top_logprobs
        if most is not None and most < 3:
            pytest.skip("this engine records no likeliest tokens")
        tokens = await collect(engine.sampler, request(top_logprobs=3))
        for token in tokens:
            assert len({id for id, _ in token.top}) == 3
            assert [logprob for _, logprob in token.top] == sorted((x for _, x in token.top), reverse=True)
        if engine.has_model:
            rows = engine.reference([*PROMPT, *ids(tokens)])[len(PROMPT) - 1 :]
            assert [[id for id, _ in token.top] for token in tokens] == rows.topk(3).indices[: len(tokens)].tolist()

    async def test_constrained_completions_fit_and_leave_free_ones_as_they_are(self, engine: SamplerHarness) -> None:
        if not engine.sampler.capabilities.constrains:
            pytest.skip("this engine cannot constrain completions")
        text = Tokenizer.from_file(str(engine.model / "tokenizer.json"))
        end = frozenset([text.token_to_id("<|im_end|>")])
        fields = {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}
        schema = json.dumps({"type": "object", "properties": fields, "required": ["ok"], "additionalProperties": False})
        bound = replace(
            request(60, n=2, stop_token_ids=end), constraint=Constraint(JsonForm(schema, "<answer>", "</answer>"))
        )
        free = request(20)
        alone = [by_completion(await collect(engine.sampler, job)) for job in (bound, free)]
        together = await asyncio.gather(collect(engine.sampler, bound), collect(engine.sampler, free))
        assert list(map(by_completion, together)) == alone
        for index in range(2):
            completion = [token for token in together[0] if token.index == index]
            answer = text.decode(ids(completion), skip_special_tokens=True)
            value = json.loads(answer.removeprefix("<answer>").removesuffix("</answer>"))
            assert isinstance(value["ok"], bool)
            assert value.get("n", 1) in (1, 22)
            assert completion[-1].finish is FinishReason.STOP
            assert completion[0].forced
            assert completion[-1].forced
            assert not all(token.forced for token in completion)
            if engine.has_model:
                rows = engine.reference([*PROMPT, *ids(completion)])[len(PROMPT) - 1 :]
                expected = [float(row[token.token_id]) for row, token in zip(rows, completion, strict=False)]
                assert [token.logprob for token in completion] == pytest.approx(expected, abs=1e-4)
        assert not any(token.forced for token in together[1])

    async def test_free_text_in_which_calls_are_constrained_has_raw_logprobs(self, engine: SamplerHarness) -> None:
        if not engine.sampler.capabilities.constrains:
            pytest.skip("this engine cannot constrain completions")
        call = JsonForm('{"type": "object"}', "<tool_call>", "</tool_call>")
        tokens = await collect(
            engine.sampler, replace(request(20), constraint=Constraint(calls=(call,), trigger="<tool_call>"))
        )
        assert not any(token.forced for token in tokens)
        if engine.has_model:
            rows = engine.reference([*PROMPT, *ids(tokens)])[len(PROMPT) - 1 :]
            expected = [float(row[token.token_id]) for row, token in zip(rows, tokens, strict=False)]
            assert [token.logprob for token in tokens] == pytest.approx(expected, abs=1e-4)

    async def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(self, engine: SamplerHarness) -> None:
        if not engine.sampler.capabilities.constrains:
            pytest.skip("this engine cannot constrain completions")
        refusals = (
            ('{"not": {}}', "Unimplemented keys"),
            ('{"enum": []}', "schema"),
            ('{"$ref": "#"}', "no answer fits"),
        )
        for schema, reason in refusals:
            job = replace(request(20), constraint=Constraint(JsonForm(schema)))
            with pytest.raises(ConstraintRefused, match=reason):
                await collect(engine.sampler, job)
        assert len(await collect(engine.sampler, request(4))) == 4

    async def test_dropping_a_completion_ends_it_and_leaves_the_others(self, engine: SamplerHarness) -> None:
        stream = engine.sampler.sample(request(40, n=2))
        counts, after_drop = {0: 0, 1: 0}, 0
        dropped = False
        async for tokens in stream:
            for token in tokens:
                counts[token.index] += 1
                after_drop += dropped and token.index == 0
            if not dropped and counts[0]:
                stream.drop(0)
                dropped = True
        assert counts[1] == 40
        assert counts[0] < 40
        assert after_drop == 0
        assert engine.sampler.stats().active == 0

    async def test_closing_a_stream_frees_its_places(self, engine: SamplerHarness) -> None:
        stream = engine.sampler.sample(request(LONG, n=MAX_SEQUENCES))
        async for _tokens in stream:
            break
        stream.close()
        answers = await asyncio.gather(*(collect(engine.sampler, request(3)) for _ in range(MAX_SEQUENCES)))
        assert [len(tokens) for tokens in answers] == [3] * MAX_SEQUENCES
        assert (engine.sampler.stats().active, engine.sampler.stats().waiting) == (0, 0)

    @pytest.mark.parametrize("full", Priority)
    async def test_a_full_queue_refuses_at_once_and_only_its_own_priority(
        self, engine: SamplerHarness, full: Priority
    ) -> None:
        other = min(set(Priority) - {full})
        places = MAX_SEQUENCES + MAX_QUEUE
        assert engine.sampler.limits.max_choices == places
        streams = [engine.sampler.sample(request(LONG, priority=full)) for _ in range(places)]
        with pytest.raises(QueueFull, match=f"{MAX_QUEUE} sequences wait"):
            engine.sampler.sample(request(priority=full))
        streams.append(engine.sampler.sample(request(LONG, n=places, priority=other)))
        with pytest.raises(QueueFull, match=f"{MAX_QUEUE} sequences wait"):
            engine.sampler.sample(request(priority=other))
        assert engine.sampler.stats().active + engine.sampler.stats().waiting == 2 * places
        for stream in streams:
            stream.close()
        assert len(await collect(engine.sampler, request(3, priority=full))) == 3

    async def test_an_owner_learns_nothing_about_the_prompts_of_others(self, engine: SamplerHarness) -> None:
        """Neither while another's request runs nor afterwards, also if it is one token longer or shorter."""
        prompt = [number % 90 for number in range(64)]

        async def cached(owner: str, length: int) -> int:
            stream = engine.sampler.sample(SampleRequest(prompt[:length], SamplingParams(4), owner=owner))
            async for _tokens in stream:
                pass
            count: int = stream.cached_tokens
            return count

        await engine.sampler.score(ScoreRequest(prompt, 2, owner="teacher of alice"))
        assert await asyncio.gather(cached("alice", 64), cached("bob", 64), cached("", 63)) == [0, 0, 0]
        again = [await cached("alice", 64), await cached("bob", 63)]
        # The last token is always computed.
        cached_tokens = 62 // engine.page_tokens * engine.page_tokens if engine.counts_cached else 0
        assert again == [cached_tokens, cached_tokens]
        assert await cached("carol", 64) == 0

    async def test_versions_mix_in_a_batch_and_none_disturbs_another(self, engine: SamplerHarness) -> None:
        if not engine.sampler.capabilities.keeps_base:
            pytest.skip(ONE_VERSION)
        async with engine.published(0) as one, engine.published(1) as two:
            versions = [BASE_VERSION, one, two]
            alone = [ids(await collect(engine.sampler, request(version=version))) for version in versions]
            streams = [engine.sampler.sample(request(version=version)) for version in versions]
            assert [stream.version for stream in streams] == versions

            async def read(stream: object) -> list[int]:
                return [token.token_id async for batch in stream for token in batch]  # type: ignore[attr-defined]

            assert await asyncio.gather(*map(read, streams)) == alone
            assert len({tuple(tokens) for tokens in alone}) == 3

    async def test_a_candidate_serves_only_who_asks_until_it_is_promoted(self, engine: SamplerHarness) -> None:
        if not engine.sampler.capabilities.candidates:
            pytest.skip(ONE_VERSION)
        async with engine.published(0) as served, engine.published(1, candidate=True) as candidate:
            stream = engine.sampler.sample(request(1))
            stream.close()
            assert engine.sampler.newest_version == stream.version == served
            examined = ids(await collect(engine.sampler, request(version=candidate)))
            assert examined != ids(await collect(engine.sampler, request()))
            engine.sampler.promote(candidate)
            assert engine.sampler.newest_version == candidate
            assert ids(await collect(engine.sampler, request())) == examined

    async def test_one_version_at_a_time_replaces_the_one_before_and_the_base_model(
        self, engine: SamplerHarness
    ) -> None:
        if engine.sampler.capabilities.keeps_base:
            pytest.skip("this engine holds several versions at once")
        base = ids(await collect(engine.sampler, request()))
        async with engine.published(0) as served:
            first = ids(await collect(engine.sampler, request()))
            async with engine.published(1, candidate=True) as candidate:
                waiting = engine.sampler.sample(request())
                examined = ids(await collect(engine.sampler, request(version=candidate)))
                assert engine.sampler.newest_version == served
                for gone in (BASE_VERSION, served):
                    with pytest.raises(VersionGone, match=f"version {gone}"):
                        engine.sampler.sample(request(version=gone))
                engine.sampler.promote(candidate)
                assert [token.token_id async for batch in waiting for token in batch] == examined
                assert waiting.version == engine.sampler.newest_version == candidate
            assert len({tuple(base), tuple(first), tuple(examined)}) == 3
        assert ids(await collect(engine.sampler, request())) == base

    async def test_a_retracted_version_is_gone_and_its_number_is_not_used_again(self, engine: SamplerHarness) -> None:
        before = engine.sampler.newest_version
        async with engine.published(0, candidate=True) as version:
            pass
        assert engine.sampler.newest_version == before
        with pytest.raises(VersionGone, match=f"version {version}"):
            engine.sampler.sample(request(version=version))
        with pytest.raises(VersionGone, match=f"version {version}"):
            await engine.sampler.score(ScoreRequest(PROMPT, 2, version=version))
        with pytest.raises(EngineUnavailable, match="not newer"):
            await engine.sampler.publish(version, await engine.policy(1))

    async def test_a_request_finishes_on_a_version_that_is_retracted_meanwhile(self, engine: SamplerHarness) -> None:
        async with engine.published(0) as version:
            alone = ids(await collect(engine.sampler, request(60)))
            stream = engine.sampler.sample(request(60))
        with pytest.raises(VersionGone, match=f"version {version}"):
            engine.sampler.sample(request(version=version))
        # Another policy does not take its place yet.
        async with engine.published(1):
            assert [token.token_id async for batch in stream for token in batch] == alone

    async def test_the_oldest_version_makes_room_and_its_requests_finish_on_it(self, engine: SamplerHarness) -> None:
        if not engine.sampler.capabilities.keeps_base:
            pytest.skip(ONE_VERSION)
        async with engine.published(0) as oldest:
            alone = ids(await collect(engine.sampler, request(60)))
            stream = engine.sampler.sample(request(60))
            async with engine.published(1) as second:
                newest = next(engine.numbers)
                publishing = asyncio.create_task(engine.sampler.publish(newest, await engine.policy(2)))
                assert [token.token_id async for batch in stream for token in batch] == alone
                await publishing
                assert engine.sampler.newest_version == newest
                with pytest.raises(VersionGone, match=f"version {oldest}"):
                    engine.sampler.sample(request(version=oldest))
                assert len(await collect(engine.sampler, request(version=second))) == 12
                engine.sampler.retract(newest)

    async def test_a_policy_that_cannot_be_loaded_changes_nothing(self, engine: SamplerHarness) -> None:
        unknown = set(WeightForm) - engine.sampler.capabilities.loads
        for form in unknown:
            with pytest.raises(EngineUnavailable, match=form):
                await engine.sampler.publish(next(engine.numbers), PolicyRef(form, engine.folder))
        assert engine.sampler.newest_version == BASE_VERSION
        assert len(await collect(engine.sampler, request())) == 12

    async def test_requests_in_flight_finish_on_their_version_while_another_is_published(
        self, engine: SamplerHarness
    ) -> None:
        jobs = [request(60, seed=seed) for seed in range(MAX_SEQUENCES)]
        alone = [ids(await collect(engine.sampler, job)) for job in jobs]
        begun = asyncio.Event()

        async def read(job: SampleRequest) -> tuple[int, list[int]]:
            stream, tokens = engine.sampler.sample(job), []
            async for batch in stream:
                begun.set()
                tokens += ids(batch)
            return stream.version, tokens

        running = [asyncio.create_task(read(job)) for job in jobs]
        await begun.wait()
        async with engine.published(0) as version:
            after = await read(jobs[0])
            assert await asyncio.gather(*running) == [(BASE_VERSION, tokens) for tokens in alone]
            assert after[0] == version
            assert after[1] != alone[0]

    async def test_what_was_sampled_scores_as_it_was_sampled(self, engine: SamplerHarness) -> None:
        async def check(asked: int) -> None:
            tokens = await collect(engine.sampler, request(version=asked))
            scores = await engine.sampler.score(ScoreRequest([*PROMPT, *ids(tokens)], 12, version=asked))
            assert scores.logprobs == pytest.approx([token.logprob for token in tokens], abs=1e-4)

        await check(BASE_VERSION)
        async with engine.published(1) as version:
            await check(version)
            if engine.sampler.capabilities.keeps_base:
                await check(BASE_VERSION)

    async def test_chosen_tokens_are_scored_beside_the_given_ones(self, engine: SamplerHarness) -> None:
        if not engine.sampler.capabilities.scores_targets:
            pytest.skip("this engine scores no chosen tokens")
        targets = np.array([[9, 10], [9, 11], [12, 12]], np.int32)
        scores = await engine.sampler.score(ScoreRequest([*PROMPT, 9, 9, 12], 3, targets=targets))
        assert scores.targets is not None
        assert scores.targets[:, 0].tolist() == pytest.approx(scores.logprobs, abs=1e-4)
        if engine.has_model:
            rows = engine.reference([*PROMPT, 9, 9, 12])[len(PROMPT) - 1 : -1]
            expected = [[float(row[id]) for id in chosen] for row, chosen in zip(rows, targets, strict=True)]
            assert scores.targets == pytest.approx(np.array(expected), abs=1e-4)

    async def test_tokens_beyond_the_context_are_not_scored(self, engine: SamplerHarness) -> None:
        room = engine.sampler.limits.max_context_tokens
        with pytest.raises(EngineError, match=f"context holds {room}"):
            await engine.sampler.score(ScoreRequest([1] * (room + 1), 1))

    async def test_a_process_that_dies_fails_what_ran_and_is_started_again(self, engine: SamplerHarness) -> None:
        if not engine.has_process:
            pytest.skip("this engine has no process of its own")
        async with engine.published(1) as version:
            before = ids(await collect(engine.sampler, request()))
            running = [asyncio.create_task(collect(engine.sampler, request(LONG))) for _ in range(MAX_SEQUENCES)]
            await until(lambda: engine.sampler.stats().active == MAX_SEQUENCES)
            engine.kill()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
            # The next request waits for the process, which has the same policy again.
            assert ids(await collect(engine.sampler, request(version=version))) == before
            assert engine.sampler.stats().restarts == 1

    async def test_a_sampler_that_closes_ends_what_runs_and_refuses_what_comes(self, engine: SamplerHarness) -> None:
        sampler = engine.make()
        await sampler.start()
        running = [asyncio.create_task(collect(sampler, request(LONG))) for _ in range(MAX_SEQUENCES)]
        await until(lambda: sampler.stats().active > 0)
        await sampler.close()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
        with pytest.raises(EngineUnavailable):
            sampler.sample(request())
        with pytest.raises(EngineUnavailable):
            await sampler.score(ScoreRequest(PROMPT, 2))


def training_batch(seed: int = 0, advantage: float | None = None) -> list[TrainingSequence]:
    """Random conversations of two turns each, with the turns' numbers derived from the seed."""
    draw, sequences = random.Random(seed), []
    for number in range(3):
        ids = draw.choices(range(200), k=draw.randint(14, 24))
        spans = []
        for turn, (start, stop) in enumerate([(3, 6), (9, len(ids))]):
            value = draw.uniform(-1, 1) if advantage is None else advantage
            logprobs = [draw.uniform(-6, -5) for _ in range(stop - start)]
            spans.append(Span(100 * seed + 10 * number + turn, start, stop, logprobs, [value] * (stop - start)))
        sequences.append(TrainingSequence(ids, spans))
    return sequences


class LearnerConformance:
    """The behaviours of a learner."""

    async def test_a_step_changes_the_policy_and_is_measured(self, engine: LearnerHarness) -> None:
        before = await engine.state()
        result = await engine.learner.step(training_batch())
        assert await engine.state() != before
        assert math.isfinite(result.loss)
        assert result.kl_old > 0
        assert 0 < result.response_tokens <= result.tokens

    async def test_the_same_steps_make_the_same_policy(self, engine: LearnerHarness) -> None:
        states = []
        for _ in range(2):
            await engine.learner.reset()
            for seed in range(2):
                await engine.learner.step(training_batch(seed))
            states.append(await engine.state())
        assert states[0] == states[1]

    async def test_a_step_is_taken_back_once_and_bit_for_bit(self, engine: LearnerHarness) -> None:
        assert engine.learner.capabilities.undo
        await engine.learner.step(training_batch(1))
        before = await engine.state()
        await engine.learner.step(training_batch(2))
        after = await engine.state()
        await engine.learner.undo()
        assert await engine.state() == before
        with pytest.raises(StepRefused, match="no step to take back"):
            await engine.learner.undo()
        await engine.learner.step(training_batch(2))
        assert await engine.state() == after

    @pytest.mark.parametrize("cause", ["max_kl", "advantage"])
    async def test_a_refused_step_leaves_the_policy(self, engine: LearnerHarness, cause: str) -> None:
        await engine.learner.step(training_batch(1))
        before = await engine.state()
        engine.set_max_kl(1e-12 if cause == "max_kl" else 100.0)
        advantage = float("nan") if cause == "advantage" else None
        with pytest.raises(StepRefused, match="--max-kl" if cause == "max_kl" else "not finite"):
            await engine.learner.step(training_batch(2, advantage))
        engine.set_max_kl(100.0)
        assert await engine.state() == before
        with pytest.raises(StepRefused, match="no step to take back"):
            await engine.learner.undo()
        await engine.learner.step(training_batch(3))
        after = await engine.state()
        # The next step is the one that would have followed without the refused one.
        await engine.learner.reset()
        for seed in (1, 3):
            await engine.learner.step(training_batch(seed))
        assert await engine.state() == after

    async def test_resumed_training_equals_uninterrupted_training(self, engine: LearnerHarness, tmp_path: Path) -> None:
        await engine.learner.step(training_batch(1))
        await engine.learner.save(tmp_path)
        await engine.learner.step(training_batch(2))
        after = await engine.state()
        await engine.learner.reset()
        await engine.learner.step(training_batch(9))
        await engine.learner.load(tmp_path)
        with pytest.raises(StepRefused, match="no step to take back"):
            await engine.learner.undo()
        await engine.learner.step(training_batch(2))
        assert await engine.state() == after

    async def test_a_checkpoint_that_cannot_be_read_leaves_the_policy(
        self, engine: LearnerHarness, tmp_path: Path
    ) -> None:
        await engine.learner.step(training_batch(1))
        before = await engine.state()
        with pytest.raises(StepRefused, match="checkpoint"):
            await engine.learner.load(tmp_path / "nowhere")
        assert await engine.state() == before

    async def test_a_reset_learner_is_a_new_one(self, engine: LearnerHarness) -> None:
        before = await engine.state()
        await engine.learner.step(training_batch(1))
        await engine.learner.reset()
        assert await engine.state() == before
        with pytest.raises(StepRefused, match="no step to take back"):
            await engine.learner.undo()

    async def test_a_policy_is_written_in_a_form_that_the_learner_declares(
        self, engine: LearnerHarness, tmp_path: Path
    ) -> None:
        await engine.learner.step(training_batch(1))
        policy = await engine.learner.write_policy(tmp_path)
        assert policy.form in engine.learner.capabilities.writes
        assert policy == policy_in(tmp_path)

    async def test_calls_at_the_same_time_run_one_after_the_other(self, engine: LearnerHarness) -> None:
        learner = engine.learner
        await asyncio.gather(learner.step(training_batch(1)), learner.step(training_batch(2)), learner.undo())
        together = await engine.state()
        await learner.reset()
        await learner.step(training_batch(1))
        assert await engine.state() == together

    async def test_a_process_that_dies_is_started_again_by_load(self, engine: LearnerHarness, tmp_path: Path) -> None:
        if not engine.has_process:
            pytest.skip("this engine has no process of its own")
        await engine.learner.step(training_batch(1))
        before = await engine.state()
        await engine.learner.save(tmp_path)
        engine.kill()
        with pytest.raises(EngineUnavailable):
            await engine.learner.step(training_batch(2))
        await engine.learner.load(tmp_path)
        assert await engine.state() == before
