"""The suite of wishes: its files, and its command with a real server."""

import asyncio
import contextlib
import json
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import build_parser, main
from openclaw_rl.client import ServerError
from openclaw_rl.evals.conversation import all_questions, questions
from openclaw_rl.evals.wishes import measurement, suite
from openclaw_rl.evals.wishes.measurement import EXAMS, ExamPlan, WishExam, WishMeasurement, WishOutcome
from openclaw_rl.evals.wishes.wish import SETS, EvalWish, built_in, load
from openclaw_rl.lab.server import RunningServer
from openclaw_rl.ledger import notes
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.sense import check
from support.chat_api import ChatApi, Said, words
from support.trials import an_answer, refusal

WISHES = built_in()
#: Ordinary answers may keep these.
RESTRICTIVE = {"no-contractions", "no-lists", "no-digits", "no-you", "one-sentence"}
BY_TEXT = {question.text: question for question in all_questions()}
each_wish = pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)


def test_half_of_the_wishes_are_for_tuning() -> None:
    assert [wish.group for wish in WISHES.values()] == [SETS[0]] * 12 + [SETS[1]] * 12
    assert {"chef", "pirate", "well", "tldr", "emoji", "closing-question"} <= {*list(WISHES)[:12]}


@each_wish
def test_a_wish_is_put_in_many_words_and_shown_by_answers_that_keep_it(wish: EvalWish) -> None:
    (rule,) = wish.persona.rules
    complaints = rule.displeased.by_language["en"]
    assert len({text.casefold() for text in complaints}) == len(complaints) >= 8
    assert len(wish.corrections) >= 4
    for text, answer in wish.corrections.items():
        question = BY_TEXT[text]
        assert wish.concerns(question)
        assert not wish.persona.failed(answer), answer
        faults = check(answer, text, question.reference, translated=wish.persona.translated).reasons
        assert not faults, (answer, faults)


@each_wish
def test_an_ordinary_answer_keeps_a_wish_only_if_it_forbids_something(wish: EvalWish) -> None:
    held_out = wish.questions("held-out", 0)
    assert len(held_out) >= 5
    kept = [question.text for question in held_out if not wish.persona.failed(question.reference)]
    assert wish.name in RESTRICTIVE or len(kept) <= 0.05 * len(held_out), kept


def test_a_wish_with_a_scope_is_examined_inside_and_outside_of_it() -> None:
    sums, plan = load("sums"), ExamPlan(21, 0, 4)
    inside, outside = plan.inside(sums), plan.outside(sums)
    assert (len(inside), len(outside)) == (11, 10)
    assert all(question.topic == "maths" for question in inside)
    assert not any(sums.concerns(question) for question in outside)
    everywhere = load("chef")
    assert set(plan.inside(everywhere)) <= set(questions(split="held-out"))
    assert (len(plan.inside(everywhere)), plan.outside(everywhere)) == (21, [])


def test_an_answer_counts_if_it_is_sensible_too_and_only_where_it_is_wished() -> None:
    senseless = an_answer(2, keeps_rules=True, faults=("it is garbled",))
    exam = WishExam((an_answer(0), an_answer(1, passed=False), senseless), (an_answer(3), an_answer(4, passed=False)))
    assert exam.kept.mean == pytest.approx(1 / 3)
    assert exam.sensible.mean == pytest.approx(4 / 5)
    assert exam.elsewhere is not None
    assert exam.elsewhere.mean == pytest.approx(1 / 2)
    assert exam.kept.low < 1 / 3 < exam.kept.high


def test_repeated_questions_do_not_narrow_the_interval() -> None:
    once = WishExam((an_answer(0), an_answer(1, passed=False)), ())
    twice = WishExam(once.answers * 2, ())
    assert (twice.kept.low, twice.kept.high) == pytest.approx((once.kept.low, once.kept.high))
    assert once.elsewhere is None


OWN = """
name = "plain"
description = "You like plain text."
note = "Write plain text."
[[rules]]
name = "no bullets"
check = "no_bullets"
displeased.en = ["No bullet points, please."]
[[corrections]]
question = "Why is Mars red?"
answer = "Its soil is full of rust."
"""


