"""The tasks of the environment browser on the built-in sites, without a browser: what policies get in them."""

import json
import sys
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Task
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.environment import Addresses, ShowOptions, make_browser, make_tasks, read_lines
from openclaw_rl.envs.browser.errors import BrowserGone
from openclaw_rl.envs.browser.gate import SiteRequest
from openclaw_rl.envs.browser.scenes import site_reply
from openclaw_rl.envs.browser.site_pages import SitePage, link, textbox
from openclaw_rl.envs.browser.site_tasks import FAMILIES, LEVELS, MAX_EXAMPLES, SiteTasks
from openclaw_rl.envs.host import checked_messages, checked_outcome, checked_step
from openclaw_rl.envs.registry import BUILT_IN, make_environment
from support.policies import attempt, calls, says
from support.properties import examples
from support.web_pages import (
    BlankSite,
    destroys_everything,
    does_nothing,
    oracle,
    says_nothing,
    without_browser,
)

EVERYTHING = without_browser(levels=tuple(LEVELS))


def some_tasks(number: int, split: str = "train", seed: int = 0, **settings: Any) -> list[Task]:
    source = SiteTasks(**settings) if settings else EVERYTHING
    return list(islice(source.tasks(split, seed), number))


async def test_an_oracle_solves_every_family_and_level() -> None:
    seen = set()
    for task in [*some_tasks(300), *some_tasks(100, "held-out")]:
        episode = EVERYTHING.open(task)
        steps, outcome = await attempt(episode, oracle(task, episode))
        assert (outcome.solved, outcome.reward, outcome.hint) == (True, 1.0, ""), task
        assert not any(step.hint for step in steps), task
        assert len(steps) == len(task.data["solution"])
        for step in steps:
            checked_step(step)
        seen.add((task.data["family"], task.data["level"]))
    assert seen == {(family, level) for family in FAMILIES for level in LEVELS}


async def test_policies_that_do_nothing_or_destroy_everything_solve_nothing() -> None:
    for task in some_tasks(240):
        _, idle = await attempt(EVERYTHING.open(task), does_nothing)
        _, silent = await attempt(EVERYTHING.open(task), says_nothing)
        assert (idle.solved, idle.reward, silent.solved, silent.reward) == (False, 0.0, False, 0.0)
        assert idle.hint
        if task.data["level"] > 1:  # one click at random is right one time in three
            episode = EVERYTHING.open(task)
            _, greedy = await attempt(episode, destroys_everything(episode))
            assert not checked_outcome(greedy).solved, task
            assert greedy.reward < 1, task


async def test_every_wrong_click_of_the_first_level_fails_with_the_right_one_as_a_hint() -> None:
    for task in some_tasks(40, levels=1):
        right = task.data["solution"][0][2]
        for number in (1, 2, 3):
            episode = without_browser().open(task)
            await episode.start()
            name = episode.view.elements[number - 1].name
            step = await episode.step(says(f"click {number}"))
            outcome = await episode.outcome()
            assert step.done
            assert outcome.solved == (name == right)
            expected = "" if outcome.solved else f"Write: click {episode.view.number(*task.data['solution'][0][1:3])}"
            assert step.hint == expected


@given(seed=st.integers(0, 2**32), split=st.sampled_from(["train", "held-out"]))
@examples(20)
def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(seed: int, split: str) -> None:
    tasks = some_tasks(5, split, seed)
    assert tasks == some_tasks(5, split, seed)
    assert [task.id for task in tasks] != [task.id for task in some_tasks(5, split, seed + 1)]
    assert json.loads(json.dumps(tasks[0].data)) == tasks[0].data


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_and_examples_share_no_goal(family: str) -> None:
    for level in LEVELS:
        train = some_tasks(200, "train", 1, pages=family, levels=level)
        held_out = some_tasks(200, "held-out", 2, pages=family, levels=level)
        goals = [{task.data["goal"] for task in tasks} for tasks in (train, held_out)]
        source = SiteTasks(pages=family, levels=level)
        shown = [source.examples(task, offers_tool=False) for task in (train[0], held_out[7], train[5])]
        assert shown[0] == shown[1] == shown[2]
        examples = {message["content"].split("\n")[0] for message in shown[0] if message["role"] == "user"}
        assert not goals[0] & goals[1]
        assert not (goals[0] | goals[1]) & examples
        assert min(map(len, goals)) > 2


