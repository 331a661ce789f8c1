"""One decoder for the Llama family of models, as a function of its weights.

`Decoder.forward` takes a flat run of tokens. Its caller provides attention (over a paged cache, when sampling) and the
function that adds adapters to a projection, so a batch may mix any sequences and adapters. The learner computes the
same function with other fusions (`blocks`), from the same weights, and so does the sampler on CUDA (`cuda_forward`).

On a CPU only weights may be narrower than float32: products round their input and their result to the precision of the
weights and sum in float32, and so does a prompt's attention in the sampler. Residual stream, norms, rotation, other
attention, keys and values, adapters and log-probs are float32.
"""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openclaw_rl.engines.local.families import quantisation_of
from openclaw_rl.engines.local.model import ops
from openclaw_rl.engines.local.model.language_model import Adapt, Adaptable, Attend, LanguageModel, Projection, Sizes
from openclaw_rl.engines.local.model.linear import Linear, QuantisedLinear, quantised
from openclaw_rl.engines.local.model.model_config import ModelConfig, UnsupportedModel, read_model_config
from openclaw_rl.engines.local.model.quantised_files import decoded, plain_name, stored_bits
from openclaw_rl.models import read_json_object

#: The modules of each fused projection, in order, by their names in a PEFT folder.
MODULES: dict[Projection, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
PROJECTIONS = tuple(MODULES)


@dataclass(frozen=True, slots=True)
class Shape(Sizes):
    """The sizes and constants of a decoder."""

    eps: float
    rotary_layers: tuple[bool, ...]
    """Per layer, whether queries and keys are rotated (in SmolLM3 some layers have no rotation)."""
    head_norm: bool = False
    """Whether each query and key head is normed before it is rotated (Qwen3)."""

    @property
    def adaptable(self) -> tuple[Adaptable, ...]:
        widths = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        widths |= {"gate_proj": self.intermediate, "up_proj": self.intermediate}
        widths |= {"o_proj": self.hidden, "down_proj": self.hidden}
        modules = []
        for projection, names in MODULES.items():
            inputs, width = self.projection_sizes(projection)
            part = "self_attn" if projection in ("qkv", "o") else "mlp"
            start = 0
            for name in names:
                columns = slice(start, start + widths[name])
                paths = {i: f"model.layers.{i}.{part}.{name}" for i in range(self.layers)}
                modules.append(Adaptable(name, projection, inputs, widths[name], columns, width, paths))
                start = columns.stop
        return tuple(modules)

    def projection_sizes(self, projection: Projection) -> tuple[int, int]:
        """(input, output) width of a fused projection."""
        return {
            "qkv": (self.hidden, self.q_size + 2 * self.kv_size),
            "o": (self.q_size, self.hidden),
            "gate_up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
        }[projection]

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Shape":
        return cls(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_size,
            eps=config.rms_norm_eps,
            max_context=config.max_context,
            rotary_layers=config.rotary_layers,
            head_norm=config.family == "Qwen3ForCausalLM",
        )


@dataclass(slots=True)
class Layer:
    """One block's weights, with queries, keys and values (and gate and up) fused into one projection."""

    input_norm: Tensor
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @property
    def quantised(self) -> list[QuantisedLinear]:
        """The projections whose weights are stored in 4 or 8 bits."""
        linears = (self.qkv, self.o, self.gate_up, self.down)
        return [linear for linear in linears if isinstance(linear, QuantisedLinear)]


@dataclass(slots=True)
class Decoder(LanguageModel):
    """A model's weights and its forward pass. Every weight is in one field only, also if it is used twice."""

    shape: Shape
    embed: Tensor
    layers: list[Layer]
    norm: Tensor
    untied_head: Tensor | None
    """[vocabulary, hidden]; None if the embedding is also the head."""
    inverse_frequencies: Tensor
    rotary_scale: float = 1.0

    @property
    def head(self) -> Tensor:
        """[vocabulary, hidden]: turns hidden states into scores."""
        return self.embed if self.untied_head is None else self.untied_head

    @property
    def activation_dtype(self) -> torch.dtype:
        return ops.activation_dtype(self.embed)

    @property
    def weight_bytes(self) -> int:
        scales = [linear.scales for layer in self.layers for linear in layer.quantised]
        return sum(tensor.nbytes for tensor in (*take_apart(self).values(), *scales))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, head_dim / 2] for the tokens' positions, in float32."""
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        return angles.cos() * self.rotary_scale, angles.sin() * self.rotary_scale

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, adapt: Adapt | None = None) -> Tensor:
        shape = self.shape
        cos, sin = self.angles(positions)
        residual = ops.embedding(ids, self.embed)
        x: Tensor = ops.rms_norm(residual, self.layers[0].input_norm, shape.eps)
        for i, layer in enumerate(self.layers):
            heads = self._heads(i, layer, project(i, "qkv", layer.qkv, x, adapt), cos, sin)
            x = project(i, "o", layer.o, attend(i, *heads), adapt)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, shape.eps)
            x = ops.silu_mul(project(i, "gate_up", layer.gate_up, x, adapt))
            x = project(i, "down", layer.down, x, adapt)
            last = i + 1 == shape.layers
            norm = self.norm if last else self.layers[i + 1].input_norm
            x, residual = ops.add_rms_norm(x, residual, norm, shape.eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return ops.linear(hidden, self.head).float()

    def _heads(self, i: int, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the fused projection into queries, keys, values and rotate the first two to their positions."""
        shape = self.shape
        heads = qkv.view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        turned = shape.heads + shape.kv_heads
        qk = heads[:, :turned]
        v = heads[:, turned:]
        if shape.head_norm:
            q = ops.norm_rotate(qk[:, : shape.heads], cos, sin, layer.q_norm, shape.eps)
            k = ops.norm_rotate(qk[:, shape.heads :], cos, sin, layer.k_norm, shape.eps)
            return q, k, v
        if shape.rotary_layers[i]:
            qk = ops.norm_rotate(qk, cos, sin, None, shape.eps)
        return qk[:, : shape.heads], qk[:, shape.heads :], v


def project(i: int, name: Projection, linear: Linear, x: Tensor, adapt: Adapt | None) -> Tensor:
    """A projection, with the tokens' adapters if there are any."""
    y = linear(x)
    return y if adapt is None else adapt(i, name, x, y)


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    keep: Callable[[Layer], Any] = lambda layer: layer,
    bits: int = 0,
) -> Decoder:
    """Read a Transformers model folder (config.json and safetensors) onto a device. Raises UnsupportedModel.

    `keep` is called with each layer as soon as it is read, and returns what is kept of it. With `bits`, the weights of
    the layers are stored in so many.
    """
    config = read_model_config(folder)
    shape = Shape.from_config(config)
    rotary = config.rotary_frequencies(folder, device)
    read = TensorFiles(folder, dtype, device, bits)
    embed = read("model.embed_tokens.weight")
    head = None if config.tie_word_embeddings else read("lm_head.weight")
    if head is None:
        check_tied(read, embed)
    layers = [keep(load_layer(read, f"model.layers.{i}.")) for i in range(shape.layers)]
    return Decoder(shape, embed, layers, read("model.norm.weight"), head, rotary.inverse, rotary.scale)


def check_tied(read: "TensorFiles", embed: Tensor) -> None:
    """Refuse a second, different head: programs do not agree on which of the two they use."""
    head = read.optional("lm_head.weight")
    if head is not None and not torch.equal(head, embed):
        raise UnsupportedModel(
            "tie_word_embeddings in config.json says that the head is the embedding, but the checkpoint's "
            "lm_head.weight is another: remove that tensor, or set tie_word_embeddings to false"
        )


def take_apart(decoder: Decoder) -> dict[str, Tensor]:
    """The weights by their names in a model folder, as views: the reverse of `load_decoder`."""
    shape = decoder.shape
    tensors = {"model.embed_tokens.weight": decoder.embed, "model.norm.weight": decoder.norm}
    if decoder.untied_head is not None:
        tensors["lm_head.weight"] = decoder.untied_head
    for i, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{i}."
        norms = {
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.post_norm,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
        }
        tensors |= {f"{prefix}{name}.weight": norm for name, norm in norms.items() if norm is not None}
        heads = (shape.q_size, shape.kv_size, shape.kv_size)
        for linear, names, sizes in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), heads),
            (layer.o, ("self_attn.o_proj",), (shape.hidden,)),
            (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (shape.intermediate, shape.intermediate)),
            (layer.down, ("mlp.down_proj",), (shape.hidden,)),
        ):
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if tensor is not None:
                    parts = tensor.split_with_sizes(sizes)
                    tensors |= {f"{prefix}{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
    return tensors


def load_layer(read: "TensorFiles", prefix: str) -> Layer:
    """Read one block and fuse its projections for `forward`."""
    attention = prefix + "self_attn."
    mlp = prefix + "mlp."
    return Layer(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=read.linear(*(f"{attention}{name}_proj" for name in "qkv")),
        o=read.linear(attention + "o_proj"),
        post_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=read.linear(mlp + "gate_proj", mlp + "up_proj"),
        down=read.linear(mlp + "down_proj"),
        q_norm=read.optional(attention + "q_norm.weight"),
        k_norm=read.optional(attention + "k_norm.weight"),
    )


class TensorFiles:
    """The tensors of a model folder by name, from all of its shards."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, bits: int = 0) -> None:
        """With `bits`, projections are stored in so many; else in as many as in the folder, where that is possible."""
        self.dtype = dtype
        self.device = device
        self.bits = bits
        config = folder / "config.json"
        self.quantisation = quantisation_of(read_json_object(config)) if config.is_file() else {}
        self.files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                shard: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UnsupportedModel(f"{path} is damaged: {error}") from error
            self.files.update(dict.fromkeys(shard.keys(), shard))
        if not self.files:
            raise UnsupportedModel(f"{folder} holds no .safetensors files")

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = decoded(name, self, self.quantisation) if self.quantisation else self.raw(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModel(
                f"{name} is stored as {tensor.dtype}, quantised in a way that cannot be decoded here"
            )
        return tensor.to(self.device, dtype or self.dtype)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        if name not in self.files:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor

    def bits_of(self, name: str) -> int:
        """The bits in which a projection's weight is stored from now on; 0: as numbers."""
        return self.bits or (stored_bits(name, self) if self.quantisation else 0)

    def all_digits(self, name: str) -> Tensor | None:
        """A weight that is stored in codes which are kept, without any rounding; None for others."""
        return self(name, torch.float32) if self.quantisation and stored_bits(name, self) else None

    def state_dict(self) -> dict[str, Tensor]:
        """All weights as numbers, by their names in a folder that is not quantised."""
        names = filter(None, map(plain_name, self.files))
        return {name: self(name) for name in names}

    def shape(self, name: str) -> list[int] | None:
        """A tensor's size, without reading it; None if there is no such tensor."""
        return list(self.files[name].get_slice(name).get_shape()) if name in self.files else None

    def optional(self, name: str) -> Tensor | None:
        return self(name) if name in self.files else None

    def linear(self, *names: str) -> Linear:
        """The named projections, stacked into one."""
        bits = min(self.bits_of(name + ".weight") for name in names)
        # Codes are found from all digits that there are.
        dtype = torch.promote_types(self.dtype, torch.float32) if bits else self.dtype
        weight = torch.cat([self(name + ".weight", dtype) for name in names])
        biases = [self.optional(name + ".bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        if present and len(present) < len(biases):
            raise UnsupportedModel(f"some of {', '.join(names)} have a bias and some have none")
        return quantised(weight, torch.cat(present) if present else None, bits, self.dtype)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError if it cannot be written, for example because the disk is full."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
