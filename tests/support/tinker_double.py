"""A double of Tinker in this process: the parts of the SDK that are used, with its types, computing on a tiny model.

A `Cloud` is the service. What it stores outlives sessions, and a test can make its next calls fail. Signatures are
those of the installed version of the SDK.
"""

import asyncio
import copy
import dataclasses
import gc
import inspect
import weakref
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, PolicyLoaded, Score, WorkerOptions
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.packing import micro_batches
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import (
    Alternatives,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    Span,
    TopTokens,
    TrainingSequence,
)

tinker = pytest.importorskip("tinker", reason="the tinker extra is not installed")
types = tinker.types

RANK, ALPHA = 4, 8.0
#: Policies that can be sampled from in one test.
SLOTS = 64
#: Whether this version of the SDK returns the likeliest tokens with samples.
NEW_SDK = "topk_sample_logprobs" in str(tinker.SamplingClient.sample_async.__code__.co_varnames)
NEW_TYPES = "sequence_id" in inspect.signature(types.SampledSequence).parameters
SAMPLE = inspect.signature(tinker.SamplingClient.sample_async)

#: A fault: an error, seconds of delay, or a change to the result.
Fault = Exception | float | Callable[[Any], Any]


def status_error(status: int, detail: str = "no") -> Exception:
    """The error that the SDK raises for an HTTP status."""
    names = {401: "AuthenticationError", 404: "NotFoundError", 422: "UnprocessableEntityError", 429: "RateLimitError"}
    kind = getattr(tinker, names.get(status, "InternalServerError" if status >= 500 else "APIStatusError"))
    response = httpx.Response(status, json={"detail": detail}, request=httpx.Request("POST", "http://tinker"))
    error: Exception = kind(detail, response=response, body={"detail": detail})
    return error


def failed_request(category: str, words: str = "it did not work") -> Exception:
    """A request that was accepted and then failed."""
    return tinker.RequestFailedError(words, request_id="1", category=types.RequestErrorCategory(category))


def tensor(values: list[float]) -> Any:
    return types.TensorData(data=values, dtype="float32", shape=[len(values)])


def sequence(tokens: list[int], logprobs: list[float] | None, stop_reason: str, top: Any = None) -> Any:
    if NEW_TYPES:
        return types.SampledSequence(
            stop_reason=stop_reason,
            sequence_id="s",
            _tokens_list=tokens,
            _logprobs_list=logprobs,
            _topk_logprobs_list=top,
        )
    return types.SampledSequence(stop_reason=stop_reason, tokens=tokens, logprobs=logprobs)


def rows_of(top: TopTokens) -> list[list[tuple[int, float]]]:
    """The likeliest tokens as the service writes them."""
    rows = zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in rows]


def drawn_from(row: list[tuple[int, float]], params: SamplingParams) -> dict[int, float]:
    """What is drawn from where the raw log-probs, the likeliest first, are `row`."""
    if not params.temperature:
        return {row[0][0]: 0.0}
    kept = row[: params.top_k or None]
    probs = np.exp(np.array([value for _, value in kept]) / params.temperature)
    probs /= probs.sum()
    probs = probs[np.cumsum(probs) - probs < params.top_p]
    logprobs = np.log(probs / probs.sum()).tolist()
    return {id: value for (id, _), value in zip(kept, logprobs, strict=False)}


def response(sequences: list[Any], prompt: Any = None, top: Any = None, targets: Any = None) -> Any:
    if NEW_TYPES:
        return types.SampleResponse(
            sequences=sequences,
            _prompt_logprobs_list=prompt,
            _topk_prompt_logprobs_list=top,
            target_prompt_logprobs=targets,
        )
    return types.SampleResponse(sequences=sequences, prompt_logprobs=prompt, topk_prompt_logprobs=top)


