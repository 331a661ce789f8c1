"""A judge behind an endpoint that may do anything, and one on the engine that serves."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.judge.askers import (
    MIN_ANSWER_TOKENS,
    Asker,
    AskParams,
    EndpointAsker,
    EngineAsker,
    read_answers,
)
from openclaw_rl.judge.judges.base import Case, JudgeDown, JudgeFailed
from openclaw_rl.judge.judges.llm import LlmJudge
from openclaw_rl.rendering.chat import ChatRenderer, ChatTemplate
from openclaw_rl.types import BASE_VERSION, Priority, Question, SampleRequest
from support.fakes import ScriptedSampler
from support.judge_server import Body, JudgeServer, Reply, completion

CHAT = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Was it good?"}]
PARAMS = AskParams(votes=3, temperature=0.6, max_tokens=100)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer(lambda body: completion(*[f"answer {i}" for i in range(body["n"])]))
    yield server
    server.stop()


@pytest.fixture
async def asker(server: JudgeServer) -> AsyncIterator[EndpointAsker]:
    asker = EndpointAsker(server.url, "judge-1")
    yield asker
    await asker.close()


async def texts(asker: EndpointAsker, params: AskParams = PARAMS, seed: int = 1) -> list[str]:
    return [answer.text for answer in await asker.ask(CHAT, params, seed)]


async def down(asker: EndpointAsker) -> JudgeDown:
    with pytest.raises(JudgeDown) as caught:
        await asker.ask(CHAT, PARAMS, 1)
    return caught.value


async def failed(asker: EndpointAsker) -> str:
    with pytest.raises(JudgeFailed) as caught:
        await asker.ask(CHAT, PARAMS, 1)
    return str(caught.value)


# an endpoint that works


async def test_all_votes_come_with_one_request(server: JudgeServer, asker: EndpointAsker) -> None:
    assert await texts(asker, seed=7) == ["answer 0", "answer 1", "answer 2"]
    (asked,) = server.requests
    assert asked == {
        "model": "judge-1",
        "messages": CHAT,
        "n": 3,
        "temperature": 0.6,
        "max_tokens": 100,
        "seed": 7,
    }
    assert server.paths == ["/v1/chat/completions"]
    assert [headers["Authorization"] for headers in server.headers] == [None]


async def test_the_key_is_sent_and_a_slash_at_the_end_is_none_too_many(server: JudgeServer) -> None:
    asker = EndpointAsker(server.url + "/", "judge-1", "a-key")
    await asker.ask(CHAT, PARAMS, 1)
    await asker.close()
    assert server.paths == ["/v1/chat/completions"]
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer a-key"]


async def test_one_that_ignores_n_is_asked_for_the_missing_answers_with_other_seeds(
    server: JudgeServer, asker: EndpointAsker
) -> None:
    server.answer = lambda body: completion(f"seed {body['seed']}")
    assert sorted(await texts(asker, seed=5)) == ["seed 5", "seed 6", "seed 7"]
    assert [body["n"] for body in server.requests] == [3, 1, 1]


async def test_one_that_gives_more_than_was_asked_for_is_not_listened_to_longer(
    server: JudgeServer, asker: EndpointAsker
) -> None:
    server.answer = lambda body: completion(*"abcdef")
    assert await texts(asker) == ["a", "b", "c"]


async def test_an_answer_without_words_is_an_empty_one(server: JudgeServer, asker: EndpointAsker) -> None:
    server.answer = lambda body: completion(None, "", "x")
    assert await texts(asker) == ["", "", "x"]


async def test_tokens_are_shared_among_the_answers(server: JudgeServer, asker: EndpointAsker) -> None:
    server.answer = lambda body: completion("a", "b", "c", usage={"prompt_tokens": 30, "completion_tokens": 60})
    assert [answer.tokens for answer in await asker.ask(CHAT, PARAMS, 1)] == [30, 30, 30]


async def test_half_a_character_in_a_turn_is_no_obstacle(server: JudgeServer, asker: EndpointAsker) -> None:
    """JSON can escape half a character, so a client can send one, and the ledger keeps it."""
    answers = await asker.ask([{"role": "user", "content": "half \ud83d of it"}], PARAMS, 1)
    assert len(answers) == 3
    assert server.requests[0]["messages"][0]["content"].startswith("half ")


THOUGHT = "If it is good I should write \\boxed{1}, if bad \\boxed{-1}. Hmm, so this"
HINT_THOUGHT = "Perhaps [HINT_START]Give it in kilometres.[HINT_END] \\boxed{1}, or"


async def values(asker: Asker) -> list[tuple[float | None, str]]:
    """What a judge that asks so makes of the answers to both questions."""
    found = await LlmJudge(asker, PARAMS, timeout=20).judge(Case(1, "a", "b", [], ()), frozenset(Question))
    return [(vote.value, vote.text) for vote in found.votes]


async def test_an_answer_that_ran_out_of_tokens_is_no_vote_and_is_kept(
    server: JudgeServer, asker: EndpointAsker
) -> None:
    """The endpoint's template may have opened the thought, so nothing but its end tells it from an answer."""

    def answer(body: Body) -> Reply:
        reply = json.loads(completion(THOUGHT, HINT_THOUGHT, "\\boxed{-1}").body)
        for choice, reason in zip(reply["choices"], ("length", "length", "stop"), strict=True):
            choice["finish_reason"] = reason
        return Reply(body=json.dumps(reply).encode())

    server.answer = answer
    assert await values(asker) == [(None, THOUGHT), (None, HINT_THOUGHT), (-1, "\\boxed{-1}")] * 2


