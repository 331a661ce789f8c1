"""Writes a model, or an adapter alone, as a GGUF file for llama.cpp and the programs that are built on it.

- The package `gguf` of llama.cpp's authors knows the names of tensors and fields, the file format and the quantisation.
- Tensors are read, changed and written one at a time.
- A model that llama.cpp would compute in another way than the local engine is refused.
- Of tokenizers, llama.cpp knows BPE over bytes and SentencePiece. How text is cut before BPE is a name in the file. A
  tokenizer whose rules have no name is refused.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from openclaw_rl.engines.local.families import family_of
from openclaw_rl.engines.local.merge import FittingAdapter, weight_shapes
from openclaw_rl.engines.local.model.decoder import TensorFiles, check_tied
from openclaw_rl.engines.local.model.model_config import ModelConfig, UnsupportedModel, read_model_config
from openclaw_rl.errors import UserError
from openclaw_rl.models import read_json_object

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
#: The types of weights that can be written, and what llama.cpp calls a file of them.
TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
}
#: Architectures in which llama.cpp rotates neighbours in a head. Transformers rotates the two halves of a head.
ROTATES_NEIGHBOURS = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3)
#: Modules that may have a bias in every architecture. In `LLAMA`, all modules may.
BIASED = ("q_proj", "k_proj", "v_proj")
#: llama.cpp leaves out the rotation of every fourth layer of a SmolLM3, whatever its file says.
SMOLLM3_INTERVAL = 4
#: The largest number that float16 has.
MAX_F16 = 65504
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
#: Kept in some older files; it follows from the configuration.
FREQUENCIES = "rotary_emb.inv_freq"
#: Tensors that are yet to be written, with a bar that moves as they are.
Track = Callable[[list["Planned"]], Iterable["Planned"]]


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    read: Callable[[], Array]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in bytes."""
        shape: tuple[int, ...] = gguf.quant_shape_to_byte_shape(self.shape, self.kind)
        return shape