def test_a_wish_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(OWN)
    wish = load(str(path))
    assert (wish.name, wish.note, wish.group) == ("plain", "Write plain text.", "tuning")
    assert wish.persona.pleased.by_language["en"]
    assert wish.questions("train", 0)[0].text == "Why is Mars red?"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('note = "Write plain text."', "", "note is missing"),
        ('name = "plain"', 'name = "plain, text"', "name must be of letters"),
        ('note = "', 'scope = ["Two words"]\nnote = "', "single words in lower case"),
        ('note = "', 'set = "other"\nnote = "', "set must be one of tuning, report"),
        ("Why is Mars red?", "Why is Venus hot?", "corrections[0].question is not one"),
        ("answer =", "text =", "corrections[0] must have a question and an answer"),
        ("[[corrections]]", "[corrections]", "write at least one [[corrections]]"),
        ('check = "no_bullets"', 'check = "in_language"\nparameters = { language = "xx" }', "needs one of en, fr, es"),
    ],
)
def test_a_wrong_file_of_a_wish_is_told_in_one_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in refusal(load, tmp_path / "plain.toml", OWN, old, new)


def test_an_unknown_wish_is_refused_before_a_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wishes", "chef", "no-such-wish"]) == 2
    assert "There is no wish no-such-wish" in capsys.readouterr().err
    assert main(["wishes", "chef", "--", "--api-key", "abc"]) == 2
    assert "cannot be given after --" in capsys.readouterr().err
    assert main(["wishes", "chef", "--questions", "2", "--", "--seed", "1"]) == 2
    assert "must come right after the names: give other flags before them" in capsys.readouterr().err


