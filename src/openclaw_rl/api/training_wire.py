"""Request bodies of an outside trainer."""

from typing import Annotated

from pydantic import Field

from openclaw_rl.api.wire import WireModel

#: The most turns that one claim can ask for; only a mistake would ask for more.
MAX_CLAIMED_TURNS = 4096
#: The longest lease: a week.
MAX_LEASE_SECONDS = 604_800
#: The longest time that a claim can wait for turns: proxies close connections that are silent for longer.
MAX_CLAIM_WAIT_SECONDS = 60


class ClaimRequest(WireModel):
    """The body of POST /v1/training/claim: how many turns, for how long, and how long to wait for them."""

    count: Annotated[int, Field(ge=1, le=MAX_CLAIMED_TURNS)] | None = None
    """At least so many turns, or none; without it, --batch-size."""
    lease_seconds: Annotated[float, Field(ge=1, le=MAX_LEASE_SECONDS)] | None = None
    """Without it, --lease-seconds."""
    wait_seconds: Annotated[float, Field(ge=0, le=MAX_CLAIM_WAIT_SECONDS)] = 0.0


class ConfirmRequest(WireModel):
    """The body of POST /v1/training/confirm: the id of a lease whose turns were trained on."""

    lease: str
