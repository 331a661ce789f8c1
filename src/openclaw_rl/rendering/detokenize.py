"""From sampled token ids back to text, one token at a time.

Boundary: ids and a `tokenizers.Tokenizer` in, text (or the raw bytes of one token) out. Nothing here
knows about chat formats; special tokens are dropped as `skip_special_tokens=True` drops them.
"""

import re

from tokenizers import Tokenizer

# What every decoder puts in place of bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"

# A UTF-8 character has at most four bytes and a token at least one, so four tokens always reach back to
# the start of the last character: from there on, decoding them alone agrees with decoding everything.
_CONTEXT = 4

# The window is cut back to the context when it has grown to this: rarely enough that most tokens cost one
# decode, often enough that the decode is short.
_WINDOW = 3 * _CONTEXT

# How byte-fallback vocabularies (sentencepiece) spell a single byte.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """What is the same for every response of a tokenizer, found out once; `stream` begins a response."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token}
        added = tokenizer.get_added_tokens_decoder()
        # A model's output layer is often padded past the vocabulary; `decode` skips such ids, like special ones.
        self.visible = frozenset(id for id in vocabulary if id not in added or not added[id].special)
        self.single_bytes = frozenset(id for id in self.visible if _BYTE_TOKEN.fullmatch(vocabulary[id]))

    def stream(self) -> "StreamDecoder":
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes one response; the pieces joined, with `flush()` last, are exactly the decode of all ids.

    A piece never holds part of a character. What is held back is at most the last character, with one
    exception: a byte-fallback decoder judges a run of byte tokens as a whole (one bad byte turns all
    of them into U+FFFD), so such a run is held until it ends. The cost per token is constant either way.

    Holds for decoders that only ever append to the text before an unfinished character, which is every
    one in use for language models; one that strips the end of the text would need to see the end.
    """

    def __init__(self, shared: Detokenizer) -> None:
        self._shared = shared
        self._window: list[int] = []
        self._settled = 0  # how many characters of the window's text are out already

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is certain now and was not before."""
        if token_id not in self._shared.visible:
            return ""
        self._window.append(token_id)
        if token_id in self._shared.single_bytes:
            return ""
        text = self._settled_text()
        piece = text[self._settled :]
        if len(self._window) >= _WINDOW:
            # The first token of a decode may lose its leading space, so the window keeps tokens already out
            # to stand in that place.
            del self._window[:-_CONTEXT]
            text = self._settled_text()
        self._settled = len(text)
        return piece

    def flush(self) -> str:
        """End of the response: whatever was held back, with U+FFFD for bytes that never became text."""
        piece = self._text()[self._settled :]
        self._window.clear()
        self._settled = 0
        return piece

    def _settled_text(self) -> str:
        # An unfinished character decodes to exactly one U+FFFD, and only at the end can it be unfinished.
        return self._text().removesuffix(_REPLACEMENT)

    def _text(self) -> str:
        return self._shared.tokenizer.decode(self._window, skip_special_tokens=True)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as visible characters, read backwards.

    Bytes that print in Latin-1 stand for themselves; the others take the code points from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes one token adds in the middle of a text; none for an id outside the vocabulary.

    Special tokens give their own spelling: this describes what was sampled, not what is shown.
    """
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    decoder = tokenizer.decoder
    if decoder is None:
        return token.encode()
    if decoder.decode(["Ġ"]) == " ":  # only a byte-level decoder reads this letter as a space
        if all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return token.encode()  # an added token, spelled as it is
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    # In second place, where a leading space is text and not the mark of a beginning.
    text: str = decoder.decode(["a", token])
    return text.removeprefix("a").encode()