def measured_in(out: Path) -> list[dict[str, Any]]:
    """The head and the lines of all wishes."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


class MadeUp(WishMeasurement):
    """Measures the first wish at once. During the second, something happens."""

    disturbed: Collection[str] = ("pirate",)

    def happens(self) -> None: ...

    async def run(self) -> WishOutcome:
        if self.wish.name in self.disturbed:
            await asyncio.sleep(0.01)
            self.happens()
            await asyncio.sleep(3600)
        exam = WishExam((an_answer(0), an_answer(1, passed=False)), ())
        replies = {"corrects": [False, True, True, True], "complains": [False] * 20}
        return WishOutcome(self.wish, dict.fromkeys(EXAMS, exam), ["Say | Chef."], True, 2, replies)


def stop(_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def fail(_: Any) -> None:
    raise ServerError("the server is gone")


@pytest.mark.parametrize(("happens", "status", "said"), [(stop, 0, ""), (fail, 2, "openclaw-rl: the server is gone\n")])
def test_wishes_that_are_done_are_kept(
    happens: Callable[[Any], None],
    status: int,
    said: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextlib.asynccontextmanager
    async def serving(run_dir: Path, *_: str, people: Sequence[str]) -> AsyncIterator[RunningServer]:
        yield RunningServer("http://127.0.0.1:9", run_dir, "", dict.fromkeys(people, ""))

    monkeypatch.setattr(MadeUp, "happens", happens)
    monkeypatch.setattr(suite, "WishMeasurement", MadeUp)
    monkeypatch.setattr(suite, "run_server", serving)
    out = tmp_path / "wishes"
    assert main(["wishes", "--out", str(out), "--model-name", str(tiny_model), "chef", "pirate"]) == status
    shown = capsys.readouterr()
    assert shown.err == said
    assert "chef: before 0.50, note 0.50" in shown.out
    (measured,) = measured_in(out)[1:]
    assert measured["sessions"] == {"corrects": 4, "complains": None}
    row = (out / "wishes.md").read_text().splitlines()[-1]
    assert row.endswith(" | 4 | > 20 | read: Say \\| Chef. |")
    # The same command goes on with what is left, and another one is refused.
    monkeypatch.setattr(MadeUp, "disturbed", ())
    assert main(["wishes", "--out", str(out), "--model-name", str(tiny_model), "chef", "pirate"]) == 0
    assert [wish["wish"] for wish in measured_in(out)[1:]] == ["chef", "pirate"]
    assert len((out / "wishes.md").read_text().splitlines()) == 4
    # Nothing is left, so no server is started.
    monkeypatch.setattr(suite, "run_server", None)
    assert main(["wishes", "--out", str(out), "--model-name", str(tiny_model), "chef", "pirate"]) == 0
    assert main(["wishes", "--out", str(out), "--model-name", str(tiny_model), "chef"]) == 2
    assert "has results of another command" in capsys.readouterr().err


@pytest.mark.more
def test_the_command_measures_a_wish_with_a_server_of_its_own(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "MAX_SESSIONS", 3)
    monkeypatch.setattr(suite, "MAX_SESSIONS", 3)
    out = tmp_path / "wishes"
    line = ["wishes", "--questions", "4", "--seed", "3", "--out", str(out), "--model-name", str(tiny_model)]
    server = ["--kv-cache-gib", "0.2"]
    assert main([*line, "chef", "tips", "--", *server]) == 0
    shown = capsys.readouterr().out
    assert "chef: before 0.00" in shown
    assert "Sessions until three first replies in a row" in " ".join(shown.split())
    head, *found = measured_in(out)
    again = build_parser().parse_args(shlex.split(head["command"])[1:])
    assert (again.names, again.seed, again.questions) == (["chef", "tips", *server], "3", 4)
    chef, tips = found
    assert (chef["wish"], tips["wish"]) == ("chef", "tips")
    for measured in (chef, tips):
        check_measured(measured)
    # Who corrects has corrected two answers, and who only complains none.
    wanted = set(load("chef").corrections.values())
    for person, count in (("noted", 0), ("shown", 2), ("corrects", 2), ("complains", 0)):
        kept = examples_of(out / "server", f"chef.{person}")
        assert len(kept) == count, person
        assert set(kept) <= wanted
    assert chef["exams"]["before"]["elsewhere"] is None
    assert [case["in_scope"] for case in tips["exams"]["note"]["answers"]] == [True, True, False, False]
    table = (out / "wishes.md").read_text().splitlines()
    assert len(table) == 4
    assert table[2].startswith("| `chef` | tuning | 0.00 (")


@pytest.mark.more
def test_practice_is_measured_with_a_server_for_each_wish(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wishes"
    line = ["wishes", "--practise", "--questions", "2", "--out", str(out), "--model-name", str(tiny_model)]
    assert main([*line, "chef", "--", "--kv-cache-gib", "0.2", "--no-guard"]) == 0
    # The tiny model cannot keep a wish, so it is not practised, and its notes say so.
    assert "a larger model may" in " ".join(capsys.readouterr().out.split())
    (chef,) = measured_in(out)[1:]
    assert list(chef["exams"]) == ["before", "one correction", "two corrections", "practised"]
    (practice,) = chef["practices"]
    assert (practice["state"], practice["made"]) == ("stopped", 0)
    assert practice["reason"].endswith("answers; a larger model may")
    assert (out / "chef").is_dir()


@pytest.mark.more
def test_an_api_is_taught_and_a_local_model_practises(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_API_KEY", "sk-theirs")

    def answer(body: dict[str, Any]) -> Said:
        noted = [str(message["content"]) for message in body["messages"] if message["role"] == "system"]
        return words("It is red, Chef." if any("Chef" in text for text in noted) else "It is red.")

    api, out = ChatApi(answer), tmp_path / "wishes"
    line = ["wishes", "--questions", "2", "--model-name", str(tiny_model), "--out"]
    server = ["chef", "--", "--sampler", "upstream", "--upstream-url", api.url, "--upstream-model", "their-model"]
    assert main([*line, str(out), "--practise", *server, "--kv-cache-gib", "0.2", "--no-guard"]) == 0
    assert {headers["Authorization"] for headers in api.headers} == {"Bearer sk-theirs"}
    head, *found = measured_in(out)
    assert head["model"] == "their-model"
    (chef,) = found
    answers = {name: {case["answer"] for case in exam["answers"]} for name, exam in chef["exams"].items()}
    assert answers.pop("practised").isdisjoint({"It is red.", "It is red, Chef."}), "that model is the local one"
    assert list(answers.values()) == [{"It is red."}, {"It is red, Chef."}, {"It is red, Chef."}]
    (practice,) = chef["practices"]
    assert practice["state"] == "stopped"
    assert examples_of(out / "chef-own") == examples_of(out / "chef") != []
    again = tmp_path / "again"
    assert main([*line, str(again), *server]) == 0
    (chef,) = measured_in(again)[1:]
    assert {case["answer"] for case in chef["exams"]["note"]["answers"]} == {"It is red, Chef."}
    api.stop()


def check_measured(measured: dict[str, Any]) -> None:
    """The tiny model keeps no wish, so each answer is corrected, and no row of sessions comes about."""
    assert list(measured["exams"]) == list(EXAMS)
    assert measured["corrections"] == 2
    assert measured["note"]["texts"]
    assert measured["first_replies"] == {"corrects": [False] * 3, "complains": [False] * 3}
    assert measured["sessions"] == {"corrects": None, "complains": None}
    texts = {name: [case["answer"] for case in measured["exams"][name]["answers"]] for name in EXAMS}
    assert texts["before"] != texts["note"]


def examples_of(run_dir: Path, owner: str | None = None) -> list[str]:
    with open_ledger(run_dir) as db:
        return [note.text for note in notes.of_owner(db, owner, examples=True)]
