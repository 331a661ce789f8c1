"""How often something that takes time may be done beside learning."""

import time

#: The share of the time that such a thing may take.
MAX_SHARE = 0.05


class Budget:
    """Decides whether something is due that may take at most `share` of the time.

    - It is due when that share of the time since the last occasion exceeds what the last occasion took. The first one,
      whose cost is not known, is due at once.
    - So what is not done yet goes back at most 1 / `share` times as long as one occasion takes.
    """

    def __init__(self, share: float = MAX_SHARE) -> None:
        self.share = share
        self.seen = time.monotonic()
        """Up to when time was counted, for those who count all of it."""
        self._passed = self._cost = 0.0

    @property
    def is_due(self) -> bool:
        return self._passed * self.share > self._cost

    def add_time(self, seconds: float) -> None:
        """So much time has passed that counts."""
        self._passed += seconds

    def add_cost(self, seconds: float) -> None:
        """It was done, and took this long."""
        self._passed = 0.0
        self._cost = seconds
