"""The options of recording."""

from pathlib import Path

from openclaw_rl.config.options import Section, option


class CaptureOptions(Section):
    """What is recorded, and where."""

    session_timeout: float = option(
        1800.0, "Seconds after which a silent session has ended.", group="Capture", env="SESSION_TIMEOUT", gt=0
    )
    capture: bool = option(
        True,
        "Record turns; without it the server serves and stores nothing.",
        group="Capture",
        env=("CAPTURE", "ENABLE_RL_INTERCEPT"),
        flags=("--enable-rl-intercept",),
    )
    rl_buffer_dir: Path | None = option(
        None, "Where the ledger of turns is kept.", group="Capture", env="RL_BUFFER_DIR", shown="the run directory"
    )
