"""The learner on Tinker, against a double that computes on the local engine: gradients, whole steps, faults."""

import dataclasses
import json
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from openclaw_rl.app.checks import check_versions
from openclaw_rl.app.config import load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineAway, EngineUnavailable, StepRefused, policy_in
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.engines.tinker.datum import (
    CROSS_ENTROPY,
    loss_config,
    measure,
    read_tables,
    sampled,
    slopes_of,
    to_data,
    to_weighted_data,
)
from openclaw_rl.engines.tinker.learner import TinkerLearner
from openclaw_rl.engines.tinker.traits import Traits, read_schema
from openclaw_rl.errors import UserError
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import Alternatives, LossSettings, ScoreRequest, Span, TrainingSequence
from support.methods import a_method
from support.tinker_double import ALPHA, RANK, Cloud, failed_request, status_error, tensor, tinker, types
from support.tinker_learners import a_learner, batch

LOSSES = ("ppo", "importance_sampling", "cispo")
#: A server whose ways differ in all that is known to differ.
OTHER_WAYS = Traits("other", None, takes_means=True, samples_over_training=True)


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


def with_others(cloud: Cloud, sequences: Sequence[TrainingSequence], seed: int = 7) -> list[TrainingSequence]:
    """The same with alternatives: up to three at each token, for every second span."""
    draw = np.random.default_rng(seed)

    def changed(sequence: TrainingSequence, place: int, span: Span) -> Span:
        if place % 2:
            return span
        shape = (span.stop - span.start, int(draw.integers(1, 4)))
        ids = draw.integers(0, 200, shape).astype(np.int32)
        scores = cloud.scores(list(sequence.ids[: span.stop]), shape[0], 0, targets=ids).targets
        old = scores + draw.normal(0, 0.3, shape)
        others = Alternatives(ids, old.astype(np.float32), draw.normal(0, 1, shape).astype(np.float32))
        return dataclasses.replace(span, alternatives=others)

    return [
        dataclasses.replace(one, spans=[changed(one, place, span) for place, span in enumerate(one.spans)])
        for one in sequences
    ]


def held(learner: TinkerLearner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.primitives.run.client.lora.parameters()]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("takes_means", [False, True], ids=["sums", "means"])
@pytest.mark.parametrize("kind", LOSSES)
async def test_the_gradient_is_the_local_engines(cloud: Cloud, kind: str, takes_means: bool) -> None:
    cloud.takes_means = takes_means
    settings = LossSettings(kind, 0.2, 0.28)
    sequences = batch(cloud, shift=0.4)
    lora = LoraWeights.create(cloud.decoder.shape, RANK, ALPHA, seed=3)
    ours = Trainer(cloud.decoder, lora, PolicyLoss(kind, 0.2, 0.28)).forward_backward(sequences)
    client = await cloud.service().create_lora_training_client_async("tiny/model", RANK, 3)
    data = to_data(types, sequences, takes_means=takes_means)
    theirs = await (await client.forward_backward_async(data, kind, loss_config(settings)))
    for own, other in zip(lora.parameters(), client.lora.parameters(), strict=True):
        assert own.grad is not None
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-6)
    assert theirs.metrics["loss:sum"] == pytest.approx(ours.loss, rel=1e-4, abs=1e-6)
    measured = measure(settings, sequences, ours.logprobs)
    assert measured.loss == pytest.approx(ours.loss, rel=1e-4, abs=1e-6)
    assert measured.clipped == ours.clipped


@pytest.mark.parametrize("takes_means", [False, True], ids=["sums", "means"])
@pytest.mark.parametrize("kind", LOSSES)
async def test_the_gradient_over_alternatives_is_the_local_engines(cloud: Cloud, kind: str, takes_means: bool) -> None:
    cloud.takes_means = takes_means
    sequences = with_others(cloud, batch(cloud, shift=0.4))
    lora = LoraWeights.create(cloud.decoder.shape, RANK, ALPHA, seed=3)
    ours = Trainer(cloud.decoder, lora, PolicyLoss(kind, 0.2, 0.28)).forward_backward(sequences)
    client = await cloud.service().create_lora_training_client_async("tiny/model", RANK, 3)
    asked = await (await client.forward_async(to_weighted_data(types, sequences), CROSS_ENTROPY))
    tables = read_tables(sequences, asked)
    found = slopes_of(LossSettings(kind, 0.2, 0.28), sequences, tables)
    assert found.loss == pytest.approx(ours.loss, rel=1e-4, abs=1e-6)
    assert sampled(sequences, tables)[0][0] == pytest.approx(ours.logprobs[0][0], abs=1e-4)
    data = to_weighted_data(types, sequences, found.tables, factor=takes_means)
    await (await client.forward_backward_async(data, CROSS_ENTROPY))
    for own, other in zip(lora.parameters(), client.lora.parameters(), strict=True):
        assert own.grad is not None
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-6)


