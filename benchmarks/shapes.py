"""Decoders with random weights at real shapes, for measurements without a checkpoint.

python benchmarks/shapes.py FOLDER [SHAPE]   writes a model folder, at the shape of Qwen3-4B 8 GB
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import argument_parser
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Layer, Shape, take_apart, write_tensors
from openclaw_rl.engines.local.model.linear import Linear

WEIGHTS = "model.safetensors"

QWEN3_4B = Shape(
    vocab=151936,
    hidden=2560,
    intermediate=9728,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    eps=1e-6,
    max_context=40960,
    rotary_layers=(True,) * 36,
    head_norm=True,
)

QWEN3_0_6B = replace(QWEN3_4B, hidden=1024, intermediate=3072, layers=28, heads=16, rotary_layers=(True,) * 28)

QWEN3_8B = replace(QWEN3_4B, hidden=4096, intermediate=12288)

SHAPES = {"Qwen3-0.6B": QWEN3_0_6B, "Qwen3-4B": QWEN3_4B, "Qwen3-8B": QWEN3_8B}


def random_decoder(shape: Shape, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Random weights of the right sizes, scaled so that activations stay finite."""

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def layer() -> Layer:
        projections = {name: Linear(normal(*reversed(shape.projection_sizes(name)))) for name in PROJECTIONS}
        norms = {name: ones(shape.head_dim) for name in ("q_norm", "k_norm")} if shape.head_norm else {}
        return Layer(input_norm=ones(shape.hidden), post_norm=ones(shape.hidden), **projections, **norms)

    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    embed = normal(shape.vocab, shape.hidden)
    layers = [layer() for _ in range(shape.layers)]
    return Decoder(shape, embed, layers, ones(shape.hidden), None, 1.0 / 1e6**exponents)


def qwen3_config(shape: Shape) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=shape.max_context,
        rms_norm_eps=shape.eps,
    )


def transformers_model(shape: Shape, device: str) -> Any:
    """The baseline: a model of the same sizes, also with random weights."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(qwen3_config(shape), dtype=torch.bfloat16)


#: ChatML, for a model that answers with random words.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_random_model(folder: Path, shape: Shape, device: str) -> None:
    """A model folder with random weights, and a tokenizer that has a word for every id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġw{n}" for n in range(shape.vocab - len(letters) - len(control))), *control]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in control])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=control[2], pad_token=control[0])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    qwen3_config(shape).save_pretrained(folder)
    with torch.inference_mode():
        tensors = take_apart(random_decoder(shape, torch.bfloat16, torch.device(device)))
        write_tensors({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="Qwen3-4B", help="(default: Qwen3-4B)")
    given = parser.parse_args()
    save_random_model(given.folder, SHAPES[given.shape], "cuda" if torch.cuda.is_available() else "cpu")
