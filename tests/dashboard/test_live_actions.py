"""What the page can do: rate, forget, roll back, compare; and the events that keep it up to date."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from openclaw_rl.api.service import OperationFailed, Operations
from openclaw_rl.app.http_server import Server
from openclaw_rl.dashboard.live import reads
from openclaw_rl.dashboard.live.reads import KEEPALIVE, PULSE, ChangeFeed, PageThreads
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.ledger import sessions, training
from openclaw_rl.ledger.pages import cursor
from openclaw_rl.types import SHARED, Source, State
from support.judged_run import a_report
from support.live_page import ALICE, BOB, LivePage, Visitor, live_page
from support.lively_run import change, keep_screenshots
from support.records import Book


class Scripted(Operations):
    """Learning that only remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None]] = []
        self.held: Any = None

    async def roll_back(self, version: int | None, *, retrain: bool = False, line: str = SHARED) -> int:
        self.asked.append(("roll back", version))
        if version == 7:
            raise OperationFailed("There is no checkpoint of policy version 7.")
        return 9

    async def hold(self, version: int) -> int:
        self.asked.append(("hold", version))
        return int(await self.held(version)) if self.held else await super().hold(version)


@pytest.fixture
def operations() -> Scripted:
    return Scripted()


@pytest.fixture
def page(tmp_path: Path, tiny_model: Path, operations: Scripted) -> Iterator[LivePage]:
    with live_page(tiny_model, tmp_path / "run", operations=operations) as page:
        yield page


def hello(page: LivePage, session: str = "s") -> None:
    page.say("Hi!", [{"role": "user", "content": "hello"}], {"X-Session-Id": session})


def test_a_thumb_and_a_sentence_are_explicit_feedback(page: LivePage) -> None:
    hello(page)
    with page.visitor() as visitor:
        answer = visitor.do("feedback", turn=1, score=-1, text=" Say it in French. ")
        assert answer.json()["message"].startswith("Recorded")
        (turn,) = page.turns()
        assert [(f.score, f.text, f.source) for f in turn.feedback] == [(-1.0, "Say it in French.", Source.EXPLICIT)]
        assert turn.state is State.READY, "it can be judged now"
        assert visitor.see("sessions/1").all("button", **{"aria-pressed": "true"})
        for fields in ({"turn": 1}, {"turn": 1, "score": 2}, {"score": 1}, {"turn": "x", "score": 1}):
            assert visitor.do("feedback", **fields).status_code == 400


def test_a_form_works_without_scripts(page: LivePage) -> None:
    hello(page)
    with page.visitor() as visitor:
        fields = {"token": visitor.token, "turn": "1", "score": "1"}
        referer = f"{page.url}/dashboard/sessions/1"
        answer = visitor.http.post("/dashboard/feedback", data=fields, headers={"Referer": referer})
        assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/sessions/1")


def test_a_turn_that_was_learned_from_can_no_longer_be_rated(page: LivePage) -> None:
    hello(page)
    with page.visitor() as visitor:
        for state in (State.READY, State.JUDGED, State.BATCHED, State.APPLIED):
            page.ledger.submit(lambda db, state=state: db.execute("UPDATE turns SET state = ?", (state,))).result(10)
        assert visitor.do("feedback", turn=1, score=1).status_code == 409
        assert not visitor.see("sessions/1").all("form", action="/dashboard/feedback")


def test_a_forgotten_session_is_gone_from_the_files(page: LivePage) -> None:
    secret = "a very secret word"
    page.say("oh", [{"role": "user", "content": secret}], {"X-Session-Id": "s"})
    hello(page, "other")
    (page.folder / "records.jsonl").write_text('{"turn": 1}\n{"turn": 2}\n')
    for name in ("s", "other"):
        keep_screenshots(page, name, "000.png")
    with page.visitor() as visitor:
        answer = visitor.do("forget", session=1).json()
        assert answer["message"] == "Forgot the session with its 1 turn."
        assert answer["location"] == "/dashboard/sessions"
        assert visitor.get("sessions/1").status_code == 404
    assert [turn.session.id for turn in page.turns()] == ["other"]
    assert (page.folder / "records.jsonl").read_text() == '{"turn": 2}\n'
    assert [path.name for path in (page.folder / "screenshots").iterdir()] == ["other"]
    assert not any(secret.encode() in path.read_bytes() for path in page.folder.glob("ledger*"))


