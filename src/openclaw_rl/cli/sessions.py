"""`openclaw-rl sessions`: a list of sessions that fits the terminal, or one session in full."""

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from sqlite3 import Connection
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.errors import DamagedTurn
from openclaw_rl.ledger.schema import open_ledger, snapshot
from openclaw_rl.methods.options import MethodOptions
from openclaw_rl.terminal import console, say
from openclaw_rl.types import SHARED, ConversationNote, EpisodeSummary, Question, SessionSummary, StoredTurn, Verdict

#: Columns that the list leaves out where the terminal is too narrow, in this order.
OPTIONAL_COLUMNS = ("recognised by", "main", "open", "with next state", "group", "turns", "owner", "task")
#: The narrowest and the widest column for what a session is about. With less room the words go below the id.
MIN_ABOUT, MAX_ABOUT = 20, 60
ID = "session"
#: What a column takes besides its text: a line and a blank on either side.
COLUMN_FRAME = 3
#: How many sessions are named where an id fits several.
MAX_IDS_NAMED = 5


def add(commands: Any) -> None:
    parser = add_command(commands, "sessions", "list sessions, or show one in full", run, RUN_OPTIONS)
    parser.add_argument("id", nargs="?", metavar="ID", help="the session to show; the beginning of its id is enough")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.ledger.pages import session_summaries
    from openclaw_rl.ledger.turns import load_turns

    config = run_config(options)
    with open_ledger(config.ledger_dir) as db, snapshot(db):
        if options.id is None:
            list_sessions(db)
        else:
            for session in session_summaries(db, id=complete_id(db, options.id)):
                show_session(session, load_turns(db, session.key), config.method)
    return 0


def complete_id(db: Connection, given: str) -> str:
    """The id of a session from its beginning. Raises UserError if no session starts so, or several do."""
    from openclaw_rl.ledger.sessions import session_ids

    ids = session_ids(db, given)
    if given in ids:
        return given
    if not ids:
        raise UserError(f"There is no session {given}. 'openclaw-rl sessions' lists them.")
    if len(ids) > 1:
        some = ", ".join(ids[:MAX_IDS_NAMED]) + (", …" if len(ids) > MAX_IDS_NAMED else "")
        raise UserError(f"{len(ids)} sessions begin with {given}: {some}. Give more of the id.")
    return ids[0]


def list_sessions(db: Connection) -> None:
    """Ids are shown whole, so that they can be copied; columns without room beside them are left out."""
    from openclaw_rl.ledger.pages import session_summaries
    from openclaw_rl.ledger.sessions import first_messages

    sessions = session_summaries(db)
    out = console()
    if not sessions:
        out.print("No session has been recorded yet.")
        return
    columns = session_columns(sessions)
    all_widths = {name: column_width(name, cells) for name, cells in columns.items()}
    widths = fitting(all_widths, out.width, MIN_ABOUT)
    is_below = room_left(widths, out.width) < MIN_ABOUT
    if is_below:
        widths = fitting(all_widths, out.width, -COLUMN_FRAME)
    table = Table()
    for name, width in widths.items():
        table.add_column(f"{name}, about" if is_below and name == ID else name, min_width=width, max_width=width)
    if not is_below:
        table.add_column("about", no_wrap=True, max_width=min(MAX_ABOUT, room_left(widths, out.width)))
    for row, session in enumerate(sessions):
        # Clients choose names: nothing in them is markup.
        cells = [Text(columns[name][row]) for name in widths]
        try:
            words = Text(about(first_messages(db, session.number)))
        except DamagedTurn as error:
            words = Text(f"({error})")
        if is_below:
            words.truncate(widths[ID], overflow="ellipsis")
            cells[0] = Text.assemble((cells[0].plain, "bold"), "\n", words)
        table.add_row(*cells, *([] if is_below else [words]))
    out.print(table, crop=False)


def fitting(widths: Mapping[str, int], total: int, room: int) -> dict[str, int]:
    """The columns that leave this much room for one more, if leaving out optional ones is enough."""
    chosen = dict(widths)
    for name in OPTIONAL_COLUMNS:
        if room_left(chosen, total) < room:
            chosen.pop(name, None)
    return chosen


def session_columns(sessions: Sequence[SessionSummary]) -> dict[str, list[str]]:
    """The cells of the list, by heading."""
    columns = {
        ID: [item.key.id for item in sessions],
        "owner": [item.key.owner for item in sessions],
        "recognised by": [item.source for item in sessions],
        "last active": [time.strftime("%Y-%m-%d %H:%M", time.localtime(item.last)) for item in sessions],
        "turns": [str(item.turns) for item in sessions],
        "main": [str(item.main) for item in sessions],
        "with next state": [str(item.ready) for item in sessions],
        "open": ["" if item.closed else "yes" for item in sessions],
    }
    if len(set(columns["owner"])) < 2:
        del columns["owner"]
    episodes = [item.episode for item in sessions]
    if any(episodes):
        columns["task"] = [episode.task if episode else "" for episode in episodes]
        columns["group"] = [(episode.group or "") if episode else "" for episode in episodes]
        columns["reward"] = [reward_cell(episode) if episode else "" for episode in episodes]
    return columns


