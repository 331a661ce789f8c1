"""Sessions as a terminal shows them: a list that fits its width, and one of them in full."""

import time
from collections.abc import Mapping

from rich.cells import cell_len
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openclaw_rl.ledger.reader import LedgerReader
from openclaw_rl.rendering.chat import content_text
from openclaw_rl.terminal import console
from openclaw_rl.types import Question, SessionSummary, StoredTurn, Verdict

#: In the list of sessions, what is left out where it is narrow, the least missed first.
GIVING_WAY = ("recognised by", "main", "open", "with next state", "owner")
#: How much of what a session is about must have room beside them, and how much is shown at most.
LEAST_ABOUT, MOST_ABOUT = 20, 60
#: What a column takes beside its text: a line and a blank on either side.
COLUMN_FRAME = 3


def list_sessions(reader: LedgerReader) -> None:
    """Ids are to be copied and are shown whole; what has no room beside them is left out."""
    out = console()
    found = reader.sessions()
    if not found:
        out.print("No session has been recorded yet.")
        return
    columns = session_columns(found)
    widths = {name: column_width(name, cells) for name, cells in columns.items()}
    for name in GIVING_WAY:
        if room_beside(widths, out.width) < LEAST_ABOUT:
            widths.pop(name, None)
    table = Table()
    for name, width in widths.items():
        table.add_column(name, min_width=width, max_width=width)
    left = max(len("about"), min(MOST_ABOUT, room_beside(widths, out.width)))
    table.add_column("about", no_wrap=True, max_width=left)
    for row, item in enumerate(found):
        # Names are the clients': nothing in them is markup.
        table.add_row(*(Text(columns[name][row]) for name in widths), Text(about(reader, item)))
    out.print(table, crop=False)


def session_columns(found: list[SessionSummary]) -> dict[str, list[str]]:
    """What is said of sessions, by heading."""
    columns = {
        "session": [item.key.id for item in found],
        "owner": [item.key.owner for item in found],
        "recognised by": [item.source for item in found],
        "last heard of": [time.strftime("%Y-%m-%d %H:%M", time.localtime(item.last)) for item in found],
        "turns": [str(item.turns) for item in found],
        "main": [str(item.main) for item in found],
        "with next state": [str(item.ready) for item in found],
        "open": ["" if item.closed else "yes" for item in found],
    }
    if len(set(columns["owner"])) < 2:
        del columns["owner"]
    return columns


def room_beside(widths: Mapping[str, int], whole: int) -> int:
    """What columns leave to one more beside them."""
    return whole - 1 - sum(widths.values()) - COLUMN_FRAME * (len(widths) + 1)


def column_width(name: str, cells: list[str]) -> int:
    """Of the longest cell; a heading may stand on several lines."""
    return max(map(cell_len, (*name.split(), *cells)))


def about(reader: LedgerReader, summary: SessionSummary) -> str:
    """What the user said first, on one line."""
    said = (content_text(m.get("content")) for m in reader.first_messages(summary) if m["role"] == "user")
    return " ".join(next(said, "").split())


def show_session(reader: LedgerReader, summary: SessionSummary) -> None:
    out = console()
    ended = "ended" if summary.closed else "open"
    known = f" of {summary.key.owner}, recognised by {summary.source}, {ended}"
    out.print(Text.assemble((summary.key.id, "bold"), known))
    for turn in reader.turns(summary.key):
        out.print(Panel(turn_body(turn), title=Text(turn_title(turn)), title_align="left"))


def turn_title(turn: StoredTurn) -> str:
    reason = f" ({turn.reason})" if turn.reason else ""
    sample = f" as {turn.sample}" if turn.sample else ""
    state = f"{turn.state}{sample}{reason}"
    return f"turn {turn.number} · {turn.kind} · {state} · policy {turn.version} · {turn.continuation}"


def turn_body(turn: StoredTurn) -> Group:
    """What was asked, what was answered, and what came of it."""
    asked = [m for m in turn.messages if m["role"] in ("user", "tool")][-1:]
    lines = [Text.assemble((f"{m['role']}: ", "cyan"), content_text(m.get("content"))) for m in asked]
    lines.append(Text.assemble(("assistant: ", "green"), content_text(turn.message.get("content"))))
    for call in turn.message.get("tool_calls") or []:
        lines.append(Text(f"  calls {call['function']['name']} {call['function']['arguments']}", style="green"))
    for message in turn.next_state or []:
        lines.append(Text.assemble((f"next, {message['role']}: ", "magenta"), content_text(message.get("content"))))
    lines += [Text(f"feedback: {given.score:+g} {given.text}", style="yellow") for given in turn.feedback]
    if turn.verdict is not None:
        lines += verdict_lines(turn.verdict)
    sizes = f"{len(turn.prompt_ids)} prompt tokens, {len(turn.response_ids)} response tokens, {turn.finish_reason}"
    return Group(*lines, Text(sizes, style="dim"))


def verdict_lines(verdict: Verdict) -> list[Text]:
    """What was thought of a turn: the score, the votes behind it, the hints."""
    score = "no score" if verdict.score is None else f"score {verdict.score:+g}"
    counted = [vote.value for vote in verdict.votes if vote.question is Question.SCORE]
    votes = " ".join("?" if value is None else f"{value:+g}" for value in counted)
    parts = (score, f"by {verdict.source}" if verdict.source else "", f"votes {votes}" if votes else "", verdict.reason)
    lines = [Text(f"judge: {' · '.join(filter(None, parts))}", style="bold yellow")]
    for hint in verdict.hints:
        scored = " (scored by the teacher)" if hint.logprobs else ""
        teacher = f" (no teacher: {hint.problem})" if hint.problem else scored
        lines.append(Text(f"hint: {hint.text}{teacher}", style="yellow"))
    return lines
