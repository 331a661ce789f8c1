"""The options for recording turns and keeping notes."""

from pathlib import Path

from openclaw_rl.config.options import Section, option
from openclaw_rl.types.episodes import MAX_GROUP_SIZE

#: The defaults of groups.
GROUP_SIZE, GROUP_TIMEOUT = 8, 600.0


class CaptureOptions(Section):
    """What is recorded, and where."""

    heading = "Capture"
    session_timeout: float = option(1800.0, "Seconds without a request after which a session ends.", gt=0)
    capture: bool = option(
        True,
        "Record turns; with --no-capture the server stores nothing and does not learn.",
        env=("CAPTURE", "ENABLE_RL_INTERCEPT"),
        flags=("--enable-rl-intercept",),
    )
    rl_buffer_dir: Path | None = option(
        None, "Folder of the ledger, which records the turns.", shown="the run directory"
    )
    group_size: int = option(
        GROUP_SIZE, "Attempts at a task that form a group, unless their rewards say otherwise.", ge=2, le=MAX_GROUP_SIZE
    )
    group_timeout: float = option(
        GROUP_TIMEOUT, "Seconds after its first reward that a group waits for further attempts.", gt=0
    )


class NotesOptions(Section):
    """Notes of what users ask for."""

    heading = "Notes"
    notes: bool = option(True, "Keep notes of what users ask for, and give them to the model; --no-notes does neither.")
    note_probes: int = option(
        8,
        "One conversation in this many is answered without a note, to see whether the policy does without it; 0: none.",
        ge=0,
    )
    note_tokens: int = option(
        600, "The most tokens of notes in a prompt; of more notes, those most like the request are given.", gt=0
    )
    examples: int = option(
        2,
        "The most examples of wanted answers that a conversation is given, as earlier exchanges; 0: none.",
        ge=0,
        le=8,
    )
    distil_personal: bool = option(
        False, "Teach the policy also notes that only one of several users has, or that contradict another user's."
    )
