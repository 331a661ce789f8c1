"""A server whose trainer is outside, over HTTP, with judged turns to claim."""

from pathlib import Path
from typing import Any, Protocol

from openclaw_rl.api.options import ApiKey
from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.learn.outside import OutsideSettings, OutsideTraining
from openclaw_rl.ledger import turns, verdicts
from openclaw_rl.methods.base import Method
from openclaw_rl.types import Hint, SampleKind, Source, State, Verdict
from support.recording import Recording
from support.records import a_turn

KEYS = {"alice": "alice-secret", "bob": "bob-secret"}


class ScriptedWeights:
    """In place of inference servers: the version that they hold."""

    def __init__(self) -> None:
        self.newest_version = self.latest = 1

    def push(self) -> None:
        self.newest_version = self.reserve()

    def reserve(self) -> int:
        self.latest += 1
        return self.latest

    async def look(self) -> int:
        return self.newest_version


class Changeable(Protocol):
    """Something with a ledger."""

    def change(self, change: Any, *arguments: Any) -> Any: ...


def judged(place: Changeable, score: float | None = 1.0, hint: list[float] | None = None, **given: Any) -> int:
    """Record a judged turn; with `hint`, the teacher's log-probs of its two tokens. Returns its number."""
    number: int = place.change(turns.record_turn, a_turn(**given), "test", None, 0, State.READY)
    hints = (Hint("Be brief.", hint),) if hint else ()
    kind = {(True, False): SampleKind.RL, (False, True): SampleKind.OPD}.get((score is not None, bool(hint)))
    verdict = Verdict(score, Source.LLM, hints)
    assert place.change(verdicts.record, number, verdict, kind or SampleKind.OPD_RL, "", 0)
    return number


class OutsideServer(Recording):
    """An application with an outside trainer and two keys, of which alice's is the admin's."""

    def __init__(self, model: Path, directory: Path, method: Method, **settings: Any) -> None:
        self.loops, self.weights = BackgroundLoops(None, None, 0), ScriptedWeights()
        keys = [ApiKey(name, secret) for name, secret in KEYS.items()]
        super().__init__(model, directory, keys=keys, operations=self.loops)
        self.settings = {"trainer": "slime", "batch_size": 2, "max_steps": 100, "max_staleness": 8, **settings}
        self.begin(method)

    def begin(self, method: Method, **settings: Any) -> OutsideTraining:
        """Train with other settings from now on."""
        values = {"lease_seconds": 3600.0, **self.settings, **settings}
        self.loops.outside = OutsideTraining(self.ledger, method, OutsideSettings(**values), self.weights)
        return self.loops.outside

    def change(self, change: Any, *arguments: Any) -> Any:
        return self.ledger.submit(change, *arguments).result(60)

    def judged(self, score: float | None = 1.0, hint: list[float] | None = None, **given: Any) -> int:
        return judged(self, score, hint, **given)

    def empty(self) -> None:
        super().empty()
        self.change(lambda db: [db.execute(f"DELETE FROM {table}") for table in ("lease_turns", "leases", "policies")])
