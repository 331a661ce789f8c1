"""What a run teaches another model: its accepted answers and corrections as texts to imitate, its notes and examples.

The other model's own tokens are used, and its own log-probs: nothing is known of how likely a text was to the model
that wrote it, so no ratio is made of that. What is imitated was accepted, so each text has explicit feedback of +1.
Whoever trains on it judges, gates and guards as always.
"""

import sqlite3
from pathlib import Path

from openclaw_rl.errors import UserError
from openclaw_rl.ledger import notes
from openclaw_rl.ledger.errors import DamagedTurn, TooManyNotes
from openclaw_rl.ledger.schema import FILE, open_ledger, snapshot, transaction
from openclaw_rl.ledger.sessions import close_session
from openclaw_rl.ledger.trajectories import FileTurn, Imported, imported_turns, number_of, readable
from openclaw_rl.ledger.turns import add_feedback, load_turns, record_turn
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message, images_in
from openclaw_rl.types import Feedback, NoteState, Source, State, StoredTurn, TurnKind


def import_run(db: sqlite3.Connection, folder: Path, renderer: ChatRenderer) -> Imported:
    """Take over what the run in a folder teaches. What was taken over before is not taken again. Raises UserError."""
    if not (folder / FILE).is_file():
        raise UserError(f"{folder} is no run directory: it has no {FILE}.")
    result = Imported()
    damaged: list[DamagedTurn] = []
    with open_ledger(folder, readonly=True) as source, snapshot(source):
        _copy_notes(db, source)
        for turn in readable(load_turns(source), damaged):
            answer = answer_to_imitate(turn)
            if answer is not None:
                try:
                    _import(db, turn, answer, renderer, result)
                except ChatError as error:
                    result.errors.append(f"{folder}, turn {turn.number}: {error}")
    result.errors += [f"{folder}: {error}." for error in damaged]
    return result


def answer_to_imitate(turn: StoredTurn) -> Message | None:
    """What a model should answer in a turn's place: the correction, or else the answer if it was accepted."""
    has_images = any(images_in(message.get("content")) for message in turn.messages)
    if turn.kind is not TurnKind.MAIN or turn.episode is not None or has_images:
        return None
    corrections = [said.correction for said in turn.feedback if said.correction]
    if corrections:
        return {"role": "assistant", "content": corrections[-1]}
    is_accepted = turn.verdict is not None and (turn.verdict.score or 0.0) > 0
    return turn.message if is_accepted and turn.finish_reason != "length" else None


def _import(
    db: sqlite3.Connection, turn: StoredTurn, answer: Message, renderer: ChatRenderer, result: Imported
) -> None:
    """Store one text to imitate as an imported turn of its own."""
    lesson = FileTurn(turn.messages, answer, turn.next_state, is_trained=True)
    (imported,) = imported_turns(f"{turn.session.owner}/{turn.session.id}/{turn.number}", [lesson], renderer)
    if number_of(db, imported) is not None:
        result.known += 1
        return
    with transaction(db):
        record_turn(db, imported, "import", None, 0, State.CAPTURED)
        add_feedback(db, imported.session.owner, imported.completion, 0, Feedback(1.0, source=Source.EXPLICIT))
        close_session(db, imported.session)
    result.turns += 1


def _copy_notes(db: sqlite3.Connection, source: sqlite3.Connection) -> None:
    """Copy the active notes and examples of all users, unless they are there."""
    owners = [row["owner"] for row in source.execute("SELECT DISTINCT owner FROM notes")]
    for owner in owners:
        there = {(note.question, note.text) for note in notes.for_new_conversation(db, owner)}
        for note in notes.for_new_conversation(source, owner):
            if note.state is not NoteState.ACTIVE or (note.question, note.text) in there:
                continue
            try:
                with transaction(db):
                    if note.question:
                        notes.add_example(db, owner, note.question, note.text, pinned=note.pinned)
                    else:
                        notes.add(db, owner, note.text, note.topic, pinned=note.pinned, scope=note.scope)
            except TooManyNotes:
                break
