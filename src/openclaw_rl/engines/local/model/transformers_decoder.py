"""A model of any family that Transformers computes, behind the same seam as our own decoder.

Transformers' modelling code computes everything but attention, which is ours: it is registered in Transformers' table
of attention functions and asks the pass that is running. The linear modules add adapters.

One forward pass at the start finds out what no configuration says: which modules attend, with heads of which size, and
which linear modules are called once per layer.

Families with state outside attention, or with attention that cannot be replaced, are computed by Transformers alone,
one sequence at a time: it keeps a state for each. A shared prefix or a packed batch would be computed wrongly.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openclaw_rl.engines.local.families import has_own_decoder
from openclaw_rl.engines.local.model.agreement import COMPARED_TOKENS, EXACT, check_agreement, exact_attention
from openclaw_rl.engines.local.model.attention import PLAIN, AttentionForm, attend_last
from openclaw_rl.engines.local.model.decoder import TensorFiles, load_decoder
from openclaw_rl.engines.local.model.experts import DOWN, GATE_UP, adapted_experts
from openclaw_rl.engines.local.model.language_model import Adapt, Attend, LanguageModel, Projection
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.quantised_modules import CODES, QuantisedWeight, make_room, quantise_modules
from openclaw_rl.engines.local.model.transformers_files import in_short, read_model
from openclaw_rl.engines.local.model.transformers_sizes import (
    AttentionProbe,
    StateSize,
    TransformersSizes,
    layer_prefix,
    sizes_of,
    sizes_with_state,
)
from openclaw_rl.engines.memory import BITS
from openclaw_rl.models import read_json_object

CPU = torch.device("cpu")
#: The names of our attention in Transformers' table, and of Transformers' own in float32.
ATTENTION = "openclaw_rl"
#: Tokens of the pass that looks at the model.
PROBE_TOKENS = 4


class GivenHidden(tuple[Tensor]):
    """Hidden states as modelling code receives them: also by name, and without any of the other results."""

    def __new__(cls, hidden: Tensor) -> "GivenHidden":
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class Pass(NamedTuple):
    """A forward pass that is running."""

    attend: Attend
    adapt: Adapt | None = None
    recomputed: int = 0
    """So many of the first layers are computed a second time in the backward pass."""
    project: "Project | None" = None
    """Computes the linear modules that adapters change, in place of `adapt`."""


#: project(layer, projection, compute, input) → output with the tokens' adapters added
Project = Callable[[int, Projection, Callable[[Tensor], Tensor], Tensor], Tensor]
_running: ContextVar[Pass] = ContextVar("running")


@contextmanager
def running(current: Pass) -> Iterator[None]:
    token = _running.set(current)
    try:
        yield
    finally:
        _running.reset(token)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """What Transformers' modelling code calls: [1, heads, tokens, dim] → [1, tokens, heads, dim]."""
    if position_bias is not None:
        raise UnsupportedModel("its attention adds a bias to each pair of positions, which is not computed here")
    current = _running.get(None)
    if current is None:
        raise UnsupportedModel("its attention cannot be set back to Transformers' own, for a comparison")
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    form = AttentionForm(scaling, sliding_window, softcap, s_aux)
    attended = current.attend(module.layer_idx, q, k, v, form)
    return attended.view(1, len(q), q.shape[1], -1), None


