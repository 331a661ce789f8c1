"""A model folder's tokenizer: from the text of a rendered chat to token ids, and from sampled ids to text as they come.

Control tokens such as `<|im_start|>` split a rendered chat into segments that tokenise independently, so the ids of a
segment can be cached. Only the template may write control tokens: the same characters in a message are changed by
`guard` before rendering, and become ordinary text. Control tokens are dropped from the text of sampled ids, unless
they are asked for.
"""

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer
from tokenizers.pre_tokenizers import Metaspace

from openclaw_rl.models import BadModelFolder, read_json_object
from openclaw_rl.rendering.memo import ID_BYTES, Memo, TokenCache, shared

# Every decoder returns this for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"

# A UTF-8 character has at most four bytes and a token has at least one. So the last four tokens always contain the
# whole last character, and decoding them alone gives the same end of the text as decoding everything.
_CONTEXT_TOKENS = 4

# When the window has this many tokens, it is cut back to the context. With a larger window decoding is slower; with a
# smaller one more tokens need a second decode.
_MAX_WINDOW_TOKENS = 3 * _CONTEXT_TOKENS

# The spelling of a single byte in byte-fallback vocabularies (sentencepiece).
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """What all responses of one tokenizer share, computed once; `stream` begins a response.

    Control tokens are not part of the text, except those that are shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token}
        added = tokenizer.get_added_tokens_decoder()
        # A model's output layer is often larger than the vocabulary; `decode` skips the extra ids like special ones.
        self.visible = frozenset(id for id in vocabulary if id not in added or not added[id].special)
        self.single_bytes = frozenset(id for id in self.visible if _BYTE_TOKEN.fullmatch(vocabulary[id]))

    def showing(self, tokens: Collection[str]) -> "Detokenizer":
        """One that shows these control tokens too, as far as the vocabulary has them."""
        shown = copy(self)
        ids = map(self.tokenizer.token_to_id, tokens)
        shown.visible = self.visible | {id for id in ids if id is not None}
        return shown

    def stream(self) -> "StreamDecoder":
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes one response.

    - The pieces joined, `flush()` included, are exactly what decoding all ids at once gives.
    - A piece never contains part of a character.
    - At most the last character is held back. One exception: a byte-fallback decoder reads a run of byte tokens as a
      whole (one bad byte turns all of them into U+FFFD), so such a run is held back until it ends.
    - The cost per token is constant.

    This is true for decoders that only append to the text before an unfinished character, as all decoders of language
    models do. It would not be true for a decoder that strips the end of the text.
    """

    def __init__(self, shared: Detokenizer) -> None:
        self._shared = shared
        self._window: list[int] = []
        self._settled = 0  # how many characters of the window's text have been returned
        self._in_run = False  # whether it ends with a run of byte tokens that have not been decoded
        self._holds = False  # whether it has text that has not been returned

    def push(self, token_ids: Iterable[int]) -> str:
        """Add the next ids; return the text that has become certain. The fewer calls, the less it costs."""
        visible = [token_id for token_id in token_ids if token_id in self._shared.visible]
        run = len(visible)
        while run and visible[run - 1] in self._shared.single_bytes:
            run -= 1
        piece = self._settle(visible[:run]) if run else ""
        if run < len(visible):
            self._window += visible[run:]
            self._in_run = self._holds = True
        return piece

    def _settle(self, ids: list[int]) -> str:
        """Add ids; return the text that has become certain."""
        if len(self._window) >= _MAX_WINDOW_TOKENS and not self._in_run:
            # The first token of a decode may lose its leading space. So the window keeps tokens whose text has been
            # returned, and one of them is the first.
            del self._window[:-_CONTEXT_TOKENS]
            self._settled = len(self._text().removesuffix(_REPLACEMENT))
        self._window += ids
        text = self._text()
        # An unfinished character decodes to exactly one U+FFFD, and only the last character can be unfinished.
        certain = text.removesuffix(_REPLACEMENT)
        piece = certain[self._settled :]
        self._settled = len(certain)
        self._in_run = False
        self._holds = len(certain) < len(text)
        return piece

    def flush(self) -> str:
        """End of the response: return what was held back, with U+FFFD for bytes that are no character."""
        piece = self._text()[self._settled :] if self._holds else ""
        self._window.clear()
        self._settled = 0
        self._in_run = False
        self._holds = False
        return piece

    def _text(self) -> str:
        # The window has only visible ids.
        return self._shared.tokenizer.decode(self._window, skip_special_tokens=False)


