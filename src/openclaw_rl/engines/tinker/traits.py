"""What kind of server a Tinker address belongs to: servers differ in more than they say.

Tinker itself is what the SDK describes. Other servers tell through their schema (`/openapi.json`) which losses they
know and which program they are. What is known of SkyRL tx 0.3, the self-hosted server that this is tested with: it
takes the mean where Tinker sums, and weights that are sampled from are put over those that are trained.
"""

from dataclasses import dataclass
from typing import Any

import httpx

from openclaw_rl.engines.base import EngineAway

SKYRL_TX = "Tinker API Mock"
LOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Traits:
    """How a server differs from Tinker."""

    name: str = "Tinker"
    losses: frozenset[str] | None = None
    """Those that it knows; None: it does not say."""
    takes_means: bool = False
    """Whether its losses are means over a sequence's tokens and over sequences, not sums."""
    samples_over_training: bool = False
    """Whether a model must not be trained and sampled from under the same name."""


async def look_at(base_url: str | None) -> Traits:
    """What can be known before a session is opened. Raises EngineAway if nobody is there."""
    if base_url is None:
        return Traits()
    try:
        async with httpx.AsyncClient(timeout=LOOK_SECONDS) as client:
            answer = await client.get(f"{base_url.rstrip('/')}/openapi.json")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise EngineAway(f"No Tinker server can be reached at {base_url} (--tinker-base-url): {reason}.") from error
    try:
        return read_schema(answer.json()) if answer.status_code == 200 else Traits()
    except (ValueError, KeyError, TypeError, AttributeError):
        return Traits()


def read_schema(schema: dict[str, Any]) -> Traits:
    """Traits from an OpenAPI document. Raises KeyError and the like if it is none."""
    skyrl = schema["info"]["title"] == SKYRL_TX
    known = schema["components"]["schemas"]["ForwardBackwardInput"]["properties"]["loss_fn"].get("enum")
    return Traits(
        name="SkyRL tx" if skyrl else str(schema["info"]["title"]),
        losses=frozenset(known) if known else None,
        takes_means=skyrl,
        samples_over_training=skyrl,
    )
