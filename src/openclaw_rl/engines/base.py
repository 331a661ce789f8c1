"""The protocols that engines implement, their errors, and what an engine declares about itself.

The rest of the code does not know which engine it has. A new engine is a module or package next to this one that
implements `Sampler`, `Learner` or both. `tests/engines/conformance.py` holds it to what is promised here.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from openclaw_rl.models import ADAPTER_CONFIG, ON_TINKER
from openclaw_rl.rendering.response import Delta
from openclaw_rl.types import Priority, SampledToken, SampleRequest, ScoreRequest, Scores, TrainingSequence


class EngineError(Exception):
    """The engine could not do what was asked. A client may read the message."""


class QueueFull(EngineError):
    """Too many requests wait already. Try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: int = 1) -> None:
        super().__init__(f"The queue is full ({waiting} sequences wait already). Try again shortly.")
        self.retry_after = retry_after


class EngineUnavailable(EngineError):
    """The engine stopped while it worked on this request, or cannot start."""


class VersionGone(EngineUnavailable):
    """The policy version that was asked for is not held any more, and will not come back."""


class ConstraintRefused(EngineUnavailable):
    """The request's constraint cannot be enforced. The message says why, and the request alone is at fault."""


class ApiRefused(EngineUnavailable):
    """The API behind a sampler of text refuses a request or fails. `status` is what it answers."""

    def __init__(self, message: str, status: int, code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


class EngineAway(EngineUnavailable):
    """The engine cannot be reached or refuses access. The request itself is not at fault."""


class StepRefused(EngineError):
    """The step would have harmed the policy, or could not be made. The policy is as it was before."""


class StepStopped(StepRefused):
    """`stop_step` ended the step early. The policy is as it was before, and no batch is to blame."""


class StepUnsupported(EngineAway):
    """The engine cannot make steps of this kind, so no batch is to blame. The policy is as it was before."""


class StepLost(EngineError):
    """A primitive failed in a way that may pass: the step is worth another trial from its snapshot."""

    def __init__(self, final: EngineError) -> None:
        """`final` is raised instead if the last trial fails in this way."""
        super().__init__(str(final))
        self.final = final


class WeightForm(StrEnum):
    """The form in which a learner hands the weights of a policy to a sampler."""

    PEFT = "a PEFT adapter"
    MODEL = "a model with all its weights"
    REMOTE = "a reference to weights on Tinker"


#: The file by which each form is recognised; a model folder has none of the files before it.
MARKERS = {ON_TINKER: WeightForm.REMOTE, ADAPTER_CONFIG: WeightForm.PEFT, "config.json": WeightForm.MODEL}


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """One policy's weights. Only engines look into the folder."""

    form: WeightForm
    folder: Path


def policy_in(folder: Path) -> PolicyRef:
    """The policy in a folder on disk. Raises EngineUnavailable if there is none."""
    for name, form in MARKERS.items():
        if (folder / name).is_file():
            return PolicyRef(form, folder)
    raise EngineUnavailable(
        f"{folder} holds no policy: it has none of {', '.join(MARKERS)}. "
        "Give another --resume-from-ckpt, or none to start from the base model."
    )


@dataclass(frozen=True, slots=True)
class SamplerCapabilities:
    """What a sampler can load, record and score."""

    loads: frozenset[WeightForm]
    tokens: bool = True
    """Whether it takes and gives tokens; a `TextSampler` takes messages and gives text."""
    max_top_logprobs: int | None = None
    """Most likeliest tokens that it records with a sample; None: as many as asked for."""
    scores_targets: bool = True
    """Whether `score` returns the log-probs of chosen tokens (`ScoreRequest.targets`)."""
    raw_logprobs: bool = True
    """Whether log-probs are those of the raw distribution, before temperature, top-p and top-k."""
    candidates: bool = True
    """Whether a candidate can be sampled from while the newest version serves."""
    keeps_base: bool = True
    """Whether the base model can be asked while a policy serves."""
    constrains: bool = False
    """Whether it can restrict completions (`SampleRequest.constraint`)."""
    advice: str = ""
    """How to get more from this sampler, if that is possible."""

    def check_loads(self, policy: PolicyRef) -> None:
        """Raise EngineUnavailable for a policy in a form that the sampler cannot load."""
        if policy.form not in self.loads:
            raise EngineUnavailable(
                f"{policy.folder} holds {policy.form}, and this sampler loads {' or '.join(sorted(self.loads))}. "
                "Give the --lora-rank and the --backend that it was trained with, or another --resume-from-ckpt; "
                "none starts from the base model."
            )


@dataclass(frozen=True, slots=True)
class LearnerCapabilities:
    """What a learner writes, and whether it can take a step back."""

    writes: frozenset[WeightForm]
    undo: bool = True
    alternatives: bool = True
    """Whether it trains on tokens that were not sampled (`Lesson.alternatives`)."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine."""

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
    """The state of an engine, for `/readyz` and `/metrics`."""

    ready: bool
    active: int
    waiting: int
    restarts: int
    detail: str = ""
    """Why it is not ready, as a sentence."""
    servers: Mapping[str, int | None] = field(default_factory=dict)
    """For each server of another project by its URL: the requests that it works on; None if it is not up."""


class SampleStream(Protocol):
    """The tokens of one request as they are sampled.

    * Iterating gives lists of tokens, each list as soon as it exists; tokens of one completion come in order.
    * The last token of each completion has a finish, and only that one.
    * `drop` ends one completion early, `close` all that still run. Both free the places at once.
    * `cached_tokens`, the prompt tokens that did not have to be computed, is known when the last token is read. It
      counts only what the request's owner has asked for before, so that nobody can find out about others' prompts.
    * If the engine fails, iterating raises EngineUnavailable.
    """

    @property
    def version(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[list[SampledToken]]: ...
    def drop(self, index: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ChatCall:
    """Asks a model that is given messages for `n` answers."""

    body: Mapping[str, Any]
    """A request as OpenAI's API has it, without a model and without `n`; one that has a `prompt` continues a text."""
    n: int = 1
    priority: Priority = Priority.USER


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of one answer."""

    index: int
    """Which of the n answers it belongs to."""
    deltas: tuple[Delta, ...]
    finish: str | None = None
    """OpenAI's name for why the answer ended, on its last piece."""


class TextStream(Protocol):
    """The pieces of one call as they come; otherwise like a `SampleStream`.

    `usage`, OpenAI's numbers of tokens, is known when the last piece is read; empty if the API does not give them.
    """

    @property
    def version(self) -> int: ...
    @property
    def usage(self) -> Mapping[str, int]: ...
    def __aiter__(self) -> AsyncIterator[list[TextPiece]]: ...
    def drop(self, index: int) -> None: ...
    def close(self) -> None: ...


#: For each sequence, for each of its spans, one log-prob per token.
SpanLogprobs = list[list[list[float]]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a training step did to the policy. Averages per response token, except for the loss and the norm."""

    loss: float
    clip_fraction: float
    kl_old: float
    """Distance between the policy after the step and the one before it."""
    kl_base: float
    """Distance between the policy before the step and the base model, estimated on part of the batch."""
    grad_norm: float
    """0 if the engine does not report it."""
    tokens: int
    response_tokens: int
    seconds: float
    before: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """By turn: the learner's log-probs of the response tokens, under the policy before the step."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """One forward and backward pass over a batch. Sums over the response tokens, except for the loss."""

    loss: float
    """Of the whole batch."""
    clipped: float
    """Number of tokens that the clip held back."""
    kl_base: float
    """0 if the loss has no term for the divergence from the base model."""
    tokens: int
    """Tokens that the model read."""
    response_tokens: int
    logprobs: SpanLogprobs
    """Of the policy during this pass."""


class TrainingPrimitives(Protocol):
    """What an engine implements in order to train; `TransactionalLearner` makes whole steps of it.

    The calls of one step come one after the other, with two exceptions: `optim_step` is called while
    `forward_backward` runs and must take effect after it, and `score(…, base=True)` may run during any other call.

    - Every call may raise EngineUnavailable: the policy in training is then lost, until `load` or `reset`.
    - `forward_backward`, `optim_step` and `score` may also raise StepRefused, StepUnsupported or StepLost. The
      weights may have changed by then: the caller restores a snapshot.
    """

    @property
    def capabilities(self) -> LearnerCapabilities: ...
    @property
    def has_dropout(self) -> bool:
        """Whether the log-probs of `forward_backward` differ from those of `score` for the same weights."""

    def describe(self) -> str:
        """A phrase that says where and how it runs."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Drop the policy in training at once, even during a call."""

    async def reset(self) -> None:
        """Start again from the base model."""

    def stop_step(self) -> None:
        """Let the calls that run end early with StepStopped, where the engine can."""

    def pause_step(self, *, paused: bool) -> None:
        """Let the calls that run rest, or go on, where the engine can."""

    async def forward_backward(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        """Compute the gradient of the batch's loss, in place of any earlier gradient."""

    async def optim_step(self) -> float:
        """Apply the gradient once and return its norm (0 if unknown). Raises StepRefused if there is no gradient."""

    async def snapshot(self) -> str:
        """Keep the weights and the optimiser's state; the result names them. Only the newest has to be kept."""

    async def restore(self, snapshot: str) -> None:
        """Return to a snapshot, bit for bit."""

    async def score(self, sequences: Sequence[TrainingSequence], *, base: bool = False) -> SpanLogprobs:
        """Log-probs of the spans' tokens under the policy.

        With `base`, under the base model, and only for the first sequences if it cannot be asked about all.
        """

    async def write_policy(self, folder: Path) -> PolicyRef: ...

    async def save(self, folder: Path, steps: int, *, lasting: bool = True) -> None:
        """Write the policy, the optimiser's state, and the number of steps made so far.

        If it is not `lasting`, a later save replaces it soon: a service may let what it stores for it expire.
        """

    async def load(self, folder: Path) -> int:
        """Continue from what `save` wrote; returns the number of steps. Raises StepRefused and changes nothing if
        the checkpoint does not fit."""


class Learner(Protocol):
    """Trains the policy. Calls run one at a time. After EngineUnavailable, call `load` or `reset` before anything else.

    `TransactionalLearner` implements it for every engine that has `TrainingPrimitives`.
    """

    @property
    def capabilities(self) -> LearnerCapabilities: ...

    def describe(self) -> str:
        """A phrase that says where and how it runs."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def reset(self) -> None:
        """Start again from the base model."""

    async def step(self, sequences: Sequence[TrainingSequence]) -> StepResult:
        """Make one step on a batch, whole or not at all. Raises StepRefused."""

    def stop_step(self) -> None:
        """Let the step that runs, if any, end early with StepStopped: the policy is then as it was before."""

    def pause_step(self, *, paused: bool) -> None:
        """Let the step that runs, if any, rest, or go on, so that others have the machine meanwhile."""

    async def undo(self) -> None:
        """Take the last step back. Raises StepRefused if there is none."""

    async def write_policy(self, folder: Path) -> PolicyRef:
        """Write the policy into a folder, in one of the forms that the learner declares."""

    async def save(self, folder: Path, *, lasting: bool = True) -> None:
        """Write all that is needed to continue: the policy's files, and others named `learner.…`.

        If it is not `lasting`, a later save replaces it soon: a service may let what it stores for it expire.
        """

    async def load(self, folder: Path) -> None:
        """Continue from what `save` wrote. Raises StepRefused if it does not fit."""


class Sampler(Protocol):
    """Draws tokens and scores given ones.

    * Requests run at the same time, and none waits for a weight update.
    * A request finishes on the policy version on which it began.
    * Log-probs are those of the raw distribution, where `capabilities` says so. A constraint does not change them.
    * A constrained completion that ends by itself fits its constraint. Tokens that it forced are marked.
    """

    @property
    def capabilities(self) -> SamplerCapabilities: ...
    @property
    def limits(self) -> EngineLimits: ...
    @property
    def newest_version(self) -> int: ...
    def stats(self) -> EngineStats: ...

    async def start(self) -> None:
        """Return when requests can be served. Raises EngineUnavailable with the reason if that fails."""

    async def close(self) -> None: ...

    def describe(self) -> str:
        """A phrase that says where and how it runs, once it has started."""

    def sample(self, request: SampleRequest) -> SampleStream:
        """Queue a request. Raises QueueFull, EngineUnavailable and VersionGone at once."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Log-probs of given tokens, as background work. Raises EngineError if they cannot be computed."""

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        """Load a policy that a learner wrote as `version`. Requests that name no version then sample from it.

        A candidate serves only requests that name it, until it is promoted or retracted. Raises EngineUnavailable.
        """

    def promote(self, version: int) -> None: ...
    def retract(self, version: int) -> None: ...


#: What a sampler of text says to whoever wants tokens of it.
NO_TOKENS = "The model's tokens and weights are elsewhere: this server passes text on."


class TextSampler(Sampler, ABC):
    """A sampler of a model that is given messages. It draws no tokens, scores none and loads no weights."""

    @abstractmethod
    def chat(self, call: ChatCall) -> TextStream:
        """Send a call. Raises QueueFull and EngineUnavailable at once; iterating raises ApiRefused too."""

    def sample(self, request: SampleRequest) -> SampleStream:
        raise EngineUnavailable(NO_TOKENS)

    async def score(self, request: ScoreRequest) -> Scores:
        raise EngineUnavailable(NO_TOKENS)

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        raise EngineUnavailable(NO_TOKENS)

    def promote(self, version: int) -> None:
        raise EngineUnavailable(NO_TOKENS)

    def retract(self, version: int) -> None:
        raise EngineUnavailable(NO_TOKENS)