# one that does not


@pytest.mark.parametrize("status", [401, 402, 403, 404, 408, 429, 500, 502, 503, 529])
async def test_statuses_that_are_no_fault_of_the_turn(server: JudgeServer, asker: EndpointAsker, status: int) -> None:
    server.answer = lambda body: Reply(status, b"no")
    said = str(await down(asker))
    assert str(status) in said
    assert server.url in said


@pytest.mark.parametrize(("status", "advice"), [(401, "OPENCLAW_JUDGE_API_KEY"), (404, "--judge-model")])
async def test_what_can_be_mended_is_said_with_how(
    server: JudgeServer, asker: EndpointAsker, status: int, advice: str
) -> None:
    server.answer = lambda body: Reply(status)
    assert advice in str(await down(asker))


@pytest.mark.parametrize(("asked", "seconds"), [("12", 12), ("86400", 600)])
async def test_one_that_says_when_to_come_back(
    server: JudgeServer, asker: EndpointAsker, asked: str, seconds: int
) -> None:
    server.answer = lambda body: Reply(429, headers={"Retry-After": asked})
    assert (await down(asker)).retry_after == seconds


@pytest.mark.parametrize(("status", "text"), [(400, "too long: 9999 tokens"), (413, "large"), (422, "no"), (307, "")])
async def test_statuses_that_are_about_the_turn(
    server: JudgeServer, asker: EndpointAsker, status: int, text: str
) -> None:
    server.answer = lambda body: Reply(status, text.encode())
    assert await failed(asker) == f"the judge answers {status}: {text}"


async def test_what_a_judge_says_to_a_refusal_is_not_repeated_at_length(
    server: JudgeServer, asker: EndpointAsker
) -> None:
    server.answer = lambda body: Reply(400, b"x" * 100_000)
    assert len(await failed(asker)) < 300


@pytest.mark.parametrize("body", [b"", b"<html>Welcome!</html>", b"\xff\xfe\x00", b'{"choices": [', b"[" * 200_000])
async def test_an_answer_that_is_no_json(server: JudgeServer, asker: EndpointAsker, body: bytes) -> None:
    server.answer = lambda _: Reply(body=body)
    assert await failed(asker) == "the judge's answer is not JSON"


