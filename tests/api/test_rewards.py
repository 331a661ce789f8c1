"""Episodes over HTTP: sessions that are held until they are rewarded, and the rewards themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.api.options import ApiKey
from openclaw_rl.types import EpisodeState, State
from support.harness import running
from support.recording import Recording

TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
KEYS = {"alice": "alice-secret", "bob": "bob-secret"}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    keys = [ApiKey(name, secret) for name, secret in KEYS.items()]
    with running(Recording(tiny_model, tmp_path_factory.mktemp("ledger"), keys=keys)) as bench:
        yield bench  # type: ignore[misc]
        bench.ledger.close()  # type: ignore[attr-defined]


@pytest.fixture
def bench(server: Recording) -> Recording:
    server.empty()
    return server


def key(owner: str = "alice") -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[owner]}"}


def play(bench: Recording, session: str, turns: int = 1, mode: str | None = "1", owner: str = "alice") -> list[str]:
    """Play an episode of some turns; the ids of its completions."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"begin {session}"}]
    headers = {**key(owner), "X-Session-Id": session, **({"X-Episode": mode} if mode else {})}
    ids = []
    for number in range(turns):
        messages.append(bench.say(f"move {number}", messages, headers))
        messages.append({"role": "user", "content": f"state {number}"})
        ids.append(bench.last_id)
    return ids


def reward(bench: Recording, session: str, owner: str = "alice", **body: Any) -> httpx.Response:
    return httpx.post(f"{bench.url}/v1/sessions/{session}/reward", json=body, headers=key(owner))


