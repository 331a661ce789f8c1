"""A model folder's tokenizer: from the text of a rendered chat to token ids.

Control tokens such as `<|im_start|>` split a rendered chat into segments that tokenise independently, so the ids of a
segment can be cached. Only the template may write control tokens: the same characters in a message are changed by
`guard` before rendering, and become ordinary text.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Metaspace

from openclaw_rl.errors import UserError

#: Put into the spelling of a control token in a message, so that it is not recognised. A Unicode noncharacter, which
#: no message has reason to contain.
GUARD = "\ufdd0"
#: A pattern that never matches, for tokenizers without control tokens.
MATCHES_NOTHING = r"(?!)()"
#: The size of the segment cache. A long agent prompt is 150 KB; this is enough for a hundred of them.
MAX_CACHED_CHARACTERS = 16_000_000


class BadModelFolder(UserError):
    """A file in the model's folder cannot be used; the message says which and why."""


class ChatTokenizer:
    """Encodes rendered chats; `backend` decodes.

    - The text of a message never becomes a control token.
    - A segment between control tokens that is in the cache is not tokenised again.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.backend: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise BadModelFolder(f"The tokenizer.json in {folder} cannot be read: {error}.") from error
        # Never makes control tokens of text: only `encode_chat` inserts their ids.
        self.backend.encode_special_tokens = True
        self.settings = read_json(folder / "tokenizer_config.json")
        self.template = chat_template(folder, self.settings)
        self.eos_ids = eos_ids(folder, self)
        added = self.backend.get_added_tokens_decoder()
        self._control = {t.content: id for id, t in added.items() if t.special}
        self._strips_left = {t.content for t in added.values() if t.lstrip}
        self._strips_right = {t.content for t in added.values() if t.rstrip}
        names = [re.escape(name) for name in sorted(self._control, key=len, reverse=True)]
        self._split = re.compile(f"({'|'.join(names)})" if names else MATCHES_NOTHING)
        self._add_no_space_before_segments()
        self._segments = SegmentCache(MAX_CACHED_CHARACTERS)

    def _add_no_space_before_segments(self) -> None:
        """Some tokenizers add a space at the beginning of a text; a segment of a chat is not the beginning."""
        splitter = self.backend.pre_tokenizer
        if isinstance(splitter, Metaspace) and splitter.prepend_scheme == "first":
            splitter.prepend_scheme = "never"
            self.backend.pre_tokenizer = splitter

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and so on, under the names that templates use."""
        named = {key: value for key, value in self.settings.items() if key.endswith("_token")}
        texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def guard(self, text: str) -> str:
        """The text of a message, changed so that no control token is recognised in it."""
        if not text.isascii():
            # JSON can contain half of a surrogate pair, which tokenizers refuse.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for control in self._control:
            if control in text:
                text = text.replace(control, control[0] + GUARD + control[1:])
        return text

    @property
    def eos_id(self) -> int:
        """The id that ends an answer that was not sampled, such as an imported one."""
        configured = self.backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return configured if configured is not None else min(self.eos_ids)

    def encode_text(self, text: str) -> list[int]:
        """The ids of plain text. Control tokens in it become ordinary text."""
        return self._encode(text)

    def encode_chat(self, text: str) -> list[int]:
        """The ids of a rendered chat."""
        ids: list[int] = []
        for part, is_control in self._parts(text):
            if is_control:
                ids.append(self._control[part])
            else:
                ids += self._encode(part)
        return ids

    def uncached_characters(self, text: str) -> int:
        """How many characters of a rendered chat are not in the cache and would have to be tokenised."""
        parts = self._parts(text)
        return sum(len(part) for part, is_control in parts if not is_control and part not in self._segments)

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Control tokens and the segments between them. Some control tokens remove the spaces next to them."""
        parts = self._split.split(text)
        for number, part in enumerate(parts):
            if number % 2:
                yield part, True
                continue
            if number and parts[number - 1] in self._strips_right:
                part = part.lstrip()
            if number + 1 < len(parts) and parts[number + 1] in self._strips_left:
                part = part.rstrip()
            if part:
                yield part, False

    def _encode(self, text: str) -> list[int]:
        ids = self._segments.get(text)
        if ids is None:
            ids = self.backend.encode(text.replace(GUARD, ""), add_special_tokens=False).ids
            self._segments.put(text, ids)
        return ids


class SegmentCache:
    """A least-recently-used cache of token ids by text, bounded by the total length of its texts."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        # Long prompts are tokenised in threads of their own.
        self._lock = threading.Lock()

    def __contains__(self, text: str) -> bool:
        return text in self._ids

    def get(self, text: str) -> list[int] | None:
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
            return ids

    def put(self, text: str, ids: list[int]) -> None:
        with self._lock:
            if text not in self._ids:
                self._held += len(text)
            self._ids[text] = ids
            while self._held > self._limit:
                dropped, _ids = self._ids.popitem(last=False)
                self._held -= len(dropped)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise BadModelFolder(f"{path} is not valid JSON: {error}.") from None
    return content


def chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The model's chat template: a separate file in newer folders, a setting in older ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("tool_use") or named.get("default")
    return template


def eos_ids(folder: Path, tokenizer: ChatTokenizer) -> frozenset[int]:
    """The ids that end a completion: those of the generation config and that of the tokenizer."""
    configured = read_json(folder / "generation_config.json").get("eos_token_id")
    ids = set(configured if isinstance(configured, list) else [configured])
    ids.add(tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", "")))
    return frozenset(id for id in ids if id is not None)
