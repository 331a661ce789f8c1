"""An outside trainer over HTTP: what a claim gives, who may claim, and what a confirmation does."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.ledger import leases, training, verdicts
from openclaw_rl.ledger.turns import load_turn, record_turn
from openclaw_rl.types import SampleKind, Source, State, Verdict
from support.episodes import attempt, judge
from support.harness import running
from support.methods import a_method
from support.outside_trainer import KEYS, OutsideServer, judged
from support.records import Book, a_turn

METHOD = a_method("combine", w_opd=0.5, opd_clip=1.0)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutsideServer]:
    with running(OutsideServer(tiny_model, tmp_path_factory.mktemp("ledger"), METHOD)) as bench:
        assert isinstance(bench, OutsideServer)
        yield bench
        bench.ledger.close()


@pytest.fixture
def bench(server: OutsideServer) -> OutsideServer:
    server.empty()
    server.begin(METHOD)
    return server


def send(bench: OutsideServer, call: str, owner: str | None = "alice", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS[owner]}"} if owner else {}
    return httpx.post(f"{bench.url}/v1/training/{call}", json=body, headers=headers, timeout=60)


def claim(bench: OutsideServer, **body: Any) -> dict[str, Any]:
    response = send(bench, "claim", **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["code"]


def test_a_claim_gives_everything_that_a_trainer_needs(bench: OutsideServer) -> None:
    bench.ledger.submit(training.add_policy, 3, 0, "17")
    scored = bench.judged(score=1.0, version=3, finish_reason="length")
    hinted = bench.judged(score=-1.0, hint=[-0.1, -3.25], version=3)
    answer = claim(bench)
    assert answer["step"] == 1
    assert answer["expires"] > time.time() + 3000
    (first,), (second,) = answer["groups"]
    assert first == {
        "turn": scored,
        "session": "s",
        "group": None,
        "messages": bench.ledger.read(load_turn, scored).messages,
        "message": bench.ledger.read(load_turn, scored).message,
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
        "loss_mask": [1, 1],
        "rollout_log_probs": [-0.5, -0.25],
        "teacher_log_probs": None,
        "advantages": [1.0, 1.0],
        "reward": 1.0,
        "score": 1.0,
        "policy_version": 3,
        "weight_version": "17",
        "finish_reason": "length",
    }
    assert second["turn"] == hinted
    assert second["teacher_log_probs"] == pytest.approx([-0.1, -3.25])
    assert second["reward"] == -1.0
    assert second["advantages"] == pytest.approx([-1.0 + 0.5 * 0.4, -1.0 - 0.5]), "clipped to 1, weighted by 0.5"


def test_an_answer_accepted_under_notes_has_the_prompt_without_them(bench: OutsideServer) -> None:
    bench.begin(a_method("notes", w_notes=0.5), batch_size=1)
    number = bench.change(record_turn, a_turn(plain_ids=[1, 9]), "test", None, 0, State.READY)
    verdict = Verdict(1.0, Source.LLM, plain_logprobs=[-1.0, -2.0])
    assert bench.change(verdicts.record, number, verdict, SampleKind.NOTES, "", 0)
    ((turn,),) = claim(bench)["groups"]
    assert (turn["prompt_ids"], turn["rollout_log_probs"]) == ([1, 9], [-1.0, -2.0])
    assert (turn["advantages"], turn["reward"]) == ([0.5, 0.5], 0.5)


def test_forced_tokens_are_masked(bench: OutsideServer) -> None:
    bench.judged(forced=[True, False])
    bench.judged()
    (first,), _second = claim(bench)["groups"]
    assert (first["loss_mask"], first["advantages"]) == ([0, 1], [0.0, 1.0])


def test_confirmed_turns_were_trained_on_once(bench: OutsideServer) -> None:
    turns = [bench.judged(), bench.judged()]
    lease = claim(bench)["lease"]
    bench.weights.push()
    answers = [send(bench, "confirm", lease=lease).json() for _ in range(2)]
    version = bench.weights.newest_version
    assert answers == [{"lease": lease, "step": 1, "policy_version": 0}] * 2
    assert bench.states() == [State.APPLIED] * 2
    (row,) = bench.db.execute("SELECT step, version, outcome FROM updates").fetchall()
    assert tuple(row) == (1, version, "applied")
    assert [row["turn"] for row in bench.db.execute("SELECT turn FROM update_turns")] == turns


def test_a_step_has_a_version_of_its_own_before_the_trainer_pushes_its_weights(bench: OutsideServer) -> None:
    versions = []
    for _ in range(2):
        bench.judged()
        bench.judged()
        assert send(bench, "confirm", lease=claim(bench)["lease"]).status_code == 200
        versions.append(bench.db.execute("SELECT max(version) FROM updates").fetchone()[0])
    assert len(set(versions)) == 2
    assert min(versions) > bench.weights.newest_version


def test_only_the_admin_may_claim_and_confirm(bench: OutsideServer) -> None:
    for call in ("claim", "confirm"):
        assert refusal(send(bench, call, owner=None, lease="x")) == (401, "invalid_api_key")
        assert refusal(send(bench, call, owner="bob", lease="x")) == (403, "operator_only")


def test_too_few_turns_are_not_handed_out_and_the_answer_says_how_many_there_are(bench: OutsideServer) -> None:
    bench.judged()
    answer = claim(bench, count=3)
    assert (answer["lease"], answer["groups"]) == (None, [])
    assert answer["waiting_for"] == "1 of 3 judged turns are there"
    assert bench.states() == [State.JUDGED]


def test_a_claim_waits_for_turns(bench: OutsideServer) -> None:
    bench.judged()
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(claim(bench, wait_seconds=30)))
    asking.start()
    bench.judged()
    asking.join(30)
    assert answers[0]["lease"]


def test_a_trainer_that_was_killed_while_it_waited_holds_no_turns(bench: OutsideServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{bench.url}/v1/training/claim",
            json={"wait_seconds": 60},
            headers={"Authorization": f"Bearer {KEYS['alice']}"},
            timeout=httpx.Timeout(10, read=0.1),
        )
    turns = [bench.judged(), bench.judged()]
    assert [turn["turn"] for (turn,) in claim(bench)["groups"]] == turns


def test_a_lease_that_ran_out_is_refused_and_its_turns_are_handed_out_again(
    bench: OutsideServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [bench.judged(), bench.judged()]
    lease = claim(bench, lease_seconds=60)["lease"]
    later = time.time() + 61
    monkeypatch.setattr(leases.time, "time", lambda: later)
    late = send(bench, "confirm", lease=lease)
    assert refusal(late) == (409, "lease_ended")
    assert "ran out" in late.json()["error"]["message"]
    assert [group[0]["turn"] for group in claim(bench)["groups"]] == turns


def test_what_cannot_be_claimed_or_confirmed_is_refused_in_a_sentence(bench: OutsideServer) -> None:
    assert refusal(send(bench, "confirm", lease="nothing")) == (404, "unknown_lease")
    assert refusal(send(bench, "claim", count=0))[0] == 400
    assert refusal(send(bench, "claim", lease_seconds=0))[0] == 400
    bench.begin(METHOD, max_steps=0)
    done = send(bench, "claim")
    assert refusal(done) == (409, "cannot_claim")
    assert "--max-steps 0" in done.json()["error"]["message"]
    bench.loops.outside = None
    for call in ("claim", "confirm"):
        response = send(bench, call, lease="x")
        assert response.status_code == 409
        assert "--learner outside" in response.json()["error"]["message"]


def test_a_rollback_is_refused(bench: OutsideServer) -> None:
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    response = httpx.post(f"{bench.url}/v1/policy/rollback", json={}, headers=headers)
    assert response.status_code == 409
    assert "slime trains this policy" in response.json()["error"]["message"]


def test_a_group_comes_whole_and_with_its_advantages(tmp_path: Path, tiny_model: Path) -> None:
    method = a_method("rl", baseline="group")
    with running(OutsideServer(tiny_model, tmp_path, method)) as bench:
        assert isinstance(bench, OutsideServer)
        book = Book(tmp_path)
        first = attempt(book, "g", "a", 1.0, turns=2)
        bench.judged()
        second = attempt(book, "g", "b", 0.0)
        judge(book, method)
        group, single = sorted(claim(bench, count=3)["groups"], key=len, reverse=True)
        assert [turn["turn"] for turn in group] == [*first, *second]
        assert [turn["reward"] for turn in group] == [0.5, 0.5, -0.5]
        assert {turn["group"] for turn in group} == {"g"}
        assert len(single) == 1
        book.close()
        bench.ledger.close()


def test_turns_without_a_signal_are_dropped_and_the_others_wait(bench: OutsideServer) -> None:
    bench.judged()
    without = bench.judged(logprobs=[])
    assert claim(bench)["lease"] is None
    assert bench.states() == [State.JUDGED, State.DROPPED]
    assert bench.ledger.read(load_turn, without).reason == "no signal: its log-probs were not recorded"


def test_status_says_what_the_trainer_has_done(bench: OutsideServer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = bench.begin(METHOD)
    bench.judged()
    bench.judged()
    said = "outside: 2 judged turns wait for slime to claim them (POST /v1/training/claim)"
    assert trainer.status() == f"{said}; it has not asked since this server was started"
    claim(bench, lease_seconds=60)
    assert re.search(r"slime claimed 2 turns \d+ s ago, and has \d+ s left to confirm them", trainer.status())
    progress = trainer.progress()
    assert progress is not None
    assert progress.training
    later = time.time() + 61
    monkeypatch.setattr(leases.time, "time", lambda: later)
    bench.change(leases.expire)
    assert re.search(r"; it last asked \d+ s ago; its last claim ran out without being confirmed$", trainer.status())


CLAIMER = """
import asyncio, sys, time
from pathlib import Path
from openclaw_rl.ledger import leases
from openclaw_rl.ledger.store import Ledger
lease = asyncio.run(Ledger(Path(sys.argv[1])).write(leases.claim, 2, 8, 3600))
print(lease.id, flush=True)
time.sleep(600)
"""


def test_a_lease_survives_kill_9_of_the_server_that_gave_it(tmp_path: Path) -> None:
    book = Book(tmp_path)
    turns = [judged(book) for _ in range(2)]
    child = subprocess.Popen([sys.executable, "-c", CLAIMER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lease = child.stdout.readline().strip()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert {book.state(turn) for turn in turns} == {State.BATCHED}
    assert book.change(leases.confirm, lease, 1, 0) == 1
    assert {book.state(turn) for turn in turns} == {State.APPLIED}
    book.close()


def test_the_answer_is_valid_json_whatever_people_said(bench: OutsideServer) -> None:
    said = '"}]\u2028 [{" \\ '
    bench.judged(messages=[{"role": "user", "content": said}])
    bench.judged()
    (first,), _second = claim(bench)["groups"]
    assert first["messages"] == [{"role": "user", "content": said}]