def refusal(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["code"]


def test_the_tokens_of_a_multi_turn_tool_episode_are_exactly_those_that_the_model_read_and_wrote(
    bench: Recording,
) -> None:
    headers = {**key(), "X-Session-Id": "tools", "X-Episode": "1"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is at 3"}]
    for step in range(3):
        answer = bench.say(CALL, messages, headers, tools=TOOLS)
        (call,) = answer["tool_calls"]
        # As clients do: the answer is sent back in their own form.
        messages.append({"role": "assistant", "content": None, "tool_calls": [{**call, "id": f"call-{step}"}]})
        messages.append({"role": "tool", "tool_call_id": f"call-{step}", "content": f"error {step}: nothing"})
    assert bench.states() == [State.AWAITING] * 3, "a tool's error is not read by rules"
    steps = [{"index": 1, "reward": 0.25, "text": "The place must be even."}]
    assert reward(bench, "tools", reward=0.0, steps=steps).status_code == 200
    turns = bench.turns()
    for turn, request, after in zip(turns, bench.sampler.requests, [*turns[1:], None], strict=True):
        assert turn.prompt_ids == list(request.prompt_ids)
        tokens = [*turn.prompt_ids, *turn.response_ids]
        assert after is None or after.prompt_ids[: len(tokens)] == tokens
        assert len(turn.logprobs) == len(turn.response_ids)
    assert [turn.state for turn in turns] == [State.READY] * 3
    assert [(turn.episode.step, turn.episode.step_reward) for turn in turns if turn.episode] == [
        (0, None),
        (1, 0.25),
        (2, None),
    ]
    assert [[(said.score, said.text) for said in turn.feedback] for turn in turns] == [
        [(0.0, "")],
        [(0.0, "The place must be even.")],
        [(0.0, "")],
    ]


def test_a_held_session_waits_for_its_reward_whatever_else_happens(bench: Recording) -> None:
    (first, second) = play(bench, "s", turns=2)
    for path, body in (
        ("/v1/feedback", {"id": first, "thumb": "up"}),
        ("/v1/sessions/s/close", {}),
    ):
        httpx.post(f"{bench.url}{path}", json=body, headers=key())
    assert bench.states() == [State.AWAITING] * 2
    assert httpx.get(f"{bench.url}/readyz", headers=key()).json()["queue"] == {
        "held": 2,
        "to_judge": 0,
        "to_train": 0,
    }
    assert reward(bench, "s", reward=1, steps=[{"id": second, "reward": -1}], text="Look first.").json() == {
        "id": "s",
        "status": "recorded",
    }
    assert bench.states() == [State.READY] * 2
    assert httpx.get(f"{bench.url}/readyz", headers=key()).json()["queue"]["to_judge"] == 2
    assert [turn.feedback[-1].text for turn in bench.turns()] == ["", "Look first."]


def test_feedback_on_a_turn_of_an_episode_is_refused(bench: Recording) -> None:
    (id,) = play(bench, "s")
    response = httpx.post(f"{bench.url}/v1/feedback", json={"id": id, "thumb": "up"}, headers=key())
    assert response.status_code == 409
    assert "rewarded as a whole" in response.json()["error"]["message"]


def test_the_same_reward_twice_is_one_and_another_is_refused(bench: Recording) -> None:
    play(bench, "s")
    body = {"reward": 0.5, "group": "g", "steps": [{"index": 0, "reward": 1.0}], "solved": True}
    assert [reward(bench, "s", **body).status_code for _ in range(3)] == [200] * 3
    assert refusal(reward(bench, "s", **{**body, "reward": 0.25})) == (409, "already_rewarded")
    assert refusal(reward(bench, "s", error="it broke")) == (409, "already_rewarded")
    (turn,) = bench.turns()
    assert len(turn.feedback) == 1


def test_the_session_of_another_user_is_unknown(bench: Recording) -> None:
    play(bench, "s")
    assert refusal(reward(bench, "s", owner="bob", reward=1)) == (404, "unknown_session")
    assert refusal(reward(bench, "t", reward=1)) == (404, "unknown_session")
    assert refusal(reward(bench, "t", error="no browser")) == (404, "unknown_session")
    assert httpx.post(f"{bench.url}/v1/sessions/s/reward", json={"reward": 1}).status_code == 401
    assert bench.states() == [State.AWAITING]


def test_groups_of_two_users_are_two_groups(bench: Recording) -> None:
    for owner in KEYS:
        play(bench, f"{owner}-1", owner=owner)
        assert reward(bench, f"{owner}-1", owner=owner, reward=1, group="g", group_size=2).status_code == 200
    assert bench.db.execute("SELECT count(*) FROM groups WHERE closed IS NULL").fetchone()[0] == 2


def test_an_attempt_that_failed_before_its_first_turn_counts_in_its_group(bench: Recording) -> None:
    assert reward(bench, "a", error="no browser", group="g", group_size=2).status_code == 200
    assert reward(bench, "b", error="no browser", group="g", group_size=2).status_code == 200
    play(bench, "c")
    assert refusal(reward(bench, "c", reward=1, group="g", group_size=2)) == (409, "too_late")
    assert refusal(reward(bench, "c", reward=1, group="g", group_size=2)) == (409, "too_late")
    (turn,) = bench.turns()
    assert turn.state is State.DROPPED
    assert turn.episode is not None
    assert turn.episode.state is EpisodeState.FAILED


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"reward": NaN}', "reward"),
        (b'{"reward": 1e400}', "reward"),
        (b'{"reward": -1e7}', "reward"),
        (b'{"reward": "1"}', "reward"),
        (b'{"reward": true}', "reward"),
        (b"{}", "Give either reward"),
        (b'{"reward": 1, "error": "x"}', "Give either reward"),
        (b'{"reward": 1, "steps": [{"index": 0, "reward": Infinity}]}', "steps"),
        (b'{"reward": 1, "steps": [{"reward": 1}]}', "index or its completion's id"),
        (b'{"reward": 1, "steps": [{"index": 1, "reward": 1}]}', "no turn with index 1"),
        (b'{"reward": 1, "steps": [{"id": "chatcmpl-x", "reward": 1}]}', "no turn with id"),
        (b'{"reward": 1, "steps": [{"index": 0, "reward": 1}, {"index": 0, "reward": 2}]}', "named twice"),
        (b'{"reward": 1, "steps": [' + b",".join([b'{"index": 0}'] * 4097) + b"]}", "at most 4096"),
        (b'{"reward": 1, "group": ""}', "group"),
        (b'{"reward": 1, "group": "g", "group_size": 1}', "group_size"),
        (b"[1]", "JSON object"),
        (b"reward", "not valid JSON"),
    ],
)
def test_a_bad_reward_is_refused_with_a_sentence_and_changes_nothing(bench: Recording, body: bytes, words: str) -> None:
    play(bench, "s")
    response = httpx.post(f"{bench.url}/v1/sessions/s/reward", content=body, headers=key())
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert bench.states() == [State.AWAITING]
    assert not bench.db.execute("SELECT count(*) FROM groups").fetchone()[0]


def test_a_group_keeps_the_size_that_it_began_with(bench: Recording) -> None:
    for name in "ab":
        play(bench, name)
    assert reward(bench, "a", reward=1, group="g", group_size=3).status_code == 200
    response = reward(bench, "b", reward=1, group="g", group_size=4)
    assert response.status_code == 400
    assert "begun with 3 attempts" in response.json()["error"]["message"]
    assert reward(bench, "b", reward=1, group="g").status_code == 200


def test_nothing_of_an_evaluation_is_trained_on(bench: Recording) -> None:
    play(bench, "s", turns=2, mode="eval")
    assert reward(bench, "s", reward=1, group="g", solved=True).status_code == 200
    assert {(turn.state, turn.reason) for turn in bench.turns()} == {(State.DROPPED, "its episode is an evaluation")}
    episode = bench.turns()[0].episode
    assert episode is not None
    assert (episode.reward, episode.solved, episode.group) == (1.0, True, None)


