"""The errors of samplers and learners, and what each means to its caller."""


class EngineError(Exception):
    """The engine could not do what was asked. A client may read the message."""


class QueueFull(EngineError):
    """Too many requests wait already. Try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: int = 1) -> None:
        super().__init__(f"The queue is full ({waiting} sequences wait already). Try again shortly.")
        self.retry_after = retry_after


class EngineUnavailable(EngineError):
    """The engine stopped while it worked on this request, or cannot start."""


class VersionGone(EngineUnavailable):
    """The policy version that was asked for is not held any more, and will not come back."""


class ConstraintRefused(EngineUnavailable):
    """The request's constraint cannot be enforced. The message says why, and the request alone is at fault."""


class EngineAway(EngineUnavailable):
    """The engine cannot be reached or refuses access. The request itself is not at fault."""


class StepRefused(EngineError):
    """The step would have harmed the policy, or could not be made. The policy is as it was before."""


class StepStopped(StepRefused):
    """`stop_step` ended the step early. The policy is as it was before, and no batch is to blame."""


class StepUnsupported(EngineAway):
    """The engine cannot make steps of this kind, so no batch is to blame. The policy is as it was before."""


class StepLost(EngineError):
    """A primitive failed in a way that may pass: the step is worth another trial from its snapshot."""

    def __init__(self, final: EngineError) -> None:
        """`final` is raised instead if the last trial fails in this way."""
        super().__init__(str(final))
        self.final = final
