"""Turns to and from files: one JSON object per line.

`trajectories` has one session per line, as text only (session_id, turns with type, prompt, response, next_state,
trainable); people can read and write it. `jsonl` has one turn per line, with everything the ledger has. The first can
be imported, and so can conversations as other programs write them (`messages`): an imported turn has no sampled tokens,
so its text is tokenised once, it is marked `imported`, and the current policy has to score it before it may be trained
on. A session that was an episode has its task, group, reward and steps with it, and is rewarded again when it is
imported.
"""

import codecs
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from openclaw_rl.ledger import episodes
from openclaw_rl.ledger.errors import DamagedTurn, LedgerError, TooLate
from openclaw_rl.ledger.examples import MAX_EXAMPLE_CHARACTERS
from openclaw_rl.ledger.options import GROUP_SIZE
from openclaw_rl.ledger.packing import common_prefix, pack_json
from openclaw_rl.ledger.pages import session_summaries
from openclaw_rl.ledger.schema import snapshot, transaction
from openclaw_rl.ledger.sessions import EPISODE_ENDED, IMPORTED, NO_NEXT_STATE, close_session
from openclaw_rl.ledger.turns import add_feedback, episode_state, load_turns, record_turn
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import (
    ChatError,
    ChatRenderer,
    Message,
    content_text,
    spell_out_message,
    template_message,
)
from openclaw_rl.types import (
    BASE_VERSION,
    MAX_GROUP_SIZE,
    MAX_REWARD,
    Continuation,
    EpisodeMode,
    EpisodeResult,
    EpisodeState,
    EpisodeSummary,
    Feedback,
    SampleKind,
    SamplingParams,
    SessionKey,
    State,
    StoredTurn,
    Turn,
    TurnKind,
    TurnResult,
)

#: Why an imported episode has failed that had no reward when it was exported.
NOT_REWARDED = "it had no reward when it was exported"
#: The smallest group in which rewards can be compared.
MIN_GROUP_SIZE = 2
#: The rewards that the API accepts.
ImportedReward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class FileTurn:
    """One answer in a file: what was asked since the answer before, what was said, and what came next."""

    asked: list[Message]
    answer: Message
    next_state: list[Message] | None
    is_trained: bool
    correction: str | None = None
    """What should have been said."""

    @property
    def words(self) -> tuple[str, str]:
        """Prompt and response, as a trajectory has them."""
        return text_of([m for m in self.asked if m["role"] in ("user", "tool")]), text_of([self.answer])


class TrajectoryTurn(BaseModel):
    type: Literal["main", "side"] = "main"
    prompt: str
    response: str
    next_state: str | None = None
    trainable: bool = True
    correction: Annotated[str, Field(max_length=MAX_EXAMPLE_CHARACTERS)] | None = None
    """The answer that somebody wanted instead."""


class TrajectoryStep(BaseModel):
    """What was said about one turn of an episode."""

    index: int
    reward: ImportedReward | None = None
    text: str = ""


class TrajectoryEpisode(BaseModel):
    """How an episode ended."""

    mode: EpisodeMode = EpisodeMode.TRAIN
    task: str = ""
    group: str | None = None
    group_size: Annotated[int, Field(ge=MIN_GROUP_SIZE, le=MAX_GROUP_SIZE)] | None = None
    reward: ImportedReward | None = None
    solved: bool | None = None
    error: str = ""
    advantage: float | None = None
    """For readers: how far the reward was above the mean of its group. It is computed again."""
    steps: list[TrajectoryStep] = []

    def result(self) -> EpisodeResult:
        """How it ends here. An error counts, and not the reward: the attempt failed, or came too late for its group."""
        steps = tuple(TurnResult(step.index, reward=step.reward, text=step.text) for step in self.steps)
        error = self.error or (NOT_REWARDED if self.reward is None else None)
        reward = None if error else self.reward
        # An attempt that came too late was not counted in its group.
        group = None if self.error == episodes.GROUP_WAS_CLOSED else self.group
        return EpisodeResult(reward, error, self.task, group, self.group_size, self.solved, steps)