class GgufExport:
    """One model of this machine, with an adapter or without, for files of weights in one of `TYPES`.

    Raises UserError if llama.cpp cannot compute the model as it is computed here.
    """

    def __init__(self, folder: Path, adapter: FittingAdapter | None, kind: str) -> None:
        self.folder = folder
        self.adapter = adapter
        self.kind, self.file_type = TYPES[kind]
        family = family_of(read_json_object(folder / "config.json"))
        if family not in ARCHITECTURES:
            raise UserError(f"A {family} cannot be written as GGUF; these can: {', '.join(ARCHITECTURES)}.")
        try:
            self.config = read_model_config(folder)
            self.files = TensorFiles(folder, torch.float32, torch.device("cpu"))
            if self.config.tie_word_embeddings:
                check_tied(self.files, self.files(EMBEDDING))
            self.frequencies = self.config.rotary_frequencies(folder, torch.device("cpu"))
        except UnsupportedModel as error:
            raise UserError(f"{folder} cannot be written as GGUF: {error}.") from None
        self.architecture = ARCHITECTURES[family]
        self.names = gguf.get_tensor_name_map(self.architecture, self.config.num_hidden_layers)
        check_layers(folder, self.config)

    def write_model(self, path: Path, name: str, track: Track = iter) -> None:
        """Write the whole model, with the adapter added to its weights."""
        writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[self.architecture])
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(self.file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        self._add_shape(writer)
        planned = [*self._add_rotation(writer), *self._weights()]
        add_tokenizer(writer, self.folder, self.config.vocab_size)
        write(writer, path, planned, track)

    def write_adapter(self, path: Path, name: str, track: Track = iter) -> None:
        """Write the adapter alone, for a GGUF file of the model itself."""
        assert self.adapter is not None
        writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[self.architecture])
        writer.add_type("adapter")
        writer.add_name(name)
        writer.add_file_type(self.file_type)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        # llama.cpp divides it by the rank, which it takes from the shape of the factors.
        rank = next(iter(self.adapter.factors.values()))["A"].shape[0]
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, self.adapter.scale * rank)
        write(writer, path, list(self._factors(self.adapter)), track)

    def _add_shape(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_context)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.kv_heads)
        writer.add_key_length(config.head_size)
        writer.add_value_length(config.head_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.head_size)

    def _add_rotation(self, writer: gguf.GGUFWriter) -> Iterator[Planned]:
        """Write how queries and keys are rotated; yields the tensor that some kinds need. Raises UserError."""
        given = self.config.rope_scaling or self.config.rope_parameters or {}
        kind = given.get("rope_type", given.get("type", "default"))
        theta = float(given.get("rope_theta", self.config.rope_theta))
        writer.add_rope_freq_base(theta)
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(given["factor"]))
        elif kind == "yarn" and not given.keys() & {"attention_factor", "mscale", "mscale_all_dim", "truncate"}:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(float(given["factor"]))
            length = given.get("original_max_position_embeddings") or self.config.max_position_embeddings
            writer.add_rope_scaling_orig_ctx_len(int(length))
            writer.add_rope_scaling_yarn_beta_fast(float(given.get("beta_fast") or 32))
            writer.add_rope_scaling_yarn_beta_slow(float(given.get("beta_slow") or 1))
        elif kind == "llama3" and self.architecture is gguf.MODEL_ARCH.LLAMA:
            size = self.config.head_size
            plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
            factors = (plain / self.frequencies.inverse).numpy()
            name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight"
            yield Planned(name, factors.shape, gguf.GGMLQuantizationType.F32, lambda: factors)
        elif kind != "default":
            raise UserError(f"{self.folder} rotates in a way ({kind}) that llama.cpp has not for {self.config.family}.")

    def _weights(self) -> Iterator[Planned]:
        for name, size in weight_shapes(self.folder).items():
            if name.endswith(FREQUENCIES) or (name == HEAD and self.config.tie_word_embeddings):
                continue
            yield Planned(self._name(name), tuple(size), self._kind(size), partial(self._weight, name))

    def _weight(self, name: str) -> Array:
        weight = self.files(name)
        merged = self.adapter.add(name, weight) if self.adapter else weight
        array = self._arranged(name, merged).numpy()
        if self.kind is gguf.GGMLQuantizationType.F16 and np.abs(array).max() > MAX_F16:
            raise UserError(f"{name} has numbers that f16 does not have: choose bf16 or f32.")
        return array

    def _factors(self, adapter: FittingAdapter) -> Iterator[Planned]:
        for name, pair in adapter.factors.items():
            for side, factor in (("a", pair["A"]), ("b", self._arranged(name, pair["B"]))):
                array = factor.float().contiguous().numpy()
                named = f"{self._name(name)}.lora_{side}"
                yield Planned(named, array.shape, self._kind(array.shape), partial(np.asarray, array))

    def _name(self, name: str) -> str:
        found: str | None = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        _, module, kind = f".{name}".rsplit(".", 2)
        is_plain = kind != "bias" or module in BIASED or self.architecture is gguf.MODEL_ARCH.LLAMA
        if found is None or not is_plain:
            raise UserError(f"{self.folder} cannot be written as GGUF: llama.cpp has no place for {name}.")
        return found

    def _kind(self, shape: Iterable[int]) -> gguf.GGMLQuantizationType:
        """Vectors stay float32, as llama.cpp needs them; rows that cannot be cut into blocks are float16."""
        sizes = tuple(shape)
        if len(sizes) == 1:
            return gguf.GGMLQuantizationType.F32
        block, _ = gguf.GGML_QUANT_SIZES[self.kind]
        return self.kind if sizes[-1] % block == 0 else gguf.GGMLQuantizationType.F16

    def _arranged(self, name: str, tensor: Tensor) -> Tensor:
        """The rows of a query or key projection in the order in which llama.cpp rotates them."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.kv_heads}.get(name.split(".")[-2])
        if heads is None or self.architecture not in ROTATES_NEIGHBOURS:
            return tensor
        halves = tensor.reshape(heads, 2, self.config.head_size // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)


def check_layers(folder: Path, config: ModelConfig) -> None:
    """Refuse a model whose layers are rotated in another pattern than llama.cpp computes. Raises UserError."""
    interval = SMOLLM3_INTERVAL if config.family == "SmolLM3ForCausalLM" else 0
    computed = [not interval or (i + 1) % interval != 0 for i in range(config.num_hidden_layers)]
    if list(config.rotary_layers[: config.num_hidden_layers]) != computed:
        raise UserError(
            f"{folder} cannot be written as GGUF: llama.cpp would rotate other layers than this model does."
        )


def write(writer: gguf.GGUFWriter, path: Path, planned: list[Planned], track: Track) -> None:
    """Write a file, one tensor after the other. Raises UserError if the disk has too little room."""
    for item in planned:
        size = prod(item.stored_shape)
        writer.add_tensor_info(item.name, item.stored_shape, np.dtype(np.uint8), size, raw_dtype=item.kind)
    needed = sum(prod(item.stored_shape) for item in planned)
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise UserError(
            f"The file would have {needed / 1e9:.1f} GB, but {path.parent} has room for {free / 1e9:.1f} GB."
        )
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for item in track(planned):
            writer.write_tensor_data(gguf.quantize(item.read(), item.kind))
    finally:
        writer.close()


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
