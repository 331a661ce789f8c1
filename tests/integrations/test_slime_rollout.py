"""slime's rollout function against a real server. slime is a double here: it has slime's field names and rules."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.client import ServerError
from openclaw_rl.http_client import ConnectFailed, HttpClient, HttpError
from openclaw_rl.integrations import slime
from openclaw_rl.integrations.slime import TRAINER_RETRIES, RolloutSource, TrainerClient
from openclaw_rl.ledger import leases, training
from openclaw_rl.ledger.turns import load_turn
from openclaw_rl.types import State
from support import slime_double
from support.episodes import attempt, judge
from support.harness import running
from support.methods import a_method
from support.outside_trainer import KEYS, OutsideServer
from support.records import Book
from support.slime_double import Sample, arguments

RL, COMBINE = a_method("rl", baseline="group"), a_method("combine", w_opd=0.5, opd_clip=1.0)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutsideServer]:
    with running(OutsideServer(tiny_model, tmp_path_factory.mktemp("ledger"), COMBINE)) as bench:
        assert isinstance(bench, OutsideServer)
        yield bench
        bench.ledger.close()


@pytest.fixture
def bench(server: OutsideServer, monkeypatch: pytest.MonkeyPatch) -> OutsideServer:
    slime_double.install(monkeypatch)
    monkeypatch.setattr(slime, "_source", None)
    monkeypatch.setenv("OPENCLAW_RL_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENCLAW_RL_KEY", KEYS["alice"])
    server.empty()
    server.begin(COMBINE)
    return server


def rollout(number: int = 0, **given: Any) -> Any:
    return slime.generate_rollout(arguments(**given), number, None)


def test_samples_have_slimes_fields_and_slime_computes_the_advantages_of_the_method(bench: OutsideServer) -> None:
    bench.ledger.submit(training.add_policy, 3, 0, "17")
    scored = bench.judged(score=1.0, version=3, finish_reason="length")
    hinted = bench.judged(score=-1.0, hint=[-0.1, -3.25], version=3)
    taught = bench.judged(score=None, hint=[-0.4, -0.25], version=3)
    args = arguments(rollout_batch_size=3, global_batch_size=3)
    output = slime.generate_rollout(args, 0, None)
    one, two, three = (group[0] for group in output.samples)
    assert one.tokens == [1, 2, 3, 4, 5]
    assert (one.response_length, one.loss_mask, one.rollout_log_probs) == (2, [1, 1], [-0.5, -0.25])
    assert (one.index, one.group_index, one.rollout_id) == (scored, scored, scored)
    assert one.weight_versions == ["17"]
    assert [sample.status for sample in (one, two)] == [Sample.Status.TRUNCATED, Sample.Status.COMPLETED]
    assert one.metadata["raw_reward"] == 1.0
    assert [sample.reward for sample in (one, two, three)] == [1.0, -1.0, 0.0]
    trained = {each.sample.index: each.advantages for each in slime_double.train(output, args)}
    for number in (scored, hinted, taught):
        expected = COMBINE.lesson(bench.ledger.read(load_turn, number)).advantages
        assert trained[number] == pytest.approx(expected)
    assert output.metrics == {"openclaw/step": 1, "openclaw/turns": 3, "openclaw/late_leases": 0}


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_the_coefficient_of_slimes_distillation_changes_nothing(bench: OutsideServer, coefficient: float) -> None:
    turns = [bench.judged(score=None, hint=[-0.1, -0.2], forced=forced) for forced in ([], [True, False])]
    args = arguments(opd_kl_coef=coefficient)
    for each in slime_double.train(slime.generate_rollout(args, 0, None), args):
        assert each.sample.index in turns
        expected = COMBINE.lesson(bench.ledger.read(load_turn, each.sample.index)).advantages
        used = [advantage * mask for advantage, mask in zip(each.advantages, each.loss_mask, strict=True)]
        assert used == pytest.approx(expected)


def test_scores_need_no_teacher(bench: OutsideServer) -> None:
    bench.begin(RL)
    bench.judged()
    bench.judged(score=-1.0)
    args = arguments(use_opd=False)
    output = slime.generate_rollout(args, 0, None)
    assert [sample.teacher_log_probs for group in output.samples for sample in group] == [None, None]
    assert [each.advantages for each in slime_double.train(output, args)] == [[1.0, 1.0], [-1.0, -1.0]]


def test_turns_are_confirmed_when_the_next_rollout_is_asked_for(bench: OutsideServer) -> None:
    first, second = [bench.judged(), bench.judged()], [bench.judged(), bench.judged()]
    rollout(0)
    assert bench.states() == [State.BATCHED] * 2 + [State.JUDGED] * 2
    rollout(1)
    assert bench.states() == [State.APPLIED] * 2 + [State.BATCHED] * 2
    bench.judged()
    bench.judged()
    rollout(2)
    steps = [(row["number"], row["turn"]) for row in bench.db.execute("SELECT * FROM update_turns ORDER BY turn")]
    assert [turn for _step, turn in steps] == first + second


def test_turns_that_slime_died_with_are_handed_out_again(bench: OutsideServer, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [bench.judged(), bench.judged()]
    rollout(0)
    monkeypatch.setattr(slime, "_source", None)
    bench.change(lambda db: db.execute("UPDATE leases SET expires = 0"))
    output = rollout(0)
    assert [group[0].index for group in output.samples] == turns


def test_a_lease_that_was_too_short_is_counted_and_training_goes_on(
    bench: OutsideServer, caplog: pytest.LogCaptureFixture
) -> None:
    bench.judged()
    bench.judged()
    rollout(0)
    bench.change(lambda db: db.execute("UPDATE leases SET expires = 0"))
    assert rollout(1).metrics["openclaw/late_leases"] == 1
    assert "OPENCLAW_RL_LEASE_SECONDS" in caplog.text


def test_attempts_of_a_group_are_one_list_and_each_is_a_run(bench: OutsideServer) -> None:
    bench.begin(RL)
    folder = Path(bench.db.execute("PRAGMA database_list").fetchone()["file"]).parent
    book = Book(folder)
    first = attempt(book, "g", "a", 1.0, turns=2)
    second = attempt(book, "g", "b", 0.0)
    judge(book, RL)
    (group,) = rollout(rollout_batch_size=3, global_batch_size=3).samples
    assert [sample.index for sample in group] == [*first, *second]
    assert {sample.group_index for sample in group} == {first[0]}
    assert [sample.rollout_id for sample in group] == [first[0], first[0], second[0]]
    assert [sample.reward for sample in group] == [0.5, 0.5, -0.5]
    book.close()


def test_slime_cuts_nothing_off(bench: OutsideServer) -> None:
    for _ in range(3):
        bench.judged()
    args = arguments(rollout_batch_size=3, global_batch_size=2)
    trained = slime_double.train(slime.generate_rollout(args, 0, None), args)
    assert [any(each.loss_mask) for each in trained] == [True, True, True, False]


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"rewards_normalization": True}, "--disable-rewards-normalization"),
        ({"advantage_estimator": "gspo"}, "--advantage-estimator grpo"),
        ({"rollout_temperature": 0.7}, "--rollout-temperature 1"),
        ({"use_rollout_logprobs": False}, "--use-rollout-logprobs"),
        ({"opd_kl_coef": 0.0}, "--opd-kl-coef"),
    ],
)
def test_arguments_that_would_change_the_numbers_are_refused(
    bench: OutsideServer, given: dict[str, Any], missing: str
) -> None:
    with pytest.raises(ValueError, match=missing):
        rollout(**given)


def test_hints_without_slimes_distillation_are_refused_and_go_back(bench: OutsideServer) -> None:
    bench.judged(hint=[-0.1, -0.2])
    bench.judged()
    with pytest.raises(ValueError, match="--use-opd --opd-type sglang"):
        rollout(use_opd=False)
    assert bench.states() == [State.BATCHED] * 2, "until the lease runs out"
    assert bench.change(leases.open_leases)


def test_an_evaluation_is_refused(bench: OutsideServer) -> None:
    with pytest.raises(ValueError, match="--eval-interval"):
        slime.generate_rollout(arguments(), 0, None, evaluation=True)


def test_refusals_of_the_server_are_raised(bench: OutsideServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCLAW_RL_KEY", KEYS["bob"])
    with pytest.raises(ServerError, match="admin key"):
        rollout()


def test_a_server_that_is_away_is_asked_again(
    bench: OutsideServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.judged()
    bench.judged()
    client = TrainerClient(bench.url, KEYS["alice"], retries=replace(TRAINER_RETRIES, first_pause=0.001))
    stream, failures = HttpClient.stream, [ConnectFailed("refused"), HttpError("reset")]

    def sometimes(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return stream(*given)

    monkeypatch.setattr(HttpClient, "stream", sometimes)
    with caplog.at_level("WARNING"):
        assert len(RolloutSource(client).next(arguments()).samples) == 2
    assert [word in caplog.text for word in ("refused", "reset")] == [True, True]
    assert [TRAINER_RETRIES.pause(attempts, None) for attempts in (1, 2, 9)] == [1.0, 2.0, 30.0]


def test_it_is_imported_without_slime() -> None:
    assert importlib.util.find_spec("slime") is None
    code = "import openclaw_rl.integrations.slime, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
