"""When to save the learner's state for recovery, so that few steps have to be made again after a crash."""

#: The share of the training time that saving for recovery may take.
MAX_SHARE = 0.05


class RecoveryBudget:
    """Decides after each step whether a recovery state is due.

    - Saving takes at most `share` of the training time: a state is due when that share of the time since the last save
      exceeds what the last save took. The first state, whose cost is not known, is due after the first step.
    - After a crash, the steps to make again took at most 1 / `share` times as long as a save.
    """

    def __init__(self, share: float = MAX_SHARE) -> None:
        self.share = share
        self._trained = self._cost = 0.0

    @property
    def is_due(self) -> bool:
        return self._trained * self.share > self._cost

    def add_step(self, seconds: float) -> None:
        self._trained += seconds

    def add_save(self, seconds: float) -> None:
        """The state was saved, for recovery or as a checkpoint."""
        self._trained = 0.0
        self._cost = seconds