def test_what_could_not_be_deleted_is_said_without_the_names_of_others(tiny_model: Path, tmp_path: Path) -> None:
    with live_page(tiny_model, tmp_path, keys=(ALICE, BOB)) as page:
        for key, name in ((ALICE, "talk"), (ALICE, "walk"), (BOB, "talk-2"), (BOB, "walk-2")):
            headers = {"X-Session-Id": name, "Authorization": f"Bearer {key.secret}"}
            page.say("oh", [{"role": "user", "content": "hello"}], headers)
            keep_screenshots(page, name, "000.png")
        with page.visitor(BOB) as bob, page.visitor(ALICE) as alice:
            said = bob.do("forget", session=3).json()["message"]
            assert said == "Forgot the session with its 1 turn. Not all of it could be removed from the files."
            said = alice.do("forget", session=2).json()["message"]
            assert f"{tmp_path / 'screenshots' / 'walk-2'} may be of the session walk-2 or of walk" in said
        assert sorted(path.name for path in (tmp_path / "screenshots").iterdir()) == ["talk", "talk-2", "walk-2"]


def test_a_rollback_is_asked_of_the_learner(page: LivePage, operations: Scripted) -> None:
    with page.visitor() as visitor:
        assert visitor.do("rollback", version=3).json()["message"] == "Rolled back: policy 9 serves now."
        refused = visitor.do("rollback", version=7)
        assert (refused.status_code, refused.json()["message"]) == (409, "There is no checkpoint of policy version 7.")
        assert visitor.do("rollback").status_code == 400
    assert operations.asked == [("roll back", 3), ("roll back", 7)]


# Comparing


def lines(answer: Any) -> list[dict[str, str]]:
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture
def two_policies(page: LivePage) -> LivePage:
    """The sampler holds the base model and version 5; each says its name."""
    page.sampler.versions.add(5, None)
    backend = page.renderer.tokenizer.backend

    def script(request: Any, index: int) -> list[int]:
        ids = [id for character in f"I am {request.version}" for id in backend.encode(character).ids]
        return [*ids, backend.token_to_id("<|im_end|>")]

    page.sampler.script = script
    return page


def test_two_policies_answer_and_a_blind_vote_is_feedback_on_both(two_policies: LivePage) -> None:
    with two_policies.visitor() as visitor:
        assert "which serves" in visitor.see("compare").text
        sent = lines(visitor.do("compare", one=5, other=0, text="Who are you?"))
        said = {side: "".join(line["text"] for line in sent if line.get("side") == side) for side in ("left", "right")}
        assert sorted(said.values()) == ["I am 0", "I am 5"]
        assert [turn.version for turn in two_policies.turns()] in ([0, 5], [5, 0])
        better = next(side for side, text in said.items() if text == "I am 5")
        told = visitor.do("vote", comparison=sent[-1]["vote"], better=better).json()["message"]
        assert f"{better.capitalize()}: policy 5." in told
        assert {turn.version: turn.feedback[0].score for turn in two_policies.turns()} == {5: 1.0, 0: -1.0}
        assert visitor.do("vote", comparison=sent[-1]["vote"], better=better).status_code == 404, "once"