def test_a_failed_episode_has_no_reward_and_its_turns_are_dropped(bench: Recording) -> None:
    play(bench, "s", turns=2)
    assert reward(bench, "s", error="the browser died", task="web/3").status_code == 200
    assert {(turn.state, turn.reason) for turn in bench.turns()} == {(State.DROPPED, "its episode failed")}
    episode = bench.turns()[0].episode
    assert episode is not None
    assert (episode.reward, episode.error, episode.task) == (None, "the browser died", "web/3")


def test_a_session_that_was_not_held_can_be_rewarded_too(bench: Recording) -> None:
    play(bench, "s", turns=3, mode=None)
    assert bench.states() == [State.READY, State.READY, State.AWAITING]
    assert reward(bench, "s", reward=-2.5).status_code == 200
    assert bench.states() == [State.READY] * 3
    assert {turn.feedback[-1].score for turn in bench.turns()} == {-2.5}


def test_a_session_that_becomes_an_episode_holds_the_turns_that_it_had(bench: Recording) -> None:
    headers = {**key(), "X-Session-Id": "s"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for extra in ({}, {}, {"X-Episode": "1"}):
        messages += [bench.say("move", messages, {**headers, **extra}), {"role": "user", "content": "go on"}]
    assert bench.states() == [State.AWAITING] * 3
    assert reward(bench, "s", reward=1).status_code == 200
    assert bench.states() == [State.READY] * 3


def test_an_answer_after_the_end_is_not_part_of_the_episode(bench: Recording) -> None:
    play(bench, "s")
    reward(bench, "s", reward=1)
    play(bench, "s", turns=2)
    assert [turn.state for turn in bench.turns()] == [State.READY, State.DROPPED, State.DROPPED]


def test_a_request_that_is_made_again_is_one_step(bench: Recording) -> None:
    headers = {**key(), "X-Session-Id": "s", "X-Episode": "1"}
    messages = [{"role": "user", "content": "begin"}]
    for _ in range(3):
        answer = bench.say("move", messages, headers)
    bench.say("end", [*messages, answer, {"role": "user", "content": "go on"}], headers)
    assert reward(bench, "s", reward=1, steps=[{"index": 1, "reward": 1}]).status_code == 200
    assert bench.states() == [State.DROPPED, State.DROPPED, State.READY, State.READY]
    assert refusal(reward(bench, "s", reward=2))[0] == 409


def test_names_that_differ_by_a_number_are_two_episodes(bench: Recording) -> None:
    for name in ("run:1", "run:2"):
        play(bench, name)
    assert reward(bench, "run:1", reward=1).status_code == 200
    assert bench.states() == [State.READY, State.AWAITING]


@pytest.mark.parametrize("mode", ["0", "false"])
def test_a_reward_never_reaches_a_chat_with_another_name(bench: Recording, mode: str) -> None:
    play(bench, "task", mode=mode)
    unknown = reward(bench, "task:7", reward=1)
    assert refusal(unknown) == (404, "unknown_session")
    assert "'task'" in unknown.json()["error"]["message"]
    assert bench.states() == [State.AWAITING]
    assert not bench.turns()[0].feedback
    assert reward(bench, "task", reward=1).json() == {"id": "task", "status": "recorded"}


def test_a_session_of_a_reward_has_no_longer_name_than_others(bench: Recording) -> None:
    assert refusal(reward(bench, "s" * 257, error="no start", group="g", group_size=2)) == (400, "name_too_long")


@pytest.mark.parametrize(
    ("headers", "body", "words"),
    [
        ({"X-Episode": "maybe", "X-Session-Id": "s"}, {}, "1 or eval"),
        ({"X-Episode": "1"}, {}, "X-Session-Id"),
        ({"X-Episode": "1", "X-Session-Id": "s" * 300}, {}, "256"),
        ({"X-Episode": "1", "X-Session-Id": "s"}, {"n": 2}, "one answer"),
        ({"X-Episode": "1", "X-Session-Id": "s"}, {"store": False}, "recorded"),
    ],
)
def test_a_request_that_cannot_be_part_of_an_episode_is_refused(
    bench: Recording, headers: dict[str, str], body: dict[str, Any], words: str
) -> None:
    response = bench.post({"messages": [{"role": "user", "content": "hi"}], **body}, **key(), **headers)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert not bench.turns()


@pytest.mark.parametrize(
    "body", [{"reward": 1e6}, {"reward": -1.5}, {"reward": 1, "steps": [{"index": 0, "reward": 9}]}]
)
def test_only_the_operators_key_gives_large_rewards(bench: Recording, body: dict[str, Any]) -> None:
    play(bench, "mine", owner="bob")
    refused = reward(bench, "mine", "bob", **body)
    assert refused.status_code == 400
    assert "from -1 to 1" in refused.json()["error"]["message"]
    assert reward(bench, "mine", "bob", reward=-1).status_code == 200
    play(bench, "theirs")
    assert reward(bench, "theirs", **body).status_code == 200
