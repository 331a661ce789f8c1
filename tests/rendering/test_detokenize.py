"""The pieces of a streamed decode are exactly the decode of the whole, whatever the ids."""

from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from openclaw_rl.rendering.tokenizer import Detokenizer, token_bytes
from support.properties import examples

REPLACEMENT = "\ufffd"
SAMPLE = "€€é😀\ufffd a"


def finish(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("two words"), AddedToken("｜▁｜")])
    return tokenizer


def byte_level() -> Tokenizer:
    """Every byte as a token, and tokens that begin or end in the middle of a character."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((spelled, _),) = splitter.pre_tokenize_str(SAMPLE)
    spans = {spelled[i:j] for i in range(len(spelled)) for j in range(i + 2, min(i + 6, len(spelled)) + 1)}
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet()) + sorted(spans)
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    return finish(tokenizer)


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    words = ["<unk>", "▁", "▁▁", "a", "▁a", "▁é", "€", REPLACEMENT, "b▁", "▁<"]
    vocabulary = words + [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE({token: n for n, token in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return finish(tokenizer)


def llama2_decoder() -> decoders.Decoder:
    strip = decoders.Strip(" ", 1, 0)
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])


TOKENIZERS = {
    "byte-level": byte_level(),
    "llama-2": byte_fallback(llama2_decoder()),
    "metaspace": byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def stream(tokenizer: Tokenizer, ids: list[int], at_once: int = 1) -> list[str]:
    decoder = Detokenizer(tokenizer).stream()
    groups = [ids[start : start + at_once] for start in range(0, len(ids), at_once)]
    return [*(decoder.push(group) for group in groups), decoder.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, some past the vocabulary, mixed with the ids of real text."""
    anything = st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=8)
    a_few = st.lists(st.sampled_from(range(12)), max_size=8)
    silent = st.lists(st.just(token_id(tokenizer, "<|end|>")), max_size=8)
    written = st.text(alphabet="a é€😀\ufffd\n", max_size=8).map(lambda text: tokenizer.encode(text).ids)
    return st.lists(anything | a_few | silent | written, max_size=8).map(
        lambda parts: [n for part in parts for n in part]
    )


@every_tokenizer
@given(data=st.data(), at_once=st.integers(1, 20))
@examples(300)
def test_pieces_join_to_the_whole_decode(tokenizer: Tokenizer, data: st.DataObject, at_once: int) -> None:
    ids = data.draw(ids_of(tokenizer))
    assert "".join(stream(tokenizer, ids, at_once)) == decode(tokenizer, ids)


@every_tokenizer
@given(text=st.text(max_size=30))
@examples(100)
def test_no_piece_of_well_formed_text_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.replace(REPLACEMENT, "")).ids
    assert not any(REPLACEMENT in piece for piece in stream(tokenizer, ids))


@given(data=st.data(), at_once=st.integers(1, 20))
@examples(200)
def test_byte_level_holds_back_the_last_character_at_most(data: st.DataObject, at_once: int) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = data.draw(ids_of(tokenizer))
    decoder = Detokenizer(tokenizer).stream()
    out = ""
    for start in range(0, len(ids), at_once):
        out += decoder.push(ids[start : start + at_once])
        assert out == decode(tokenizer, ids[: start + at_once]).removesuffix(REPLACEMENT)


def test_byte_fallback_holds_back_a_run_of_bytes_until_it_ends() -> None:
    tokenizer = TOKENIZERS["llama-2"]
    ids = [token_id(tokenizer, token) for token in ("a", "<0xC3>", "<0xA9>", "▁a", "€", "<0xC3>")]
    assert stream(tokenizer, ids) == ["a", "", "", "é a", "€", "", REPLACEMENT]
    assert stream(tokenizer, ids, at_once=3) == ["a", "é a€", REPLACEMENT]


class CountingTokenizer:
    """A tokenizer that keeps count of the ids it was given to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def misaligned(tokenizer: Tokenizer) -> list[int]:
    """A token that ends one character and begins the next, over and over: no clean cut anywhere."""
    ((spelled, _),) = tokenizer.pre_tokenizer.pre_tokenize_str("€€")
    return [token_id(tokenizer, spelled[0]), *[token_id(tokenizer, spelled[1:3] + spelled[0])] * 999]


def never_text(tokenizer: Tokenizer) -> list[int]:
    return [token_id(tokenizer, "<0xFF>" if "<0xFF>" in tokenizer.get_vocab() else "ÿ")] * 1000


@pytest.mark.parametrize(
    ("name", "make_ids"),
    [("byte-level", misaligned), ("byte-level", never_text), ("llama-2", never_text)],
)
def test_cost_per_token_is_constant(name: str, make_ids: Callable[[Tokenizer], list[int]]) -> None:
    counting = CountingTokenizer(TOKENIZERS[name])
    ids = make_ids(TOKENIZERS[name])
    assert "".join(stream(cast(Tokenizer, counting), ids)) == decode(TOKENIZERS[name], ids)
    assert counting.decoded <= 10 * len(ids)


def test_a_flushed_decoder_has_nothing_left() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    decoder = Detokenizer(tokenizer).stream()
    decoder.push([token_id(tokenizer, "ÿ")])
    assert [decoder.flush(), decoder.flush()] == [REPLACEMENT, ""]


@given(text=st.text(max_size=30))
def test_token_bytes_join_to_the_bytes_of_the_text(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert b"".join(token_bytes(tokenizer, n) for n in tokenizer.encode(text).ids) == text.encode()


def test_byte_level_tokens_cover_every_byte() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found = {token_bytes(tokenizer, token_id(tokenizer, char)) for char in alphabet}
    assert found == {bytes([n]) for n in range(256)}


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("byte-level", "<|end|>", b"<|end|>"),
        ("byte-level", "｜▁｜", "｜▁｜".encode()),
        ("llama-2", "<0xE2>", b"\xe2"),
        ("llama-2", "▁é", " é".encode()),
        ("metaspace", "<0xE2>", b"\xe2"),
        ("metaspace", "▁▁", b"  "),
        ("metaspace", "a", b"a"),
    ],
)
def test_token_bytes_of_one_token(name: str, token: str, expected: bytes) -> None:
    tokenizer = TOKENIZERS[name]
    assert token_bytes(tokenizer, token_id(tokenizer, token)) == expected


@every_tokenizer
def test_an_id_past_the_vocabulary_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert token_bytes(tokenizer, tokenizer.get_vocab_size() + 1) == b""