def _byte_level_alphabet() -> dict[str, int]:
    """The byte for each character of GPT-2's byte-level alphabet.

    Printable Latin-1 bytes are spelled as themselves; the others as the code points from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that a token adds in the middle of a text; none for an id outside the vocabulary.

    A special token returns its spelling: this describes what was sampled, not what is shown.
    """
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    decoder = tokenizer.decoder
    if decoder is None:
        return token.encode()
    if decoder.decode(["Ġ"]) == " ":  # only a byte-level decoder decodes this letter to a space
        if all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return token.encode()  # an added token, which is not byte-level
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    # Decoded as the second token: a leading space of the first token may be dropped.
    text: str = decoder.decode(["a", token])
    return text.removeprefix("a").encode()


#: Put into the spelling of a control token in a message, so that it is not recognised. A Unicode noncharacter, which
#: no message has reason to contain.
GUARD = "\ufdd0"
#: A pattern that never matches, for tokenizers without control tokens.
MATCHES_NOTHING = r"(?!)"
#: The size of the segment cache. A long agent prompt takes 300 KB with its ids; this is enough for two hundred.
MAX_CACHED_BYTES = 64_000_000
#: The longest text that is tokenised or searched at once while it is not known whether it fits into the context.
PIECE_CHARACTERS = 65_536
#: How many characters are searched at once for the place where the new part of a chat begins.
SEARCHED_CHARACTERS = 4096
#: An earlier chat is looked for by so many characters before that place.
END_CHARACTERS = 256

# The calling thread tokenises. Otherwise the library would start a thread for each core, and one request could use all.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TooLong(ValueError):
    """The text has more tokens than are allowed."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A rendered chat and its ids."""

    text: str
    ids: list[int]
    known: int = 0
    """Where its last control token ends: a chat that begins with the text up to there begins with the same ids."""
    control: str = ""
    """That token."""
    known_ids: int = 0
    """How many ids these are."""

    @property
    def end(self) -> tuple[int, str]:
        """What it is found by. Chats that have it in common need not be equal."""
        return self.known, self.text[max(0, self.known - END_CHARACTERS) : self.known]


NO_CHAT = EncodedChat("", [])