@pytest.mark.parametrize("tool", [False, True])
@pytest.mark.parametrize("level", LEVELS)
async def test_examples_are_solved_tasks_in_the_same_words(level: int, tool: bool) -> None:
    """An example is what the environment itself says when its actions are done."""
    env = without_browser(ShowOptions(offers_tool=tool), levels=level, examples=MAX_EXAMPLES)
    for task in some_tasks(8, levels=level):
        episode = env.open(task)
        messages = checked_messages("start", await episode.start())
        assert [message["role"] for message in messages[:3]] == ["system", "user", "assistant"]
        assert messages[-1]["content"].startswith(f"{task.data['goal']}\n")
        assert bool(episode.tools) is tool
        actions = [message for message in messages if message["role"] == "assistant"]
        assert all(bool(message.get("tool_calls")) is tool for message in actions)
        assert len(messages) == 2 * len(actions) + 2


def test_the_first_messages_of_the_first_level_are_short() -> None:
    for task in some_tasks(40, levels=1):
        examples = SiteTasks().examples(task, offers_tool=False)
        assert len(examples) == 4
        assert sum(len(message["content"]) for message in examples) < 700


async def test_an_answer_that_is_no_action_is_told_and_the_attempt_goes_on() -> None:
    (task,) = some_tasks(1, pages="search", levels=2)
    episode = without_browser().open(task)
    await episode.start()
    for answer, said in [
        (says("Hello!"), "no action in the answer"),
        (says("click 99"), "There is no element 99"),
        (says("type 2 text"), "Nothing can be typed into this element"),
        (says("back"), "no page to go back to"),
    ]:
        step = await episode.step(answer)
        assert said in step.messages[0]["content"]
        assert said in step.hint
        assert "Write: type" in step.hint
        assert '[2] button "Find"' in step.messages[0]["content"]
        assert not step.done
    assert (await episode.step(says("scroll down"))).messages


async def test_the_attempt_ends_after_a_bounded_number_of_answers() -> None:
    (task,) = some_tasks(1, pages="shop", levels=3)
    steps, outcome = await attempt(EVERYTHING.open(task), says_nothing)
    assert len(steps) == len(task.data["solution"]) + 4
    assert not outcome.solved


async def test_each_of_several_calls_gets_an_answer_and_only_the_first_is_done() -> None:
    (task,) = some_tasks(1, pages="search", levels=2)
    episode = without_browser(ShowOptions(offers_tool=True)).open(task)
    await episode.start()
    first, second = (
        ("browser", {"action": "type", "element": 1, "text": "a"}),
        ("browser", {"action": "click", "element": 2}),
    )
    step = await episode.step(calls(first, second))
    assert [message["tool_call_id"] for message in step.messages] == ["call0", "call1"]
    assert '= "a"' in step.messages[0]["content"]
    assert "one action at a time" in step.messages[1]["content"]
    assert not step.done


async def test_partial_work_gets_a_part_of_the_reward_and_says_what_is_missing() -> None:
    task = next(task for task in some_tasks(100) if (task.data["family"], task.data["level"]) == ("shop", 3))
    skipped = next(move for move in task.data["solution"] if move[2] == "Name")
    moves = [move for move in task.data["solution"] if move != skipped]
    episode = EVERYTHING.open(task)
    _, outcome = await attempt(episode, oracle(Task(task.id, {**task.data, "solution": moves}), episode))
    assert not outcome.solved
    assert 0.5 < outcome.reward < 0.8
    assert f'{skipped[2]} must be "{skipped[3]}", not ""' in outcome.hint


