"""Tasks on the built-in sites, without end: a catalogue to search and a shop, whose state the site keeps."""

import json
from collections.abc import Iterator, Mapping
from itertools import count
from random import Random
from typing import Any

from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.browser.actions import TOOL_NAME, BrowserAction
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.scenes import SiteScene
from openclaw_rl.envs.browser.site_pages import Site, SiteDraft, solve
from openclaw_rl.envs.browser.sites import SearchSite, ShopSite
from openclaw_rl.envs.calls import call_message
from openclaw_rl.lab.tasks import checked_examples, checked_split, digest, several, split_with_examples

FAMILIES: Mapping[str, type[Site]] = {"search": SearchSite, "shop": ShopSite}
#: Level → what it asks for.
LEVELS = {1: "one click on a short page", 2: "two to four actions", 3: "several pages, with something to leave alone"}
#: An example has up to 20 messages, and an episode begins with at most 64.
MAX_EXAMPLES = 3


class SiteTasks:
    """Generated tasks.

    - The same split and seed give the same tasks. What is asked belongs to one split, by a digest of its words; neither
      split shares it with the examples.
    - All tasks of a family and level have the same examples, so the server reads them once and keeps them in its cache.
    - A task's data holds the whole site and the moves that solve it; the model sees neither.
    """

    def __init__(self, pages: Any = tuple(FAMILIES), levels: Any = (1,), examples: Any = 2) -> None:
        self._families = several("browser", "page", pages, FAMILIES)
        self._levels = several("browser", "level", levels, LEVELS)
        self._examples = checked_examples("browser", examples, MAX_EXAMPLES)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        checked_split("browser", split)
        return (self._task(split, Random(f"browser {split} {seed} {index}")) for index in count())

    def scene(self, task: Task, chromium: Chromium) -> SiteScene:
        data = task.data
        return SiteScene(FAMILIES[data["family"]](data["content"]), data, chromium)

    def examples(self, task: Task, *, offers_tool: bool) -> list[Message]:
        return site_examples(task.data["family"], task.data["level"], self._examples, offers_tool=offers_tool)

    def _task(self, split: str, random: Random) -> Task:
        family = random.choice(self._families)
        level = random.choice(self._levels)
        draft = draw(family, level, split, random)
        data: dict[str, Any] = {
            "family": family,
            "level": level,
            "goal": draft.goal,
            "content": json.loads(json.dumps(draft.content)),
            "solution": list(draft.solution),
        }
        return Task(f"browser/{split}/{family}-{level}-{digest(data):016x}", data)


def site_examples(family: str, level: int, number: int, *, offers_tool: bool) -> list[Message]:
    """Solved tasks, as messages; the same ones for the same arguments."""
    random = Random(f"browser examples {family} {level}")
    messages: list[Message] = []
    for index in range(number):
        draft = draw(family, level, "examples", random)
        reply: Message = {"role": "user"}
        before = f"{draft.goal}\n"
        for turn, (shown, action) in enumerate(solve(FAMILIES[family](draft.content), draft.solution)):
            messages.append({**reply, "content": before + shown})
            id_ = f"example{index}{turn}"
            messages.append(called(action, id_) if offers_tool else {"role": "assistant", "content": str(action)})
            reply = {"role": "tool", "tool_call_id": id_} if offers_tool else {"role": "user"}
            before = ""
    return messages


def called(action: BrowserAction, id_: str) -> Message:
    """An action as a tool call."""
    arguments: dict[str, Any] = {"action": action.kind, "element": action.element, "text": action.text}
    return call_message(TOOL_NAME, {name: value for name, value in arguments.items() if value not in (None, "")}, id_)


def draw(family: str, level: int, split: str, random: Random) -> SiteDraft:
    """A task of a family that belongs to a split."""
    while split_with_examples(digest((draft := FAMILIES[family].draw(random, level)).goal)) != split:
        pass
    return draft