class Cloud:
    """The service. Servers differ in `takes_means`, `knows_top_k`, `can_score` and `shows_drawn`."""

    def __init__(self, model: Path, folder: Path, name: str = "tiny/model") -> None:
        self.name, self.folder = name, folder
        self.decoder = load_decoder(model, torch.float32, torch.device("cpu"))
        self.worker = Worker(self.decoder, WorkerOptions(model, "cpu", "float32", 8, None, 0.05, SLOTS, RANK))
        self.takes_means = False
        self.knows_top_k = True
        self.can_score = True
        self.shows_drawn = False
        """Whether log-probs of samples are those after temperature and truncation, not raw."""
        self.losses = {"ppo", "importance_sampling", "cispo", "cross_entropy"}
        self.states: dict[str, dict[str, Any]] = {}
        self.slots: dict[str, int] = {}
        self.kept_seconds: dict[str, int | None] = {}
        """For how long each path is kept; None: for good."""
        self._clients: weakref.WeakSet[Training | Sampling] = weakref.WeakSet()
        self.faults: dict[str, list[Fault]] = {}
        self.calls: list[str] = []
        self.prompts: list[tuple[int, int, int]] = []
        """For each sampling call: prompt tokens, completions, tokens requested."""
        self.epoch = 0
        self.sessions = 0
        self.open_sessions = 0
        self._ids, self._slots = count(1), count(1)

    def fail(self, name: str, *faults: Fault) -> None:
        """Make the next calls of this name fail, each with one of these faults."""
        self.faults.setdefault(name, []).extend(faults)

    def end_sessions(self) -> None:
        """Forget all current clients; saved states are kept."""
        self.epoch += 1

    async def does(self, name: str, work: Callable[[], Any], epoch: int | None = None) -> Any:
        """Carry out a call, or the fault that replaces it."""
        self.calls.append(name)
        if epoch not in (None, self.epoch):
            raise status_error(404, "session not found")
        fault = self.faults[name].pop(0) if self.faults.get(name) else None
        if isinstance(fault, Exception):
            raise fault
        # No call to a real service finishes at once.
        await asyncio.sleep(fault if isinstance(fault, float) else 0.001)
        result = work()
        return fault(result) if callable(fault) else result

    def path(self, kind: str, name: str, ttl_seconds: int | None = None) -> str:
        path = f"tinker://run-{next(self._ids)}/{kind}/{name}"
        self.kept_seconds[path] = ttl_seconds
        return path

    def keep(self, adapter: Path, path: str | None = None) -> str:
        """Store an adapter's weights to sample from; returns their path on the service."""
        path, slot = path or self.path("sampler_weights", adapter.name), next(self._slots)
        loaded = self.worker.obey(LoadPolicy(slot, slot, adapter))
        assert isinstance(loaded, PolicyLoaded)
        assert loaded.error is None
        self.slots[path] = slot
        return path

    def gave(self, client: "Training | Sampling") -> None:
        self._clients.add(client)

    def clients(self, kind: type[Any]) -> int:
        """How many clients of a kind somebody holds."""
        gc.collect()
        return sum(isinstance(client, kind) for client in self._clients)

    def service(self, **given: Any) -> "Service":
        self.sessions += 1
        self.open_sessions += 1
        self.given = given
        return Service(self)

    def scores(self, ids: list[int], last: int, slot: int, top_k: int = 0, targets: Any = None) -> Any:
        id = next(self._ids)
        self.worker.obey(Score(id, ScoreRequest(ids, last, top_k=top_k, targets=targets), slot))
        while True:
            found = self.worker.step().scores
            if id in found:
                return found[id]

    def sample(self, prompt: list[int], n: int, params: SamplingParams, slot: int) -> list[list[Any]]:
        id = next(self._ids)
        self.worker.obey(Add(id, SampleRequest(prompt, params, n), slot, slot))
        drawn: list[list[Any]] = [[] for _ in range(n)]
        while not self.worker.scheduler.idle:
            for token in self.worker.step().tokens.get(id, []):
                drawn[token.index].append(token)
        return drawn


