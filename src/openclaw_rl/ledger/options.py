"""The options for recording turns and keeping notes."""

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


class NotesOptions(Section):
    """Notes of what users ask for."""

    notes: bool = option(
        True,
        "Keep notes of what users ask for, and give them to the model; --no-notes does neither.",
        group="Notes",
        env="NOTES",
    )
    note_probes: int = option(
        8,
        "One conversation in this many is answered without a note, to see whether the policy does without it; 0: none.",
        group="Notes",
        env="NOTE_PROBES",
        ge=0,
    )
    distil_personal: bool = option(
        False,
        "Teach the policy also notes that only one of several users has, or that contradict another user's.",
        group="Notes",
        env="DISTIL_PERSONAL",
    )
