"""The demo's page: what was measured, what was said, and nothing that a model wrote is more than text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl import __version__
from openclaw_rl.errors import UserError
from openclaw_rl.evals.conversation import Transcript
from openclaw_rl.evals.page import choose_conversations, choose_pairs, page, write_page
from openclaw_rl.evals.summary import summarise
from openclaw_rl.evals.trial import Exam, HeldSession, TrialOutcome
from support.page_assertions import Seen, look
from support.properties import examples
from support.trials import a_trial, an_answer, an_exam, an_exchange, learning

HOSTILE = [
    "<script>alert(1)</script>",
    "</style></script><img src=x onerror=alert(1)>",
    "\"quotes' & <b>bold</b> &lt;",
    "{{ 7 * 7 }} {% raw %}",
    "emoji 🦞👩‍👩‍👧 and 中文 and \u202e backwards",
    "--> <!-- <![CDATA[",
]


def seen(*outcomes: TrialOutcome) -> Seen:
    return look(page(outcomes, "openclaw-rl demo --seed 1", "a-model"))


def test_the_page_has_the_picture_the_command_and_what_made_it(tmp_path: Path) -> None:
    write_page(
        [learning(), learning("rl")], tmp_path / "deep" / "demo.html", "openclaw-rl demo --x '<y>'", "tiny <model>"
    )
    found = look((tmp_path / "deep" / "demo.html").read_text("utf-8"))
    assert "combine, from 25 % to 75 %" in found.all("svg")[0].attributes["aria-label"]
    assert found.all("pre")[0].text == "openclaw-rl demo --x '<y>'"
    assert f"Model: tiny <model>. openclaw-rl {__version__}, Python 3." in found.text
    assert "torch 2" in found.text


def test_the_table_has_the_numbers_of_the_statistics() -> None:
    trials = [learning(m, p, s) for m in ("rl", "combine") for p in ("brief", "student") for s in (0, 1, 2)]
    rows = seen(*trials).rows()[1:]
    summaries = summarise(trials)
    assert len(rows) == len(summaries) == 4
    for row, line in zip(rows, summaries, strict=True):
        intervals = [i for i in (line.before, line.after, line.quality_before, line.quality_after) if i]
        shares = [f"{100 * i.mean:.0f} % [{100 * i.low:.0f}, {100 * i.high:.0f}]" for i in intervals]
        assert row == [line.persona, line.method, *shares, str(line.until), "18", f"{line.minutes:.1f}", "3"]


def test_trials_that_never_got_there_are_marked() -> None:
    cut = a_trial(an_exam([False]), an_exam([False], 60.0), sessions=[False] * 4)
    assert "not within 4" in seen(cut).rows()[1]


def test_it_is_not_said_to_have_learned_if_that_is_not_clear() -> None:
    half = [True, False] * 10
    clear = a_trial(an_exam([False] * 20), an_exam([True] * 20, 60.0))
    assert seen(clear).all("h1")[0].text == "It learned from being used"
    for unclear in (a_trial(an_exam(half), an_exam([*half[:-1], True], 60.0)), a_trial(an_exam(half)), a_trial()):
        assert seen(unclear).all("h1")[0].text == "What was learned from being used"
        assert "it learned" not in seen(unclear).all("title")[0].text


def test_the_top_tells_of_the_first_line_and_not_of_the_best() -> None:
    worse = a_trial(an_exam([True] * 10), an_exam([False] * 10, 60.0), method="combine")
    better = a_trial(an_exam([False] * 10), an_exam([True] * 10, 60.0), method="rl")
    lead = seen(better, worse).all("p", class_="lead")[0].text
    assert "100 % of the time at first, and 0 % of the time" in " ".join(lead.split())


def test_answers_that_changed_come_first_and_one_that_got_worse_is_never_left_out() -> None:
    before = [False, False, False, False, True, True, False, True]
    after = [True, True, True, True, False, False, False, True]
    pairs = choose_pairs(a_trial(an_exam(before), an_exam([True] * 8, 9.0), an_exam(after, 60.0)))
    assert [pair.question for pair in pairs] == [f"Question {n}?" for n in (0, 1, 2, 4, 6)]
    assert pairs == choose_pairs(a_trial(an_exam(before), an_exam(after, 60.0))), "the same every time"


def test_answers_are_compared_by_their_question() -> None:
    one, two = an_answer(1, False), an_answer(2, False)
    trial = a_trial(Exam(0, 0.0, 0, (one, two)), Exam(4, 60.0, 4, (an_answer(2), an_answer(3))))
    assert [(pair.before, pair.after) for pair in choose_pairs(trial)] == [(two, an_answer(2))]


def test_answers_stand_side_by_side_with_marks() -> None:
    faulty = an_answer(1, True, keeps_rules=True, faults=("it repeats itself", "it is garbled"))
    trial = a_trial(Exam(0, 0.0, 0, (an_answer(0, False), faulty)), Exam(4, 60.0, 4, (an_answer(0), an_answer(1))))
    sides = [
        " ".join(element.text.split())
        for element in seen(trial).all("div")
        if "side " in element.attributes.get("class", "")
    ]
    assert sides == [
        "before ✗ not as wanted Bad answer 0.",
        "after ✓ as wanted Good answer 0.",
        "before ✗ it repeats itself, it is garbled Good answer 1.",
        "after ✓ as wanted Good answer 1.",
    ]


def test_the_first_a_middle_and_the_last_conversation_are_shown() -> None:
    assert [number for number, _ in choose_conversations(a_trial(sessions=[True] * 9))] == [1, 5, 9]
    assert [number for number, _ in choose_conversations(a_trial(sessions=[True, False]))] == [1, 2]
    assert [number for number, _ in choose_conversations(a_trial(sessions=[True]))] == [1]
    assert choose_conversations(a_trial()) == []


def test_a_conversation_is_shown_as_it_was_had() -> None:
    trial = a_trial()
    again = an_exchange(2, message="Too long! Why is it so?", answer="Because.", reaction="Perfect, thanks!")
    first = an_exchange(1, False, message="Why?", answer="A long story.", reaction="Too long!")
    trial.sessions.append(HeldSession(0, 1.0, Transcript("s", (first, again))))
    talk = " ".join(seen(trial).all("div", class_="talk")[0].text.split())
    assert talk == (
        "brief Why? assistant ✗ failed: one short sentence A long story. "
        "brief Too long! Why is it so? assistant ✓ as wanted Because. brief Perfect, thanks!"
    )


def hostile_trial(text: str) -> TrialOutcome:
    answers = (an_answer(0, False, text, question=text), an_answer(1, False, keeps_rules=True, faults=(text,)))
    trial = a_trial(Exam(0, 0.0, 0, answers), Exam(4, 60.0, 4, (an_answer(0, True, text, question=text),)), method=text)
    said = an_exchange(1, False, message=text, answer=text, reaction=text)
    trial.sessions.append(HeldSession(0, 1.0, Transcript(text, (said,))))
    return trial


def test_what_models_and_people_write_is_text() -> None:
    text = " ".join(HOSTILE)
    found = look(page([hostile_trial(text)], text, text))
    assert found.text.count(text) >= 8


@examples(40)
@given(st.text(min_size=1, max_size=200))
def test_whatever_is_written_is_read_as_it_was_written(text: str) -> None:
    found = look(page([hostile_trial(text)], text, text))
    assert found.text.count(text) >= (8 if text.strip() else 1)


def test_long_answers_are_folded_and_endless_ones_end() -> None:
    long, endless = "word " * 400, "x" * 1_000_000
    trial = a_trial(Exam(0, 0.0, 0, (an_answer(0, False, long),)), Exam(4, 60.0, 4, (an_answer(0, True, endless),)))
    written = page([trial], "", "")
    folded = look(written).all("details", class_="long")
    assert len(folded) == 2
    assert long in folded[0].text
    assert "980000 characters more" in folded[1].text
    assert len(written) < 150_000


def test_half_a_character_can_be_written(tmp_path: Path) -> None:
    write_page([hostile_trial("half \ud83e a lobster")], tmp_path / "a.html", "", "")
    assert "half \ufffd a lobster" in (tmp_path / "a.html").read_text("utf-8")


def test_no_trial_is_no_error() -> None:
    found = seen()
    assert "No trial was held." in found.text
    assert "there is nothing to compare yet" in found.text


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written: Is a directory\.$"):
        write_page([], tmp_path, "", "")