class Tags(HTMLParser):
    """The tags of a document, which must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_pages_are_sound_html_and_hostile_words_stay_words() -> None:
    for task in some_tasks(50):
        site = FAMILIES[task.data["family"]](task.data["content"])
        Tags(site.get("/").html())
    words = '"><script>alert(1)</script>'
    html = SitePage([words, link(words, words), textbox(words, words, words)]).html()
    assert "<script>" not in html
    Tags(html)


@given(method=st.sampled_from(["GET", "POST"]), path=st.text(), body=st.binary())
@settings(deadline=None)
def test_a_site_answers_every_request(method: str, path: str, body: bytes) -> None:
    for task in some_tasks(8):
        site = FAMILIES[task.data["family"]](task.data["content"])
        for address in (f"/{path}", f"/page/{path}", f"/open/{path}", f"/book/{path}", f"/results/{path}", "/order"):
            assert site_reply(site, SiteRequest(method, address, body)).status in (200, 303, 204)
        assert site.get("/").html()
        checked_outcome(site.outcome())


def test_a_form_leads_to_the_page_that_its_site_names() -> None:
    site = BlankSite({"/": SitePage(["Hello"])})
    reply = site_reply(site, SiteRequest("POST", "/a b?x=1", b"name=Ada+Holt&empty="))
    assert (reply.status, reply.headers["Location"]) == (303, "/a%20b")
    assert site.posted == [("/a b", {"name": "Ada Holt", "empty": ""})]


ADDRESS = {"url": "http://127.0.0.1:8000/", "goal": "Click it.", "check": "document.title === 'Done'"}


def test_tasks_of_a_file_belong_to_one_split(tmp_path: Path) -> None:
    lines = [{**ADDRESS, "goal": f"Click {number}."} for number in range(30)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    source = Addresses(read_lines(path))
    splits = [{task.data["goal"] for task in islice(source.tasks(split, 0), 60)} for split in ("train", "held-out")]
    assert len(splits[0]) + len(splits[1]) == 30
    assert not splits[0] & splits[1]
    assert all(splits)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pages": "blog"}, "no page blog; there are search, shop"),
        ({"levels": 4}, "no level 4; there are 1, 2, 3"),
        ({"levels": []}, "at least one level"),
        ({"examples": 9}, "from 0 to 3, not 9"),
        ({"examples": True}, "from 0 to 3, not True"),
        ({"tool": "yes"}, "tool is true or false, not 'yes'"),
        ({"miniwob": "all", "levels": 1}, "either pages and levels or miniwob"),
        ({"url": "http://127.0.0.1/"}, "Task 1 needs url, goal, check"),
        ({**ADDRESS, "url": "file:///etc/passwd"}, "must begin with http:// or https://"),
        ({**ADDRESS, "url": "http://a:b@127.0.0.1/"}, "user name or a password"),
        ({"tasks": "/nowhere/tasks.jsonl"}, "tasks.jsonl"),
        ({"screenshots": "/proc/nowhere"}, "Screenshots cannot be kept in /proc/nowhere"),
        ({"colour": "red"}, "does not take colour; it takes pages, levels"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_environment("browser", options)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ([1], "Task 1 needs url, goal, check"),
        ({**ADDRESS, "split": "dev"}, "the splits are train and held-out, not dev"),
        ({**ADDRESS, "max_steps": 0}, "max_steps must be a number from 1 on"),
    ],
)
def test_a_wrong_task_is_refused_in_a_sentence(line: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Addresses([line])


def test_what_is_missing_on_this_machine_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCREENSHOT_BACKEND", "selenium")
    with pytest.raises(ConfigError, match=r"SCREENSHOT_BACKEND=selenium is not supported: .* driven by playwright"):
        make_browser()
    monkeypatch.delenv("SCREENSHOT_BACKEND")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package playwright: pip install 'openclaw-rl\[browser\]'"):
        make_browser()
    with pytest.raises(ConfigError, match="pip install --no-deps miniwob"):
        make_tasks({}, "all", {}, None, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"needs Chromium: install it .*, or set CHROMIUM"):
        make_browser()
    monkeypatch.setenv("CHROMIUM", "/nowhere/chrome")
    with pytest.raises(ConfigError, match="CHROMIUM=/nowhere/chrome is not a program"):
        make_browser()


async def test_a_browser_that_fails_without_a_word_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentDriver:
        async def start(self) -> None:
            raise TimeoutError

    library = ModuleType("playwright.async_api")
    library.async_playwright = SilentDriver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "playwright", ModuleType("playwright"))
    monkeypatch.setitem(sys.modules, "playwright.async_api", library)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("CHROMIUM", sys.executable)
    with pytest.raises(BrowserGone, match="the browser does not start: TimeoutError"):
        await Chromium().open("http://127.0.0.1:1")


def test_gui_is_another_name_of_browser() -> None:
    assert BUILT_IN["gui"] == BUILT_IN["browser"]