def test_a_checkpoint_that_is_not_loaded_is_loaded_first(two_policies: LivePage, operations: Scripted) -> None:
    async def write(folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")

    asyncio.run(Checkpoints(two_policies.folder / "checkpoints", 3).save(3, 3, (), write))

    async def held(_version: int) -> int:
        two_policies.sampler.versions.add(4, None)
        return 4

    operations.held = held
    with two_policies.visitor() as visitor:
        assert "policy 3, checkpoint of step 3" in visitor.see("compare").text
        sent = lines(visitor.do("compare", one=3, other=0, text="Who?"))
        said = {side: "".join(line["text"] for line in sent if line.get("side") == side) for side in ("left", "right")}
        assert sorted(said.values()) == ["I am 0", "I am 4"]
        assert operations.asked == [("hold", 3)]
        assert "policy 3" in visitor.do("vote", comparison=sent[-1]["vote"], better="same").json()["message"]
        assert all(not turn.feedback for turn in two_policies.turns()), "no vote is no feedback"


def test_a_step_shows_the_answers_before_and_after_it(two_policies: LivePage) -> None:
    hello(two_policies)
    for state in (State.READY, State.JUDGED, State.BATCHED):
        change(two_policies, sessions.move, 1, state)
    change(two_policies, training.apply_step, 1, 5, [1], a_report(1).as_json())
    change(two_policies, training.apply_step, 2, 6, [], a_report(2).as_json())
    with two_policies.visitor() as visitor:
        part = visitor.get("learning/1/again/1").text
        assert "I am 0" in part
        assert "I am 5" in part
        assert "Policy 6 cannot be asked: Policy version 6 is not loaded." in visitor.get("learning/2/again/1").text
        assert visitor.get("learning/1/again/9").status_code == 404
        assert visitor.get("learning/9/again/1").status_code == 404
        assert visitor.get("learning/1/again/1", **{"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_the_sides_are_chance(two_policies: LivePage) -> None:
    with two_policies.visitor() as visitor:
        firsts = set()
        for _ in range(40):
            sent = lines(visitor.do("compare", one=5, other=0, text="Who are you?"))
            firsts.add("".join(line["text"] for line in sent if line.get("side") == "left"))
            if len(firsts) == 2:
                return
    pytest.fail("forty times the same side")


def test_what_cannot_be_compared_is_a_sentence(two_policies: LivePage) -> None:
    with two_policies.visitor() as visitor:
        for fields in ({"one": 5, "other": 5}, {"one": 5, "other": 4}, {"one": 5}, {"one": 5, "other": 0, "text": " "}):
            answer = visitor.do("compare", **{"text": "Who?", **fields})
            assert answer.status_code == 400
            assert answer.json()["message"]
        two_policies.sampler.full = True
        assert visitor.do("compare", one=5, other=0, text="Who?").status_code == 429


def test_a_vote_on_an_answer_that_is_damaged_is_a_sentence(two_policies: LivePage) -> None:
    with two_policies.visitor() as visitor:
        sent = lines(visitor.do("compare", one=5, other=0, text="Who are you?"))
        two_policies.ledger.submit(lambda db: db.execute("UPDATE turns SET state = 'nonsense'")).result(10)
        answer = visitor.do("vote", comparison=sent[-1]["vote"], better="left")
        assert answer.status_code == 410
        assert "is damaged" in answer.json()["message"]


# Events


@contextlib.contextmanager
def listening(visitor: Visitor, since: int, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    with visitor.http.stream("GET", f"/dashboard/events?since={since}", headers=headers, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")

        def events() -> Iterator[dict[str, Any]]:
            kind = ""
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data" and kind == "change":
                    yield json.loads(value)

        yield events()


def test_a_turn_and_a_step_arrive_as_events(page: LivePage) -> None:
    with page.visitor() as visitor, listening(visitor, page.ledger.read(cursor)) as events:
        hello(page)
        first = next(events)
        assert (first["sessions"], first["turns"], first["complete"]) == ([1], [1], True)
        change(page, training.apply_step, 1, 1, [], a_report(1).as_json())
        assert next(events)["updates"] == [1]


def test_a_page_that_reconnects_misses_nothing(page: LivePage) -> None:
    hello(page)
    since = page.ledger.read(cursor)
    hello(page, "second")
    with page.visitor() as visitor, listening(visitor, 0, **{"Last-Event-ID": str(since)}) as events:
        assert next(events)["sessions"] == [2]


def test_a_cursor_from_before_the_log_means_read_everything(page: LivePage) -> None:
    with page.visitor() as visitor, listening(visitor, 0) as events:
        assert next(events)["complete"] is False


def test_events_tell_an_owner_only_of_their_own(tmp_path: Path, tiny_model: Path) -> None:
    with (
        live_page(tiny_model, tmp_path / "run", keys=(ALICE, BOB)) as page,
        page.visitor(BOB) as bob,
        listening(bob, page.ledger.read(cursor)) as events,
    ):
        for key in (ALICE, BOB):
            headers = {"Authorization": f"Bearer {key.secret}", "X-Session-Id": key.name}
            page.say("Hi!", [{"role": "user", "content": "hello"}], headers)
        first = next(events)
        assert (first["sessions"], first["turns"]) == ([2], [2])


async def test_streams_end_when_the_server_stops(book: Book) -> None:
    feed = ChangeFeed(PageThreads(book.ledger), lambda: 0)
    stream = feed.events("me", 0, pulse=False)
    assert await anext(stream) == KEEPALIVE
    feed.close()
    assert [event async for event in stream] == []


async def test_an_open_page_does_not_keep_the_server_from_stopping(tmp_path: Path, tiny_model: Path) -> None:
    page = LivePage(tiny_model, tmp_path / "run")
    config = uvicorn.Config(page.app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=60)
    server = Server(config, page.sampler, 60.0, on_stop=page.dashboard.close)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient() as http, http.stream("GET", f"http://127.0.0.1:{port}/dashboard/events") as stream:
        lines = stream.aiter_lines()
        assert await anext(lines) == KEEPALIVE.decode().strip()
        server.should_exit = True
        async with asyncio.timeout(20):
            assert [line async for line in lines if line.startswith("event")] in ([], ["event: change"])
            await serving
    page.ledger.close()


def test_another_site_cannot_use_up_the_streams(page: LivePage) -> None:
    with page.visitor() as visitor:
        assert visitor.get("events", **{"Sec-Fetch-Site": "cross-site"}).status_code == 403


async def test_numbers_that_change_without_the_ledger_are_a_pulse(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "PULSE_SECONDS", 0.01)
    monkeypatch.setattr(reads, "MIN_INTERVAL", 0.0)
    numbers = iter(range(10**6))
    feed = ChangeFeed(PageThreads(book.ledger), lambda: next(numbers))
    stream = feed.events("me", book.ledger.read(cursor), pulse=True)
    events = [await anext(stream) for _ in range(3)]
    assert events == [KEEPALIVE, PULSE, PULSE]
    feed.close()
    await stream.aclose()
