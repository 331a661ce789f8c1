"""Writes a tokenizer into a GGUF file, from the tokenizer.json of a model folder.

llama.cpp knows two kinds that our families use: BPE over bytes, and SentencePiece. How text is cut before BPE is a name
in the file, and the rules behind the names are part of llama.cpp. A tokenizer whose rules have no name is refused.
"""

import re
from pathlib import Path
from typing import Any

import gguf

from openclaw_rl.errors import UserError
from openclaw_rl.models import read_json_object

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: The expressions by which tokenizers cut text, and whether a word of the vocabulary is taken whole; with the name that
#: llama.cpp has for both.
SPLITS = {
    (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", True): "llama-bpe",
    (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", False): "smaug-bpe",
    (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}", False): "qwen2",
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        True,
    ): "tekken",
}
#: The spelling of a single byte in SentencePiece vocabularies.
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
#: The score of a token that no merge makes.
NO_MERGE = -1e6


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, rows: int) -> None:
    """Write the tokenizer of a model with `rows` embeddings. Raises UserError if llama.cpp has none like it."""
    content = read_json_object(folder / "tokenizer.json")
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise UserError(f"The tokenizer of {folder} is no BPE: it cannot be written as GGUF.")
    is_sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = vocabulary(folder, content, rows, is_sentencepiece)
    if is_sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores(tokens, model["merges"]))
        writer.add_add_space_prefix(adds_space(content))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split_name(folder, content))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=not is_sentencepiece, n_vocab=rows)
    # What a file does not say, llama.cpp takes from the name of the tokenizer.
    special.add_special_token = {"bos": False, "eos": False, **special.add_special_token}
    special.add_to_gguf(writer, quiet=True)


def vocabulary(
    folder: Path, content: dict[str, Any], rows: int, is_sentencepiece: bool
) -> tuple[list[str], list[gguf.TokenType]]:
    """The text and the type of each token. Embeddings without a token get an unused one."""
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [gguf.TokenType.UNUSED] * rows
    added = content.get("added_tokens") or []
    ids = [*content["model"]["vocab"].values(), *(token["id"] for token in added)]
    if max(ids) >= rows:
        raise UserError(f"The tokenizer of {folder} has token {max(ids)}, but the model has only {rows} embeddings.")
    for text, number in content["model"]["vocab"].items():
        tokens[number] = text
        is_byte = is_sentencepiece and BYTE.fullmatch(text)
        types[number] = gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL
    for token in added:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.CONTROL if token.get("special") else gguf.TokenType.USER_DEFINED
    unknown = content["model"].get("unk_token")
    if is_sentencepiece and unknown in tokens:
        types[tokens.index(unknown)] = gguf.TokenType.UNKNOWN
    return tokens, types


def scores(tokens: list[str], merges: list[Any]) -> list[float]:
    """SentencePiece joins the pair whose token has the best score; BPE the pair of the first merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return [-float(ranks[token]) if token in ranks else NO_MERGE for token in tokens]


def adds_space(content: dict[str, Any]) -> bool:
    """Whether a space is put before a text."""
    if any(part.get("type") == "Prepend" for part in parts(content.get("normalizer"), "normalizers")):
        return True
    splitters = parts(content.get("pre_tokenizer"), "pretokenizers")
    return any(part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never" for part in splitters)


def split_name(folder: Path, content: dict[str, Any]) -> str:
    """llama.cpp's name of how text is cut before BPE. Raises UserError if it has none."""
    *before, last = parts(content.get("pre_tokenizer"), "pretokenizers") or [{}]
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        if last.get("use_regex", True) and not before:
            return "gpt-2"
        kind = before[0].get("type") if len(before) == 1 else None
        if last.get("use_regex", True) and kind == "Digits" and before[0].get("individual_digits"):
            return "smollm"
        if not last.get("use_regex", True) and kind == "Split" and before[0].get("behavior") == "Isolated":
            pattern = before[0].get("pattern", {}).get("Regex")
            name = SPLITS.get((pattern, bool(content["model"].get("ignore_merges"))))
            if name is not None:
                return name
    raise UserError(f"The tokenizer of {folder} cuts text by rules that llama.cpp has no name for.")


def parts(element: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a part of tokenizer.json, which is one step, a sequence of them, or nothing."""
    if not isinstance(element, dict):
        return []
    return list(element[name]) if element.get("type") == "Sequence" else [element]
