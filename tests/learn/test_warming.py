"""A new policy reads the conversations that are under way before it serves."""

from pathlib import Path

from openclaw_rl.engines.base import PolicyRef, WeightForm
from openclaw_rl.learn.step import MAX_CONVERSATIONS, MAX_TOKENS, warm
from openclaw_rl.ledger import sessions
from openclaw_rl.types import Priority, SampleRequest, SessionKey
from support.fakes import ScriptedSampler
from support.records import Book, a_side_turn, a_turn


async def warmed(book: Book, *, full: bool = False) -> list[SampleRequest]:
    sampler = ScriptedSampler(lambda request, index: [7], max_context=2 * MAX_TOKENS)
    sampler.full = full
    await sampler.publish(3, PolicyRef(WeightForm.PEFT, Path("v3")))
    await warm(book.ledger, sampler, 3)
    return sampler.requests


async def test_the_last_turn_of_every_open_session_is_read_by_the_new_policy_behind_everybody(book: Book) -> None:
    book.capture(a_turn("one", prompt_ids=[1, 2], response_ids=[3]))
    book.capture(a_turn("one", prompt_ids=[1, 2, 3, 4], response_ids=[5]))
    book.capture(a_turn("two", prompt_ids=[8], response_ids=[9], owner="you"))
    book.capture(a_side_turn("two", owner="you", prompt_ids=[6], response_ids=[6]))
    book.capture(a_turn("ended", prompt_ids=[1], response_ids=[1]))
    book.change(sessions.close_session, SessionKey("me", "ended"))
    requests = await warmed(book)
    assert sorted(list(request.prompt_ids) for request in requests) == [[1, 2, 3, 4, 5], [8, 9]]
    assert {request.prompt_ids[0]: request.owner for request in requests} == {1: "me", 8: "you"}
    assert {(request.version, request.priority, request.params.max_tokens) for request in requests} == {
        (3, Priority.BACKGROUND, 1)
    }


async def test_only_so_many_are_read_and_only_so_much(book: Book) -> None:
    for number in range(MAX_CONVERSATIONS + 3):
        book.capture(a_turn(f"s{number}", prompt_ids=[number], response_ids=[number]))
    assert len(await warmed(book)) == MAX_CONVERSATIONS
    book.capture(a_turn("long", prompt_ids=[1] * MAX_TOKENS, response_ids=[1]))
    assert MAX_TOKENS + 1 not in [len(request.prompt_ids) for request in await warmed(book)]


async def test_an_engine_that_has_no_room_is_left_alone(book: Book) -> None:
    book.capture(a_turn("one"))
    assert await warmed(book, full=True) == []
