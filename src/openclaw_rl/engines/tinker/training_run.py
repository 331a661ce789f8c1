"""A training run on the service: an adapter with its optimiser, passes over data, saved states, and the records on disk
that say where the service keeps them.
"""

import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import TRIALS, Connection
from openclaw_rl.engines.tinker.datum import loss_config
from openclaw_rl.engines.tinker.sdk import CallFailed
from openclaw_rl.models import ON_TINKER
from openclaw_rl.types import TrainingSettings

POLICY = ON_TINKER
STATE = "learner.json"
SCHEME = "tinker://"
NAMED_PATH = re.compile(rf'{SCHEME}[^"]+')
log = logging.getLogger(__name__)
#: AdamW's, as the local engine has it; Tinker's own default is smaller.
ADAM_EPS = 1e-8
#: How long the service keeps the states that undo a step or continue after a crash, and the policies that serve; and
#: both of a person's line, which waits while its owner is away. It keeps checkpoints for good.
DAY = 24 * 3600
STATE_SECONDS = 7 * DAY
POLICY_SECONDS = 30 * DAY
LINE_SECONDS = 90 * DAY
NOTHING_LOADED = "The learner on Tinker holds no policy."


class BadRecord(ValueError):
    """The folder does not hold a policy on Tinker; the message says why."""


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """The paths of one policy version on the service."""

    base_model: str
    rank: int
    sampler: str | None
    """Weights to sample from; None if they have to be made from the state."""
    state: str | None
    """Weights with the optimiser's state, if they were saved."""

    def write(self, folder: Path) -> None:
        (folder / POLICY).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "PolicyRecord":
        """Raises BadRecord."""
        try:
            saved = json.loads((folder / POLICY).read_text())
            record = cls(str(saved["base_model"]), int(saved["rank"]), saved["sampler"], saved["state"])
        except FileNotFoundError:
            raise BadRecord(f"{folder} holds no policy of Tinker's ({POLICY} is missing)") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadRecord(f"{folder / POLICY} is damaged: {error!r}") from error
        paths = [path for path in (record.sampler, record.state) if path is not None]
        if not paths or not all(isinstance(path, str) and path.startswith(SCHEME) for path in paths):
            raise BadRecord(f"{folder / POLICY} is damaged: it names no {SCHEME} path")
        return record


