"""Several ranks that train one policy: how they meet, add up gradients, and agree on errors.

Gradients travel through NCCL between CUDA devices and through gloo on the CPU. What the ranks tell each other travels
through gloo in a group of its own, so that it never gets between the weights and gradients that are under way.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openclaw_rl.engines.base import StepLost, StepRefused, StepStopped
from openclaw_rl.engines.host import address_of, host_id, interface_of
from openclaw_rl.engines.local.process.worker_messages import Meeting, RankPlace
from openclaw_rl.engines.local.training.ranks import RankLost, whole
from openclaw_rl.losses.custom_loss import LossFailed

#: How long a rank waits for the others, for instance if their micro-batches are larger, before it gives up.
MAX_WAIT = timedelta(minutes=30)
TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
#: Errors of one rank that the others raise in the same class.
SHARED_ERRORS: tuple[type[Exception], ...] = (
    StepLost,
    StepStopped,
    StepRefused,
    LossFailed,
    torch.OutOfMemoryError,
    MemoryError,
)


class OtherRankFailed(Exception):
    """Another rank has failed in this pass; `RankGroup.share_out` finds out why."""


class RankGroup:
    """Implements `Ranks` for one of several processes.

    - The sum of a tensor has the same bits on every rank, so copies of weights stay equal.
    - A rank that fails in the middle of a pass never leaves another one waiting. While weights are sharded, ranks
      tell each other before every exchange of weights or gradients whether they have failed.
    """

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.place = place
        self.device = device
        self.sharded_models: list[Any] = []
        """Modules of FSDP, whose state is put in order after a pass that failed."""
        self._control = dist.new_group(backend="gloo", timeout=MAX_WAIT)
        hosts = [""] * place.count
        with lost_unless_done():
            dist.all_gather_object(hosts, host_id(), self._control)
        self.on_this_machine = hosts.count(host_id())

    @property
    def is_first(self) -> bool:
        return self.place.number == 0

    def share_out(self, count: int, compute: Callable[[int], None], take_part: Callable[[], object]) -> None:
        number = self.place.number
        ranks = self.place.count
        error: Exception | None = None
        try:
            for first in range(0, count, ranks):
                if first + number < count:
                    compute(first + number)
                elif self.place.shards:
                    take_part()
        except RankLost:
            raise
        except OtherRankFailed:
            self._raise_first(None)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the others wait
            error = failure
        self.raise_any(error)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        with lost_unless_done():
            for tensor in tensors:
                if not hasattr(tensor, "full_tensor"):
                    # A column of a table would be added up in the wrong order.
                    dense = tensor.contiguous()
                    dist.all_reduce(dense)
                    if dense is not tensor:
                        tensor.copy_(dense)

    def all_agree(self, agrees: bool) -> bool:
        return not self._any(not agrees)

    def raise_any(self, error: Exception | None) -> None:
        if self._any(error is not None):
            self._raise_first(error)

    def go_on_together(self) -> None:
        """Called before each exchange of weights or gradients. Raises OtherRankFailed if a rank will not take part."""
        if self._any(False):
            raise OtherRankFailed

    def on_first(self, action: Callable[[], None]) -> None:
        error: Exception | None = None
        if self.is_first:
            try:
                action()
            except (OSError, StepRefused) as failure:
                error = failure
        self.raise_any(error)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        collected = {}
        with lost_unless_done():
            for name, tensor in tensors.items():
                tensor = whole(tensor.detach())
                if self.is_first:
                    collected[name] = tensor.cpu()
        return collected

    def _any(self, here: bool) -> bool:
        """Whether something is true on at least one rank."""
        flag = torch.tensor(here, dtype=torch.int32)
        with lost_unless_done():
            dist.all_reduce(flag, dist.ReduceOp.MAX, self._control)
        return bool(flag)

    def _raise_first(self, error: Exception | None) -> None:
        """All ranks raise the error of the first rank that has one."""
        errors: list[tuple[type[Exception], str] | None] = [None] * self.place.count
        with lost_unless_done():
            dist.all_gather_object(errors, None if error is None else (shared_kind(error), str(error)), self._control)
        for model in self.sharded_models:
            model.settle()
        first, kind, message = next((number, *other) for number, other in enumerate(errors) if other is not None)
        if error is not None and first == self.place.number:
            raise error
        raise StepLost(StepRefused(message)) if kind is StepLost else kind(message)


def shared_kind(error: Exception) -> type[Exception]:
    """The class in which the other ranks raise an error of this one."""
    if isinstance(error, OSError):
        return StepRefused
    return next((kind for kind in SHARED_ERRORS if isinstance(error, kind)), RuntimeError)


@contextlib.contextmanager
def lost_unless_done() -> Iterator[None]:
    """An exchange with the other ranks. Raises RankLost if one of them is gone."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise RankLost(str(error)) from error


def join(place: RankPlace, device: torch.device, connection: Any) -> RankGroup:
    """Meet the other ranks. The first one says through `connection` where it waits, and the others are told there.

    On one machine they use its loopback, so that nothing can be reached from outside. Otherwise they use the network
    over which the server is connected.
    """
    host = place.host or address_of(connection.fileno())
    if interface := interface_of(host):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    store = open_store(place, host, connection)
    dist.init_process_group(backend, store=store, rank=place.number, world_size=place.count, timeout=MAX_WAIT)
    return RankGroup(place, device)


def open_store(place: RankPlace, host: str, connection: Any) -> Any:
    """The table through which the ranks find each other. It listens only on the address that the others are told."""
    if place.number == 0:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        given = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        store = TCP_STORE(host, port, place.count, True, MAX_WAIT, **given)
        connection.send(Meeting(host, port))
        return store
    meeting: Meeting = connection.recv()
    return TCP_STORE(meeting.host, meeting.port, place.count, False, MAX_WAIT, wait_for_workers=False)
