"""`openclaw-rl report`: any run becomes a page, whole or broken, used or not; nothing in it is changed."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from openclaw_rl import cli
from openclaw_rl.dashboard.components.render import moment
from openclaw_rl.dashboard.run import first_prompts
from openclaw_rl.dashboard.views.learning import BARS, portions
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.ledger import verdicts
from openclaw_rl.ledger.run_dir import RunDirLock
from openclaw_rl.ledger.schema import FILE, VERSION, connect, open_ledger
from openclaw_rl.ledger.verdicts import ExampleKind
from openclaw_rl.rendering.tokenizer import ChatTokenizer
from openclaw_rl.types import SampleKind, Sign, Source, State, Verdict, VerdictSummary
from support.judged_run import a_report, answered, fill, judged, write_metrics
from support.page_assertions import Seen, look
from support.records import Book, a_side_turn

Report = Callable[..., Seen]


class Whole(NamedTuple):
    """A run's turns by kind, and its page."""

    turns: dict[str, int]
    page: Seen


HOSTILE = "<script>alert(1)</script></style>\"'>&lt; 🦞 中文 {{ 1 }}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run that `book` is of."""
    (tmp_path / "run").mkdir(exist_ok=True)
    return tmp_path / "run"


@pytest.fixture
def report(folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs the command, without answers unless it is told otherwise; the page that it wrote."""

    def run(*flags: str, answers: bool = False, problem: str = "") -> Seen:
        flags = (*flags, *(() if answers else ("--no-answers",)))
        code = cli.main(["report", str(folder), "--model-name", str(tiny_model), *flags])
        said = capsys.readouterr()
        assert f"The report is in {folder}" in said.out
        assert (code, problem in said.err) == (2 if problem else 0, True)
        return look((folder / "report.html").read_text("utf-8"))

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, adapters: list[Path]) -> Whole:
    """A run with everything in it, and its page."""
    folder = tmp_path_factory.mktemp("whole")
    book = Book(folder)
    turns = fill(book, ChatTokenizer(tiny_model))
    book.capture(a_side_turn())
    book.close()
    write_metrics(folder, [a_report(step) for step in range(1, 6)])
    a_checkpoint(folder, adapters[0])
    assert cli.main(["report", str(folder), "--no-answers"]) == 0
    return Whole(turns, look((folder / "report.html").read_text("utf-8")))


def a_checkpoint(folder: Path, adapter: Path, step: int = 2) -> None:
    async def copy(target: Path) -> None:
        shutil.copytree(adapter, target, dirs_exist_ok=True)

    asyncio.run(Checkpoints(folder / "checkpoints", 3).save(step, step, (), copy))


def tiles(seen: Seen) -> dict[str, str]:
    names, values = seen.all("dt"), seen.all("dd")
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


# Whole runs


def test_the_head_says_where_the_run_stands(whole: Whole, tiny_model: Path) -> None:
    assert tiles(whole.page) == {
        "Model": str(tiny_model),  # which the checkpoint names
        "Method": "combine",
        "Step": "2",
        "Policy version": "2",
        "Turns": "8",
        "Server": "not running",
    }
    states = [" ".join(item.text.split()) for item in whole.page.all("li")]
    assert {"ready 1", "judged 3", "applied 1", "dropped 3", "captured 0"} <= set(states)
    assert "1 turn waits to be judged" in whole.page.all("p", class_="lead")[0].text
    assert ["session title", "1"] in whole.page.rows()
    assert not whole.page.all("p", class_="alert")


def test_every_kind_of_turn_is_shown_with_what_came_of_it(whole: Whole) -> None:
    shown = [" ".join(article.text.split()) for article in whole.page.all("article")]
    by_turn = {name: next((t for t in shown if f"turn {number} " in t), "") for name, number in whole.turns.items()}
    assert by_turn["hint"].startswith("Learned from, with a hint")
    assert by_turn["hint"].endswith(
        "user Ask hint hello policy 0 Say hint hello<|im_end|> came next: user Next hint hello "
        "score -1 by feedback teaches with score and hint judged asked to change hint Hint hello"
    )
    assert "score +1 by llm teaches with its score judged Because hello" in by_turn["best"]
    assert by_turn["worst"].startswith("Rated worst")
    assert by_turn["silent"].startswith("Not judged")
    assert "no score not trained on Silence hello the judge abstained: hello" in by_turn["silent"]
    assert "Its tokens have no colour" in by_turn["silent"]
    assert by_turn["aside"].endswith("not trained on quarantined: Refused hello")
    assert "explicit feedback +1 Told hello" in by_turn["explicit"]
    assert by_turn["waiting"] == ""


def test_curves_and_verdicts_are_drawn_and_counted(whole: Whole) -> None:
    labels = [picture.attributes["aria-label"] for picture in whole.page.all("svg")]
    changes = "to the previous policy, from 0.01 to 0.01; to the base model, from 0.02 to 0.1."
    assert f"Change in KL per token, over 5 points: {changes}" in labels
    assert "Verdicts: over time, 2 good, 0 neutral, 3 bad, 1 abstained." in labels
    assert "Verdicts by llm: over time, 1 good, 0 neutral, 1 bad, 0 abstained." in labels
    assert any(label.startswith("Share of verdicts with a hint, over 6 points") for label in labels)
    rows = whole.page.rows()
    assert ["feedback", "0", "0", "2", "0", "1"] in rows
    assert ["Not judged", "0", "0", "0", "1", "0"] in rows
    assert ["explicit", "1", "0", "0", "0", "0"] in rows


def test_batches_set_aside_and_checkpoints_are_listed(whole: Whole) -> None:
    rows = whole.page.rows()
    assert ["3", str(whole.turns["aside"]), "Refused hello"] in rows
    assert ["step-000002-v2", "2", "2"] in [row[:3] for row in rows]


def test_tokens_are_coloured_with_the_weights_that_were_given(
    book: Book, tokenizer: ChatTokenizer, report: Report
) -> None:
    fill(book, tokenizer)

    def coloured(seen: Seen) -> dict[str, int]:
        spans = [
            span.attributes.get("class", "").split()[:1] for span in seen.all("span") if "title" in span.attributes
        ]
        return {name: spans.count([name]) for name in ("up", "down")}

    both, hints, scores = (report(*f) for f in ((), ("--method", "opd"), ("--method", "rl")))
    assert coloured(hints)["up"] > 0, "the teacher likes some of the tokens"
    assert coloured(scores)["down"] > coloured(both)["down"] - coloured(hints)["down"]
    down = [span for span in scores.all("span") if span.attributes.get("class", "").startswith("down")]
    tips = [span.attributes["title"] for span in down if "title" in span.attributes]
    assert tips
    assert all(tip.endswith("advantage -1.000") for tip in tips)


@pytest.mark.parametrize("word", [HOSTILE, "x" * 25_000])
def test_what_people_and_models_wrote_is_text(
    book: Book, tokenizer: ChatTokenizer, folder: Path, report: Report, word: str
) -> None:
    fill(book, tokenizer, word)
    seen = report()
    assert seen.text.count(word[:500]) > 20
    assert (folder / "report.html").stat().st_size < 3_000_000


def test_half_a_character_in_a_message_is_no_error(book: Book, report: Report) -> None:
    asked = [{"role": "user", "content": "What is \ud83e?"}]
    turn = book.put(State.READY, messages=asked, message={"role": "assistant", "content": "a \ud83e"})
    judged(book, turn, Verdict(1.0, Source.LLM), SampleKind.RL)
    assert "What is \ufffd?" in report().text


def test_tool_calls_and_parts_are_words(book: Book, report: Report) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Bern"}'}}
    parts = [{"type": "text", "text": "How warm "}, {"type": "text", "text": "is it?"}]
    turn = book.put(
        State.READY,
        messages=[{"role": "tools", "tools": []}, {"role": "user", "content": parts}],
        message={"role": "assistant", "content": None, "tool_calls": [call]},
    )
    judged(book, turn, Verdict(1.0, Source.LLM), SampleKind.RL)
    text = report().text
    assert "How warm is it?" in text
    assert 'calls look_up {"city": "Bern"}' in text


# Runs that are in use, empty or broken


def test_a_run_in_use_is_only_read(book: Book, tokenizer: ChatTokenizer, folder: Path, report: Report) -> None:
    fill(book, tokenizer)
    before = book.everything()
    lock = RunDirLock(folder)
    lock.tell("http://127.0.0.1:9")
    book.db.execute("BEGIN")
    seen = report()
    assert tiles(seen)["Server"] == "http://127.0.0.1:9"
    assert book.everything() == before
    book.db.execute("COMMIT")
    book.capture(a_side_turn())
    assert tiles(report())["Turns"] == "8"
    lock.close()


def test_an_empty_folder_is_a_page_that_says_so(report: Report) -> None:
    seen = report()
    text = seen.text
    for sentence in (
        "There is no ledger in",
        "There is no metrics.jsonl: no training step has been made yet.",
        "No turn has been recorded yet. Start the server and talk to it.",
        "No training step has been recorded.",
        "No turn has been judged.",
        "They were not asked for (--no-answers).",
    ):
        assert sentence in text
    assert "No conversation has been recorded, so there is nothing to ask." in report(answers=True).text


def test_a_ledger_that_is_none_is_said_and_the_rest_is_shown(folder: Path, report: Report) -> None:
    (folder / FILE).write_bytes(b"this is no database" * 100)
    write_metrics(folder, [a_report(1)])
    seen = report(problem="is damaged: file is not a database.")
    assert "is damaged: file is not a database." in seen.text
    assert len(seen.all("svg")) == 8


@pytest.mark.parametrize(("version", "word"), [(1, "an older version"), (VERSION + 1, "a newer version")])
def test_a_ledger_of_another_version_is_said(folder: Path, report: Report, version: int, word: str) -> None:
    db = connect(folder / FILE)
    db.execute("CREATE TABLE turns (number INTEGER)")
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    assert word in report(problem=word).text
    again = connect(folder / FILE)
    assert again.execute("PRAGMA user_version").fetchone()[0] == version, "nothing is changed"
    again.close()


def test_damage_is_said_and_the_rest_is_shown(
    book: Book, tokenizer: ChatTokenizer, folder: Path, adapters: list[Path], report: Report
) -> None:
    fill(book, tokenizer)
    a_checkpoint(folder, adapters[0], 1)
    a_checkpoint(folder, adapters[1], 2)
    (folder / "checkpoints" / "step-000002-v2" / "checkpoint.json").write_text("{")
    write_metrics(folder, [a_report(1)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss"')
    text = report().text
    assert "The checkpoint step-000002-v2 is damaged and left out." in text
    assert "Lines of metrics.jsonl that cannot be read and are left out: 1." in text
    assert "step-000001-v1" in text


def test_without_the_model_words_are_shown_and_nothing_is_fetched(
    book: Book, tokenizer: ChatTokenizer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(book, tokenizer)
    assert cli.main(["report", str(folder), "--model-name", "./no-such-model"]) == 0
    seen = look((folder / "report.html").read_text("utf-8"))
    assert "Answers are shown without their tokens: The model ./no-such-model is not on this machine" in seen.text
    assert "There are no answers to compare. The model ./no-such-model" in seen.text
    assert "Say hint hello" in seen.text


def test_a_damaged_tokenizer_is_said(
    book: Book, tokenizer: ChatTokenizer, folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    fill(book, tokenizer)
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    assert cli.main(["report", str(folder), "--model-name", str(broken), "--no-answers"]) == 0
    assert "tokenizer.json in" in look((folder / "report.html").read_text("utf-8")).text


# The command


def test_the_page_goes_where_it_is_wanted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "b.html"
    assert cli.main(["report", "--no-answers", "--out", str(out), "--run-dir", str(folder)]) == 0
    look(out.read_text("utf-8"))
    assert not (folder / "report.html").exists()
    assert cli.main(["report", str(folder), "--no-answers", "--out", str(folder)]) == 2
    assert "cannot be written: Is a directory." in capsys.readouterr().err


def test_no_folder_is_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder / "nowhere")]) == 2
    assert "There is no folder" in capsys.readouterr().err


def test_a_folder_of_other_things_is_refused_and_left_alone(
    folder: Path, book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "passwd").write_text("mine")
    assert cli.main(["report", str(other), "--no-answers"]) == 2
    assert capsys.readouterr().err == (
        f"openclaw-rl: There is no ledger in {other}: give the run directory of a server.\n"
    )
    assert [path.name for path in other.iterdir()] == ["passwd"]
    # A run may have its ledger elsewhere.
    assert cli.main(["report", str(other), "--no-answers", "--rl-buffer-dir", str(folder)]) == 0
    assert (other / "report.html").is_file()


# Answers before and after


def greedy(model: Path, adapter: Path | None, prompts: list[list[int]], count: int) -> list[list[int]]:
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        found = PeftModel.from_pretrained(found, adapter)
    written = [found.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False) for ids in prompts]
    return [answer[0][len(ids) :].tolist() for answer, ids in zip(written, prompts, strict=True)]


@pytest.mark.more
def test_both_models_are_asked_what_the_run_was_asked_first(
    book: Book,
    tokenizer: ChatTokenizer,
    folder: Path,
    tiny_model: Path,
    adapters: list[Path],
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("openclaw_rl.dashboard.report.ANSWER_TOKENS", 12)
    for question in ("the fox", "the fox", "hello world", "what is the answer?", "lazy dog"):
        answered(book, tokenizer, question, "oh", "next", session=f"{question} {len(book.rows('SELECT * FROM turns'))}")
    a_checkpoint(folder, adapters[2])
    pairs = report(answers=True).all("article", class_="pair")
    questions = ["the fox", "hello world", "what is the answer?"]
    ids = [tokenizer.encode_text(question) for question in questions]
    before, after = (greedy(tiny_model, adapter, ids, 12) for adapter in (None, adapters[2]))
    assert before != after
    for pair, question, old, new in zip(pairs, questions, before, after, strict=True):
        words = [question, "base model", decoded(tokenizer, old), "newest checkpoint", decoded(tokenizer, new)]
        assert " ".join(pair.text.split()) == " ".join(" ".join(words).split())


def decoded(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    return str(tokenizer.backend.decode(ids, skip_special_tokens=True)) or "(nothing)"


def test_a_model_that_cannot_be_loaded_is_said(
    book: Book, tokenizer: ChatTokenizer, folder: Path, adapters: list[Path], report: Report
) -> None:
    answered(book, tokenizer, "the fox", "oh", "next")
    assert "There is no checkpoint yet" in report(answers=True).text
    a_checkpoint(folder, adapters[0])
    other = folder / "checkpoints" / "step-000002-v2"
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**settings, "r": "many"}))
    record = json.loads((other / "checkpoint.json").read_text())
    record["files"] = {}
    (other / "checkpoint.json").write_text(json.dumps(record))
    assert "There are no answers to compare." in report(answers=True).text


# Parts


def test_examples_are_few_varied_and_the_newest(book: Book, tokenizer: ChatTokenizer) -> None:
    for step in (1, 2, 3):
        last = fill(book, tokenizer, step=step)
    with open_ledger(book.folder, readonly=True) as db:
        chosen = verdicts.examples(db, 2)
    assert len({turn for _, turn in chosen}) == len(chosen) == 10
    by_kind: dict[ExampleKind, list[int]] = {}
    for kind, turn in chosen:
        by_kind.setdefault(kind, []).append(turn)
    assert {len(turns) for turns in by_kind.values()} == {2}
    assert by_kind[ExampleKind.HINTED][0] == last["hint"]
    assert last["silent"] in by_kind[ExampleKind.ABSTAINED]


def test_prompts_are_how_conversations_began(book: Book, tokenizer: ChatTokenizer) -> None:
    first = answered(book, tokenizer, "one", "oh", "next", "a")
    answered(book, tokenizer, "later", "oh", "next", "a", parent=first)
    book.capture(a_side_turn(messages=[{"role": "user", "content": "a title"}]))
    answered(book, tokenizer, "two", "oh", "next", "b")
    with open_ledger(book.folder, readonly=True) as db:
        prompts = first_prompts(db, 3)
    assert [prompt.question for prompt in prompts] == ["one", "two"]
    assert list(prompts[0].ids) == book.read(first).prompt_ids


def test_verdicts_are_counted_by_sign_and_judge(book: Book, tokenizer: ChatTokenizer) -> None:
    fill(book, tokenizer)
    with open_ledger(book.folder, readonly=True) as db:
        found, counts = verdicts.summaries(db), verdicts.counts(db)
    assert [verdict.sign for verdict in found] == ["bad", "good", "bad", "abstained", "bad", "good"]
    (feedback,) = (count for count in counts if count.source is Source.FEEDBACK)
    assert feedback.signs == {Sign.GOOD: 0, Sign.NEUTRAL: 0, Sign.BAD: 2, Sign.ABSTAINED: 0}
    assert feedback.hinted == 1


@pytest.mark.parametrize("count", [0, 1, BARS - 1, BARS, BARS + 1, 1000])
def test_portions_are_all_verdicts_in_at_most_so_many_bars(count: int) -> None:
    verdicts = [VerdictSummary(1.0, Sign.GOOD, Source.LLM, 0, str(number)) for number in range(count)]
    found = portions(verdicts)
    assert [verdict for part in found for verdict in part] == verdicts
    assert len(found) <= BARS
    assert len({len(part) for part in found[:-1]}) <= 1


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, -1e300])
def test_a_time_that_is_none_is_said(seconds: float) -> None:
    assert moment(seconds) == "at an unknown time"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", moment(1.8e9))
