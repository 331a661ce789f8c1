"""Tasks on pages of our own: forms, tables, searches and a shop, without end."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.browser.actions import TOOL_NAME, BrowserAction
from openclaw_rl.envs.browser.chromium.backend import BrowserBackend
from openclaw_rl.envs.browser.pages.form import Forms
from openclaw_rl.envs.browser.pages.model_page import ModelPage, solve
from openclaw_rl.envs.browser.pages.search import Searches
from openclaw_rl.envs.browser.pages.shop import Shops
from openclaw_rl.envs.browser.pages.site import SiteDraft, SiteFamily
from openclaw_rl.envs.browser.pages.table import Tables
from openclaw_rl.envs.browser.scenes import SiteScene

FAMILIES: Mapping[str, SiteFamily] = {"form": Forms(), "table": Tables(), "search": Searches(), "shop": Shops()}
#: Level → what it asks for.
LEVELS = {1: "one click on a short page", 2: "two to four actions", 3: "several pages, with something to leave alone"}
SPLITS = ("train", "held-out")
#: Of so many goals one is held out, and one more is used for examples only.
SPLIT_ONE_IN = 5
#: An example has up to 20 messages, and an episode begins with at most 64.
MAX_EXAMPLES = 3


class OwnPages:
    """Generated tasks.

    - The same split and seed give the same tasks. What is asked belongs to one split, by a digest of its words; neither
      split shares it with the examples.
    - All tasks of a family and level have the same examples, so the server reads them once and keeps them in its cache.
    - A task's data holds the whole site and the moves that solve it; the model sees neither.
    """

    def __init__(self, pages: Any = None, levels: Any = None, examples: Any = None) -> None:
        self._families = several("page", pages, FAMILIES) if pages is not None else tuple(FAMILIES)
        self._levels = several("level", levels, LEVELS) if levels is not None else (1,)
        self._examples = checked_examples(2 if examples is None else examples)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        if split not in SPLITS:
            raise ConfigError(f"browser has no split {split}; the splits are {' and '.join(SPLITS)}.")
        return (self._task(split, Random(f"browser {split} {seed} {index}")) for index in count())

    def scene(self, task: Task, backend: BrowserBackend) -> SiteScene:
        data = task.data
        return SiteScene(FAMILIES[data["family"]].site(data["content"]), data, backend)

    def examples(self, task: Task, *, offers_tool: bool) -> list[Message]:
        return site_examples(task.data["family"], task.data["level"], self._examples, offers_tool=offers_tool)

    def _task(self, split: str, random: Random) -> Task:
        family, level = random.choice(self._families), random.choice(self._levels)
        draft = draw(family, level, split, random)
        data: dict[str, Any] = {
            "family": family,
            "level": level,
            "goal": draft.goal,
            "content": json.loads(json.dumps(draft.content)),
            "solution": [move.plain() for move in draft.solution],
        }
        return Task(f"browser/{split}/{family}-{level}-{digest(data):016x}", data)


def site_examples(family: str, level: int, number: int, *, offers_tool: bool) -> list[Message]:
    """Solved tasks, as messages; the same ones for the same arguments."""
    random = Random(f"browser examples {family} {level}")
    messages: list[Message] = []
    for index in range(number):
        draft = draw(family, level, "examples", random)
        page = ModelPage(FAMILIES[family].site(draft.content))
        reply: Message = {"role": "user"}
        before = f"{draft.goal}\n"
        for turn, (shown, action) in enumerate(solve(page, [move.plain() for move in draft.solution])):
            messages.append({**reply, "content": before + shown})
            id_ = f"example{index}{turn}"
            messages.append(called(action, id_) if offers_tool else {"role": "assistant", "content": str(action)})
            reply, before = ({"role": "tool", "tool_call_id": id_} if offers_tool else {"role": "user"}), ""
    return messages


def called(action: BrowserAction, id_: str) -> Message:
    """An action as a tool call."""
    arguments: dict[str, Any] = {"action": action.kind, "element": action.element, "text": action.text}
    text = json.dumps({name: value for name, value in arguments.items() if value not in (None, "")})
    call = {"id": id_, "type": "function", "function": {"name": TOOL_NAME, "arguments": text}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def draw(family: str, level: int, split: str, random: Random) -> SiteDraft:
    """A task of a family that belongs to a split."""
    while split_of(draft := FAMILIES[family].draw(random, level)) != split:
        pass
    return draft


def split_of(draft: SiteDraft) -> str:
    """The split of what is asked."""
    return {0: "held-out", 1: "examples"}.get(digest(draft.goal) % SPLIT_ONE_IN, "train")


def digest(content: Any) -> int:
    """A number for a JSON value: equal for equal values, on every machine."""
    text = json.dumps(content, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def several(name: str, given: Any, known: Mapping[Any, Any]) -> tuple[Any, ...]:
    """One or several of the known values, as given in an option. Raises ConfigError."""
    if isinstance(given, str):
        given = given.split(",")
    values = tuple(given) if isinstance(given, Sequence) else (given,)
    if wrong := [value for value in values if value not in known]:
        raise ConfigError(f"browser has no {name} {wrong[0]}; there are {', '.join(map(str, known))}.")
    if not values:
        raise ConfigError(f"browser needs at least one {name}.")
    return values


def checked_examples(given: Any) -> int:
    """Raises ConfigError."""
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= MAX_EXAMPLES:
        raise ConfigError(f"The number of examples of browser is from 0 to {MAX_EXAMPLES}, not {given}.")
    return given
