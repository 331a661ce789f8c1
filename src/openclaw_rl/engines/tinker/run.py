"""A training run on the service: an adapter with its optimiser, passes over data, and states to come back to."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import TRIALS, Connection
from openclaw_rl.engines.tinker.errors import CallFailed
from openclaw_rl.engines.tinker.surrogate import loss_config
from openclaw_rl.types import TrainingSettings

log = logging.getLogger(__name__)

#: AdamW's, as the local engine has it; Tinker's own default is smaller.
ADAM_EPS = 1e-8
#: How long the service keeps what only the next step or a running server needs. What is in a checkpoint it keeps.
DAY = 24 * 3600
STATE_SECONDS, POLICY_SECONDS = DAY, 30 * DAY
NOTHING_LOADED = "The learner on Tinker holds no policy."


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How to train."""

    rank: int
    train_attn: bool
    train_mlp: bool
    training: TrainingSettings


class TrainingRun:
    """What the service holds of the policy in training; nothing, until `begin` or `restore`."""

    def __init__(self, connection: Connection, options: TrainingOptions) -> None:
        self.connection, self.options = connection, options
        self.state: str | None = None
        """Where the service has saved what it holds now, if it has."""
        self._client: Any = None

    @property
    def client(self) -> Any:
        if self._client is None:
            raise EngineUnavailable(NOTHING_LOADED)
        return self._client

    def forget(self) -> None:
        self._client = self.state = None

    async def begin(self, base_model: str) -> None:
        """A new adapter, which changes nothing yet. Raises EngineUnavailable."""
        self.forget()
        self._client = await self._creating(lambda: self._create(base_model), "begin a training run")

    async def train(self, data: list[Any], loss: str | None = None) -> tuple[Any, Any]:
        """One pass and its update, submitted together: the service makes them in order. Raises CallFailed.

        With the options' loss, unless another one is named, which has no settings.
        """
        training, client = self.options.training, self.client
        self.state = None
        adam = self.connection.types.AdamParams(
            learning_rate=training.learning_rate,
            beta1=training.betas[0],
            beta2=training.betas[1],
            eps=ADAM_EPS,
            weight_decay=training.weight_decay,
            grad_clip_norm=training.max_grad_norm,
        )

        async def both() -> tuple[Any, Any]:
            gradients = await client.forward_backward_async(data, *self._loss(loss))
            update = await client.optim_step_async(adam)
            return await gradients, await update

        return await self.connection.work(both, f"train with the loss {self._loss(loss)[0]}", trials=1)

    async def look(self, data: list[Any], loss: str | None = None) -> Any:
        """A pass that changes nothing. Raises CallFailed."""
        client = self.client

        async def look() -> Any:
            return await (await client.forward_async(data, *self._loss(loss)))

        return await self.connection.work(look, "look at the policy")

    def _loss(self, named: str | None) -> tuple[str, dict[str, float] | None]:
        own = self.options.training.loss
        return (named, None) if named else (own.kind, loss_config(own))

    async def saved_state(self, *, lasting: bool = False) -> str:
        """The path of what is held now, saved if it is not, or not for long enough. Raises EngineUnavailable."""
        client = self.client
        if self.state is None or lasting:
            ttl = None if lasting else STATE_SECONDS
            # A name of its own each time: one whose answer was lost on the way may exist all the same.
            self.state = await self._saving(lambda: client.save_state_async(new_name("state"), ttl_seconds=ttl))
        return self.state

    async def saved_policy(self, *, lasting: bool = False) -> str:
        """The path of the weights alone, to sample from. Raises EngineUnavailable."""
        client, ttl = self.client, None if lasting else POLICY_SECONDS
        return await self._saving(lambda: client.save_weights_for_sampler_async(new_name("policy"), ttl_seconds=ttl))

    async def restore(self, state: str, base_model: str) -> None:
        """Hold what was saved under a path. Raises EngineUnavailable, and then holds nothing."""
        client, self._client = self._client, None
        if client is not None and not sdk.is_deprecated(client.load_state_with_optimizer_async):

            async def load() -> Any:
                return await (await client.load_state_with_optimizer_async(state))

            try:
                await self.connection.work(load, "load a training state")
                self._client = client
            except CallFailed as error:
                log.warning("%s A new training run goes on from there.", error)
        if self._client is None:
            self.state = None
            self._client = await self._creating(lambda: self._create_from(state, base_model), "load a training state")
        self.state = state

    async def _create(self, base_model: str) -> Any:
        options = self.options
        return await self.connection.service.create_lora_training_client_async(
            base_model=base_model,
            rank=options.rank,
            seed=options.training.seed,
            train_attn=options.train_attn,
            train_mlp=options.train_mlp,
            train_unembed=False,
        )

    async def _create_from(self, state: str, base_model: str) -> Any:
        """A run that goes on from a state, in the way that this version of the SDK wants it."""
        if sdk.is_deprecated(sdk.load().TrainingClient.load_state_with_optimizer_async):
            return await self.connection.service.create_training_client_from_state_with_optimizer_async(state)
        client = await self._create(base_model)
        await (await client.load_state_with_optimizer_async(state))
        return client

    async def _saving(self, make: Callable[[], Awaitable[Awaitable[Any]]]) -> str:
        async def save() -> Any:
            return await (await make())

        try:
            saved = await self.connection.work(save, "save the weights", trials=TRIALS)
        except CallFailed as error:
            raise error.as_unavailable() from error
        path: str = saved.path
        return path

    async def _creating(self, make: Callable[[], Awaitable[Any]], what: str) -> Any:
        try:
            return await self.connection.create(make, what)
        except CallFailed as error:
            raise error.as_unavailable() from error


def new_name(kind: str) -> str:
    return f"{kind}-{uuid4().hex[:12]}"