class Service:
    """`ServiceClient`."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.epoch = cloud, cloud.epoch
        self.holder = self
        self._closed = False
        if hasattr(tinker.ServiceClient, "close"):
            self.close = self._close_newer
        else:
            self.close_holder = self._end
            self.holder = Holder(self)

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self.cloud.open_sessions -= 1

    def _close_newer(self, status: str, detail: str | None = None) -> Awaitable[None]:
        async def end() -> None:
            self._end()

        return asyncio.ensure_future(end())

    async def get_server_capabilities_async(self) -> Any:
        def tell() -> Any:
            known = types.SupportedModel.model_fields if hasattr(types.SupportedModel, "model_fields") else {}
            more = {"max_context_length": 256} if "max_context_length" in known else {}
            return types.GetServerCapabilitiesResponse(
                supported_models=[types.SupportedModel(model_name=self.cloud.name, **more)]
            )

        return await self.cloud.does("capabilities", tell)

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
    ) -> "Training":
        assert (base_model, rank) == (self.cloud.name, RANK)
        return await self.cloud.does("create", lambda: Training(self.cloud, seed or 0), self.epoch)

    async def create_training_client_from_state_with_optimizer_async(self, path: str) -> "Training":
        def restore() -> Training:
            client = Training(self.cloud, 0)
            client.take(path)
            return client

        return await self.cloud.does("create_from_state", restore, self.epoch)

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> "Sampling":
        def create() -> Sampling:
            if model_path is None:
                assert base_model == self.cloud.name
                return Sampling(self.cloud, 0)
            if model_path not in self.cloud.slots:
                raise status_error(404, f"{model_path} not found")
            return Sampling(self.cloud, self.cloud.slots[model_path])

        return await self.cloud.does("create_sampling", create, self.epoch)

    def create_rest_client(self) -> "Rest":
        return Rest(self.cloud)


class Rest:
    """`RestClient`."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        def delete() -> None:
            if self.cloud.states.pop(tinker_path, self.cloud.slots.pop(tinker_path, None)) is None:
                raise status_error(404, f"{tinker_path} not found")

        await self.cloud.does("delete", delete)


class Holder:
    """Holds the session in an older `ServiceClient`."""

    def __init__(self, service: Service) -> None:
        self.close = service.close_holder


