"""What an engine is, in protocols, and the errors that every engine raises.

The rest of the code does not know which engine it has. A new engine is one file (or package) beside this one
that implements `Sampler`, and `Learner` if it can train.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from openclaw_rl.types import SampledToken, SampleRequest, ScoreRequest, Scores, TrainingSequence

if TYPE_CHECKING:  # both raise the errors below
    from openclaw_rl.engines.capabilities import SamplerCapabilities
    from openclaw_rl.engines.policy_ref import PolicyRef


class EngineError(Exception):
    """The engine could not do what was asked; the message is fit for a client's eyes."""


class QueueFull(EngineError):
    """Too many requests wait already. Try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: int = 1) -> None:
        super().__init__(f"The queue is full ({waiting} sequences wait already). Try again shortly.")
        self.retry_after = retry_after


class EngineUnavailable(EngineError):
    """The engine stopped while it worked on this request, or cannot start."""


class VersionGone(EngineUnavailable):
    """The policy version that was asked for is not held any more, and will not be again."""


class EngineAway(EngineUnavailable):
    """The engine cannot be reached, or lets nobody in: nothing that it was asked to do is to blame."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine can hold."""

    max_context_tokens: int
    """Prompt and completion together."""
    max_sequences: int
    """Sequences sampled at the same time."""
    max_choices: int
    """Completions that one request may ask for."""

    def check_fits(self, request: ScoreRequest) -> None:
        """Raise EngineError if the tokens to score are more than the context holds."""
        if len(request.ids) > self.max_context_tokens:
            raise EngineError(
                f"{len(request.ids)} tokens are to be scored, and the context holds {self.max_context_tokens}."
            )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A glance at the engine, for `/readyz` and `/metrics`."""

    ready: bool
    active: int
    waiting: int
    restarts: int
    detail: str = ""
    """Why it is not ready, in words."""


class SampleStream(Protocol):
    """The tokens of one request as they are sampled.

    Iterate to get lists of tokens, each list as soon as it exists. `drop` ends one of the completions early,
    `close` all that still run; either frees their place at once. `cached_tokens` (prompt tokens that did not
    have to be computed) is known from the first list on.
    """

    @property
    def version(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[list[SampledToken]]: ...
    def drop(self, index: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a training step did to the policy. Per response token, except for the loss and the norm."""

    loss: float
    clip_fraction: float
    kl_old: float
    """Divergence of the new policy from the one before the step."""
    kl_base: float
    """Divergence of the policy before the step from the base model, estimated on part of the batch."""
    grad_norm: float
    """0 where the engine does not tell it."""
    tokens: int
    response_tokens: int
    seconds: float


class StepRefused(EngineError):
    """The step would have harmed the policy, or could not be made; the policy is as it was before."""


class Learner(Protocol):
    """Computes gradients. One call at a time; all may raise EngineUnavailable, after which `load` or `reset` is due."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def reset(self) -> None:
        """Begin anew, with a policy that is the base model."""

    async def step(self, sequences: Sequence[TrainingSequence]) -> StepResult:
        """One step on a batch, all of it or nothing. Raises StepRefused."""

    async def undo(self) -> None:
        """Take the last step back."""

    async def write_policy(self, folder: Path) -> "PolicyRef":
        """Write the policy into a folder, in one of the forms that the learner declares."""

    async def save(self, folder: Path) -> None:
        """Write all that is needed to go on from here: the policy's files, and others that are called `learner.…`."""

    async def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises StepRefused if it is not fit."""


class Sampler(Protocol):
    """Draws tokens. Requests run concurrently; none waits for a weight update."""

    @property
    def capabilities(self) -> "SamplerCapabilities": ...
    @property
    def limits(self) -> EngineLimits: ...
    @property
    def newest_version(self) -> int: ...
    def stats(self) -> EngineStats: ...

    async def start(self) -> None:
        """Return when requests can be served; raise EngineUnavailable with a reason when that cannot be."""

    async def close(self) -> None: ...

    def sample(self, request: SampleRequest) -> SampleStream:
        """Queue a request. Raises QueueFull at once rather than let a client wait without end."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Log-probs of given tokens, as background work. Raises EngineError when they cannot be had."""

    async def publish(self, version: int, policy: "PolicyRef", *, candidate: bool = False) -> None:
        """Load what a learner wrote as `version`; new requests then sample from the newest version.

        A candidate is sampled from only when it is asked for, until it is promoted or retracted.
        """

    def promote(self, version: int) -> None: ...
    def retract(self, version: int) -> None: ...
