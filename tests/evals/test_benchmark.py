"""The benchmark against endpoints that learn by a script: what each track makes of them, and what is written."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from openclaw_rl.cli import main
from openclaw_rl.client import ServerError
from openclaw_rl.evals.benchmark import run as runner
from openclaw_rl.evals.benchmark import tracks
from openclaw_rl.evals.benchmark.person import PastingChat
from openclaw_rl.evals.benchmark.results import load_results, results_table, scores
from openclaw_rl.evals.benchmark.tracks import FULL, QUICK, TRACKS
from openclaw_rl.evals.conversation import questions
from openclaw_rl.evals.wishes.drawn import FORMS, PLACES, draw
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.sense import check
from support.scripted_endpoints import (
    Memory,
    ScriptedEndpoint,
    TooLong,
    listening,
    perfect,
    quoting,
    repeating,
    stubborn,
)

#: With this seed, the wish of the suite is `chef`.
SEED = 7
SMALL = replace(QUICK, questions=3, sessions=3, most_sessions=3, many=4, cases=2, rounds=1, tasks=2)
KEYS = ("--key", "sesame-1", "--key", "sesame-2")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "QUICK", SMALL)


def measure(out: Path, endpoint: ScriptedEndpoint, *options: str) -> int:
    with listening(endpoint) as url:
        forget = ("--forget-url", f"{url}/memory")
        given = ["--quick", "--seed", str(SEED), "--out", str(out), *KEYS, *forget, *options]
        return main(["benchmark", "--url", url, *given])


def means(out: Path) -> dict[str, float | None]:
    return {track: one.score.mean if one.score else None for track, one in scores(load_results(out)).items()}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"endpoint-{SEED}.jsonl").read_text().splitlines()]


def results(out: Path) -> list[dict[str, Any]]:
    return [line for line in lines(out) if "track" in line]


@pytest.fixture(scope="module")
def of_perfect(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("perfect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "QUICK", SMALL)
        assert measure(out, ScriptedEndpoint(perfect(SMALL, SEED))) == 0
    return out


def test_a_perfect_endpoint_scores_1_on_every_track(of_perfect: Path) -> None:
    assert means(of_perfect) == dict.fromkeys(TRACKS, 1.0)


@pytest.mark.parametrize("wire", ["chat", "responses"])
def test_a_stubborn_endpoint_scores_0_on_every_track(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Among so many cases are some for which no tool is needed.
    monkeypatch.setattr(runner, "QUICK", replace(SMALL, cases=FULL.cases))
    endpoint = ScriptedEndpoint(stubborn)
    assert measure(tmp_path, endpoint, "--wire", wire) == 0
    assert means(tmp_path) == dict.fromkeys(TRACKS, 0.0)
    assert all(("input" in body) is (wire == "responses") for body in endpoint.bodies)


def test_to_repeat_what_was_said_is_not_to_keep_it(tmp_path: Path) -> None:
    assert measure(tmp_path, ScriptedEndpoint(repeating)) == 0
    assert means(tmp_path) == dict.fromkeys(TRACKS, 0.0)


def test_to_add_what_was_quoted_keeps_what_may_stand_anywhere(tmp_path: Path) -> None:
    endpoint = ScriptedEndpoint(quoting)
    assert measure(tmp_path, endpoint, "--track", "wishes,many,change-of-mind") == 0
    shares = {line["item"]: line["score"]["mean"] for line in results(tmp_path)}
    # The person who wants to be called Chef quotes nothing.
    assert shares.pop("chef") == 0.0
    assert shares.pop("says-lively-sparrow-capitals") == 1.0
    many = next(line for line in results(tmp_path) if line["track"] == "many")["facts"]["kept"]
    assert {name.partition("-")[0]: share for name, share in many.items()} == {
        **{"says": 1.0, "begins": 0.0, "ends": 0.0, "last": 0.0}
    }
    (change,) = [line for line in results(tmp_path) if line["track"] == "change-of-mind"]
    # It never unlearns: to be told not to say something is to hear it once more.
    assert change["parts"]["without it afterwards"]["mean"] == 0.0


@pytest.mark.parametrize("shared", [False, True])
def test_what_one_person_wants_must_not_reach_another(tmp_path: Path, shared: bool) -> None:
    endpoint = ScriptedEndpoint(perfect(SMALL, SEED), shared=shared)
    assert measure(tmp_path, endpoint, "--track", "two-people") == 0
    (line,) = results(tmp_path)
    # If two people want another beginning each, one of them gets that of the other.
    assert line["score"]["mean"] <= 0.5 if shared else line["score"]["mean"] == 1.0
    assert line["parts"]["leaked"]["mean"] >= 0.5 if shared else line["parts"]["leaked"]["mean"] == 0.0


def test_people_may_be_told_apart_by_the_field_user(tmp_path: Path) -> None:
    endpoint = ScriptedEndpoint(perfect(SMALL, SEED))
    with listening(endpoint) as url:
        given = ["--quick", "--seed", str(SEED), "--out", str(tmp_path), "--track", "two-people", "--by-user"]
        assert main(["benchmark", "--url", url, *given]) == 0
    assert means(tmp_path) == {"two-people": 1.0}
    # The first question is nobody's.
    assert len({body["user"] for body in endpoint.bodies[1:]}) == 2


def test_what_an_endpoint_does_not_offer_is_said_and_not_scored(tmp_path: Path) -> None:
    with listening(ScriptedEndpoint(stubborn)) as url:
        given = ["--quick", "--seed", str(SEED), "--out", str(tmp_path), "--track", "two-people,forget"]
        assert main(["benchmark", "--url", url, *given]) == 0
    two, forget = results(tmp_path)
    assert (two["score"], forget["score"]) == (None, None)
    assert "give a --key for each" in two["reason"]
    assert "give --forget-url" in forget["reason"]


def test_an_endpoint_that_answers_nothing_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def say(memory: Memory, messages: list[Any], body: dict[str, Any]) -> dict[str, Any]:
        if body["model"] == "golf":
            raise ValueError("There is no model golf.")
        return stubborn(memory, messages, body)

    assert measure(tmp_path, ScriptedEndpoint(say), "--track", "many", "--model", "golf") == 2
    assert "answers 400: There is no model golf." in capsys.readouterr().err
    assert not results(tmp_path)
    # With the right name it goes on in the same folder.
    assert measure(tmp_path, ScriptedEndpoint(say), "--track", "many", "--model", "chess") == 0
    assert len(results(tmp_path)) == 1


def test_an_endpoint_that_refuses_tools_is_not_scored_on_them(tmp_path: Path) -> None:
    def say(memory: Memory, messages: list[Any], body: dict[str, Any]) -> dict[str, Any]:
        if "tools" in body:
            raise ValueError("no tools")
        return stubborn(memory, messages, body)

    assert measure(tmp_path, ScriptedEndpoint(say), "--track", "sense,tools") == 0
    sense, tools = results(tmp_path)
    assert list(sense["parts"]) == ["before", "plain", "coding"]
    assert "no tools" in sense["facts"]["refused"]["tool use"]
    assert "no tools" in tools["reason"]


def test_only_fields_and_headers_of_openai_are_sent(tmp_path: Path) -> None:
    endpoint = ScriptedEndpoint(stubborn)
    assert measure(tmp_path, endpoint) == 0
    assert {name for body in endpoint.bodies for name in body} == {
        "messages",
        "max_tokens",
        "temperature",
        "seed",
        "tools",
    }
    sent = {name.lower() for headers in endpoint.headers for name in headers}
    assert not {name for name in sent if name.startswith("x-")}


def test_the_same_seed_asks_the_same_and_another_asks_something_else(tmp_path: Path) -> None:
    asked = []
    for name, seed in (("first", SEED), ("second", SEED), ("third", SEED + 1)):
        endpoint = ScriptedEndpoint(stubborn)
        assert measure(tmp_path / name, endpoint, "--seed", str(seed), "--track", "wishes,tools") == 0
        asked.append(sorted(json.dumps(body) for body in endpoint.bodies))
    assert asked[0] == asked[1] != asked[2]


def test_a_run_that_was_stopped_goes_on_where_it_stopped(
    tmp_path: Path, of_perfect: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = ScriptedEndpoint(perfect(SMALL, SEED))
    endpoint.fails_after = 100
    assert measure(tmp_path, endpoint) == 2
    assert "broke" in capsys.readouterr().err
    done = [line["item"] for line in results(tmp_path)]
    assert 2 < len(done) < 13
    assert (tmp_path / "index.html").exists()
    endpoint.fails_after = 10**9
    assert measure(tmp_path, endpoint) == 0
    assert means(tmp_path) == dict.fromkeys(TRACKS, 1.0)
    items = [(line["track"], line["item"]) for line in results(tmp_path)]
    assert len(items) == len(set(items)) == len(results(of_perfect))
    assert [line["begun_times"] for line in results(tmp_path)].count(2) == 1
    capsys.readouterr()
    assert measure(tmp_path, endpoint) == 0
    assert f"Seed {SEED}: all is measured already." in capsys.readouterr().out
    assert measure(tmp_path, endpoint, "--seed", str(SEED), "--name", "other") == 0
    head, *others = lines(tmp_path)
    older = [{**head, "version": "0"}, *others]
    (tmp_path / f"endpoint-{SEED}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in older))
    assert measure(tmp_path, endpoint) == 2
    assert "has results of another version" in capsys.readouterr().err


def test_a_seed_that_is_not_given_is_chosen_and_kept(tmp_path: Path) -> None:
    with listening(ScriptedEndpoint(stubborn)) as url:
        command = ["benchmark", "--url", url, "--quick", "--track", "many", "--out", str(tmp_path)]
        assert main(command) == 0
        assert main(command) == 0
    assert len(load_results(tmp_path)) == 1


def test_a_line_has_all_that_a_score_needs(of_perfect: Path) -> None:
    head, *_ = lines(of_perfect)
    assert (head["seed"], head["quick"], head["system"], head["people_by"]) == (SEED, True, "endpoint", "2 keys")
    assert head["version"]
    wish = next(line for line in results(of_perfect) if line["item"].startswith("says"))
    assert wish["score"]["low"] < wish["score"]["mean"] == 1.0
    assert wish["parts"]["before"]["mean"] == 0.0
    assert wish["held"] is None  # The first session was not as wanted, and three are held.
    (log,) = wish["log"]
    assert wish["cost"]["requests"] == len(log) == 2 * 3 + 2 * 3
    assert wish["cost"]["prompt_tokens"] == sum(one["tokens"][0] for one in log)
    assert {one["said"] for one in log} >= {name for name, _ in wish["marks"]}
    assert not any(word in (of_perfect / f"endpoint-{SEED}.jsonl").read_text() for word in ("sesame", "Bearer"))
    student = next(line for line in results(of_perfect) if line["item"] == "student")
    assert (student["held"]["sessions"], student["held"]["requests"]) == (3, 3 * 2)
    assert student["held"]["tokens"] > 0


def test_a_wish_that_the_prompt_does_not_carry_is_kept_unaided(tmp_path: Path) -> None:
    """The scripted endpoint counts the words that it is sent, so its prompts stay as short as they were."""
    endpoint = ScriptedEndpoint(perfect(SMALL, SEED))
    assert measure(tmp_path / "weights", endpoint, "--track", "wishes") == 0
    assert [line["parts"]["unaided"]["mean"] for line in results(tmp_path / "weights")] == [1.0, 1.0]
    endpoint = ScriptedEndpoint(perfect(SMALL, SEED))
    endpoint.reads_memory = True
    assert measure(tmp_path / "prompt", endpoint, "--track", "wishes") == 0
    for line in results(tmp_path / "prompt"):
        assert "unaided" not in line["parts"]
        assert line["facts"]["carried_tokens"] > 0
    endpoint = ScriptedEndpoint(perfect(SMALL, SEED))
    endpoint.reads_memory = True
    assert measure(tmp_path / "bare", endpoint, "--track", "wishes", "--bare-header", "X-Memory: off") == 0
    assert [line["parts"]["unaided"]["mean"] for line in results(tmp_path / "bare")] == [0.0, 0.0]


def test_two_results_are_compared_case_by_case(
    of_perfect: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(tmp_path, ScriptedEndpoint(stubborn), "--name", "stubborn", "--track", "many,tools") == 0
    capsys.readouterr()
    assert main(["benchmark", "compare", str(tmp_path), str(of_perfect / f"endpoint-{SEED}.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "endpoint minus stubborn, on the same cases (95 % interval)\n" in shown
    assert shown.count("+1.00 (") == 2
    assert measure(tmp_path / "other", ScriptedEndpoint(stubborn), "--track", "many", "--seed", "8") == 0
    assert main(["benchmark", "compare", str(tmp_path / "other"), str(of_perfect)]) == 2
    assert "no case in common" in capsys.readouterr().err
    assert main(["benchmark", "compare", str(of_perfect)]) == 2
    assert main(["benchmark", "compare", str(of_perfect), str(tmp_path / "nothing")]) == 2


def test_the_table_at_the_end_fits_a_terminal_of_80_columns(of_perfect: Path) -> None:
    """Each track in two lines, and nothing cut off or broken within a word."""
    console = Console(width=80)
    with console.capture() as shown:
        console.print(results_table(load_results(of_perfect)))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    told = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in told] == [word for track in TRACKS for word in ("endpoint", track)]
    assert [row[1] for row in told if row[0] == "endpoint"] == ["1.00"] * len(TRACKS)
    assert {row[5] for row in told if row[0] in TRACKS} == {""}, "tokens are on the first line"


def test_the_table_the_picture_and_the_page_have_all_tracks(of_perfect: Path) -> None:
    table, page = (of_perfect / "results.md").read_text(), (of_perfect / "index.html").read_text()
    picture = ElementTree.parse(of_perfect / "scores.svg").getroot()
    texts = {element.text for element in picture.iter() if element.tag.endswith("text")}
    for track in TRACKS:
        assert f"| endpoint | {track} | 1.00 (" in table
        assert f"<td>{track}</td>" in page
        assert track in texts
    assert "1.00 (" in page


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "either --url"),
        (["--url", "http://127.0.0.1:9", "--baseline", "bare"], "either --url"),
        (["--url", "http://127.0.0.1:9", "--", "--seed", "3"], "runs already"),
        (["--url", "http://127.0.0.1:9", "--track", "golf"], "There is no track golf"),
        (["--baseline", "golf"], "There is no baseline golf"),
        (["--url", "http://127.0.0.1:9", "--bare-header", "off"], "is not NAME: VALUE"),
        (["golf"], "Unexpected argument: golf"),
        (["--url", "http://127.0.0.1:9", "--user-model", "x"], "must be given together"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    given: list[str], said: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", "--out", str(tmp_path), "--model-name", str(tiny_model), *given]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--baseline", "golf"]])
def test_a_refused_command_leaves_no_folder(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["benchmark", *given]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_a_drawn_wish_is_kept_by_the_answers_that_show_it_and_by_no_other(place: str, form: str) -> None:
    draws = (draw(Random(seed), [place]) for seed in range(100))
    drawn = next(one for one in draws if one.wish.name.endswith(form))
    for question in questions(split="train")[::9]:
        shown = drawn.wish.corrections[question.text]
        assert not drawn.wish.persona.failed(shown)
        assert check(shown, question.text, question.reference).ok
        assert drawn.wish.persona.failed(question.reference)
        assert drawn.back.persona.failed(shown)
        assert not drawn.back.persona.failed(question.reference)


def test_drawn_wishes_differ_and_share_no_words() -> None:
    assert len({draw(Random(seed)).wish.name for seed in range(50)}) == 50
    first = draw(Random(0))
    for seed in range(30):
        other = draw(Random(seed), without=[first.words])
        assert not set(first.words.lower().strip("*").split()) & set(other.words.lower().strip("*").split())


def test_a_track_is_added_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "benchmark.md"
    names = dict(vars(tracks))
    exec(page.read_text().split("```python\n")[1].split("```")[0], names)
    monkeypatch.setitem(TRACKS, "polite", names["polite_items"])
    assert measure(tmp_path / "polite", ScriptedEndpoint(perfect(SMALL, SEED)), "--track", "polite") == 0
    assert measure(tmp_path / "rude", ScriptedEndpoint(stubborn), "--track", "polite") == 0
    assert (means(tmp_path / "polite"), means(tmp_path / "rude")) == ({"polite": 1.0}, {"polite": 0.0})


async def test_all_that_was_said_before_is_pasted_until_it_is_forgotten() -> None:
    endpoint = ScriptedEndpoint(stubborn)
    with listening(endpoint) as url:
        async with PastingChat(url) as chat:
            first = [{"role": "user", "content": "Why is Mars red?"}]
            await chat.ask(first)
            await chat.ask(
                [*first, {"role": "assistant", "content": "Rust."}, {"role": "user", "content": "Call me Sam."}]
            )
            await chat.ask([{"role": "user", "content": "How do bees make honey?"}])
            await chat.forget()
            await chat.ask([{"role": "user", "content": "Why do stars twinkle?"}])
    systems = [[one["content"] for one in body["messages"] if one["role"] == "system"] for body in endpoint.bodies]
    assert systems[0] == systems[1] == systems[3] == []
    assert systems[2][0].endswith("user: Why is Mars red?\nassistant: Rust.\nuser: Call me Sam.")


async def test_what_is_pasted_fits_the_model() -> None:
    def say(_memory: Memory, messages: list[Any], _body: dict[str, Any]) -> dict[str, Any]:
        if sum(len(one["content"]) for one in messages) > 300:
            raise TooLong("It is too long.")
        return {"content": "Rust."}

    endpoint = ScriptedEndpoint(say)
    with listening(endpoint) as url:
        async with PastingChat(url) as chat:
            first = [{"role": "user", "content": "Why is Mars red? " + "Say it. " * 20}]
            await chat.ask(
                [*first, {"role": "assistant", "content": "Rust."}, {"role": "user", "content": "Call me Sam."}]
            )
            await chat.ask([{"role": "user", "content": "How do bees make honey?"}])
            with pytest.raises(ServerError, match="too long"):
                await chat.ask([{"role": "user", "content": "Why? " * 100}])
    lengths = [sum(len(one["content"]) for one in body["messages"]) for body in endpoint.bodies]
    assert any(100 < length <= 300 for length in lengths[1:-1])


@pytest.mark.more
def test_baselines_are_measured_with_servers_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    given = ["--quick", "--seed", str(SEED), "--at-once", "2", "--out", str(tmp_path), "--model-name", str(tiny_model)]
    names, chosen = "bare,history,notes", "wishes,two-people,forget"
    assert main(["benchmark", "--baseline", names, "--track", chosen, *given]) == 0
    # These train, and one of them practises.
    assert main(["benchmark", "--baseline", "practice,team", "--track", "forget", *given, "--", "--no-guard"]) == 0
    found = {one.system: one for one in load_results(tmp_path)}
    assert list(found) == ["bare", "history", "notes", "practice", "team"]
    for name, one in found.items():
        assert len(one.lines) == (1 if name in ("practice", "team") else 4), name
        assert all((line["steps"] is None) is (len(one.lines) == 4) for line in one.lines)
        reasons = {line["item"]: line["reason"] for line in one.lines if line["reason"]}
        assert len(reasons) == (1 if name == "bare" else 0), reasons
        assert all("no way to delete" in reason for reason in reasons.values())
    # The tiny model keeps nothing, but what was said is read, and is deleted for one person alone.
    (run_dir,) = (tmp_path / "servers" / f"notes-{SEED}").iterdir()
    with open_ledger(run_dir) as db:
        owners = {owner for (owner,) in db.execute("SELECT DISTINCT owner FROM notes")}
    assert len(owners) >= 2
    wishes = [line for line in found["notes"].lines if line["track"] == "wishes"]
    assert all("unaided" in line["parts"] for line in wishes)
    assert any(line["facts"]["carried_tokens"] for line in wishes)


@pytest.mark.more
def test_people_on_one_server_are_trained_apart_unless_they_are_measured_together(
    tiny_model: Path, tmp_path: Path
) -> None:
    given = ["--quick", "--seed", str(SEED), "--at-once", "1", "--out", str(tmp_path), "--model-name", str(tiny_model)]
    assert main(["benchmark", "--baseline", "combine", "--track", "many,two-people,forget", *given]) == 0
    ((many, two, forget),) = (one.lines for one in load_results(tmp_path))
    assert many["steps"] >= 1
    assert two["steps"] >= 1
    # What was trained for the person who is forgotten is gone, and nothing of what the other one has.
    assert forget["steps"] == 0
    assert all(line["score"] for line in (many, two, forget))
    folders = list((tmp_path / "servers" / f"combine-{SEED}").iterdir())
    lines = [sorted(path.name for path in (folder / "lines").glob("*")) for folder in folders]
    assert sorted(map(len, lines)) == [0, 1]