@dataclass(frozen=True, slots=True)
class LearnerRecord:
    """The state to continue training from."""

    steps: int
    state: str

    def write(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "LearnerRecord":
        """Raises BadRecord."""
        try:
            saved = json.loads((folder / STATE).read_text())
            record = cls(int(saved["steps"]), str(saved["state"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadRecord(f"{folder / STATE} cannot be read: {error!r}") from error
        if not record.state.startswith(SCHEME):
            raise BadRecord(f"{folder / STATE} is damaged: it names no {SCHEME} path")
        return record


@dataclass(frozen=True, slots=True)
class TrainingRunOptions:
    """Settings of a training run."""

    rank: int
    train_attn: bool
    train_mlp: bool
    training: TrainingSettings
    state_seconds: int = STATE_SECONDS
    policy_seconds: int = POLICY_SECONDS


def paths_in(folder: Path, *, without: Path | None = None) -> set[str]:
    """The paths on the service that the records below a folder name, `without` those below another."""
    # No other files, which may quote what somebody said.
    records = [*folder.rglob(POLICY), *folder.rglob(STATE)]
    texts = (
        record.read_text(errors="replace") for record in records if without is None or without not in record.parents
    )
    return {path for text in texts for path in NAMED_PATH.findall(text)}


class TrainingRun:
    """The policy in training, as the service holds it. It holds none until `begin` or `restore`."""

    def __init__(self, connection: Connection, options: TrainingRunOptions) -> None:
        self.connection = connection
        self.options = options
        self.state: str | None = None
        """Path of the current state on the service, if it is saved there."""
        self._client: Any = None
        self._train = "train"

    @property
    def client(self) -> Any:
        if self._client is None:
            raise EngineUnavailable(NOTHING_LOADED)
        return self._client

    def forget(self) -> None:
        self._client = self.state = None

    async def begin(self, base_model: str) -> None:
        """Create an adapter that does not change the model yet. Raises EngineUnavailable."""
        self.forget()
        self._client = await self._creating(lambda: self._create(base_model), "begin a training run")

    async def submit_pass(self, data: list[Any], loss: str | None = None) -> Awaitable[Any]:
        """Submit a forward and backward pass; its result is awaited separately. Both raise CallFailed.

        It uses the options' loss, or another one by its name and without settings.
        """
        client = self.client
        arguments = self._loss(loss)
        self.state = None
        self._train = f"train with the loss {arguments[0]}"
        return await self._submit(lambda: client.forward_backward_async(data, *arguments), self._train)

    async def submit_update(self) -> Awaitable[Any]:
        """Submit the optimiser's step; its result is awaited separately. Both raise CallFailed."""
        training = self.options.training
        client = self.client
        adam = self.connection.types.AdamParams(
            learning_rate=training.learning_rate,
            beta1=training.betas[0],
            beta2=training.betas[1],
            eps=ADAM_EPS,
            weight_decay=training.weight_decay,
            grad_clip_norm=training.max_grad_norm,
        )
        return await self._submit(lambda: client.optim_step_async(adam), self._train)

    async def _submit(self, make: Callable[[], Awaitable[Awaitable[Any]]], what: str) -> Awaitable[Any]:
        answer = await self.connection.work(make, what)
        return self.connection.work(lambda: answer, what)

    async def forward(self, data: list[Any], loss: str | None = None) -> Any:
        """A pass that changes nothing. Raises CallFailed."""
        client = self.client
        arguments = self._loss(loss)
        return await self.connection.work(lambda: result(client.forward_async(data, *arguments)), "look at the policy")

    def _loss(self, name: str | None) -> tuple[str, dict[str, float] | None]:
        settings = self.options.training.loss
        return (name, None) if name else (settings.kind, loss_config(settings))

    async def saved_state(self, *, lasting: bool = False) -> str:
        """Path of the current state; saves it unless it is saved already, for long enough. Raises EngineUnavailable."""
        client = self.client
        if self.state is None or lasting:
            ttl = None if lasting else self.options.state_seconds
            # A new name each time: an earlier save whose answer was lost may still have taken place.
            self.state = await self._saving(lambda: client.save_state_async(new_name("state"), ttl_seconds=ttl))
        return self.state

    async def saved_policy(self, *, lasting: bool = False) -> str:
        """Save the weights alone, to sample from; returns their path. Raises EngineUnavailable."""
        client = self.client
        ttl = None if lasting else self.options.policy_seconds
        return await self._saving(lambda: client.save_weights_for_sampler_async(new_name("policy"), ttl_seconds=ttl))

    async def restore(self, state: str, base_model: str) -> None:
        """Return to a saved state. Raises EngineUnavailable; the run then holds no policy."""
        client = self._client
        self._client = None
        if client is not None and not sdk.is_deprecated(client.load_state_with_optimizer_async):
            try:
                await self.connection.work(
                    lambda: result(client.load_state_with_optimizer_async(state)), "load a training state"
                )
                self._client = client
            except CallFailed as error:
                log.warning("%s A new training run continues from there.", error)
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
        """A run that continues from a state, in the way that this version of the SDK supports."""
        if sdk.is_deprecated(sdk.load().TrainingClient.load_state_with_optimizer_async):
            return await self.connection.service.create_training_client_from_state_with_optimizer_async(state)
        client = await self._create(base_model)
        await result(client.load_state_with_optimizer_async(state))
        return client

    async def _saving(self, make: Callable[[], Awaitable[Awaitable[Any]]]) -> str:
        try:
            saved = await self.connection.work(lambda: result(make()), "save the weights", trials=TRIALS)
        except CallFailed as error:
            raise error.as_unavailable() from error
        path: str = saved.path
        return path

    async def _creating(self, make: Callable[[], Awaitable[Any]], what: str) -> Any:
        try:
            return await self.connection.create(make, what)
        except CallFailed as error:
            raise error.as_unavailable() from error


async def result(submission: Awaitable[Awaitable[Any]]) -> Any:
    """The result of a call: the SDK first returns when the call is submitted."""
    return await (await submission)


def new_name(kind: str) -> str:
    return f"{kind}-{uuid4().hex[:12]}"
