"""Which policy version is in which adapter slot of the worker. The sampler's books; slot 0 is the base model."""

from pathlib import Path
from typing import NamedTuple

from openclaw_rl.types import BASE_VERSION


class Resident(NamedTuple):
    """Where a version is in the worker, and where it came from."""

    slot: int
    folder: Path


class PolicySlots:
    """A fixed number of slots for policy versions; the newest resident version is the one that serves."""

    def __init__(self, slots: int) -> None:
        self.resident: dict[int, Resident] = {}
        self.latest = BASE_VERSION
        """The highest version there ever was: a number is never used for two policies."""
        self.candidates: set[int] = set()
        """Resident, but not to serve unless asked for."""
        self._slots = range(1, slots + 1)

    @property
    def newest(self) -> int:
        return max((version for version in self.resident if version not in self.candidates), default=BASE_VERSION)

    def slot_of(self, version: int) -> int | None:
        """The slot of a version, None if it is not resident."""
        if version == BASE_VERSION:
            return 0
        return self.resident[version].slot if version in self.resident else None

    def free_slot(self, in_use: set[int]) -> int | None:
        """An empty slot, else that of the oldest version which is not in use and not the newest."""
        taken = {entry.slot: version for version, entry in self.resident.items()}
        empty = [slot for slot in self._slots if slot not in taken]
        idle = sorted(version for version in self.resident if version not in in_use and version != self.newest)
        return empty[0] if empty else self.resident[idle[0]].slot if idle else None

    def vacate(self, slot: int) -> dict[int, Resident]:
        """Take whatever version is in a slot out of the books; what it was, for `restore`."""
        before = {version: entry for version, entry in self.resident.items() if entry.slot == slot}
        for version in before:
            del self.resident[version]
        return before

    def restore(self, before: dict[int, Resident]) -> None:
        """The slot was not overwritten after all."""
        self.resident.update(before)

    def settle(self, version: int, slot: int, folder: Path, candidate: bool = False) -> None:
        if candidate:
            self.candidates.add(version)
        self.resident[version] = Resident(slot, folder)
        self.latest = max(self.latest, version)

    def drop(self, version: int) -> None:
        self.resident.pop(version, None)
        self.candidates.discard(version)