class Trajectory(BaseModel):
    """A line of a trajectories file."""

    session_id: str = Field(min_length=1)
    turns: list[TrajectoryTurn] = Field(min_length=1)
    episode: TrajectoryEpisode | None = None

    @property
    def file_turns(self) -> list[FileTurn]:
        return [
            FileTurn(
                [{"role": "user", "content": turn.prompt}],
                {"role": "assistant", "content": turn.response},
                None if turn.next_state is None else [{"role": "user", "content": turn.next_state}],
                turn.type == "main" and turn.trainable,
                turn.correction,
            )
            for turn in self.turns
        ]


class FilePart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str
    arguments: Annotated[str, BeforeValidator(lambda given: given if isinstance(given, str) else pack_json(given))]


class FileCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class FileMessage(BaseModel):
    """A message of OpenAI's chat format. An answer with `weight` 0 is not trained on."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[FilePart] | None = None
    tool_calls: list[FileCall] | None = None
    tool_call_id: str | None = None
    weight: Literal[0, 1] = 1

    @property
    def message(self) -> Message:
        return self.model_dump(exclude={"weight"}, exclude_none=True)


class FileConversation(BaseModel):
    """A line as other programs write it: a whole conversation."""

    session_id: str = ""
    messages: list[FileMessage]
    tools: list[dict[str, Any]] = []
    episode: ClassVar[None] = None

    @model_validator(mode="before")
    @classmethod
    def _is_no_turn(cls, line: Any) -> Any:
        # Its messages are the prompt alone, so earlier answers would be taken for a conversation of their own.
        if isinstance(line, dict) and "response_ids" in line:
            raise ValueError(
                "this is a turn of 'export --format jsonl': export without --format what is to be imported"
            )
        return line

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not any(message.role == "assistant" for message in self.messages):
            raise ValueError("no message is the assistant's")
        self.session_id = self.session_id or "messages-" + short_hash(self.model_dump_json())
        return self

    @property
    def file_turns(self) -> list[FileTurn]:
        answers = [at for at, message in enumerate(self.messages) if message.role == "assistant"]
        file_turns = []
        start = 0
        for answer, after in zip(answers, [*answers[1:], len(self.messages)], strict=True):
            asked, came = ([m.message for m in self.messages[a:b]] for a, b in ((start, answer), (answer + 1, after)))
            tools = [{"role": "tools", "tools": self.tools}] if self.tools and not start else []
            given = self.messages[answer]
            file_turns.append(FileTurn([*tools, *asked], given.message, came or None, bool(given.weight)))
            start = answer + 1
        return file_turns


def kind_of_line(content: Any) -> str:
    return "messages" if isinstance(content, dict) and "messages" in content else "turns"


#: A session of a file, in either form.
FileSession = Trajectory | FileConversation
LINE: TypeAdapter[FileSession] = TypeAdapter(
    Annotated[
        Annotated[Trajectory, Tag("turns")] | Annotated[FileConversation, Tag("messages")], Discriminator(kind_of_line)
    ]
)
FORMATS = (
    'A line is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]} or '
    '{"session_id": "…", "turns": [{"prompt": "…", "response": "…", "next_state": "…"}, …]}.'
)


def short_hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def export_trajectories(db: sqlite3.Connection, damaged: list[DamagedTurn]) -> Iterator[dict[str, Any]]:
    """Sessions as text, without the turns that cannot be read: those are added to `damaged`."""
    with snapshot(db):
        summaries = session_summaries(db)
        # Two owners may use the same name, and the file has no owners: the name alone would be ambiguous.
        owners = Counter(summary.key.id for summary in summaries)
        groups = {(summary.key.owner, summary.episode.group) for summary in summaries if summary.episode}
        group_owners = Counter(group for _owner, group in groups)
        for summary in reversed(summaries):
            if summary.turns:
                owner, id = summary.key
                turns = list(readable(load_turns(db, summary.key), damaged))
                if not turns:
                    continue
                line: dict[str, Any] = {
                    "session_id": id if owners[id] == 1 else f"{owner}/{id}",
                    "turns": [in_words(turn) for turn in turns],
                }
                if summary.episode is not None:
                    group = summary.episode.group
                    is_shared = group is not None and group_owners[group] > 1
                    line["episode"] = episode_of(summary.episode, f"{owner}/{group}" if is_shared else group, turns)
                yield line


def episode_of(episode: EpisodeSummary, group: str | None, turns: Sequence[StoredTurn]) -> dict[str, Any]:
    """An episode as a file has it, with its group under this name."""
    above = None if episode.reward is None or episode.group_mean is None else episode.reward - episode.group_mean
    counted = [turn for turn in turns if turn.episode and turn.episode.step is not None]
    steps = [
        {"index": turn.episode.step, "reward": turn.episode.step_reward, "text": turn.feedback[-1].text}
        for turn in counted
        if turn.episode and (turn.episode.step_reward is not None or turn.feedback[-1].text)
    ]
    return {
        "mode": str(episode.mode),
        "task": episode.task,
        "group": group,
        # A group shrinks when attempts are deleted.
        "group_size": episode.group_size and max(MIN_GROUP_SIZE, episode.group_size),
        "reward": episode.reward,
        "solved": episode.solved,
        "error": episode.error,
        "advantage": above,
        "steps": steps,
    }


def export_turns(db: sqlite3.Connection, damaged: list[DamagedTurn]) -> Iterator[dict[str, Any]]:
    """Turns with everything that the ledger has, without practised answers, which follow from others.

    Those that cannot be read are added to `damaged`.
    """
    with snapshot(db):
        for turn in readable(load_turns(db), damaged):
            if turn.sample is not SampleKind.PRACTICE:
                yield asdict(turn)


def readable(turns: Iterable[StoredTurn | DamagedTurn], damaged: list[DamagedTurn]) -> Iterator[StoredTurn]:
    """The turns that can be read; the others are added to `damaged`."""
    for turn in turns:
        if isinstance(turn, DamagedTurn):
            damaged.append(turn)
        else:
            yield turn


def in_words(turn: StoredTurn) -> dict[str, Any]:
    """A turn as text."""
    said = [i for i, message in enumerate(turn.messages) if message["role"] == "assistant"]
    asked = turn.messages[said[-1] + 1 if said else 0 :]
    words = {
        "type": str(turn.kind),
        "prompt": text_of([m for m in asked if m["role"] in ("user", "tool")]),
        "response": text_of([turn.message]),
        "trainable": turn.kind is TurnKind.MAIN and not was_replaced(turn),
    }
    if corrections := [said.correction for said in turn.feedback if said.correction]:
        words["correction"] = corrections[-1]
    return words if turn.next_state is None else {**words, "next_state": text_of(turn.next_state)}


def was_replaced(turn: StoredTurn) -> bool:
    """Whether the turn is no step of its episode, because the client asked again."""
    return turn.episode is not None and turn.episode.reward is not None and turn.episode.step is None


def text_of(messages: Sequence[Message]) -> str:
    """The text of messages; tool calls as the model would write them."""
    plain = (spell_out_message(template_message(m)) if m["role"] == "assistant" else m for m in messages)
    return "\n".join(content_text(message.get("content")) for message in plain)


@dataclass(slots=True)
class Imported:
    """The result of an import."""

    turns: int = 0
    known: int = 0
    """Turns that were in the ledger already."""
    errors: list[str] = field(default_factory=list)
    """One sentence per bad line, with file and line."""


def import_file(db: sqlite3.Connection, path: Path, renderer: ChatRenderer) -> Imported:
    """Read a file of sessions into the ledger. Bad lines are reported; good lines are imported all the same.

    The first that is not in a known form also shows the forms.
    """
    result = Imported()
    forms = f" {FORMATS}"
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                import_session(db, LINE.validate_json(line), renderer, result)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(str(part) for part in first["loc"][1:])
                what = f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
                result.errors.append(f"{path}:{number}: {what}.{forms}")
                forms = ""
            except (ChatError, LedgerError) as error:
                result.errors.append(f"{path}:{number}: {error}")
    return result


def import_session(db: sqlite3.Connection, session: FileSession, renderer: ChatRenderer, result: Imported) -> None:
    """Import one session as a whole or not at all; one that was exported from this ledger is already there.

    A session of which a turn is there already is not made an episode: it would be rewarded twice. Raises LedgerError.
    """
    file_turns = session.file_turns
    if was_recorded_here(db, session.session_id, file_turns):
        result.known += len(file_turns)
        return
    turns = list(imported_turns(session.session_id, file_turns, renderer))
    key, imported = turns[0].session, Imported()
    with transaction(db):
        before: tuple[int, Turn] | None = None
        episode = None if any(number_of(db, turn) is not None for turn in turns) else session.episode
        if episode is not None:
            episodes.begin(db, key, "import", episode.mode)
        for turn, file_turn in zip(turns, file_turns, strict=True):
            before = store_imported(db, turn, file_turn, before, imported), turn
        close_session(db, key)
        if episode is not None and (late := episodes.end(db, key, episode.result(), GROUP_SIZE)):
            raise TooLate(late)
    result.turns += imported.turns
    result.known += imported.known


def was_recorded_here(db: sqlite3.Connection, session_id: str, file_turns: Sequence[FileTurn]) -> bool:
    """Whether this ledger recorded the session itself: the file is then an export of it."""
    written = {file_turn.words for file_turn in file_turns}
    owner, _, id = session_id.rpartition("/")
    named = [*session_summaries(db, id=session_id), *(session_summaries(db, id=id) if owner else ())]
    for summary in named:
        if summary.key.owner != IMPORTED and (summary.key.id == session_id or summary.key.owner == owner):
            recorded = (in_words(turn) for turn in readable(load_turns(db, summary.key), []))
            if written <= {(turn["prompt"], turn["response"]) for turn in recorded}:
                return True
    return False


def store_imported(
    db: sqlite3.Connection,
    turn: Turn,
    written: FileTurn,
    before: tuple[int, Turn] | None,
    result: Imported,
) -> int:
    """Store a turn as what it adds to the one before it, unless it is already there; its number.

    A turn without a next state is dropped, unless it awaits the reward of its episode. So is one of an episode that
    has ended.
    """
    known = number_of(db, turn)
    if known is not None:
        result.known += 1
        return known
    base, keep = None, 0
    if before is not None:
        base, earlier = before
        keep = common_prefix(turn.prompt_ids, [*earlier.prompt_ids, *earlier.response_ids])
    reason = why_dropped(db, turn, written)
    state = State.DROPPED if reason else State.CAPTURED
    number = record_turn(db, turn, "import", base, keep, state, reason)
    if written.next_state is not None:
        db.execute("UPDATE turns SET next_state = ? WHERE number = ?", (pack_json(written.next_state), number))
    if written.correction and turn.kind is TurnKind.MAIN and episode_state(db, turn.session) is None:
        add_feedback(db, turn.session.owner, turn.completion, 0, Feedback(-1.0, correction=written.correction))
    result.turns += 1
    return number


def number_of(db: sqlite3.Connection, turn: Turn) -> int | None:
    """The number of an imported turn; None if it is not in the ledger."""
    row = db.execute("SELECT number FROM turns WHERE completion = ?", (turn.completion,)).fetchone()
    return row and int(row["number"])


def why_dropped(db: sqlite3.Connection, turn: Turn, written: FileTurn) -> str:
    """Why an imported turn is not trained on; empty if it may be."""
    if turn.kind is not TurnKind.MAIN:
        return turn.kind_reason
    episode = episode_state(db, turn.session)
    if episode is None:
        return "" if written.next_state is not None or written.correction else NO_NEXT_STATE
    return "" if episode is EpisodeState.HELD else EPISODE_ENDED


def imported_turns(session_id: str, file_turns: Sequence[FileTurn], renderer: ChatRenderer) -> Iterator[Turn]:
    """A session's turns, each with those before it as its history."""
    messages: list[Message] = []
    for index, file_turn in enumerate(file_turns):
        messages = [*messages, *file_turn.asked]
        tools = next((message["tools"] for message in messages if message["role"] == "tools"), ())
        request_key = history.keys(IMPORTED, messages).request
        prompt, response = file_turn.words
        yield Turn(
            completion="imported-" + short_hash(f"{session_id}\0{index}\0{prompt}\0{response}"),
            choice=0,
            session=SessionKey(IMPORTED, session_id),
            kind=TurnKind.MAIN if file_turn.is_trained else TurnKind.SIDE,
            kind_reason="imported" if file_turn.is_trained else "imported as not trainable",
            version=BASE_VERSION,
            messages=messages,
            message=file_turn.answer,
            prompt_ids=renderer.prompt(renderer.text([m for m in messages if m["role"] != "tools"], tools)).ids,
            response_ids=[*renderer.tokenizer.encode_text(response), renderer.tokenizer.eos_id],
            logprobs=(),
            sampling=SamplingParams(max_tokens=0),
            finish_reason="stop",
            continuation=Continuation.NEW,
            parent=None,
            request_key=request_key,
            end_key=history.extend(request_key, file_turn.answer),
        )
        messages = [*messages, file_turn.answer]