class ChatTokenizer:
    """Encodes rendered chats; `backend` decodes.

    - The text of a message never becomes a control token.
    - A segment between control tokens that is in the cache is not tokenised again.
    - In a thread of its own, it stops no other thread for longer than a few milliseconds, whatever the text is.
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
        self.added_tokens = frozenset(token.content for token in added.values())
        self._control = {t.content: id for id, t in added.items() if t.special}
        self._strips_left = {t.content for t in added.values() if t.lstrip}
        self._strips_right = {t.content for t in added.values() if t.rstrip}
        names = [re.escape(name) for name in sorted(self._control, key=len, reverse=True)]
        self._control_pattern = re.compile("|".join(names) if names else MATCHES_NOTHING)
        self._longest_control = max(map(len, self._control), default=0)
        self._control_starts = {name[0] for name in self._control}
        self._add_no_space_before_segments()
        # Whether no control token can begin inside another one: then they are found from any place in a text.
        self._are_apart = not any(start in name[1:] for name in self._control for start in self._control_starts)
        self._segments = TokenCache[str](MAX_CACHED_BYTES)
        self._chats = Memo[tuple[int, str], EncodedChat](
            MAX_CACHED_BYTES, lambda _, chat: sys.getsizeof(chat.text) + ID_BYTES * len(chat.ids)
        )

    def _add_no_space_before_segments(self) -> None:
        """Some tokenizers add a space at the beginning of a text; a segment of a chat is not the beginning."""
        splitter = self.backend.pre_tokenizer
        if isinstance(splitter, Metaspace) and splitter.prepend_scheme == "first":
            splitter.prepend_scheme = "never"
            self.backend.pre_tokenizer = splitter

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and so on, under the names that templates use."""
        named = {key: value for key, value in self.settings.items() if key.endswith("_token")}
        texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def guard(self, text: str) -> str:
        """The text of a message, changed so that no control token is recognised in it."""
        text = without_surrogates(text)
        for start in self._control_starts:
            if start in text and next(self._controls(text), None) is not None:
                break
        else:
            return text
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
        """The ids of a text. Control tokens in it become ordinary text."""
        return list(self._segment(text, "", "", sys.maxsize))

    @property
    def beginning(self) -> list[int]:
        """The tokens that begin a text for this model, such as `<s>`. A chat template writes them itself."""
        return [id for id in self.backend.encode("").ids if id not in self.eos_ids]

    def encode_chat(self, text: str, at_most: int | None = None) -> list[int]:
        """The ids of a rendered chat. Raises TooLong as soon as it is certain that there are more than `at_most`."""
        return self._encode(text, NO_CHAT, at_most).ids

    def encode_next(self, text: str, at_most: int | None = None) -> tuple[list[int], EncodedChat]:
        """The same for a chat that may begin as an earlier one, of which only the rest is encoded; and that chat.

        The ids begin with the `known_ids` first ids of the earlier chat.
        """
        earlier = self._earlier(text)
        encoded = self._encode(text, earlier, at_most)
        self._chats.put(encoded.end, encoded)
        return encoded.ids, earlier

    def _encode(self, text: str, earlier: EncodedChat, at_most: int | None) -> EncodedChat:
        limit = sys.maxsize if at_most is None else at_most
        ids = earlier.ids[: earlier.known_ids]
        start, after = earlier.known, earlier.control
        known_ids = earlier.known_ids
        for control in self._controls(text, start):
            begin, end = control.span()
            name = control[0]
            ids += self._segment(text[start:begin], after, name, limit - len(ids))
            ids.append(self._control[name])
            start, after, known_ids = end, name, len(ids)
        ids += self._segment(text[start:], after, "", limit - len(ids))
        if len(ids) > limit:
            raise TooLong
        return EncodedChat(text, ids, start, after, known_ids)

    def _earlier(self, text: str) -> EncodedChat:
        """An earlier chat of which all up to its last control token begins this one; NO_CHAT if none is known."""
        stop = len(text)
        while self._are_apart and stop > max(0, len(text) - PIECE_CHARACTERS):
            start = max(0, stop - SEARCHED_CHARACTERS)
            found = self._control_pattern.finditer(text, start, min(len(text), stop + self._longest_control))
            for control in reversed([control for control in found if control.start() < stop]):
                end = control.end()
                earlier = self._chats.get((end, text[max(0, end - END_CHARACTERS) : end]))
                if earlier is not None and text.startswith(earlier.text[:end]):
                    return earlier
            stop = start
        return NO_CHAT

    def _segment(self, text: str, after: str, before: str, limit: int) -> list[int]:
        """The ids of the text between two control tokens, some of which remove the spaces next to them.

        The list belongs to the cache. Raises TooLong.
        """
        if self._strips_right and after in self._strips_right:
            text = text.lstrip()
        if self._strips_left and before in self._strips_left:
            text = text.rstrip()
        ids = self._segments.get(text) if text else []
        if ids is None:
            if self._is_longer(text, limit):
                raise TooLong
            ids = shared(self._tokenize(text).ids)
            self._segments.put(text, ids)
        if len(ids) > limit:
            raise TooLong
        return ids

    def _is_longer(self, text: str, tokens: int) -> bool:
        """Whether a long text has more tokens than that. Tokenises pieces of it, until it is certain."""
        if len(text) <= max(PIECE_CHARACTERS, tokens):
            return False
        # Cutting a text changes the tokens next to the cuts only.
        pieces = (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))
        return any(count > tokens for count in accumulate(len(self._tokenize(piece)) for piece in pieces))

    def _controls(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        """The control tokens in a text. One search looks at a bounded part of it, so that other threads can go on."""
        while start < len(text):
            end = start + PIECE_CHARACTERS
            for control in self._control_pattern.finditer(text, start, end + self._longest_control):
                if control.start() >= end:
                    break
                yield control
                start = control.end()
            start = max(start, end)

    def _tokenize(self, text: str) -> Encoding:
        # `encode` holds the interpreter's lock and would stop all other threads; `encode_batch_fast` does not.
        return self.backend.encode_batch_fast([text.replace(GUARD, "")], add_special_tokens=False)[0]


def without_surrogates(text: str) -> str:
    """A text that UTF-8 can encode. JSON can contain half of a surrogate pair, which tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no file."""
    return read_json_object(path) if path.is_file() else {}


def chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The model's chat template: a separate file in newer folders, a setting in older ones."""
    file = folder / "chat_template.jinja"
    try:
        template = file.read_text() if file.is_file() else settings.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("tool_use") or named.get("default")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadModelFolder(f"The chat template in {folder} cannot be read: {error}.") from None
    if not isinstance(template, str | None):
        raise BadModelFolder(f"The chat template in {folder} cannot be read: it is not a text.")
    return template


def eos_ids(folder: Path, tokenizer: ChatTokenizer) -> frozenset[int]:
    """The ids that end a completion: those of the generation config and that of the tokenizer."""
    configured = read_json(folder / "generation_config.json").get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    ids.append(tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", "")))
    return frozenset(id for id in ids if isinstance(id, int))
