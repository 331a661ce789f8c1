"""The judging loop and episodes: rewards become verdicts, texts become hints, judges may score steps."""

import pytest

from openclaw_rl.judge.judges.base import FeedbackReader, JudgeError, Opinion
from openclaw_rl.ledger import episodes, groups, verdicts
from openclaw_rl.types import EpisodeResult, SampleKind, SessionKey, Source, State, TurnResult, Verdict
from support.episodes import attempt, end, next_message, play
from support.judging import ScriptedJudge, all_judged, judging, ready, until
from support.records import Book


async def test_no_judge_is_asked_about_a_held_session(book: Book) -> None:
    judge = ScriptedJudge(lambda _case: Opinion(1.0))
    turns = play(book, "held", turns=2)
    next_message(book, turns[0])
    (other,) = play(book, "rewarded")
    async with judging(book, judge):
        end(book, "rewarded", 0.25)
        await until(lambda: book.state(other) is State.JUDGED)
    assert [book.state(turn) for turn in turns] == [State.AWAITING] * 2
    assert judge.asked == []


async def test_a_raw_reward_is_the_verdict_and_zero_counts_in_a_group(book: Book) -> None:
    turns = [*attempt(book, "g", "a", 0.0), *attempt(book, "g", "b", 7.5)]
    async with judging(book, FeedbackReader(), baseline="group"):
        await all_judged(book)
        await until(lambda: book.ledger.read(groups.trainable) == 2)
    read = [book.read(turn) for turn in turns]
    assert [turn.verdict and (turn.verdict.score, turn.verdict.source) for turn in read] == [
        (0.0, Source.ENVIRONMENT),
        (7.5, Source.ENVIRONMENT),
    ]
    assert [turn.sample for turn in read] == [SampleKind.RL] * 2


@pytest.mark.parametrize("reward", [1.0, 0.0, -1.0])
async def test_the_environments_text_is_the_hint_whatever_the_reward(book: Book, reward: float) -> None:
    turns = play(book, "a", turns=2)
    said = (TurnResult(0, text="Traceback:\n  the file is not there"),)
    book.change(episodes.end, SessionKey("me", "a"), EpisodeResult(reward, steps=said), 8)
    judge = ScriptedJudge(lambda _case: Opinion(1.0, ("another hint about it",)))
    async with judging(book, judge, method="combine"):
        await all_judged(book)
    hints = [[hint.text for hint in verdict.hints] for turn in turns if (verdict := book.read(turn).verdict)]
    assert hints == [["Traceback: the file is not there"], []]
    assert judge.asked == []


async def test_a_flood_of_text_is_cut_in_the_middle(book: Book) -> None:
    (turn,) = play(book, "a")
    end(book, "a", 1.0, text="begin " + "x" * 100_000 + " end")
    async with judging(book, method="combine"):
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    (hint,) = verdict.hints
    assert len(hint.text) < 3000
    assert hint.text.startswith("begin ")
    assert hint.text.endswith(" end")


async def test_judges_score_steps_for_which_the_environment_gives_no_reward(book: Book) -> None:
    judge = ScriptedJudge(lambda case: Opinion(-1.0))
    turns = play(book, "a", turns=3)
    for turn in turns[:2]:
        next_message(book, turn)
    end(book, "a", 1.0, steps=(TurnResult(0, reward=0.5),))
    async with judging(book, judge, judges_steps=True):
        await all_judged(book)
    read = [book.read(turn) for turn in turns]
    assert [turn.episode and turn.episode.step_reward for turn in read] == [0.5, -1.0, None]
    assert [turn.verdict and turn.verdict.score for turn in read] == [1.0] * 3
    assert judge.asked == turns[1:2]


async def test_a_step_judge_that_fails_does_not_cost_the_reward(book: Book) -> None:
    def fails(_case: object) -> Opinion:
        raise JudgeError("it cannot say")

    turns = play(book, "a", turns=2)
    next_message(book, turns[0])
    end(book, "a", 1.0)
    async with judging(book, ScriptedJudge(fails), judges_steps=True):
        await all_judged(book)
    assert [book.state(turn) for turn in turns] == [State.JUDGED] * 2


async def test_a_turn_of_an_episode_that_no_judge_can_judge_is_given_up(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> Verdict:
        raise JudgeError("it cannot say")

    (turn,) = play(book, "a")
    end(book, "a", 1.0)
    async with judging(book) as running:
        monkeypatch.setattr(running.loop.panel, "verdict", fails)
        await all_judged(book)
    assert book.state(turn) is State.DROPPED
    assert "3 trials failed: it cannot say" in book.read(turn).reason


async def test_an_error_while_groups_are_settled_does_not_end_the_judging(
    book: Book, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def overflows(_episode: object) -> str:
        raise OverflowError("it is too large")

    async with judging(book, baseline="group") as running:
        monkeypatch.setattr(running.loop.method, "why_untrained", overflows)
        for name, reward in (("a", 1.0), ("b", 0.0)):
            attempt(book, "g", name, reward)
        await until(lambda: "OverflowError" in caplog.text)
        (other,) = play(book, "other")
        end(book, "other", 1.0)
        await until(lambda: book.state(other) is State.JUDGED)
        monkeypatch.undo()


async def test_the_rewards_of_environments_are_not_examined_for_a_judge_that_says_nothing(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = verdicts.recent
    monkeypatch.setattr(verdicts, "recent", lambda db, count: looks.append(count) or look(db, count))
    play(book, "a", turns=3)
    end(book, "a", 1.0)
    async with judging(book, ScriptedJudge(lambda _case: Opinion(1.0))):
        await all_judged(book)
        assert looks == []
        ready(book)
        await all_judged(book)
        await until(lambda: len(looks) == 1)