@pytest.mark.parametrize("status", [200, 400])
async def test_of_an_endless_answer_only_the_beginning_is_read(server: JudgeServer, status: int) -> None:
    asker = EndpointAsker(server.url, "judge-1")
    whole = 64 << 20
    server.answer = lambda _: Reply(status, b" " * (8 << 20), {"Content-Length": str(whole)})
    expected = "the judge's answer is larger than 4 MiB" if status == 200 else "the judge answers 400: "
    assert (await failed(asker)).startswith(expected)
    await asker.close()


async def test_a_judge_is_asked_for_answers_that_are_not_compressed(server: JudgeServer, asker: EndpointAsker) -> None:
    await asker.ask(CHAT, PARAMS, 1)
    assert server.headers[0]["Accept-Encoding"] == "identity"


WRONG: list[Any] = [
    None,
    [],
    "choices",
    7,
    {},
    {"choices": None},
    {"choices": []},
    {"choices": {}},
    {"choices": {"a": 1}},
    {"choices": ["text"]},
    {"choices": [{"text": "completion"}]},
    {"choices": [{"message": None}]},
    {"choices": [{"message": {}}]},
    {"choices": [{"message": {"content": 7}}]},
    {"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}]},
    {"choices": [{"message": {"content": "fine"}}], "usage": "much"},
    {"choices": [{"message": {"content": "fine"}}], "usage": {"prompt_tokens": "much"}},
    {"choices": [{"message": {"content": "fine"}}], "usage": {"prompt_tokens": [1]}},
    {"error": {"message": "no such model"}},
]


@pytest.mark.parametrize("body", WRONG, ids=json.dumps)
async def test_an_answer_of_the_wrong_shape(server: JudgeServer, asker: EndpointAsker, body: Any) -> None:
    server.answer = lambda _: Reply(body=json.dumps(body).encode())
    assert await failed(asker) == "the judge's answer is not a chat completion"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "usage", "prompt_tokens", "completion_tokens"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
almost = st.builds(
    lambda content, usage: {"choices": [{"message": {"content": content}}], "usage": usage},
    anything,
    anything
    | st.fixed_dictionaries({"prompt_tokens": anything, "completion_tokens": st.integers() | st.floats() | st.none()}),
)


@given(anything | almost)
def test_whatever_json_comes_it_is_answers_or_said_to_be_none(body: Any) -> None:
    try:
        answers = read_answers(body, 1.0)
    except JudgeFailed:
        return
    assert answers
    assert all(isinstance(answer.text, str) and answer.tokens >= 0 for answer in answers)


async def test_a_judge_that_refuses_connections() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        asker = EndpointAsker(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "judge-1")
        said = str(await down(asker))
        await asker.close()
    assert "cannot be reached" in said


async def test_a_judge_that_hangs_up(server: JudgeServer, asker: EndpointAsker) -> None:
    def hang_up(body: Body) -> Reply:
        raise ConnectionError

    server.answer = hang_up
    assert "cannot be reached" in str(await down(asker))


@pytest.mark.parametrize("key", ["S3CRET\r\nX: y", "S3CRET\x00", "S3\nCRET"])
async def test_a_key_that_no_header_can_carry_is_not_shown(server: JudgeServer, key: str) -> None:
    """What the judge's failure says is on `/readyz`, for everybody."""
    asker = EndpointAsker(server.url, "judge-1", key)
    said = str(await down(asker))
    await asker.close()
    assert "S3" not in said
    assert "OPENCLAW_JUDGE_API_KEY" in said


async def test_a_key_may_end_with_its_line(server: JudgeServer) -> None:
    asker = EndpointAsker(server.url, "judge-1", "a-key\n")
    await asker.ask(CHAT, PARAMS, 1)
    await asker.close()
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer a-key"]


async def test_one_that_is_slow_is_given_up_by_the_judge_that_asked_it(
    server: JudgeServer, asker: EndpointAsker
) -> None:
    answer = threading.Event()

    def slow(body: Body) -> Reply:
        answer.wait(20)
        return completion("\\boxed{1}")

    server.answer = slow
    judge = LlmJudge(asker, PARAMS, timeout=0.1)
    with pytest.raises(TimeoutError):
        await judge.judge(Case(1, "a", "b", [], ()), frozenset([Question.SCORE]))
    answer.set()


# the engine that serves


@pytest.fixture
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(tiny_model)


def saying(renderer: ChatRenderer, *texts: str) -> Callable[[SampleRequest, int], list[int]]:
    backend = renderer.tokenizer.backend
    end = backend.token_to_id("<|im_end|>")
    return lambda request, index: [*backend.encode(texts[index]).ids, end]


async def test_the_engine_gives_all_votes_of_the_base_model_behind_its_users(renderer: ChatRenderer) -> None:
    sampler = ScriptedSampler(saying(renderer, "\\boxed{1}", "hello world", "no"), versions=[3])
    answers = await EngineAsker(sampler, renderer).ask(CHAT, PARAMS, 9)
    assert [answer.text for answer in answers] == ["\\boxed{1}", "hello world", "no"]
    (request,) = sampler.requests
    assert request.prompt_ids == renderer.prompt(renderer.text(CHAT)).ids
    assert (request.n, request.version, request.priority) == (3, BASE_VERSION, Priority.BACKGROUND)
    params = request.params
    assert (params.max_tokens, params.temperature, params.seed) == (100, 0.6, 9)
    assert params.stop_token_ids == frozenset(renderer.tokenizer.eos_ids)
    read = len(request.prompt_ids) // 3
    assert answers[0].tokens == read + len(sampler.script(request, 0))


async def test_the_answer_has_as_much_room_as_is_left(renderer: ChatRenderer) -> None:
    length = len(renderer.prompt(renderer.text(CHAT)).ids)
    sampler = ScriptedSampler(saying(renderer, "a"), max_context=length + MIN_ANSWER_TOKENS)
    await EngineAsker(sampler, renderer).ask(CHAT, AskParams(1, 0.6, 4096), 1)
    assert sampler.requests[0].params.max_tokens == MIN_ANSWER_TOKENS


async def test_a_turn_that_leaves_no_room_for_an_answer_cannot_be_judged(renderer: ChatRenderer) -> None:
    length = len(renderer.prompt(renderer.text(CHAT)).ids)
    sampler = ScriptedSampler(saying(renderer, "a"), max_context=length + MIN_ANSWER_TOKENS - 1)
    with pytest.raises(JudgeFailed, match=f"too long for the judge's context: {length} tokens"):
        await EngineAsker(sampler, renderer).ask(CHAT, PARAMS, 1)
    assert not sampler.requests


async def test_an_engine_that_is_full_or_dies_is_down(renderer: ChatRenderer) -> None:
    sampler = ScriptedSampler(saying(renderer, "hello world", "b", "c"))
    sampler.full = True
    with pytest.raises(JudgeDown, match="queue is full"):
        await EngineAsker(sampler, renderer).ask(CHAT, PARAMS, 1)
    sampler.full, sampler.dies_after = False, 1
    with pytest.raises(JudgeDown, match="The worker died"):
        await EngineAsker(sampler, renderer).ask(CHAT, PARAMS, 1)


async def test_half_a_character_is_no_obstacle_to_the_engine(renderer: ChatRenderer) -> None:
    sampler = ScriptedSampler(saying(renderer, "a", "b", "c"))
    assert await EngineAsker(sampler, renderer).ask([{"role": "user", "content": "half \ud83d"}], PARAMS, 1)


async def test_an_answer_that_ran_out_of_tokens_on_the_engine_is_no_vote(renderer: ChatRenderer) -> None:
    whole = saying(renderer, THOUGHT, HINT_THOUGHT, "\\boxed{-1}")

    def script(request: SampleRequest, index: int) -> list[int]:
        ids = list(whole(request, index))
        return ids if index == 2 else (ids[:-1] * PARAMS.max_tokens)[: PARAMS.max_tokens + 1]

    found = await values(EngineAsker(ScriptedSampler(script), renderer))
    assert [value for value, _ in found] == [None, None, -1] * 2
    assert found[0][1].startswith(THOUGHT)


async def test_a_thought_that_the_prompt_opened_is_none_of_the_answer(renderer: ChatRenderer) -> None:
    renderer.template = ChatTemplate(renderer.template.text.replace("{% if enable_thinking %}", "{% if true %}"))
    ended = f"{THOUGHT}</think>\\boxed{{-1}}"
    sampler = ScriptedSampler(saying(renderer, THOUGHT, HINT_THOUGHT, ended))
    found = await values(EngineAsker(sampler, renderer))
    assert found == [(None, f"<think>{THOUGHT}"), (None, f"<think>{HINT_THOUGHT}"), (-1, f"<think>{ended}")] * 2


async def test_a_judge_asks_both_questions_at_once_and_counts_each_by_itself(renderer: ChatRenderer) -> None:
    texts = {
        Question.SCORE: ("\\boxed{-1}", "\\boxed{-1}", "hm"),
        Question.HINT: ("[HINT_START]Give it in kilometres.[HINT_END]\\boxed{1}", "\\boxed{-1}", "\\boxed{-1}"),
    }
    backend = renderer.tokenizer.backend

    def script(request: SampleRequest, index: int) -> list[int]:
        prompt = backend.decode(list(request.prompt_ids))
        question = Question.HINT if "HINT_START" in prompt else Question.SCORE
        return [*backend.encode(texts[question][index]).ids, backend.token_to_id("<|im_end|>")]

    sampler = ScriptedSampler(script)
    judge = LlmJudge(EngineAsker(sampler, renderer), PARAMS, timeout=20, seed=5)
    case = Case(7, "How far?", "Ten miles.", [{"role": "user", "content": "In km!"}], ())
    found = await judge.judge(case, frozenset(Question))
    assert (found.score, found.hints) == (-1, ("Give it in kilometres.",))
    assert [vote.value for vote in found.votes] == [-1, -1, None, 1, -1, -1]
    assert len(sampler.requests) == 2
    assert sampler.requests[0].params.seed == 12


async def test_an_answer_that_cannot_be_read_is_an_abstention_with_its_reason(server: JudgeServer) -> None:
    server.answer = lambda body: completion("well", "hm", "so so")
    asker = EndpointAsker(server.url, "judge-1")
    judge = LlmJudge(asker, PARAMS, timeout=20)
    found = await judge.judge(Case(1, "a", "b", [], ()), frozenset(Question))
    await asker.close()
    assert (found.score, found.hints) == (None, None)
    assert found.reason == "no vote on the score can be read; no vote on the hint can be read"
    assert len(found.votes) == 6


async def test_both_questions_are_left_when_one_fails(server: JudgeServer) -> None:
    """Nobody waits for the other question any more, so nothing of it goes on."""
    other, left = threading.Event(), threading.Event()

    def answer(body: Body) -> Reply:
        if "HINT_START" in body["messages"][-1]["content"]:
            other.set()
            left.wait(20)
            return completion("\\boxed{-1}")
        other.wait(20)
        return Reply(400, b"no")

    server.answer = answer
    asker = EndpointAsker(server.url, "judge-1")
    judge = LlmJudge(asker, PARAMS, timeout=20)
    before = asyncio.all_tasks()
    with pytest.raises(JudgeFailed):
        await judge.judge(Case(1, "a", "b", [], ()), frozenset(Question))
    await asyncio.sleep(0)
    still = asyncio.all_tasks() - before
    left.set()
    await asyncio.gather(*still, return_exceptions=True)
    await asker.close()
    assert not still