@dataclass(eq=False)
class TransformersDecoder(LanguageModel):
    """Weights and configuration; the modules that compute with them are made in each process that needs them."""

    shape: TransformersSizes
    config: bytes
    """The model's class in its folder's code, or None, and its configuration in Transformers, pickled."""
    names: list[tuple[str, int]]
    """Every parameter and buffer by its name in the model, with its place in `tensors`."""
    tensors: list[Tensor] = field(repr=False)

    def __post_init__(self) -> None:
        self.embed = next((tensor for tensor in self.tensors if getattr(tensor, "ndim", 0) > 1), self.tensors[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.shape, self.config, self.names, self.tensors)

    @property
    def mixes_sequences(self) -> bool:  # type: ignore[override]
        return self.shape.state is None

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapt: Adapt | None = None,
        recomputed: int = 0,
        project: Project | None = None,
    ) -> Tensor:
        """With `recomputed`, so many of the first layers are computed a second time in the backward pass."""
        base = base_of(self.model)
        if self.has_quantised_experts:
            # Autograd keeps what an expert's weight was decoded to, until the backward pass of the layer.
            recomputed = self.shape.layers
        # Where Transformers keeps the state, it knows the positions.
        given = {"position_ids": positions[None]} if self.mixes_sequences else {}
        with running(Pass(attend, adapt, recomputed, project)):
            hidden: Tensor = base(input_ids=ids[None], use_cache=False, **given)[0]
        return hidden[0]

    def advance(self, ids: Tensor, state: Any, adapt: Adapt | None) -> tuple[Tensor, Any]:
        """Final hidden states of all tokens of a sequence, or of the one after a state; and the state after it."""
        with running(Pass(attend_alone, adapt)):
            result = base_of(self.model)(input_ids=ids[None], past_key_values=state, use_cache=True)
        return result[0][0], result.past_key_values

    def logits(self, hidden: Tensor) -> Tensor:
        model = self.model
        self._given.append(hidden[None])
        try:
            logits: Tensor = model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            self._given.clear()
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def eager_logits(self, ids: Tensor, attention: str) -> Tensor:
        """As Transformers computes them by itself, for a comparison."""
        if not self.mixes_sequences:
            return self.model(input_ids=ids[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]
        self.model.set_attn_implementation(attention)
        try:
            with self._as_written():
                logits: Tensor = self.model(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            self.model.set_attn_implementation(ATTENTION)
        return logits.float()

    @cached_property
    def has_quantised_experts(self) -> bool:
        return any(name.endswith(f".{CODES}") and self.tensors[index].dim() > 2 for name, index in self.names)

    @cached_property
    def model(self) -> Any:
        """Transformers' modules, with our weights, attention and hooks."""
        with torch.device("meta"):
            own_class, config = pickle.loads(self.config)
            model = new_model(
                config,
                self.activation_dtype,
                own_class=own_class,
                one_by_one=self.has_quantised_experts,
                attention=ATTENTION if self.mixes_sequences else None,
            )
        make_room(model, (name for name, _ in self.names), self.activation_dtype)
        for name, index in self.names:
            put(model, name, self.tensors[index])
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_meta:
                raise UnsupportedModel(f"its weights cannot be shared between processes: {name} is not among them")
        self._given: list[Tensor] = []
        base = base_of(model)
        base.forward = partial(self._output, base.forward)
        if self._is_fused:
            # This imports Triton, which not every machine has.
            from openclaw_rl.engines.local.model.fused_modules import fuse

            fuse(model)
        self._hook_adapters(model)
        return model

    @property
    def _is_fused(self) -> bool:
        return self.embed.is_cuda and self.mixes_sequences

    def _as_written(self) -> AbstractContextManager[None]:
        """Modules compute as modelling code has it."""
        if not self._is_fused:
            return nullcontext()
        from openclaw_rl.engines.local.model.fused_modules import as_written

        return as_written()

    def _output(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        """The hidden states, or those that were given: then only the head is computed, with all that belongs to it."""
        return GivenHidden(self._given[0]) if self._given else compute(*args, **kwargs)

    def _hook_adapters(self, model: Any) -> None:
        modules = dict(model.named_modules())
        layers: dict[int, nn.Module] = {}
        for adaptable in self.shape.adaptable:
            for layer, path in adaptable.paths.items():
                layers[layer] = modules[layer_prefix(path)]
                module: Any = modules[path.rpartition(".")[0] if adaptable.experts else path]
                if not adaptable.experts:
                    module.forward = partial(adapted, layer, adaptable.projection, module.forward)
                elif adaptable.target == GATE_UP:
                    projections = adaptable.projection, adaptable.projection.removesuffix(GATE_UP) + DOWN
                    module.forward = partial(maybe_adapted, layer, projections, module, module.forward)
        for layer, module in layers.items():
            compute: Any = module
            compute.forward = partial(maybe_twice, layer, module.forward)


def adapted(layer: int, projection: Projection, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A linear module with adapters."""
    current = _running.get(None)
    if current is None or not (current.adapt or current.project):
        return compute(x)
    rows = x.flatten(0, -2)
    if current.project is not None:
        return current.project(layer, projection, compute, rows).view(*x.shape[:-1], -1)
    output = compute(x)
    assert current.adapt is not None
    return current.adapt(layer, projection, rows, output.flatten(0, -2)).view(output.shape)


def maybe_adapted(
    layer: int, projections: tuple[Projection, Projection], module: Any, compute: Any, *args: Tensor
) -> Any:
    """The experts of a layer, with adapters if they have any."""
    current = _running.get(None)
    if current is None or current.adapt is None or not current.adapt.has(layer, projections[0]):
        return compute(*args)
    return adapted_experts(current.adapt, layer, projections, module, *args)


def maybe_twice(layer: int, compute: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer that keeps its activations for the backward pass, or only its input."""
    current = _running.get(None)
    if current is None or layer >= current.recomputed or not torch.is_grad_enabled():
        return compute(*args, **kwargs)

    def again(*args: Any, **kwargs: Any) -> Any:
        # The backward pass comes later, on CUDA in another thread.
        with running(current):
            return compute(*args, **kwargs)

    return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def load_transformers_decoder(
    folder: Path, dtype: torch.dtype, device: torch.device, bits: int = 0, *, trusts_code: bool = False
) -> TransformersDecoder:
    """Read a model folder with Transformers, and store the layers' weights in so many bits. Raises UnsupportedModel.

    Only with `trusts_code`, code in the folder is run, if nothing else knows the model.
    """
    import transformers

    # What it reports about a folder is in our own sentences.
    logs: Any = transformers.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    register_attention()
    files = TensorFiles(folder, dtype, CPU, bits)
    experts = experts_for(dtype, one_by_one=bool(bits))
    model, own_class, with_state = read_model(folder, files, dtype, ATTENTION, experts, trusts_code=trusts_code)
    quantise_modules(model.requires_grad_(False).eval(), files.bits_of, files.all_digits, dtype, device)
    return decoder_of(model.to(device), own_class, with_state=with_state)


def decoder_of(model: Any, own_class: Any = None, *, with_state: bool = False) -> TransformersDecoder:
    """A decoder with the weights of a model of Transformers that uses our attention, or that keeps a state for each
    sequence. Raises UnsupportedModel."""
    shape = look_at_state(model) if with_state else look_at(model)
    tensors: list[Tensor] = []
    names: list[tuple[str, int]] = []
    places: dict[int, int] = {}
    for name, tensor in all_tensors(model).items():
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            tensors.append(tensor.data)
        names.append((name, places[id(tensor)]))
    return TransformersDecoder(shape, pickle.dumps((own_class, model.config)), names, tensors)


def load_language_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantize: str = "none",
    compare: bool = False,
    trusts_code: bool = False,
) -> LanguageModel:
    """Read a model folder for our own decoder, or else for Transformers. Raises UnsupportedModel.

    `quantize` is --quantize: the bits in which the layers' weights are stored.
    With `compare`, a model that Transformers computes is compared with its own attention, as a sampler does it anyway.
    """
    if has_own_decoder(read_json_object(folder / "config.json")):
        return load_decoder(folder, dtype, device, bits=BITS[quantize])
    decoder = load_transformers_decoder(folder, dtype, device, BITS[quantize], trusts_code=trusts_code)
    if compare:
        tokens = min(COMPARED_TOKENS, decoder.shape.max_context)
        positions = torch.arange(tokens, device=device)
        check_agreement(decoder, lambda ids: decoder.logits(decoder.forward(ids, positions, attend_alone)), tokens)
    return decoder


def attend_alone(layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
    """Attention in a run that is one sequence."""
    return attend_last(q, k, v, form)


def register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(ATTENTION, attention)
    AttentionInterface.register(EXACT, exact_attention)
    AttentionMaskInterface.register(EXACT, eager_mask)


def new_model(
    config: Any,
    dtype: torch.dtype,
    *,
    own_class: Any = None,
    one_by_one: bool = False,
    attention: str | None = ATTENTION,
) -> Any:
    """Transformers' modules for a configuration, without weights; without a name, with its own attention."""
    import transformers

    register_attention()
    make: Any = transformers.AutoModelForCausalLM.from_config if own_class is None else own_class._from_config
    experts = experts_for(dtype, one_by_one=one_by_one)
    model = make(config, attn_implementation=attention, experts_implementation=experts, dtype=dtype)
    return model.requires_grad_(False).eval()


def experts_for(dtype: torch.dtype, *, one_by_one: bool = False) -> str | None:
    """How experts are multiplied; None: as Transformers chooses. PyTorch has no grouped product in float64."""
    return "eager" if one_by_one or dtype == torch.float64 else None


def base_of(model: Any) -> Any:
    """The part of a model that computes hidden states."""
    # In Llama 4 the language model is not where the prefix says.
    return getattr(model, model.base_model_prefix, None) or model.model


def all_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are not in a checkpoint; one that is used twice has two names."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return tensors | dict(model.named_buffers(remove_duplicate=False))


def put(model: Any, name: str, tensor: Tensor) -> None:
    """Let a model use this memory for one of its tensors."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


@torch.inference_mode()
def look_at(model: Any) -> TransformersSizes:
    """Run a few tokens, and note who attends and which linear modules are called. Raises UnsupportedModel."""
    paths = {module: path for path, module in model.named_modules()}
    calls: dict[int, list[AttentionProbe]] = {}
    products: dict[str, int] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        call = AttentionProbe(attending[-1], q.shape[1], k.shape[1], max(k.shape[2], v.shape[2]), form.window)
        calls.setdefault(layer, []).append(call)
        return attend_last(q, k, v, form)

    attending: list[str] = []
    hooks = []
    for module, path in paths.items():
        if type(module) in (nn.Linear, QuantisedWeight):
            hooks.append(module.register_forward_hook(lambda _m, _a, _o, path=path: count(products, path)))
        elif hasattr(module, "layer_idx"):
            hooks.append(module.register_forward_pre_hook(lambda _m, _a, path=path: attending.append(path)))
    ids = torch.arange(PROBE_TOKENS, device=model.device)[None]
    try:
        with running(Pass(attend)):
            base_of(model)(input_ids=ids, position_ids=ids, use_cache=False)
    except Exception as error:
        raise UnsupportedModel(f"Transformers cannot compute it with our attention: {in_short(error)}") from error
    for hook in hooks:
        hook.remove()
    return sizes_of(model, calls, [path for path, times in products.items() if times == 1])


@torch.inference_mode()
def look_at_state(model: Any) -> TransformersSizes:
    """Run a few tokens, and note which linear modules are called, and how large the state is. Raises
    UnsupportedModel."""
    products: dict[str, int] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _a, _o, path=path: count(products, path))
        for path, module in model.named_modules()
        if type(module) in (nn.Linear, QuantisedWeight)
    ]
    sizes = []
    try:
        for tokens in (PROBE_TOKENS, COMPARED_TOKENS):
            ids = torch.arange(tokens, device=model.device)[None]
            sizes.append(state_bytes(base_of(model)(input_ids=ids, use_cache=True).past_key_values))
            while hooks:
                hooks.pop().remove()
    except Exception as error:
        raise UnsupportedModel(f"Transformers cannot compute it with a state: {in_short(error)}") from error
    per_token = -(-(sizes[1] - sizes[0]) // (COMPARED_TOKENS - PROBE_TOKENS))
    state = StateSize(max(1, sizes[0] - PROBE_TOKENS * per_token), max(1, per_token))
    return sizes_with_state(model, state, [path for path, times in products.items() if times == 1])


def state_bytes(state: Any) -> int:
    """Memory of what Transformers keeps for a sequence."""
    kept = [value for layer in state.layers for value in vars(layer).values()]
    parts = [part for value in kept for part in (value.values() if isinstance(value, dict) else [value])]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def count(calls: dict[str, int], path: str) -> None:
    calls[path] = calls.get(path, 0) + 1
