"""A model whose weights are sharded over the ranks with FSDP2.

Each rank holds a part of every weight. Where memory is short, the weights of a layer are whole on a rank only while it
computes that layer. Otherwise they stay whole until the end of the pass, because gathering them again takes time.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from openclaw_rl.engines.local.model import ops
from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Layer, TensorFiles, load_layer
from openclaw_rl.engines.local.model.linear import Linear
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.policy_slots import BadPolicy, map_tensors, open_model
from openclaw_rl.engines.local.model.shared_weights import map_leaves
from openclaw_rl.engines.local.training.blocks import no_adapters
from openclaw_rl.engines.local.training.full_weights import FullWeights
from openclaw_rl.engines.local.training.rank_group import RankGroup
from openclaw_rl.engines.local.training.ranks import whole
from openclaw_rl.engines.local.training.trainer import Policy

NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")
#: The attributes of a model outside its layers, and their names in a model folder.
OUTSIDE_LAYERS = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "untied_head": "lm_head.weight"}


class Sharding:
    """How models are sharded over a group of ranks."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.mesh: DeviceMesh = init_device_mesh(ranks.device.type, (ranks.place.count,))

    def shard(self, module: Any, dtype: torch.dtype | None) -> None:
        """Leave each rank its part of a module's weights. They are whole in `dtype` while the module computes."""
        precision = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        fully_shard(module, mesh=self.mesh, mp_policy=precision)
        # The loss of a batch is a sum over its micro-batches, and so is the gradient. FSDP would really divide by 1.
        if self.ranks.place.count > 1:
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(AllGather(self.ranks))
        module.set_custom_reduce_scatter(ReduceScatter(self.ranks))

    def layer(self, layer: Layer, dtype: torch.dtype | None = None) -> "ShardedLayer":
        """A layer's weights, sharded; trained if `dtype` is given."""
        module = ShardedLayer(layer, trained=dtype is not None)
        self.shard(module, dtype)
        return module

    def model(self, decoder: Decoder, dtype: torch.dtype | None = None) -> "ShardedDecoder":
        """A model whose layers are sharded already; trained if `dtype` is given."""
        inverse_frequencies = decoder.inverse_frequencies.to(self.ranks.device)
        module = ShardedDecoder(replace(decoder, inverse_frequencies=inverse_frequencies), dtype)
        self.shard(module, dtype)
        self.ranks.sharded_models.append(module)
        return module

    def trained_copy(self, base: "ShardedDecoder") -> "ShardedDecoder":
        """Float32 copies of a model's weights to be trained. Only one layer is whole at a time."""
        dtype = base.embed.dtype
        layers: Any = [self.layer(map_leaves(module.weights(), Tensor, wide), dtype) for module in base.layers]
        outside: Any = map_tensors(replace(base.weights(), layers=[]), wide)
        return self.model(replace(outside, layers=layers), dtype)


