"""How a self-hosted server differs from Tinker.

Tinker itself behaves as the SDK describes. Other servers say in their schema (`/openapi.json`) which losses they know
and which program they are. SkyRL tx 0.3, the self-hosted server that this is tested with, takes the mean where Tinker
sums, and overwrites the weights in training with those that are loaded to sample from.
"""

from dataclasses import dataclass
from typing import Any

import httpx

from openclaw_rl.engines.base import EngineAway
from openclaw_rl.http_client import url_without_account

SKYRL_TX = "Tinker API Mock"
SCHEMA_TIMEOUT_SECONDS = 10.0


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


async def look_at(base_url: str | None) -> Traits:
    """What the server's schema says. Raises EngineAway if the server cannot be reached."""
    if base_url is None:
        return Traits()
    try:
        async with httpx.AsyncClient(timeout=SCHEMA_TIMEOUT_SECONDS) as client:
            answer = await client.get(f"{base_url.rstrip('/')}/openapi.json")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason, shown = str(error) or type(error).__name__, url_without_account(base_url)
        raise EngineAway(f"No Tinker server can be reached at {shown} (--tinker-base-url): {reason}.") from None
    try:
        return read_schema(answer.json()) if answer.status_code == 200 else Traits()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Traits()


def read_schema(schema: dict[str, Any]) -> Traits:
    """Traits from an OpenAPI document. Raises KeyError and the like if it is not one."""
    skyrl = schema["info"]["title"] == SKYRL_TX
    known = schema["components"]["schemas"]["ForwardBackwardInput"]["properties"]["loss_fn"].get("enum")
    return Traits(
        name="SkyRL tx" if skyrl else str(schema["info"]["title"]),
        losses=frozenset(known) if known else None,
        takes_means=skyrl,
        samples_over_training=skyrl,
    )