def reward_cell(episode: EpisodeSummary) -> str:
    return str(episode.state) if episode.reward is None else f"{episode.reward:g}"


def room_left(widths: Mapping[str, int], total: int) -> int:
    """The width that these columns leave for one more."""
    return total - 1 - sum(widths.values()) - COLUMN_FRAME * (len(widths) + 1)


def column_width(name: str, cells: Sequence[str]) -> int:
    """The width of the longest cell; a heading may take several lines."""
    return max(map(cell_len, (*name.split(), *cells)))


def about(messages: Sequence[Mapping[str, Any]]) -> str:
    """The first words of the user, on one line; without any, the client's."""
    from openclaw_rl.rendering.clients import message_words

    asked = [message for message in messages if message["role"] == "user"]
    texts = (*map(message_words, asked), *map(shown_text, asked))
    return " ".join(next((text for text in texts if text.strip()), "").split())


def shown_text(message: Mapping[str, Any]) -> str:
    """What a person wrote, without the lines that a client added; the whole text if it is all the client's."""
    from openclaw_rl.rendering.chat import content_text
    from openclaw_rl.rendering.clients import message_words

    return message_words(message) or content_text(message.get("content"))


def show_session(session: SessionSummary, turns: Iterable[StoredTurn | DamagedTurn], method: MethodOptions) -> None:
    from openclaw_rl.ledger.episodes import describe

    out = console()
    ended = "ended" if session.closed else "open"
    out.print(
        Text.assemble((session.key.id, "bold"), f" of {session.key.owner}, recognised by {session.source}, {ended}")
    )
    if session.episode is not None:
        say(describe(session.episode))
    for turn in turns:
        if not isinstance(turn, StoredTurn):
            say(f"{turn}.", "red")
            continue
        out.print(Panel(turn_body(turn, method), title=Text(turn_title(turn)), title_align="left"))


def turn_title(turn: StoredTurn) -> str:
    reason = f" ({turn.reason})" if turn.reason else ""
    sample = f" as {turn.sample}" if turn.sample else ""
    state = f"{turn.state}{sample}{reason}"
    of_line = "" if turn.line == SHARED else f" of the line {turn.line}"
    return f"turn {turn.number} · {turn.kind} · {state} · policy {turn.version}{of_line} · {turn.continuation}"


def turn_body(turn: StoredTurn, method: MethodOptions) -> Group:
    """The last message of the prompt, the response, the next state, the feedback and the verdict."""
    from openclaw_rl.ledger.episodes import describe_step
    from openclaw_rl.methods.base import shown_advantage
    from openclaw_rl.rendering.clients import is_passing

    asked = [m for m in turn.messages if m["role"] in ("user", "tool") and not is_passing(m)][-1:]
    lines = [Text.assemble((f"{m['role']}: ", "cyan"), shown_text(m)) for m in asked]
    lines += [Text(note_line(note), style="blue") for note in turn.notes]
    lines.append(Text.assemble(("assistant: ", "green"), shown_text(turn.message)))
    for call in turn.message.get("tool_calls") or []:
        lines.append(Text(f"  calls {call['function']['name']} {call['function']['arguments']}", style="green"))
    for message in turn.next_state or []:
        lines.append(Text.assemble((f"next, {message['role']}: ", "magenta"), shown_text(message)))
    lines += [Text(f"feedback: {given.score:+g} {given.text}", style="yellow") for given in turn.feedback]
    if turn.verdict is not None:
        lines += verdict_lines(turn.verdict)
    if turn.episode is not None and (step := describe_step(turn.episode, shown_advantage(turn.episode, method))):
        lines.append(Text(step, style="bold yellow"))
    plain = "" if turn.plain_ids is None else f" ({len(turn.plain_ids)} without notes)"
    if turn.is_text:
        return Group(*lines, Text(f"recorded as text, {turn.finish_reason}", style="dim"))
    sizes = (
        f"{len(turn.prompt_ids)} prompt tokens{plain}, {len(turn.response_ids)} response tokens, {turn.finish_reason}"
    )
    return Group(*lines, Text(sizes, style="dim"))


def note_line(note: ConversationNote) -> str:
    kind, text = ("example", f"{note.question} → {note.text}") if note.question else ("note", note.text)
    return f"{kind} {note.number}{'' if note.given else ' (withheld)'}: {text}"


def verdict_lines(verdict: Verdict) -> list[Text]:
    """A verdict: the score, the votes behind it, the hints."""
    score = "no score" if verdict.score is None else f"score {verdict.score:+g}"
    values = [vote.value for vote in verdict.votes if vote.question is Question.SCORE]
    votes = " ".join("?" if value is None else f"{value:+g}" for value in values)
    parts = (score, f"by {verdict.source}" if verdict.source else "", f"votes {votes}" if votes else "", verdict.reason)
    lines = [Text(f"judge: {' · '.join(filter(None, parts))}", style="bold yellow")]
    for hint in verdict.hints:
        scored = " (scored by the teacher)" if hint.logprobs else ""
        teacher = f" (no teacher: {hint.problem})" if hint.problem else scored
        lines.append(Text(f"hint: {hint.text}{teacher}", style="yellow"))
    return lines