class AllGather:
    """FSDP's exchange of weights. Raises OtherRankFailed if a rank does not take part."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.ranks.go_on_together()
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(AllGather):
    """FSDP's exchange of gradients."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.ranks.go_on_together()
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class ShardedLayer(nn.Module):
    """The weights of one layer."""

    def __init__(self, layer: Layer, trained: bool) -> None:
        super().__init__()
        self.whole: list[Tensor] = []
        """The whole weights of the last pass. FSDP frees their memory between passes."""
        tensors = {name: getattr(layer, name) for name in NORMS}
        for projection in PROJECTIONS:
            linear: Linear = getattr(layer, projection)
            tensors |= {f"{projection}_weight": linear.weight, f"{projection}_bias": linear.bias}
        for name, tensor in tensors.items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, trained))

    def weights(self) -> Layer:
        """Whole weights inside `forward`, this rank's part of them elsewhere."""
        norms = {name: getattr(self, name) for name in NORMS}
        linears = {name: Linear(getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")) for name in PROJECTIONS}
        return Layer(**norms, **linears)  # type: ignore[arg-type]

    def forward(self, compute: Callable[[Layer, Tensor], Tensor], residual: Tensor) -> Tensor:
        weights = self.weights()
        self.whole = tensors_of(weights)
        return compute(weights, residual)


class ShardedDecoder(nn.Module):
    """A model. Its layers are `ShardedLayer`s."""

    embed: nn.Parameter
    norm: Any
    set_reshard_after_backward: Callable[[bool], None]
    reset_iter_state: Callable[[], None]
    """Of FSDP: leaves each rank its part of all weights, also after a pass that failed."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype | None) -> None:
        """It is trained if `dtype` is given, and computes in `dtype` then."""
        super().__init__()
        self.shape = decoder.shape
        self.itemsize = (dtype or decoder.embed.dtype).itemsize
        """Bytes of a number in whole weights."""
        self.whole: list[Tensor] = []
        """The whole weights outside the layers in the last pass."""
        self._stays_whole = False
        for name in OUTSIDE_LAYERS:
            tensor = getattr(decoder, name)
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, dtype is not None))
        self.layers: Any = nn.ModuleList(decoder.layers)  # type: ignore[arg-type]
        self._constants = replace(decoder, layers=[], embed=None, norm=None, untied_head=None)  # type: ignore[arg-type]

    def weights(self) -> Decoder:
        """Whole weights inside `forward`, this rank's part of them elsewhere; the layers as modules."""
        outside = {name: getattr(self, name) for name in OUTSIDE_LAYERS}
        return replace(self._constants, layers=list(self.layers), **outside)

    def parts(self) -> Decoder:
        """This rank's part of the weights."""
        return replace(self.weights(), layers=[module.weights() for module in self.layers])

    @property
    def activation_dtype(self) -> torch.dtype:
        return ops.activation_dtype(self.embed)

    @property
    def weight_bytes(self) -> int:
        """Memory of this rank's part."""
        return sum(local(tensor).nbytes for tensor in tensors_of(self.parts()))

    @functools.cached_property
    def bytes_when_whole(self) -> int:
        """Memory that a pass takes on this rank if all weights stay whole, with the gradients of this rank's part."""
        tensors = tensors_of(self.parts())
        gradients = sum(local(tensor).nbytes for tensor in tensors) if self.norm.requires_grad else 0
        return sum(tensor.numel() for tensor in tensors) * self.itemsize + gradients

    def begin_pass(self, stays_whole: bool) -> None:
        """Before a pass over some micro-batches: whether weights stay whole from their first use to its end."""
        self._stays_whole = stays_whole
        for layer in self.layers:
            layer.set_reshard_after_forward(not stays_whole)
        self.set_reshard_after_backward(not stays_whole)

    def end_pass(self) -> None:
        """Leave each rank its part of the weights."""
        if self._stays_whole:
            self.settle()

    def forward(self, compute: Callable[[Decoder], Tensor]) -> Tensor:
        weights = self.weights()
        self.whole = tensors_of(replace(weights, layers=[]))
        return compute(weights)

    def run(self, compute: Callable[[Decoder], Tensor]) -> Tensor:
        """`compute` with the whole weights outside the layers."""
        result: Tensor = self(compute)
        if not torch.is_grad_enabled() and not self._stays_whole:
            # FSDP waits for a backward pass, which does not come: until then it would keep weights whole.
            self.settle()
        return result

    def settle(self) -> None:
        """Leave each rank its part of the weights, also without a backward pass and after a pass that failed."""
        if self.whole:
            self.reset_iter_state()
        # What a backward pass that failed has left there would be added to the next gradient.
        for tensor in [tensor for module in (self, *self.layers) for tensor in module.whole]:
            tensor.grad = None


class ShardedFullWeights:
    """Implements `TrainedWeights` for all weights of a sharded model: float32 masters, of which each rank has a part.

    The order of its parameters and its files are those of `FullWeights`.
    """

    dropout = 0.0

    def __init__(self, base: ShardedDecoder, sharding: Sharding, folder: Path) -> None:
        """`folder` is that of the base model."""
        self.base = base
        self.ranks = sharding.ranks
        self.folder = folder
        self.model = sharding.trained_copy(base)
        self._masters = FullWeights(self.model.parts(), folder)

    def parameters(self) -> list[Tensor]:
        return self._masters.parameters()

    def decoder(self, base: object) -> ShardedDecoder:
        return self.model

    def policy(self, base: object, dropout_seed: int | None = None) -> Policy:
        return Policy(self.model, no_adapters(self.base.shape))

    def complete(self) -> FullWeights:
        """All weights, in the CPU's memory of the first rank."""

        def collect(tensor: Tensor) -> Tensor:
            full = whole(tensor.detach())
            return full.cpu() if self.ranks.is_first else tensor

        return FullWeights(map_tensors(self._masters.masters, collect), self.folder)

    def save(self, folder: Path, base_model: str) -> None:
        raise AssertionError("a part of the weights is not a policy: save the complete ones")

    def reset(self) -> None:
        """Return to the base model's weights."""
        self.assign([local(tensor) for tensor in tensors_of(self.base.parts())])

    def read(self, saved: Path) -> list[Tensor]:
        """This rank's part of the weights in a folder. Raises BadPolicy."""
        sizes = map_tensors(self._masters.masters, lambda tensor: torch.empty(tensor.shape, device="meta"))
        files = open_model(saved, sizes, torch.float32, torch.device("cpu"))
        try:
            return [rows_of(full, part) for full, part in zip(self._whole(files), self.parameters(), strict=True)]
        except (UnsupportedModel, OSError, SafetensorError) as error:
            raise BadPolicy(f"{saved} cannot be read: {error}") from error

    @torch.no_grad()
    def assign(self, parts: Sequence[Tensor]) -> None:
        """Replace this rank's part of the weights."""
        for master, part in zip(self.parameters(), parts, strict=True):
            local(master).copy_(part)

    def _whole(self, files: TensorFiles) -> Iterator[Tensor]:
        """The whole weights in the order of the parameters, of which one layer is in memory at a time."""
        yield files(OUTSIDE_LAYERS["embed"])
        for number in range(self.base.shape.layers):
            yield from tensors_of(load_layer(files, f"model.layers.{number}."))
        yield files(OUTSIDE_LAYERS["norm"])
        if self.model.untied_head is not None:
            yield files(OUTSIDE_LAYERS["untied_head"])


def read_moments(path: Path, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """This rank's part of an optimiser's state. Raises SafetensorError and OSError."""
    moments = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is not a dictionary
            index, _, name = key.partition(".")
            tensor = file.get_tensor(key) if name == "step" else part_of(file.get_slice(key), parameters[int(index)])
            moments[key] = tensor
    return moments


def part_of(stored: Any, parameter: Tensor) -> Tensor:
    """This rank's part of a stored tensor that has the size of a parameter."""
    assert isinstance(parameter, DTensor)
    if tuple(stored.get_shape()) != tuple(parameter.shape):
        raise ValueError(f"the optimiser's state has {stored.get_shape()} where the model has {list(parameter.shape)}")
    return DTensor.from_local(
        stored[rows(parameter)].to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def rows_of(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor."""
    return full[rows(parameter)].clone()


def rows(parameter: Tensor) -> slice:
    """The rows of a parameter that this rank holds. FSDP cuts as `torch.chunk` does."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    length = len(parameter)
    most = -(-length // mesh.size())
    start = min(mesh.get_local_rank() * most, length)
    return slice(start, min(start + most, length))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part.detach()


def wide(tensor: Tensor) -> Tensor:
    """A whole copy in float32."""
    return whole(tensor.detach()).to(torch.float32, copy=True)


def tensors_of(weights: Layer | Decoder) -> list[Tensor]:
    """The weights, in the order of their fields."""
    tensors: list[Tensor] = []
    constants: Any = {} if isinstance(weights, Layer) else {"inverse_frequencies": None}
    map_leaves(replace(weights, **constants), Tensor, tensors.append)
    return tensors