class Training:
    """`TrainingClient`: calls are processed in the order in which they were submitted."""

    def __init__(self, cloud: Cloud, seed: int) -> None:
        self.cloud, self.epoch = cloud, cloud.epoch
        self.lora = LoraWeights.create(cloud.decoder.shape, RANK, ALPHA, seed=seed)
        self.optimizer = torch.optim.AdamW(self.lora.parameters(), lr=0.0)
        self._last: Awaitable[Any] | None = None
        cloud.gave(self)

    def _submit(self, name: str, work: Callable[[], Any]) -> Awaitable[Any]:
        before = self._last

        async def run() -> Any:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            return await self.cloud.does(name, work, self.epoch)

        self._last = asyncio.ensure_future(run())
        self._last.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._last

    async def forward_backward_async(self, data: list[Any], loss_fn: str, loss_fn_config: Any = None) -> Any:
        self._check(loss_fn)
        return self._submit("forward_backward", lambda: self._pass(data, loss_fn, loss_fn_config, keep=True))

    async def forward_async(self, data: list[Any], loss_fn: str, loss_fn_config: Any = None) -> Any:
        self._check(loss_fn)
        return self._submit("forward", lambda: self._pass(data, loss_fn, loss_fn_config, keep=False))

    def _check(self, loss_fn: str) -> None:
        if loss_fn not in self.cloud.losses:
            raise status_error(422, f"loss_fn should be one of {sorted(self.cloud.losses)}")

    async def optim_step_async(self, adam_params: Any) -> Any:
        def update() -> Any:
            for group in self.optimizer.param_groups:
                group.update(
                    lr=adam_params.learning_rate,
                    betas=(adam_params.beta1, adam_params.beta2),
                    eps=adam_params.eps,
                    weight_decay=adam_params.weight_decay,
                )
            norm = torch.nn.utils.clip_grad_norm_(self.lora.parameters(), adam_params.grad_clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return types.OptimStepResponse(metrics={"unclipped_grad_norm": float(norm)})

        return self._submit("optim_step", update)

    async def save_state_async(self, name: str, ttl_seconds: int | None = None) -> Any:
        def save() -> Any:
            path = self.cloud.path("weights", name, ttl_seconds)
            weights = [parameter.detach().clone() for parameter in self.lora.parameters()]
            self.cloud.states[path] = {"weights": weights, "optimizer": copy.deepcopy(self.optimizer.state_dict())}
            return types.SaveWeightsResponse(path=path)

        return self._submit("save_state", save)

    async def save_weights_for_sampler_async(self, name: str, ttl_seconds: int | None = None) -> Any:
        def save() -> Any:
            path = self.cloud.path("sampler_weights", name, ttl_seconds)
            folder = self.cloud.folder / name
            self.lora.save(folder, "tiny")
            self.cloud.keep(folder, path)
            return types.SaveWeightsForSamplerResponse(path=path)

        return self._submit("save_weights", save)

    async def load_state_async(self, path: str) -> Any:
        return self._submit("load_state", lambda: self.take(path))

    async def load_state_with_optimizer_async(self, path: str) -> Any:
        return self._submit("load_state", lambda: self.take(path))

    def take(self, path: str) -> None:
        if path not in self.cloud.states:
            raise status_error(404, f"{path} not found")
        state = self.cloud.states[path]
        with torch.no_grad():
            for parameter, weight in zip(self.lora.parameters(), state["weights"], strict=True):
                parameter.copy_(weight)
                parameter.grad = None
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))

    def _pass(self, data: list[Any], loss_fn: str, config: Any, *, keep: bool) -> Any:
        if loss_fn == "cross_entropy":
            outputs = [{"logprobs": tensor(self._weighted(datum, len(data), keep))} for datum in data]
            return types.ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=outputs, metrics={})
        bounds = config or {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
        low, high = 1 - bounds["clip_low_threshold"], bounds["clip_high_threshold"] - 1
        trainer = Trainer(self.cloud.decoder, self.lora, PolicyLoss(loss_fn, low, high))
        sequences = [self._sequence(datum, len(data)) for datum in data]
        if keep:
            found = trainer.forward_backward(sequences)
            logprobs, metrics = found.logprobs, {"loss:sum": found.loss}
        else:
            logprobs, metrics = trainer.score(sequences), {}
        outputs = [{"logprobs": tensor(spans[0])} for spans in logprobs]
        return types.ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=outputs, metrics=metrics)

    def _weighted(self, datum: Any, count: int, keep: bool) -> list[float]:
        """The log-probs of targets [length, n], and the gradient of their weighted sum."""
        inputs, ids = datum.loss_fn_inputs, datum.model_input.to_ints()
        table = torch.tensor(inputs["target_tokens"].data).reshape(inputs["target_tokens"].shape)
        weights = torch.tensor(inputs["weights"].data).reshape(table.shape)
        assert ids[1:] == table[:-1, 0].tolist()
        nothing = np.zeros(table[:, 1:].shape, np.float32)
        others = Alternatives(table[:, 1:].numpy(), nothing, nothing)
        sequence = TrainingSequence([*ids, int(table[-1, 0])], [Span(0, 1, len(table) + 1, [], [], others)])
        (batch,) = micro_batches([sequence], 10_000, torch.device("cpu"))
        trainer = Trainer(self.cloud.decoder, self.lora, PolicyLoss())
        logprobs = trainer._logprobs(batch, self.lora.policy(self.cloud.decoder, 0))
        if keep:
            divisor = len(table) * count if self.cloud.takes_means else 1
            (-(weights * logprobs).sum() / divisor).backward()
        return logprobs.detach().flatten().tolist()

    def _sequence(self, datum: Any, count: int) -> TrainingSequence:
        """A datum in which every token belongs to a sample. The trainer's mean is undone, because the service sums."""
        ids, inputs = datum.model_input.to_ints(), datum.loss_fn_inputs
        targets = list(inputs["target_tokens"].data)
        assert ids[1:] == targets[:-1]
        factor = 1 if self.cloud.takes_means else len(targets) * count
        advantages = [factor * value for value in inputs["advantages"].data]
        span = Span(0, 1, len(targets) + 1, list(inputs["logprobs"].data), advantages)
        return TrainingSequence([*ids, targets[-1]], [span])