async def test_a_step_over_alternatives_moves_them_where_their_advantages_point(
    cloud: Cloud, learner: TinkerLearner
) -> None:
    sequences = with_others(cloud, batch(cloud))
    before = held(learner)
    result = await learner.step(sequences)
    assert math.isfinite(result.loss)
    assert result.grad_norm > 0
    assert not same(before, held(learner))
    told = await learner.primitives.run.forward(to_weighted_data(types, sequences), CROSS_ENTROPY)
    assert slopes_of(LossSettings(), sequences, read_tables(sequences, told)).loss < result.loss
    await learner.undo()
    assert same(before, held(learner))


async def test_tables_of_the_wrong_size_are_not_trained_on(cloud: Cloud, learner: TinkerLearner) -> None:
    before = held(learner)
    cloud.fail("forward", *[with_logprobs(lambda values: values[:-1])] * 9)
    with pytest.raises(EngineUnavailable, match="log-probs for"):
        await learner.step(with_others(cloud, batch(cloud)))
    cloud.faults.clear()
    await learner.reset()
    assert same(before, held(learner))


async def test_one_log_prob_that_is_none_is_no_step(cloud: Cloud, learner: TinkerLearner) -> None:
    before = held(learner)
    cloud.fail("forward", with_logprobs(lambda values: [float("nan")] * len(values)))
    with pytest.raises(StepRefused, match="not finite"):
        await learner.step(with_others(cloud, batch(cloud)))
    assert same(before, held(learner))


async def test_a_datum_asks_for_each_successor_and_prompts_weigh_nothing(cloud: Cloud) -> None:
    ids = [5, 6, 7, 8, 9, 10]
    spans = [Span(1, 2, 4, [-0.5, -0.25], [2.0, 4.0]), Span(2, 5, 6, [-1.0], [3.0])]
    (datum,) = to_data(types, [TrainingSequence(ids, spans)])
    inputs = datum.loss_fn_inputs
    assert datum.model_input.to_ints() == ids[:-1]
    assert list(inputs["target_tokens"].data) == ids[1:]
    assert list(inputs["logprobs"].data) == [0, -0.5, -0.25, 0, -1.0]
    assert list(inputs["advantages"].data) == pytest.approx([0, 0.5, 1.0, 0, 1.5])
    with pytest.raises(ValueError, match="turn 9"):
        to_data(types, [TrainingSequence(ids, [Span(9, 2, 4, [-0.5], [1.0, 1.0])])])


def test_the_clip_as_the_service_wants_it() -> None:
    assert loss_config(LossSettings("ppo", 0.2, 0.28)) == pytest.approx(
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    )
    assert loss_config(LossSettings("cispo", 0.2, 0.28)) == {"clip_low_threshold": 0.0, "clip_high_threshold": 1.28}
    assert loss_config(LossSettings("importance_sampling")) is None


@pytest.mark.parametrize("traits", [Traits(), OTHER_WAYS], ids=["tinker", "other"])
async def test_steps_move_the_served_policy_where_the_advantages_point(
    cloud: Cloud, learner: TinkerLearner, tmp_path: Path, traits: Traits
) -> None:
    learner.primitives.connection.traits, cloud.takes_means = traits, traits.takes_means
    sequences = [
        dataclasses.replace(s, spans=[dataclasses.replace(span, advantages=[sign] * len(span.advantages))])
        for sign, s in zip((1.0, -1.0), batch(cloud, count=2), strict=True)
        for span in s.spans[1:]
    ]
    for version in (1, 2):
        result = await learner.step(sequences)
        assert result.kl_old > 0
        assert (result.kl_base > 0) is (version == 2)
        assert result.grad_norm > 0
        assert result.response_tokens == sum(s.spans[0].stop - s.spans[0].start for s in sequences)
        folder = tmp_path / str(version)
        folder.mkdir()
        await learner.primitives.sampler.publish(version, await learner.write_policy(folder))
    for sequence, rises in zip(sequences, (True, False), strict=True):
        span = sequence.spans[0]
        request = ScoreRequest(sequence.ids[: span.stop], span.stop - span.start)
        scores = [await learner.primitives.sampler.score(dataclasses.replace(request, version=v)) for v in (0, 1, 2)]
        sums = [sum(score.logprobs) for score in scores]
        assert sums == sorted(sums, reverse=not rises)
        assert len(set(sums)) == 3


