"""Reads a run from its directory and changes nothing. Missing or damaged files become sentences on the page."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from tokenizers import Tokenizer

from openclaw_rl.dashboard.evaluations import Evaluation, read_evaluations
from openclaw_rl.dashboard.views.turn import TurnView, compare_hints, from_turn, spoken, token_view
from openclaw_rl.engines.factory import EngineSettings
from openclaw_rl.learn.checkpoints import FOLDER as CHECKPOINTS
from openclaw_rl.learn.checkpoints import RECORD, UNFINISHED, Checkpoint, Checkpoints, line_folder
from openclaw_rl.learn.guard import METRICS as GUARD_METRICS
from openclaw_rl.learn.reporting import EPISODE_METRICS, GAP_NAMES, METRICS_FILE, StepReport
from openclaw_rl.ledger import episodes, notes, pages, verdicts
from openclaw_rl.ledger.errors import LedgerUnusable, NoLedger
from openclaw_rl.ledger.schema import open_ledger, snapshot
from openclaw_rl.ledger.status import Status, read_status
from openclaw_rl.ledger.turns import conversation_starts, load_readable
from openclaw_rl.ledger.verdicts import ExampleKind
from openclaw_rl.methods.base import Method
from openclaw_rl.models import ADAPTER_CONFIG, EMBEDDED
from openclaw_rl.types import (
    SHARED,
    EpisodeCounts,
    EpisodePoint,
    Note,
    SessionSummary,
    StoredTurn,
    UpdateCard,
    VerdictCounts,
    VerdictSummary,
)

METRIC_NAMES = frozenset(field.name for field in fields(StepReport)) | {*EPISODE_METRICS, *GAP_NAMES, *GUARD_METRICS}
#: The heading of an example.
TITLES = {
    ExampleKind.HINTED: "Learned from, with a hint",
    ExampleKind.BEST: "Rated best",
    ExampleKind.WORST: "Rated worst",
    ExampleKind.ABSTAINED: "Not judged",
    ExampleKind.QUARANTINED: "Set aside",
}
#: Turns that are searched for different prompts.
MAX_SEARCHED_TURNS = 50
#: Prompts that both models are asked.
PROMPTS = 3
EXAMPLES_OF_A_KIND = 2
EPISODES_SHOWN, EPISODES_IN_CHARTS = 40, 400
STEPS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class RunSource:
    """A run's files, its method, and the engine that can answer with its policies."""

    run_dir: Path
    ledger_dir: Path
    checkpoints: Checkpoints
    model_name: str | None
    method: Method
    settings: EngineSettings
    line: str = SHARED
    """The line of policies that the page is about."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The steps of a run, by number. A step that was repeated is there once, as it was made last."""

    steps: list[dict[str, float]]
    unreadable: int
    """Lines that are not a step, for example because the disk was full."""


def read_metrics(path: Path) -> Metrics:
    """All lines that can be read; none if there is no file. The last line may be half written."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return Metrics([], 0)
    written = [line for line in lines if line.strip()]
    steps = [step for step in map(read_step, written) if step]
    by_number = {step["step"]: step for step in steps}
    return Metrics([by_number[number] for number in sorted(by_number)], len(written) - len(steps))


def read_step(line: str) -> dict[str, float] | None:
    """The metrics of a step; None if the line is not one."""
    try:
        given = json.loads(line)
        kept = {name: float(value) for name, value in given.items() if name in METRIC_NAMES and value is not None}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return kept if math.isfinite(kept.get("step", math.nan)) else None


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a conversation began, as the model was given it."""

    question: str
    ids: tuple[int, ...]


def make_example(title: str, turn: StoredTurn, tokenizer: Tokenizer | None, method: Method) -> TurnView:
    tokens = token_view(tokenizer, turn, method) if tokenizer is not None else None
    return from_turn(turn, title, tokens, compare_hints(turn, method.topk))


def question_of(turn: StoredTurn) -> str:
    """What a turn answers: the last message of a person or a tool."""
    asked = [message for message in turn.messages if message.get("role") in ("user", "tool")]
    return spoken(asked[-1]) if asked else ""


def first_prompts(db: Connection, count: int) -> list[Prompt]:
    """How the first conversations began, each question once."""
    prompts: dict[str, Prompt] = {}
    for number in conversation_starts(db, MAX_SEARCHED_TURNS):
        turn = load_readable(db, number)
        question = question_of(turn) if turn else ""
        if turn and question and question not in prompts:
            prompts[question] = Prompt(question, tuple(turn.prompt_ids))
        if len(prompts) == count:
            break
    return list(prompts.values())


