"""The constraints of the sequences in a batch."""

from collections.abc import Sequence as Rows

from openclaw_rl.engines.base import ConstraintRefused
from openclaw_rl.engines.constraints import Allowed
from openclaw_rl.engines.local.sampling.scheduler import Sequence


def allowed_tokens(drawing: Rows[Sequence]) -> tuple[dict[int, Allowed], dict[int, str]]:
    """What the constrained rows may draw; and why a request's constraint cannot be enforced any further, by request."""
    allowed: dict[int, Allowed] = {}
    refused: dict[int, str] = {}
    for row, sequence in enumerate(drawing):
        if sequence.automaton is None:
            continue
        try:
            allowed[row] = sequence.automaton.allowed()
        except ConstraintRefused as error:
            refused[sequence.request] = str(error)
    return allowed, refused
