"""The sampler of servers whose weights an outside trainer replaces, such as slime's SGLang servers."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from openclaw_rl.engines.base import EngineError, EngineUnavailable, PolicyRef, SamplerCapabilities
from openclaw_rl.engines.remote.dialect import Dialect
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.process import ServerProcess
from openclaw_rl.engines.remote.replica import Replica
from openclaw_rl.engines.remote.sampler import RemoteOptions, RemoteSampler, ServedPolicy
from openclaw_rl.engines.serving import TokenStream
from openclaw_rl.types import BASE_VERSION, SHARED, SampleRequest, SamplingParams

COST = "an outside trainer replaces its weights: an answer may begin on one version and end on the next"
#: What is sampled to find out which weights a server holds.
LOOK = SampleRequest([1], SamplingParams(max_tokens=1))
#: Gets a new version, the one before it, and what the servers call it.
Record = Callable[[int, int, str], None]


class WeightNumbers:
    """Version numbers for the weights that servers hold, by the labels that the servers give to them.

    * A new label is a new version. A number is never given to two labels, also not after this program was restarted.
    * While several servers change their weights one after the other, labels come and go: each keeps its number.
    * When the labels begin anew, because the trainer or a server was restarted, old numbers are not used again.
    """

    def __init__(self) -> None:
        self.newest = self._latest = BASE_VERSION
        self._record: Record | None = None
        self._numbers: dict[str, int] = {}
        self._newest_label = ""
        self._restarts = 0

    def begin(self, latest: int, record: Record | None = None) -> None:
        """Use only numbers after `latest`; `record` is told of each new version."""
        self.newest = self._latest = latest
        self._record = record
        self._numbers.clear()

    def number_of(self, label: str, restarts: int) -> int:
        """The version of weights with this label. `restarts` counts how often servers came back."""
        if restarts != self._restarts or self._goes_back(label):
            self._restarts = restarts
            self._numbers.clear()
        if label not in self._numbers:
            number = self.reserve()
            if self._record is not None:
                self._record(number, self.newest, label)
            self._numbers[label] = self.newest = number
            self._newest_label = label
        return self._numbers[label]

    def reserve(self) -> int:
        """A number for weights that no server has shown yet."""
        self._latest += 1
        return self._latest

    def _goes_back(self, label: str) -> bool:
        """Whether trainers that count their updates would give this label only after a restart."""
        is_counted = label.isdecimal() and self._newest_label.isdecimal()
        return is_counted and int(label) < int(self._newest_label) - 1


class OutsideWeightsSampler(RemoteSampler):
    """Implements `Sampler` with whatever weights the servers hold.

    * The version of an answer is that of the weights which drew its first token. The log-prob of each token is of the
      weights that drew this token.
    * Nothing can be published, and only the newest version can be asked for.
    """

    def __init__(
        self, dialect: Dialect, servers: Sequence[tuple[InferenceServer, ServerProcess | None]], options: RemoteOptions
    ) -> None:
        super().__init__(dialect, servers, options)
        self.numbers = WeightNumbers()
        self._begun: set[int] = set()
        """The streams of which a first token has come."""

    @property
    def capabilities(self) -> SamplerCapabilities:
        return replace(super().capabilities, loads=frozenset(), candidates=False, keeps_base=False)

    @property
    def newest_version(self) -> int:
        return self.numbers.newest

    def describe(self) -> str:
        return f"{super().describe()}; {COST}"

    async def begin(self, latest: int, record: Record | None = None) -> None:
        """Number the weights from now on, after `latest`; `record` is told of each new version."""
        self.numbers.begin(latest, record)
        await self.look()

    def reserve(self) -> int:
        """A number for weights that no server has shown yet."""
        return self.numbers.reserve()

    async def look(self) -> int:
        """The version that the servers hold now. If none answers, the last that was seen."""
        replica = next((replica for replica in self.replicas if replica.up), None)
        if replica is not None and replica.traits is not None:
            with contextlib.suppress(EngineError):
                async with replica.answering(replica.times.probe):
                    pieces = self.dialect.sample(replica.server, replica.traits, replica.traits.base_model, LOOK, 0)
                    async for piece in pieces:
                        self._see(piece.weights)
        return self.newest_version

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False, line: str = SHARED) -> None:
        raise EngineUnavailable("An outside trainer replaces the weights of these servers, so no policy can be loaded.")

    def forget(self, stream: TokenStream) -> None:
        self._begun.discard(stream.id)
        super().forget(stream)

    async def _prepare_policies(self) -> None:
        self._hold()

    def _hold(self) -> None:
        self._versions.replace_all(self.newest_version, ServedPolicy(self.traits.base_model, None))

    def _see(self, labels: Sequence[str]) -> int:
        """The version of the first of these labels, which are in the order of time; the newest if there are none."""
        restarts = sum(replica.restarts for replica in self.replicas)
        numbers = [self.numbers.number_of(label, restarts) for label in labels]
        self._hold()
        return numbers[0] if numbers else self.newest_version

    def _check_weights(
        self, replica: Replica, policy: ServedPolicy, weights: Sequence[str], stream: TokenStream | None = None
    ) -> None:
        number = self._see(weights)
        if stream is None or not weights:
            return
        # Completions of one request may be answered by different weights: the oldest counts.
        version = min(stream.version, number) if stream.id in self._begun else number
        if stream.id not in self._begun or version != stream.version:
            self._begun.add(stream.id)
            self._versions.release(stream.use)
            stream.version = version
            stream.use = self._versions.use(version)