if hasattr(tinker.TrainingClient.load_state_with_optimizer_async, "__deprecated__"):
    Training.load_state_with_optimizer_async.__deprecated__ = "as in the SDK"  # type: ignore[attr-defined]


class Sampling:
    """`SamplingClient`."""

    def __init__(self, cloud: Cloud, slot: int) -> None:
        self.cloud, self.slot, self.epoch = cloud, slot, cloud.epoch
        cloud.gave(self)

    async def sample_async(self, *positional: Any, **named: Any) -> Any:
        asked = SAMPLE.bind(self, *positional, **named)
        asked.apply_defaults()
        return await self.cloud.does("sample", lambda: self._sample(asked.arguments), self.epoch)

    def _sample(self, asked: dict[str, Any]) -> Any:
        prompt, params = asked["prompt"].to_ints(), asked["sampling_params"]
        self.cloud.prompts.append((len(prompt), asked["num_samples"], params.max_tokens))
        top_k = asked.get("topk_sample_logprobs", 0)
        own = SamplingParams(
            params.max_tokens,
            params.temperature,
            params.top_p,
            max(0, params.top_k),
            params.seed or 0,
            frozenset(params.stop or ()),
            top_k,
        )
        drawn = self.cloud.sample(prompt, asked["num_samples"], own, self.slot)
        if self.cloud.shows_drawn:
            drawn = [self._as_drawn(prompt, tokens, own) for tokens in drawn]
        sequences = [
            sequence(
                [token.token_id for token in tokens],
                [token.logprob for token in tokens],
                "stop" if tokens[-1].token_id in own.stop_token_ids else "length",
                [list(token.top) for token in tokens] if top_k else None,
            )
            for tokens in drawn
        ]
        return response(sequences, *self._about_prompt(prompt, asked))

    def _as_drawn(self, prompt: list[int], tokens: list[Any], params: SamplingParams) -> list[Any]:
        """The tokens with log-probs of the distributions that they were drawn from."""
        ids = [*prompt, *(token.token_id for token in tokens)]
        whole = self.cloud.scores(ids, len(tokens), self.slot, top_k=self.cloud.decoder.shape.vocab).top
        told = []
        for token, row in zip(tokens, rows_of(whole), strict=True):
            shaped = drawn_from(row, params)
            top = tuple(list(shaped.items())[: params.top_logprobs])
            told.append(dataclasses.replace(token, logprob=shaped[token.token_id], top=top))
        return told

    def _about_prompt(self, prompt: list[int], asked: dict[str, Any]) -> tuple[Any, Any, Any]:
        if not asked["include_prompt_logprobs"]:
            return None, None, None
        if not self.cloud.can_score:
            raise failed_request("user", "prompt log-probs are not supported")
        top_k = asked["topk_prompt_logprobs"] if self.cloud.knows_top_k else 0
        found = self.cloud.scores(prompt, len(prompt) - 1, self.slot, top_k=top_k)
        top = [None, *rows_of(found.top)] if top_k else None
        wanted, targets = asked.get("target_prompt_logprobs"), None
        if wanted is not None and self.cloud.knows_top_k:
            rows, width = wanted.shape
            cells = np.maximum(0, np.array(wanted.data).reshape(rows, width))
            scored = self.cloud.scores(prompt, rows, self.slot, targets=cells).targets
            targets = types.TensorData(data=scored.flatten().tolist(), dtype="float32", shape=[rows, width])
        last = asked.get("prompt_logprobs_last_n") or len(prompt)
        first_scored = len(prompt) - last
        logprobs = [v if i >= first_scored else None for i, v in enumerate([None, *found.logprobs])]
        return logprobs, top, targets


Sampling.sample_async.__signature__ = SAMPLE  # type: ignore[attr-defined]