async def test_the_service_is_given_every_setting_of_the_optimiser(
    cloud: Cloud, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"learning_rate": 3e-3, "weight_decay": 0.3}
    learner = await a_learner(tiny_model, betas=(0.5, 0.7), max_grad_norm=0.01, **settings)
    client = learner.primitives.run.client
    step, given = client.optim_step_async, []
    monkeypatch.setattr(client, "optim_step_async", lambda adam: given.append(adam) or step(adam))
    await learner.step(batch(cloud))
    expected = {"beta1": 0.5, "beta2": 0.7, "eps": 1e-8, "grad_clip_norm": 0.01, **settings}
    assert [{name: getattr(adam, name) for name in expected} for adam in given] == [expected]
    await learner.primitives.connection.close()


async def test_epochs_are_passes_with_an_update_each(cloud: Cloud, tiny_model: Path) -> None:
    learner = await a_learner(tiny_model, epochs=3)
    cloud.calls.clear()
    await learner.step(batch(cloud))
    passes = [call for call in cloud.calls if call in ("forward_backward", "optim_step", "forward")]
    assert passes == ["forward_backward", "optim_step"] * 3 + ["forward"]
    await learner.primitives.connection.close()


async def test_undo_and_what_follows_are_exact(cloud: Cloud, learner: TinkerLearner) -> None:
    first, second = batch(cloud, 1), batch(cloud, 2)
    await learner.step(first)
    before = held(learner)
    result = await learner.step(second)
    after = held(learner)
    assert not same(before, after)
    await learner.undo()
    assert same(held(learner), before)
    assert learner.steps == 1
    with pytest.raises(StepRefused, match="no step to take back"):
        await learner.undo()
    again = await learner.step(second)
    assert same(held(learner), after)
    assert (again.loss, again.kl_old) == (result.loss, result.kl_old)


async def test_beginning_anew_is_the_beginning_and_takes_no_new_place(cloud: Cloud, learner: TinkerLearner) -> None:
    before = held(learner)
    await learner.step(batch(cloud))
    await learner.reset()
    assert (learner.steps, same(held(learner), before)) == (0, True)
    assert cloud.calls.count("create") == 1
    cloud.states.clear()
    await learner.reset()
    assert same(held(learner), before)


async def test_a_step_that_goes_too_far_is_taken_back(cloud: Cloud, tiny_model: Path) -> None:
    learner = await a_learner(tiny_model, max_kl=1e-9)
    before = held(learner)
    with pytest.raises(StepRefused, match="--max-kl"):
        await learner.step(batch(cloud))
    assert same(held(learner), before)
    assert learner.steps == 0
    await learner.primitives.connection.close()


def with_logprobs(change: Any) -> Any:
    def altered(output: Any) -> Any:
        outputs = [{"logprobs": tensor(change(list(o["logprobs"].data)))} for o in output.loss_fn_outputs]
        return types.ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=outputs, metrics={})

    return altered


async def test_what_is_not_finite_never_reaches_the_weights(cloud: Cloud, learner: TinkerLearner) -> None:
    before = held(learner)
    nothing = with_logprobs(lambda values: [float("nan")] * len(values))
    gradient = lambda told: types.OptimStepResponse(metrics={"grad_norm": float("inf")})  # noqa: E731
    for name, fault in (("forward_backward", nothing), ("optim_step", gradient), ("forward", nothing)):
        cloud.fail(name, fault)
        with pytest.raises(StepRefused, match="not finite"):
            await learner.step(batch(cloud))
        assert same(held(learner), before)


@pytest.mark.parametrize("call", ["forward_backward", "optim_step", "forward", "save_state"])
@pytest.mark.parametrize(
    "fault", [status_error(429), status_error(502), failed_request("server"), status_error(410, "promise expired")]
)
async def test_a_step_that_is_lost_on_the_way_is_made_again_once(
    cloud: Cloud, tiny_model: Path, learner: TinkerLearner, call: str, fault: Exception
) -> None:
    expected = await a_learner(tiny_model)
    await expected.step(batch(cloud))
    cloud.fail(call, fault)
    await learner.step(batch(cloud))
    assert same(held(learner), held(expected))
    assert learner.steps == 1
    await expected.primitives.connection.close()


async def test_answers_of_the_wrong_length_are_not_trained_on(cloud: Cloud, learner: TinkerLearner) -> None:
    short = with_logprobs(lambda values: values[:-1])
    cloud.fail("forward_backward", short)
    await learner.step(batch(cloud))
    cloud.fail("forward_backward", *[short] * 3)
    with pytest.raises(EngineUnavailable, match="log-probs for"):
        await learner.step(batch(cloud))
    with pytest.raises(EngineUnavailable, match="holds no policy"):
        await learner.step(batch(cloud))


