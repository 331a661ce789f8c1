"""One policy on the service: draws tokens from it and asks it for log-probs; and how its sampling client is created.

Nothing is guessed. Log-probs that are missing, that do not fit their tokens, that are not finite or not raw are asked
for again by scoring the tokens; other wrong answers are refused.

Tinker keeps weights to sample from under a path of their own. A server that samples from the adapter that it trains
(`traits`) gets further adapters, which are never trained: each policy is loaded into one of them from the learner's
saved state.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import Connection
from openclaw_rl.engines.tinker.sdk import CallFailed, Kind, read_error
from openclaw_rl.engines.tinker.training_run import PolicyRecord, new_name, result
from openclaw_rl.engines.tinker.traits import PROBE, PROBE_PROMPT, is_shaped
from openclaw_rl.types import Numbers, SamplingParams, ScoreRequest, Scores, TopTokens

log = logging.getLogger(__name__)
#: Seeds are mapped to this many bits, which every server takes.
SEED_BITS = 31
#: Likeliest tokens to ask for where the service cannot score chosen ones.
TOP_K_INSTEAD_OF_TARGETS = 20
Top = tuple[tuple[int, float], ...]
#: Adapters that policies are loaded into in turn, so that a new policy does not disturb requests on the one before.
STAND_INS = 2


class Drawn(NamedTuple):
    """A piece of one completion."""

    ids: list[int]
    logprobs: list[float]
    top: list[Top]
    """Empty if none were asked for, or the service does not give them."""
    stopped: bool
    """Whether it ended with a stop token."""


class RemotePolicy:
    """One policy's weights behind a sampling client, which is created again if the service has lost it."""

    def __init__(self, connection: Connection, make: Callable[[], Awaitable[Any]]) -> None:
        self.connection = connection
        self._make = make
        self._client: Any = None
        self._opening = asyncio.Lock()
        self._short_scores = True
        """Whether the service is believed to be able to score only the last tokens of a prompt."""

    async def open(self) -> None:
        """Create the client; call this first. Raises CallFailed."""
        self._client = await self.connection.create(self._make, "load the policy to sample from")

    def close(self) -> None:
        """Let the client go: nobody samples until `open` is called again."""
        self._client = None

    async def draw(self, prompt: Sequence[int], params: SamplingParams, n: int, tokens: int, place: str) -> list[Drawn]:
        """`n` continuations of at most `tokens` tokens; `place` differs between the calls of one request.

        Raises CallFailed.
        """
        raw = not is_shaped(params) or await self.connection.logprob_probe.passes(lambda: self._probe(prompt))
        more = self._top_of_samples(params.top_logprobs) if raw else {}
        sequences = await self._sequences(prompt, params, n, tokens, place, more)
        return await asyncio.gather(*(self._read(prompt, sequence, params, tokens, raw) for sequence in sequences))

    async def score(self, request: ScoreRequest) -> Scores:
        """Where the service cannot score chosen tokens, more of the likeliest ones are returned. Raises CallFailed."""
        more = self._targets(request)
        if request.top_k:
            alone = request.targets is not None and not more
            more["topk_prompt_logprobs"] = max(request.top_k, TOP_K_INSTEAD_OF_TARGETS if alone else 0)
        answer = await self._prompt_logprobs(request, more)
        last = request.last_n
        logprobs = fitting(answer.prompt_logprobs, last)
        if logprobs is None:
            raise CallFailed(Kind.BROKEN, "score", f"no finite log-prob for each of the last {last} tokens")
        return Scores(logprobs, read_top(answer, request), read_targets(answer, request))

    async def _sequences(
        self, prompt: Sequence[int], params: SamplingParams, n: int, tokens: int, place: str, more: dict[str, int]
    ) -> list[Any]:
        """The completions as the service gives them."""
        settings = self.connection.types.SamplingParams(
            max_tokens=tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            seed=derived_seed(params.seed, place),
            stop=sorted(params.stop_token_ids),
        )
        answer = await self._sample(prompt, n, settings, "sample", **more)
        sequences = list(answer.sequences)
        if len(sequences) != n:
            raise CallFailed(Kind.BROKEN, "sample", f"{len(sequences)} completions where {n} were asked for")
        return sequences

    async def _probe(self, prompt: Sequence[int]) -> tuple[list[float], list[float]]:
        """The log-probs that come with a draw at a high temperature, and the scores of the same tokens."""
        start = list(prompt[-PROBE_PROMPT:])
        (sequence,) = await self._sequences(start, PROBE, 1, PROBE.max_tokens, "probe", {})
        ids = list(sequence.tokens)
        logprobs = fitting(sequence.logprobs, len(ids))
        if not logprobs:
            raise CallFailed(Kind.BROKEN, "sample", "no log-prob for each token")
        return logprobs, (await self.score(ScoreRequest([*start, *ids], len(ids)))).logprobs

    def _top_of_samples(self, top_k: int) -> dict[str, int]:
        known = sdk.takes(self._client.sample_async, "topk_sample_logprobs")
        return {"topk_sample_logprobs": top_k} if top_k and known else {}

    def _targets(self, request: ScoreRequest) -> dict[str, Any]:
        if request.targets is None or not sdk.takes(self._client.sample_async, "target_prompt_logprobs"):
            return {}
        rows = len(request.ids) - 1
        width = request.targets.shape[1]
        cells = np.full((rows, width), -1)
        cells[rows - request.last_n :] = request.targets
        tensor = self.connection.types.TensorData(data=cells.flatten().tolist(), dtype="int64", shape=[rows, width])
        return {"target_prompt_logprobs": tensor}

    async def _prompt_logprobs(self, request: ScoreRequest, more: dict[str, Any]) -> Any:
        """The service's answer about a prompt; only the last tokens are scored if the service can do that."""
        settings = self.connection.types.SamplingParams(max_tokens=1)
        asked = {**more, "include_prompt_logprobs": True}
        short = self._short_scores and sdk.takes(self._client.sample_async, "prompt_logprobs_last_n")
        if short:
            last = min(request.last_n, len(request.ids) - 1)
            try:
                return await self._sample(request.ids, 1, settings, "score", **asked, prompt_logprobs_last_n=last)
            except CallFailed as error:
                if error.kind not in (Kind.BROKEN, Kind.REFUSED):
                    raise
        answer = await self._sample(request.ids, 1, settings, "score", **asked)
        # Where the short way failed, the server may be older or the prompt at fault; now it is known which.
        self._short_scores = self._short_scores and not short
        return answer

    async def _sample(self, prompt: Sequence[int], n: int, settings: Any, what: str, **more: Any) -> Any:
        client = self._client
        ids = self.connection.types.ModelInput.from_ints(list(prompt))

        def ask() -> Awaitable[Any]:
            answer: Awaitable[Any] = self._client.sample_async(
                prompt=ids, num_samples=n, sampling_params=settings, **more
            )
            return answer

        try:
            return await self._asking(ask, what)
        except CallFailed as error:
            if error.kind is not Kind.LOST:
                raise
            log.warning("%s It is loaded again.", error)
        async with self._opening:
            if self._client is client:
                await self.open()
        return await self._asking(ask, what)

    async def _asking(self, ask: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Make a call, and remember whether the service can be reached."""
        try:
            answer = await self.connection.call(ask, what)
        except CallFailed as error:
            if error.kind in (Kind.AWAY, Kind.LOCKED):
                self.connection.sampling_trouble = str(error)
            raise
        self.connection.sampling_trouble = ""
        return answer

    async def _read(
        self, prompt: Sequence[int], sequence: Any, params: SamplingParams, tokens: int, raw: bool
    ) -> Drawn:
        """Cut a sequence after its stop token and to the length asked for, and give it raw log-probs."""
        given = list(sequence.tokens)
        given_logprobs = list(sequence.logprobs or [])
        ids = given[:tokens]
        end = next((i for i, id in enumerate(ids) if id in params.stop_token_ids), None)
        if end is not None:
            ids = ids[: end + 1]
        if not ids:
            raise CallFailed(Kind.BROKEN, "sample", "an answer without tokens")
        stopped = end is not None or (sequence.stop_reason == "stop" and len(given) <= tokens)
        logprobs = fitting(given_logprobs[: len(ids)], len(ids)) if raw and len(given_logprobs) == len(given) else None
        if logprobs is None:
            scores = await self.score(ScoreRequest([*prompt, *ids], len(ids), top_k=params.top_logprobs))
            return Drawn(ids, scores.logprobs, rows_of(scores.top, params.top_logprobs), stopped)
        tops = [ranked(entry)[: params.top_logprobs] for entry in (getattr(sequence, "topk_logprobs", None) or [])]
        fits = params.top_logprobs and len(tops) >= len(ids)
        return Drawn(ids, logprobs, tops[: len(ids)] if fits else [], stopped)


def read_top(answer: Any, request: ScoreRequest) -> TopTokens | None:
    """The likeliest tokens, equally many at each position; None if the service gives fewer than asked for."""
    if not request.top_k:
        return None
    rows = [ranked(entry) for entry in (answer.topk_prompt_logprobs or [])[-request.last_n :]]
    width = min([*map(len, rows), max(request.top_k, TOP_K_INSTEAD_OF_TARGETS)], default=0)
    if len(rows) != request.last_n or width < request.top_k:
        return None
    numbers = np.array([row[:width] for row in rows])
    return TopTokens(numbers[:, :, 0].astype(np.int32), numbers[:, :, 1].astype(np.float32))


def read_targets(answer: Any, request: ScoreRequest) -> Numbers | None:
    """The log-probs of chosen tokens, NaN where one is not finite; None if the service does not give them."""
    given = getattr(answer, "target_prompt_logprobs", None)
    if request.targets is None or given is None:
        return None
    rows = len(request.ids) - 1
    width = request.targets.shape[1]
    if len(given.data) != rows * width:
        return None
    logprobs = np.array(given.data, dtype=np.float32).reshape(rows, width)[-request.last_n :]
    return np.where(np.isfinite(logprobs), logprobs, np.float32(np.nan))


def derived_seed(seed: int, place: str) -> int:
    """A seed for one call: each piece of a request has its own, and the same request has the same ones again."""
    digest = hashlib.sha256(f"{seed}:{place}".encode()).digest()
    return int.from_bytes(digest[:8]) >> (64 - SEED_BITS)


def fitting(values: Sequence[float | None] | None, count: int) -> list[float] | None:
    """The last `count` values, if there are enough and all are finite."""
    last = list(values or [])[-count:]
    finite = [value for value in last if value is not None and math.isfinite(value)]
    return finite if len(finite) == count else None


def ranked(entry: Sequence[tuple[int, float]] | None) -> Top:
    """The likeliest tokens first, each once: some servers always put the given token first."""
    logprobs = {int(id): float(logprob) for id, logprob in entry or ()}
    return tuple(sorted(logprobs.items(), key=lambda pair: -pair[1]))


def rows_of(top: TopTokens | None, k: int) -> list[Top]:
    """The k likeliest tokens of each position; empty if there are none."""
    if top is None:
        return []
    rows = zip(top.ids[:, :k].tolist(), top.logprobs[:, :k].tolist(), strict=True)
    return [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]


class PolicyLoader:
    """Creates sampling clients."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._stand_ins: list[Any] = []
        """Adapters for policies, the least recently loaded first."""
        self._using = asyncio.Lock()

    async def open(self, record: PolicyRecord) -> Any:
        """A client that samples from a policy. Raises CallFailed and the errors of the SDK."""
        path = record.sampler
        if path is None or self.connection.traits.samples_over_training:
            path = await self._copy(record)
        return await self.connection.service.create_sampling_client_async(model_path=path)

    async def _copy(self, record: PolicyRecord) -> str:
        if record.state is None:
            raise CallFailed(Kind.REFUSED, "load the policy", "its state was not saved with it")
        async with self._using:
            adapter = await self._with_weights(record, record.state)
            saved = await result(adapter.save_weights_for_sampler_async(new_name("served")))
            self._stand_ins.append(adapter)
            path: str = saved.path
            return path

    async def _with_weights(self, record: PolicyRecord, state: str) -> Any:
        """An adapter with a state loaded; an adapter that fails to load it is not used again."""
        if len(self._stand_ins) == STAND_INS:
            adapter = self._stand_ins.pop(0)
            try:
                await result(adapter.load_state_async(state))
                return adapter
            except sdk.failures() as error:
                # A server that was restarted has lost all of them.
                log.warning("Creating an adapter to sample from again: %s", read_error(error).words)
                self._stand_ins.clear()
        adapter = await self.connection.service.create_lora_training_client_async(
            base_model=record.base_model, rank=record.rank
        )
        await result(adapter.load_state_async(state))
        return adapter
