"""Weights of 4 or 8 bits in the modules of Transformers' code."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_rl.engines.local.model.codes import can_be_encoded, encode
from openclaw_rl.engines.local.model.linear import QuantisedLinear, decode

#: In a layer, what chooses experts: few weights, on which much depends.
ROUTERS = {"gate", "router"}
CODES = "codes"
_IN_A_LAYER = re.compile(r"(.*?\.)?\d+\..*")


class QuantisedWeight(nn.Module):
    """In place of a linear module, or of a parameter that holds a weight for each expert.

    As an expert's weight it is asked for one expert at a time. Any other function of PyTorch gets all of it as numbers.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        for name, tensor in ((CODES, codes), ("scales", scales), ("bias", bias)):
            self.register_buffer(name, tensor)

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @property
    def in_features(self) -> int:
        return self.codes.shape[-1] * (1 if self.codes.dtype == torch.int8 else 2)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.in_features))

    @property
    def weight(self) -> Tensor:
        return decode(self.codes, self.scales, self.dtype)

    def __getitem__(self, expert: Any) -> Tensor:
        return decode(self.codes[expert], self.scales[expert], self.dtype)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: object,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def dense(value: Any) -> Any:
            return value.weight if isinstance(value, cls) else value

        return function(*map(dense, args), **{name: dense(value) for name, value in (kwargs or {}).items()})

    def forward(self, x: Tensor) -> Tensor:
        linear = QuantisedLinear(self.codes, self.bias, scales=self.scales, dtype=self.dtype)
        y: Tensor = _Product.apply(x.flatten(0, -2), linear)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Keeps nothing for the backward pass: the weight is decoded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantisedLinear) -> Tensor:
        ctx.linear = linear
        return linear(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.linear.input_gradient(grads[0]), None


def quantise_modules(
    model: Any,
    bits_of: Callable[[str], int],
    all_digits: Callable[[str], Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Store the linear modules and the experts of all layers in as many bits as `bits_of` their names says, on this
    device. `all_digits` of a name: the weight before it was rounded to the precision of the model, if that is known."""
    for path, parameter in layer_weights(model).items():
        owner = path.rpartition(".")[0]
        module = model.get_submodule(owner)
        is_linear = type(module) is nn.Linear
        bits = bits_of(path)
        if can_be_encoded(parameter, bits):
            bias = None if not is_linear or module.bias is None else module.bias.data
            known = all_digits(path)
            numbers = parameter.data if known is None else known
            weight = QuantisedWeight(*encode(numbers.to(device), bits), bias, dtype)
            put_module(model, owner if is_linear else path, weight)


def layer_weights(model: Any) -> dict[str, nn.Parameter]:
    """The weights that can be stored in fewer bits: of the linear modules and the experts of all layers, by name."""
    weights: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        if not _IN_A_LAYER.fullmatch(f"{path}.") or path.rpartition(".")[2] in ROUTERS:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            is_linear = type(module) is nn.Linear and name == "weight"
            if is_linear or ("experts" in path.split(".") and parameter.dim() == 3):
                weights[f"{path}.{name}"] = parameter
    return weights


def make_room(model: Any, names: Iterable[str], dtype: torch.dtype) -> None:
    """Put a quantised weight, without its numbers, wherever `names` of tensors have one."""
    nothing = torch.empty(0, device="meta")
    known = set(names)
    for name in known:
        path, _, leaf = name.rpartition(".")
        if leaf == CODES:
            bias = nothing if f"{path}.bias" in known else None
            put_module(model, path, QuantisedWeight(nothing, nothing, bias, dtype))


def put_module(model: Any, path: str, module: nn.Module) -> None:
    """Replace a module or a parameter."""
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    owner._parameters.pop(name, None)
    setattr(owner, name, module)
