"""The ranks that train one policy together, as the trainer sees them. One process alone is the usual case.

`rank_group` has the other case. It is imported only where there are several ranks, because it imports PyTorch's
distributed package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor


class RankLost(Exception):
    """The other ranks cannot be reached, so this one cannot go on."""


class Ranks(Protocol):
    """Splits the work of a pass, and makes its result one.

    All ranks make the same calls in the same order. After each call they have the same result or the same error.
    """

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files."""

    @property
    def on_this_machine(self) -> int:
        """How many ranks share the memory of this machine, with this one."""

    def share_out(self, count: int, compute: Callable[[int], None], take_part: Callable[[], object]) -> None:
        """Compute the parts 0 to `count` - 1 of a pass, each on one rank.

        A rank that has no part left calls `take_part` where the others cannot go on without it. If a part fails on
        one rank, every rank raises its error.
        """

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks. What FSDP adds up by itself is left alone."""

    def all_agree(self, agrees: bool) -> bool:
        """Whether every rank agrees."""

    def raise_any(self, error: Exception | None) -> None:
        """Raise the error of the first rank that has one."""

    def on_first(self, action: Callable[[], None]) -> None:
        """Carry out an action on the first rank alone. If it fails, every rank raises an error."""

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors in the CPU's memory, on the first rank; the others get none."""


class OneRank:
    """This process alone."""

    is_first = True
    on_this_machine = 1

    def share_out(self, count: int, compute: Callable[[int], None], take_part: Callable[[], object]) -> None:
        for number in range(count):
            compute(number)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        pass

    def all_agree(self, agrees: bool) -> bool:
        return agrees

    def raise_any(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def on_first(self, action: Callable[[], None]) -> None:
        action()

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank holds a part (then all ranks call this); other tensors as they are."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
