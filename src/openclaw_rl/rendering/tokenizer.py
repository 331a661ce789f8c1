"""A model folder's tokenizer: chat text to ids, without computing anything twice and without being fooled.

Control tokens (`<|im_start|>` and the like) split a rendered chat into segments that tokenise independently, so
a segment that was seen before costs a look-up. Only the template may write control tokens: the same
characters inside a message are `guard`ed before rendering, and become ordinary text.
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

#: A noncharacter, which no message has reason to contain: it keeps a quoted control token from being one.
GUARD = "\ufdd0"
#: A pattern that splits nothing, for tokenizers without control tokens.
NEVER = r"(?!)()"
#: How much segment text is remembered. A long agent prompt is 150 KB; this holds the segments of a hundred.
CACHED_CHARACTERS = 16_000_000


class BadModelFolder(UserError):
    """A file in the model's folder cannot be used; the message says which and why."""


class ChatTokenizer:
    """Encodes rendered chats; `backend` decodes."""

    def __init__(self, folder: Path) -> None:
        try:
            self.backend: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise BadModelFolder(f"The tokenizer.json in {folder} cannot be read: {error}.") from error
        # Text is only ever text: the ids of control tokens are put in by `encode_chat` alone.
        self.backend.encode_special_tokens = True
        self.settings = read_json(folder / "tokenizer_config.json")
        self.template = chat_template(folder, self.settings)
        self.eos_ids = eos_ids(folder, self)
        added = self.backend.get_added_tokens_decoder()
        self._control = {t.content: id for id, t in added.items() if t.special}
        self._strips_left = {t.content for t in added.values() if t.lstrip}
        self._strips_right = {t.content for t in added.values() if t.rstrip}
        names = [re.escape(name) for name in sorted(self._control, key=len, reverse=True)]
        self._split = re.compile(f"({'|'.join(names)})" if names else NEVER)
        self._treat_no_segment_as_the_first()
        self._segments = SegmentCache(CACHED_CHARACTERS)

    def _treat_no_segment_as_the_first(self) -> None:
        """Some tokenizers put a space before the beginning of a text; a segment of a chat is no beginning."""
        splitter = self.backend.pre_tokenizer
        if isinstance(splitter, Metaspace) and splitter.prepend_scheme == "first":
            splitter.prepend_scheme = "never"
            self.backend.pre_tokenizer = splitter

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and so on, as templates refer to them."""
        named = {key: value for key, value in self.settings.items() if key.endswith("_token")}
        texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def guard(self, text: str) -> str:
        """Message text in which no control token can be recognised any more."""
        if not text.isascii():
            # JSON can escape half a character; no tokenizer takes one.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for control in self._control:
            if control in text:
                text = text.replace(control, control[0] + GUARD + control[1:])
        return text

    @property
    def eos_id(self) -> int:
        """The id that ends an answer which nobody sampled."""
        own = self.backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return own if own is not None else min(self.eos_ids)

    def encode_text(self, text: str) -> list[int]:
        """The ids of plain text; control tokens in it are characters like any other."""
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

    def unseen(self, text: str) -> int:
        """How many characters of a rendered chat would have to be tokenised."""
        parts = self._parts(text)
        return sum(len(part) for part, is_control in parts if not is_control and part not in self._segments)

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Control tokens and the segments between them; some control tokens swallow the space beside them."""
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
    """Ids by text, least recently used out first, bounded by the characters held."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        # Long prompts are tokenised in threads.
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
    """A JSON object from a file; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise BadModelFolder(f"{path} is not valid JSON: {error}.") from None
    return content


def chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The model's chat template: a file of its own in newer folders, a setting in older ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("tool_use") or named.get("default")
    return template


def eos_ids(folder: Path, tokenizer: ChatTokenizer) -> frozenset[int]:
    """The ids that end a completion: the generation config's, and the tokenizer's own."""
    configured = read_json(folder / "generation_config.json").get("eos_token_id")
    ids = set(configured if isinstance(configured, list) else [configured])
    ids.add(tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", "")))
    return frozenset(id for id in ids if id is not None)
