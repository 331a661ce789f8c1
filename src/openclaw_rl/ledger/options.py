"""The options for recording turns."""

from pathlib import Path

from openclaw_rl.config.options import Section, option
from openclaw_rl.types.episodes import MAX_GROUP_SIZE

#: The defaults of groups.
GROUP_SIZE, GROUP_TIMEOUT = 8, 600.0


class CaptureOptions(Section):
    """What is recorded, and where."""

    session_timeout: float = option(
        1800.0, "Seconds without a request after which a session ends.", group="Capture", env="SESSION_TIMEOUT", gt=0
    )
    capture: bool = option(
        True,
        "Record turns; with --no-capture the server stores nothing and does not learn.",
        group="Capture",
        env=("CAPTURE", "ENABLE_RL_INTERCEPT"),
        flags=("--enable-rl-intercept",),
    )
    rl_buffer_dir: Path | None = option(
        None,
        "Folder of the ledger, which records the turns.",
        group="Capture",
        env="RL_BUFFER_DIR",
        shown="the run directory",
    )
    group_size: int = option(
        GROUP_SIZE,
        "Attempts at a task that form a group, unless their rewards say otherwise.",
        group="Capture",
        env="GROUP_SIZE",
        ge=2,
        le=MAX_GROUP_SIZE,
    )
    group_timeout: float = option(
        GROUP_TIMEOUT,
        "Seconds after its first reward that a group waits for further attempts.",
        group="Capture",
        env="GROUP_TIMEOUT",
        gt=0,
    )