async def test_a_slow_save_is_made_again_and_serving_goes_on(cloud: Cloud, tiny_model: Path, tmp_path: Path) -> None:
    learner = await a_learner(tiny_model)
    patient = learner.primitives.connection.account
    learner.primitives.connection.account = dataclasses.replace(patient, timeout=1.0)
    cloud.fail("save_weights", 1.5)
    await learner.write_policy(tmp_path)
    learner.primitives.connection.account = patient
    assert cloud.calls.count("save_weights") >= 2
    await learner.primitives.sampler.publish(1, policy_in(tmp_path))
    await learner.primitives.connection.close()


async def test_a_locked_account_is_no_fault_of_the_batch(cloud: Cloud, learner: TinkerLearner) -> None:
    cloud.fail("forward_backward", status_error(401, "key expired"))
    with pytest.raises(EngineAway, match=r"key expired.*TINKER_API_KEY"):
        await learner.step(batch(cloud))
    assert cloud.calls.count("forward_backward") == 1


async def test_a_loss_that_the_server_refuses_is_said_and_no_batch_is_blamed(cloud: Cloud, tiny_model: Path) -> None:
    cloud.losses.discard("cispo")
    learner = await a_learner(tiny_model, loss=LossSettings("cispo"))
    with pytest.raises(EngineAway, match=r"loss cispo.*--loss-fn"):
        await learner.step(batch(cloud))
    await learner.primitives.connection.close()


async def test_a_batch_that_is_refused_after_others_were_not_is_set_aside(cloud: Cloud, learner: TinkerLearner) -> None:
    await learner.step(batch(cloud))
    before = held(learner)
    cloud.fail("forward_backward", failed_request("user", "the sequence is too long"))
    with pytest.raises(StepRefused, match="too long"):
        await learner.step(batch(cloud))
    assert same(held(learner), before)


async def test_a_session_that_the_service_has_ended_is_begun_again(
    cloud: Cloud, tiny_model: Path, learner: TinkerLearner, tmp_path: Path
) -> None:
    await learner.step(batch(cloud, 1))
    await learner.save(tmp_path)
    await learner.primitives.sampler.publish(1, policy_in(tmp_path))
    request = ScoreRequest([1, 2, 3, 4], 2, version=1)
    before = await learner.primitives.sampler.score(request)
    cloud.end_sessions()
    assert (await learner.primitives.sampler.score(request)).logprobs == before.logprobs
    assert (cloud.sessions, cloud.open_sessions) == (2, 1)
    # The step is made from what was saved, and as if nothing had happened.
    expected = await a_learner(tiny_model)
    await expected.load(tmp_path)
    await expected.step(batch(cloud, 2))
    await learner.step(batch(cloud, 2))
    assert same(held(learner), held(expected))
    await expected.primitives.connection.close()


async def test_a_server_that_was_started_again_gets_its_adapters_again(
    cloud: Cloud, learner: TinkerLearner, tmp_path: Path
) -> None:
    learner.primitives.connection.traits = OTHER_WAYS
    for version in (1, 2):
        folder = tmp_path / str(version)
        folder.mkdir()
        await learner.primitives.sampler.publish(version, await learner.write_policy(folder))
    ids = [1, 2, 3, 4]
    before = await learner.primitives.sampler.score(ScoreRequest(ids, 2, version=2))
    cloud.calls.clear()
    gone = failed_request("unknown", "Model model_1 not loaded")
    cloud.fail("sample", gone)
    cloud.fail("load_state", gone)
    assert (await learner.primitives.sampler.score(ScoreRequest(ids, 2, version=2))).logprobs == pytest.approx(
        before.logprobs
    )
    assert cloud.calls[:4] == ["sample", "load_state", "create", "load_state"]


@pytest.mark.parametrize("traits", [Traits(), OTHER_WAYS], ids=["tinker", "other"])
async def test_a_checkpoint_is_gone_on_from_exactly_in_another_session(
    cloud: Cloud, learner: TinkerLearner, tiny_model: Path, tmp_path: Path, traits: Traits
) -> None:
    learner.primitives.connection.traits = traits
    await learner.step(batch(cloud, 1))
    await learner.save(tmp_path)
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"tinker.json", "learner.json"}
    assert json.loads((tmp_path / "learner.json").read_text())["state"].startswith("tinker://")
    await learner.step(batch(cloud, 2))
    other = await a_learner(tiny_model)
    other.primitives.connection.traits = traits
    await other.load(tmp_path)
    assert other.steps == 1
    await other.step(batch(cloud, 2))
    assert same(held(other), held(learner))
    await other.primitives.sampler.publish(5, policy_in(tmp_path))
    await other.primitives.connection.close()


