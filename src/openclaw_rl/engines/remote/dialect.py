"""What differs between inference servers: how to start one, ask it, and read its answers."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.types import SampledToken, SampleRequest, ScoreRequest, Scores


@dataclass(frozen=True, slots=True)
class ServerTraits:
    """What a running server said about itself."""

    product: str
    """Name and version."""
    base_model: str
    """The name by which requests ask for the base model."""
    max_context: int
    """Most tokens of a prompt and its completion together."""
    max_top_logprobs: int | None
    """Most likeliest tokens that it gives; None: as many as asked for."""
    scores_targets: bool
    """Whether it gives the log-probs of chosen tokens."""
    prioritises: bool
    """Whether it serves users before background work."""
    mixes_base: bool = True
    """Whether a request for the base model gets the base model while adapters are loaded. Where it does not, an adapter
    that changes nothing stands for the base model."""
    replaces_tied_head: bool = True
    """Whether `reload` replaces the head of a model whose embedding is also its head."""


class SampledPiece(NamedTuple):
    """Tokens of one completion, in order."""

    tokens: list[SampledToken]
    cached_tokens: int | None
    """Prompt tokens that were not computed; None if the server has not said."""
    weights: tuple[str, ...] = ()
    """The names of all weights that computed these tokens or earlier ones, if the server says them."""


class ServerScores(NamedTuple):
    """The scores of one request."""

    scores: Scores
    weights: tuple[str, ...]
    """The names of the weights that computed them, if the server says them."""


class Dialect(Protocol):
    """The requests and answers of one kind of server. Calls raise InferenceServerGone and RequestRefused."""

    name: str
    health: str
    """A path that answers 200 while the server is alive."""
    needs: str
    """The arguments that a server needs in order to work with us, for messages."""
    reload_needs: str
    """The same for a server whose weights are all replaced."""
    raw_logprobs_need: str
    """The setting with which the server gives raw log-probs, for messages."""

    async def probe(self, server: InferenceServer) -> ServerTraits:
        """Ask the server what it is and can do. Raises EngineUnavailable with the argument that it lacks."""

    def sample(
        self, server: InferenceServer, traits: ServerTraits, model: str, request: SampleRequest, index: int
    ) -> AsyncIterator[SampledPiece]:
        """Sample completion `index` of a request from a loaded policy, or from the base model."""

    async def score(
        self, server: InferenceServer, traits: ServerTraits, model: str, request: ScoreRequest
    ) -> ServerScores: ...

    async def load(self, server: InferenceServer, model: str, folder: Path) -> None:
        """Load a PEFT adapter under a name."""

    async def unload(self, server: InferenceServer, model: str) -> None:
        """Requests that run finish on it."""

    async def reload(self, server: InferenceServer, weights: str, folder: Path) -> None:
        """Replace all weights of the base model by those in a model folder, and give them a name.

        Requests that run finish before, and those that come wait. After an error the server may hold half of each.
        """


def salt_of(owner: str) -> dict[str, str]:
    """The field that keeps an owner's cached prefixes apart from others'. It does not tell the owner's name."""
    return {"cache_salt": hashlib.blake2b(owner.encode(), digest_size=16).hexdigest()} if owner else {}


def seed_of(seed: int, index: int) -> int:
    """The seed of completion `index`: neighbouring seeds have no completion in common."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()) & 0x7FFFFFFF
