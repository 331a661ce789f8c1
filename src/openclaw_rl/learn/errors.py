"""What can be wrong with a turn that was to be learned from."""


class NoSignal(ValueError):
    """The turn cannot be trained on; the message says why."""