async def test_a_checkpoint_that_does_not_fit_is_refused_in_a_sentence(
    cloud: Cloud, learner: TinkerLearner, tiny_model: Path, tmp_path: Path
) -> None:
    await learner.save(tmp_path)
    record = json.loads((tmp_path / "tinker.json").read_text())
    for change, words in (({"rank": 64}, "--lora-rank"), ({"base_model": "other"}, "--model-name")):
        (tmp_path / "tinker.json").write_text(json.dumps({**record, **change}))
        with pytest.raises(StepRefused, match=words):
            await learner.load(tmp_path)
    with pytest.raises(EngineUnavailable, match="learned from other"):
        await learner.primitives.sampler.publish(1, policy_in(tmp_path))
    (tmp_path / "tinker.json").unlink()
    with pytest.raises(StepRefused, match="no policy of Tinker's"):
        await learner.load(tmp_path)
    with pytest.raises(EngineUnavailable, match="--resume-from-ckpt"):
        await learner.primitives.sampler.publish(1, policy_in(tmp_path))
    cloud.states.clear()
    (tmp_path / "tinker.json").write_text(json.dumps(record))
    with pytest.raises(EngineUnavailable, match="does not have it any more"):
        await learner.load(tmp_path)


async def test_a_service_that_is_away_for_long_pauses_learning_without_blame(
    cloud: Cloud, learner: TinkerLearner
) -> None:
    cloud.fail("save_state", *[status_error(503, "maintenance")] * 4)
    with pytest.raises(EngineAway, match="maintenance"):
        await learner.step(batch(cloud))


def test_a_servers_schema_tells_what_it_is() -> None:
    losses = {"properties": {"loss_fn": {"enum": ["cross_entropy", "ppo"]}}}
    schema = {"info": {"title": "Tinker API Mock"}, "components": {"schemas": {"ForwardBackwardInput": losses}}}
    assert read_schema(schema) == Traits("SkyRL tx", frozenset({"cross_entropy", "ppo"}), True, True)
    schema["info"]["title"] = "Something else"
    assert read_schema(schema) == Traits("Something else", frozenset({"cross_entropy", "ppo"}))


def test_the_servers_of_skyrl_after_tx_are_recognised_with_what_they_lack() -> None:
    losses = {"properties": {"loss_fn": {"enum": ["cross_entropy", "ppo", "cispo"]}, "loss_fn_config": {}}}
    tensors = {"properties": {"data": {}}}
    schema = {
        "info": {"title": "Tinker API Mock"},
        "components": {"schemas": {"ForwardBackwardInput": losses, "TensorData": tensors}},
    }
    traits = read_schema(schema)
    assert (traits.name, traits.takes_tables, traits.pins_versions) == ("SkyRL", False, False)
    assert not traits.samples_over_training
    tensors["properties"]["shape"] = {}
    assert read_schema(schema).takes_tables


async def test_a_server_without_tables_or_pinned_versions_says_so(learner: TinkerLearner) -> None:
    sampler, connection = learner.primitives.sampler, learner.primitives.connection
    assert learner.capabilities.alternatives
    assert sampler.capabilities.candidates
    connection.traits = Traits("SkyRL", takes_tables=False, pins_versions=False)
    assert not learner.capabilities.alternatives
    with pytest.raises(UserError, match=r"--method topk-select .* use --method rl, opd or combine"):
        a_method("topk-select").check_learner(learner.capabilities)
    a_method("combine").check_learner(learner.capabilities)
    can = sampler.capabilities
    assert (can.candidates, can.keeps_base) == (False, False)
    assert "newest weights only" in sampler.describe()


async def test_what_such_a_server_cannot_do_is_refused(learner: TinkerLearner, tmp_path: Path) -> None:
    learner.primitives.connection.traits = Traits("SkyRL", pins_versions=False)
    can = learner.primitives.sampler.capabilities
    given = {"backend": "tinker", "run_dir": str(tmp_path), "judge": "feedback", "method": "rl"}
    check_versions(load(given, {}).config, can)
    for more, said in (
        ({"gate": "examples/gate.jsonl"}, "so --gate cannot examine a candidate"),
        ({"method": "opd"}, "the teacher of --method opd cannot use the base model"),
        ({"judge": "llm"}, "the judge cannot use the base model"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_versions(load({**given, **more}, {}).config, can)
