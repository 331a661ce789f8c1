"""Notes and examples: what the owner of a key asked for. Nobody sees or changes another owner's."""

from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field, model_validator

from openclaw_rl.api.errors import ApiError, refusals_of_ledger
from openclaw_rl.api.service import ServerState, body_of, server_of
from openclaw_rl.api.wire import WireModel, body_schema
from openclaw_rl.ledger import notes, practices
from openclaw_rl.ledger.errors import UnknownNote
from openclaw_rl.ledger.examples import MAX_EXAMPLE_CHARACTERS
from openclaw_rl.ledger.pages import row_number
from openclaw_rl.types import Note, Practice

router = APIRouter()

MAX_SCOPE_CHARACTERS = 100


def not_blank(text: str) -> str:
    if not notes.one_line(text):
        raise ValueError("a note says something")
    return text


NoteText = Annotated[str, Field(max_length=MAX_EXAMPLE_CHARACTERS, strict=True), AfterValidator(not_blank)]


class NoteRequest(WireModel):
    """The body of POST /v1/notes."""

    text: NoteText
    """An instruction; with a question, the answer as wanted."""
    question: NoteText | None = None
    """Makes it an example: what was asked."""
    scope: Annotated[str, Field(max_length=MAX_SCOPE_CHARACTERS)] = ""
    """Words of the requests that a note is for; empty: all."""
    pinned: bool = False

    @model_validator(mode="after")
    def _is_short(self) -> Self:
        check_length(self.text, is_example=self.question is not None)
        return self


class NoteChange(WireModel):
    """The body of PATCH /v1/notes/{id}: what is to be changed."""

    text: NoteText | None = None
    pinned: bool | None = None


@router.get("/v1/notes")
async def list_notes(request: Request) -> dict[str, Any]:
    """Your notes, each with its last practice, then your examples, in the order in which they began."""
    server = server_of(request)
    owner = server.keys.owner(request)
    with refusals_of_ledger("Notes cannot be read or changed"):
        ledger = server.ledger()
        kept = [*ledger.read(notes.of_owner, owner), *ledger.read(notes.of_owner, owner, examples=True)]
        practised = ledger.read(practices.latest, owner)
        return {"object": "list", "data": [encode(note, practised.get(note.number)) for note in kept]}


@router.post("/v1/notes", openapi_extra=body_schema(NoteRequest))
async def add_note(request: Request) -> dict[str, Any]:
    """Write a note or an example. It is given to the model from your next conversation on."""
    server = server_of(request)
    owner = server.keys.owner(request)
    body = await body_of(request, NoteRequest)
    ledger = server.ledger()
    check_use(server)
    if body.question is not None:
        with refusals_of_ledger("Notes cannot be read or changed"):
            made = ledger.write(notes.add_example, owner, body.question, body.text, pinned=body.pinned)
            return encode(await made)
    topic = await server.operations.topic_of(body.text)
    with refusals_of_ledger("Notes cannot be read or changed"):
        added = ledger.write(notes.add, owner, body.text, topic, pinned=body.pinned, scope=body.scope)
        return encode(await added)


@router.patch("/v1/notes/{number}", openapi_extra=body_schema(NoteChange))
async def change_note(number: str, request: Request) -> dict[str, Any]:
    """Change the text of a note, the answer of an example, or whether it is pinned."""
    server = server_of(request)
    owner = server.keys.owner(request)
    body = await body_of(request, NoteChange)
    ledger = server.ledger()
    text = body.text
    with refusals_of_ledger("Notes cannot be read or changed"):
        note = ledger.read(notes.load, read_number(number), owner)
    if text is not None:
        try:
            check_length(text, is_example=bool(note.question))
        except ValueError as error:
            raise ApiError(400, f"text: {error}", param="text") from None
    topic = await server.operations.topic_of(text) if text else ""
    with refusals_of_ledger("Notes cannot be read or changed"):
        edited = ledger.write(notes.edit, note.number, owner, text=text, topic=topic, pinned=body.pinned)
        return encode(await edited)


@router.delete("/v1/notes/{number}")
async def remove_note(number: str, request: Request) -> dict[str, Any]:
    """Remove a note. Conversations under way keep it."""
    server = server_of(request)
    owner = server.keys.owner(request)
    with refusals_of_ledger("Notes cannot be read or changed"):
        await server.ledger().write(notes.remove, read_number(number), owner)
    return {"id": int(number), "status": "removed"}


@router.post("/v1/notes/{number}/practice")
async def practise_note(number: str, request: Request) -> dict[str, Any]:
    """Let the policy practise a note until it keeps to it by itself; one that is under way goes on."""
    server = server_of(request)
    owner = server.keys.owner(request)
    ledger = server.ledger()
    check_use(server)
    if reason := server.operations.why_no_practice():
        raise ApiError(409, reason, code="cannot_practise")
    with refusals_of_ledger("Notes cannot be read or changed"):
        return encode_practice(await ledger.write(practices.request, read_number(number), owner))


@router.delete("/v1/notes/{number}/practice")
async def stop_practice(number: str, request: Request) -> dict[str, Any]:
    """Stop the practice of a note. What it has learned so far stays."""
    server = server_of(request)
    owner = server.keys.owner(request)
    with refusals_of_ledger("Notes cannot be read or changed"):
        return encode_practice(await server.ledger().write(practices.stop, read_number(number), owner))


def check_use(server: ServerState) -> None:
    if not server.service.uses_notes:
        raise ApiError(409, "This server uses no notes (--no-notes).", code="notes_off")


def check_length(text: str, *, is_example: bool) -> None:
    """Raise ValueError for a note that is too long: an example may be longer than an instruction."""
    if not is_example and len(text) > notes.MAX_NOTE_CHARACTERS:
        raise ValueError(f"a note has at most {notes.MAX_NOTE_CHARACTERS} characters")


def read_number(text: str) -> int:
    """A note's number. Raises UnknownNote for a text that is none."""
    number = row_number(text)
    if number is None:
        raise UnknownNote(f"There is no note {text[:40]!r}: notes have numbers.")
    return number


def encode(note: Note, practice: Practice | None = None) -> dict[str, Any]:
    return {
        "id": note.number,
        "object": "example" if note.question else "note",
        "text": note.text,
        **({"question": note.question} if note.question else {"topic": note.topic, "scope": note.scope}),
        "origin": str(note.origin),
        "state": str(note.state),
        "pinned": note.pinned,
        "turn": note.turn,
        "created": int(note.created),
        "held": {"given": note.given.held, "withheld": note.withheld.held},
        "complained": {"given": note.given.complained, "withheld": note.withheld.complained},
        **({"practice": encode_practice(practice)} if practice else {}),
    }


def encode_practice(practice: Practice) -> dict[str, Any]:
    return {
        "object": "practice",
        "note": practice.note,
        "state": str(practice.state),
        "reason": practice.reason,
        "made": practice.made,
        "steps": practice.steps,
        "created": int(practice.created),
        "ended": practice.ended and int(practice.ended),
    }