@dataclass(slots=True)
class Run:
    """All that the page shows, except answers that models would have to give."""

    folder: Path
    status: Status
    metrics: Metrics
    model: str
    checkpoints: list[Checkpoint]
    evaluations: list[Evaluation] = field(default_factory=list)
    verdicts: list[VerdictSummary] = field(default_factory=list)
    verdict_counts: list[VerdictCounts] = field(default_factory=list)
    examples: list[tuple[ExampleKind, StoredTurn]] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    episodes: list[SessionSummary] = field(default_factory=list)
    """The latest sessions that are episodes."""
    episode_counts: EpisodeCounts | None = None
    episode_points: list[EpisodePoint] = field(default_factory=list)
    """The rewards of the last episodes."""
    notes: list[Note] = field(default_factory=list)
    """Of all users, removed ones among them."""
    updates: list[UpdateCard] = field(default_factory=list)
    """The last training steps, the newest first."""
    damage: str = ""
    """Why the ledger cannot be read, if so."""
    missing: list[str] = field(default_factory=list)
    """What is missing or cannot be read, one sentence each."""


def read_run(source: RunSource, server: str | None, ready: Mapping[str, Any]) -> Run:
    """What there is; `ready` is what the run's server answers to `/readyz`, if one runs."""
    folder = source.run_dir
    checkpoints = source.checkpoints.all()
    run = Run(
        folder,
        read_status(None, server, ready),
        read_metrics(line_folder(folder, source.line) / METRICS_FILE),
        source.model_name or base_model(checkpoints) or EMBEDDED,
        checkpoints,
        read_evaluations(line_folder(folder, source.line)),
    )
    try:
        # One snapshot: the whole page shows the same moment, even if a server writes meanwhile.
        with open_ledger(source.ledger_dir, readonly=True) as db, snapshot(db):
            read_ledger(run, db, server, ready, source.line)
    except NoLedger as error:
        run.missing.append(str(error))
    except LedgerUnusable as error:
        run.damage = str(error)
    except (ValueError, KeyError, TypeError) as error:
        run.damage = f"The ledger in {source.ledger_dir} holds something that cannot be read: {error}."
    if run.damage:
        run.missing.append(run.damage)
    run.missing += gaps(run)
    return run


def read_ledger(run: Run, db: Connection, server: str | None, ready: Mapping[str, Any], line: str) -> None:
    run.status = read_status(db, server, ready)
    run.verdicts = verdicts.summaries(db)
    run.verdict_counts = verdicts.counts(db)
    shown = [(kind, load_readable(db, number)) for kind, number in verdicts.examples(db, EXAMPLES_OF_A_KIND)]
    run.examples = [(kind, turn) for kind, turn in shown if turn is not None]
    run.prompts = first_prompts(db, PROMPTS)
    run.episodes = pages.session_summaries(db, episodes_only=True, limit=EPISODES_SHOWN)
    run.episode_counts = episodes.counts(db)
    run.episode_points = pages.episode_points(db, None, EPISODES_IN_CHARTS)
    run.notes = notes.of_owner(db, all_states=True)
    run.updates = pages.update_page(db, None, STEPS_SHOWN, line)


def base_model(checkpoints: list[Checkpoint]) -> str:
    """The model that the newest adapter belongs to; empty if no adapter names one."""
    for checkpoint in reversed(checkpoints):
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            name = json.loads((checkpoint.folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
            if isinstance(name, str) and name:
                return name
    return ""


def gaps(run: Run) -> Iterator[str]:
    """What a complete run has and this one lacks."""
    if not (run.folder / METRICS_FILE).is_file():
        yield f"There is no {METRICS_FILE}: no training step has been made yet."
    elif run.metrics.unreadable:
        yield f"Lines of {METRICS_FILE} that cannot be read and are left out: {run.metrics.unreadable}."
    usable = {checkpoint.folder for checkpoint in run.checkpoints}
    folders = [path.parent for path in (run.folder / CHECKPOINTS).glob(f"*/{RECORD}")]
    for folder in sorted(folder for folder in folders if not folder.name.startswith(UNFINISHED)):
        if folder not in usable:
            yield f"The checkpoint {folder.name} is damaged and left out."
