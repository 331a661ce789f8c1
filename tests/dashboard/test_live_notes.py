"""The page of notes: what is listed, how it is changed, corrections under answers, and nobody else's notes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.api.service import Operations
from openclaw_rl.ledger import notes, practices, training
from openclaw_rl.ledger.examples import MAX_EXAMPLE_CHARACTERS
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.pages import changes_for, cursor
from openclaw_rl.types import Note, NoteState, PracticeState, State
from support.live_page import ALICE, BOB, LivePage, live_page
from support.practice import CanPractise, begin


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LivePage]:
    with live_page(
        tiny_model, tmp_path_factory.mktemp("run"), keys=(ALICE, BOB), notes=NotesOptions(), operations=CanPractise()
    ) as page:
        yield page


@pytest.fixture
def page(server: LivePage) -> LivePage:
    server.empty()
    return server


def kept(page: LivePage, owner: str, *, examples: bool = False) -> list[Note]:
    return page.ledger.read(notes.of_owner, owner, examples=examples)


def test_a_wish_is_added_edited_pinned_and_removed(page: LivePage) -> None:
    with page.visitor(ALICE) as alice:
        assert "There are none yet" in alice.get("notes").text
        assert alice.do("notes", do="add", text="Call me <b>Chef</b>.").status_code == 200
        (note,) = kept(page, ALICE.name)
        shown = alice.get("notes").text
        assert "Call me &lt;b&gt;Chef&lt;/b&gt;." in shown, "what users wrote is text"
        assert alice.do("notes", do="edit", note=note.number, text="Call me Boss.").status_code == 200
        assert alice.do("notes", do="pin", note=note.number).status_code == 200
        assert [(one.text, one.pinned) for one in kept(page, ALICE.name)] == [("Call me Boss.", True)]
        assert "pinned: always given" in alice.get("notes").text
        assert alice.do("notes", do="unpin", note=note.number).status_code == 200
        assert alice.do("notes", do="remove", note=note.number).status_code == 200
        assert kept(page, ALICE.name) == []


def test_an_example_is_added_and_edited(page: LivePage) -> None:
    with page.visitor(ALICE) as alice:
        assert alice.do("notes", do="add", question="Where is it?", answer="Chef, there.").status_code == 200
        (example,) = kept(page, ALICE.name, examples=True)
        assert alice.do("notes", do="edit", note=example.number, text="x\r\n" * 1000).status_code == 200
        assert kept(page, ALICE.name, examples=True)[0].text == "\n".join("x" * 1000)


def test_somebody_else_sees_and_changes_nothing(page: LivePage) -> None:
    with page.visitor(ALICE) as alice, page.visitor(BOB) as bob:
        alice.do("notes", do="add", text="Call me Chef.")
        alice.do("notes", do="add", question="Where?", answer="Chef, there.")
        for note in [*kept(page, ALICE.name), *kept(page, ALICE.name, examples=True)]:
            for do in ("edit", "pin", "remove"):
                assert bob.do("notes", do=do, note=note.number, text="Obey Bob.").status_code == 404
        assert "Chef" not in bob.get("notes").text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"do": "add"},
        {"do": "add", "text": " "},
        {"do": "add", "text": "x" * 301},
        {"do": "add", "question": "Why?"},
        {"do": "add", "question": "Why?", "answer": "x" * (MAX_EXAMPLE_CHARACTERS + 1)},
        {"do": "edit", "text": "Hi."},
        {"do": "pin", "note": "x"},
    ],
)
def test_a_form_that_says_nothing_is_refused(page: LivePage, fields: dict[str, str]) -> None:
    with page.visitor(ALICE) as alice:
        assert alice.do("notes", **fields).status_code == 400
        assert kept(page, ALICE.name) == kept(page, ALICE.name, examples=True) == []


def test_an_answer_is_written_as_it_was_wanted(page: LivePage) -> None:
    headers = {"Authorization": f"Bearer {ALICE.secret}", "X-Session-Id": "s"}
    page.say("There.", [{"role": "user", "content": "Where is it?"}], headers)
    (turn,) = page.turns()
    (session,) = {one.session for one in page.turns()}
    with page.visitor(ALICE) as alice, page.visitor(BOB) as bob:
        assert "Write it as you want it" in alice.get("sessions/1").text
        assert bob.do("correct", turn=turn.number, correction="Bob, there.").status_code == 404
        assert alice.do("correct", turn=turn.number, correction="Chef, there.").status_code == 200
        (example,) = kept(page, session.owner, examples=True)
        assert (example.question, example.text, example.state) == ("Where is it?", "Chef, there.", NoteState.ACTIVE)
        assert "wanted: Chef, there." in alice.get("sessions/1").text
        assert "Chef, there." in alice.get("notes").text


def change(page: LivePage, made: Any, *arguments: Any) -> Any:
    return page.ledger.submit(made, *arguments).result(60)


def test_a_wish_is_practised_stopped_and_learned(page: LivePage) -> None:
    with page.visitor(ALICE) as alice, page.visitor(BOB) as bob:
        alice.do("notes", do="add", text="Call me Chef.")
        alice.do("notes", do="add", question="Where?", answer="Chef, there.")
        (note,) = kept(page, ALICE.name)
        assert alice.get("notes").text.count('value="practise"') == 1, "an example is practised with its wish"
        before = page.ledger.read(cursor)
        assert bob.do("notes", do="practise", note=note.number).status_code == 404
        assert alice.do("notes", do="practise", note=note.number, token="x").status_code == 403
        assert alice.do("notes", do="practise", note=note.number).status_code == 200
        assert "waits to be practised" in alice.get("notes").text
        assert page.ledger.read(changes_for, before, ALICE.name).practices, "open pages of hers are told"
        assert not page.ledger.read(changes_for, before, BOB.name)
        change(page, begin, note.number)
        assert "is being practised: step 0 of 24" in alice.get("notes").text
        assert f"Note {note.number} is being practised: step 0 of 24." in alice.get("").text
        assert "practised" not in bob.get("").text
        assert bob.do("notes", do="stop", note=note.number).status_code == 404
        assert alice.do("notes", do="stop", note=note.number).status_code == 200
        assert "practice stopped: by its owner" in alice.get("notes").text
        assert alice.do("notes", do="stop", note=note.number).status_code == 409
        alice.do("notes", do="practise", note=note.number)
        number = page.ledger.read(practices.load_all)[0].number
        change(
            page, practices.set_state, number, PracticeState.LEARNED, "without the note, 15 of 16 answers keep to it"
        )
        shown = alice.get("notes").text
        assert "learned for good on" in shown
        assert "15 of 16 answers keep to it" in shown
        assert 'value="practise"' not in shown


def test_a_server_that_cannot_practise_offers_it_nowhere(page: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CanPractise, "why_no_practice", Operations.why_no_practice)
    with page.visitor(ALICE) as alice:
        alice.do("notes", do="add", text="Call me Chef.")
        assert 'value="practise"' not in alice.get("notes").text
        refused = alice.do("notes", do="practise", note=kept(page, ALICE.name)[0].number)
        assert (refused.status_code, "does not learn" in refused.text) == (409, True)


def test_a_step_shows_what_was_practised_and_with_which_message(page: LivePage) -> None:
    page.say("There.", [{"role": "user", "content": "Where?"}], {"Authorization": f"Bearer {ALICE.secret}"})
    (asked,) = page.turns()
    note = change(page, notes.add, ALICE.name, "Call me Chef.").number
    practised = change(page, begin, note, asked.number, None)
    change(page, training.claim_turns, practised)
    change(page, training.apply_step, 1, 1, practised)
    assert page.ledger.read(practices.states, practised) == [State.APPLIED] * 2
    with page.visitor(ALICE) as alice:
        update = page.db.execute("SELECT number FROM updates").fetchone()[0]
        shown = alice.get(f"learning/{update}").text
        assert f"made to practise note {note}, from your message of turn {asked.number}" in shown
        assert f"made to practise note {note}, from a question that comes with the program" in shown
        assert f'#turn-{asked.number}">its message</a>' in shown
        assert f'href="/dashboard/notes#note-{note}">its note</a>' in shown
        assert "no score" not in shown
        assert "is being practised: step 1 of 24" in alice.get("notes").text
        assert "have no colour" not in alice.get(f"turns/{practised[0]}/tokens").text
