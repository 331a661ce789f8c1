"""The options for recording turns."""

from pathlib import Path

from openclaw_rl.config.options import Section, option


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
