"""From sampled token ids to text, as they come.

Takes ids and a `tokenizers.Tokenizer`; returns text, or the raw bytes of one token. Nothing here knows about chat
formats. Special tokens are dropped, as with `skip_special_tokens=True`.
"""

import re
from collections.abc import Iterable

from tokenizers import Tokenizer

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
    """What all responses of one tokenizer share, computed once; `stream` begins a response."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token}
        added = tokenizer.get_added_tokens_decoder()
        # A model's output layer is often larger than the vocabulary; `decode` skips the extra ids like special ones.
        self.visible = frozenset(id for id in vocabulary if id not in added or not added[id].special)
        self.single_bytes = frozenset(id for id in self.visible if _BYTE_TOKEN.fullmatch(vocabulary[id]))

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
        return self._shared.tokenizer.decode(self._window, skip_special_tokens=True)


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
