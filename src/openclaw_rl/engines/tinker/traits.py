"""How a service differs from Tinker, and whether the log-probs that it gives with its samples are raw.

Tinker itself behaves as the SDK describes. Other servers say in their schema (`/openapi.json`) which losses and fields
they know, and which program they are. SkyRL tx 0.3, the self-hosted server that this is tested with, takes the mean
where Tinker sums, and overwrites the weights in training with those that are loaded to sample from. The servers of
SkyRL that came after it are recognised by the losses that 0.3 does not have. They sample from the newest weights,
whichever are asked for.

Some services give the log-probs after temperature and truncation, and do not say so. Training needs raw ones. Scores of
given tokens are always raw, so the two are compared.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from openclaw_rl.engines.base import EngineAway
from openclaw_rl.engines.tinker.sdk import CallFailed, Kind
from openclaw_rl.http_client import url_without_account
from openclaw_rl.types import SamplingParams

SKYRL_TX = "Tinker API Mock"
#: A loss that SkyRL tx 0.3 does not know and the servers after it do.
LATER_LOSS = "cispo"
SCHEMA_TIMEOUT_SECONDS = 10.0
log = logging.getLogger(__name__)
#: What is drawn for the comparison. At usual temperatures, a confident model has nearly the same log-probs raw and
#: processed; at this one they differ by a nat or more per token. It is the highest that servers take.
PROBE = SamplingParams(max_tokens=32, temperature=2.0)
#: Tokens from the end of a prompt that the draw continues.
PROBE_PROMPT = 64
#: Largest mean difference per token: ten times the rounding error of bfloat16.
TOLERANCE = 0.3
SHOWS_DRAWN = (
    "Tinker's log-probs of samples are not raw but those after temperature, top-p and top-k: tokens that are sampled "
    "with these settings are scored again."
)
UNKNOWN = "Whether Tinker's log-probs of samples are raw cannot be checked, so they are taken to be raw: %s"


@dataclass(frozen=True, slots=True)
class Traits:
    """How a server differs from Tinker."""

    name: str = "Tinker"
    losses: frozenset[str] | None = None
    """The losses that it knows; None: it does not say."""
    takes_means: bool = False
    """Whether its losses are means over a sequence's tokens and over sequences, not sums."""
    samples_over_training: bool = False
    """Whether a model must not be trained and sampled from under the same name."""
    takes_tables: bool = True
    """Whether targets may be tables (several tokens at each position), which top-k distillation needs."""
    pins_versions: bool = True
    """Whether it samples from the weights that are asked for. Otherwise it samples from the newest: there is no
    candidate, no base model next to the policy, and an answer may begin on one version and end on the next."""

    @property
    def serves_lines(self) -> bool:
        """Whether it keeps many policies apart that are sampled from at the same time."""
        return self.pins_versions and not self.samples_over_training


async def look_at(base_url: str | None) -> Traits:
    """What the server's schema says. Raises EngineAway if the server cannot be reached."""
    if base_url is None:
        return Traits()
    try:
        async with httpx.AsyncClient(timeout=SCHEMA_TIMEOUT_SECONDS) as client:
            answer = await client.get(f"{base_url.rstrip('/')}/openapi.json")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        shown = url_without_account(base_url)
        raise EngineAway(f"No Tinker server can be reached at {shown} (--tinker-base-url): {reason}.") from None
    try:
        return read_schema(answer.json()) if answer.status_code == 200 else Traits()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Traits()


def read_schema(schema: dict[str, Any]) -> Traits:
    """Traits from an OpenAPI document. Raises KeyError and the like if it is not one."""
    types = schema["components"]["schemas"]
    is_skyrl = schema["info"]["title"] == SKYRL_TX
    losses = frozenset(types["ForwardBackwardInput"]["properties"]["loss_fn"].get("enum") or ())
    is_later = is_skyrl and LATER_LOSS in losses
    tensor = types.get("TensorData", {}).get("properties")
    return Traits(
        name="SkyRL" if is_later else "SkyRL tx" if is_skyrl else str(schema["info"]["title"]),
        losses=losses or None,
        takes_means=is_skyrl,
        samples_over_training=is_skyrl and not is_later,
        takes_tables=tensor is None or "shape" in tensor,
        pins_versions=not is_later,
    )


class LogprobProbe:
    """Compares once, when it is first asked; others who ask meanwhile wait for the result."""

    def __init__(self) -> None:
        self._raw: bool | None = None
        self._checking = asyncio.Lock()

    async def passes(self, probe: Callable[[], Awaitable[tuple[Sequence[float], Sequence[float]]]]) -> bool:
        """Whether log-probs are raw. `probe` gives the log-probs that came with a draw, and the scores of its tokens.

        Raises CallFailed if the service cannot be reached; the next call then tries again.
        """
        async with self._checking:
            if self._raw is None:
                self._raw = await self._check(probe)
        return self._raw

    async def _check(self, probe: Callable[[], Awaitable[tuple[Sequence[float], Sequence[float]]]]) -> bool:
        try:
            given, scored = await probe()
        except CallFailed as error:
            if error.kind not in (Kind.BROKEN, Kind.REFUSED):
                raise
            # A server that cannot score can still serve.
            log.warning(UNKNOWN, error)
            return True
        apart = sum(abs(one - other) for one, other in zip(given, scored, strict=True)) / len(given)
        if apart > TOLERANCE:
            log.warning(SHOWS_DRAWN)
        return apart <= TOLERANCE


def is_shaped(params: SamplingParams) -> bool:
    """Whether the parameters change the distribution that is drawn from."""
    return params.temperature != 1 or params.top_p < 1 or params.top_k > 0
