"""An Apple GPU that is pretended: its tensors say that they are on mps, and the CPU computes.

Every operation on tensors of both devices fails, as on a real one. What a real one computes otherwise, and which
operators it lacks, is not seen.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

MPS = torch.device("mps", 0)
#: Operations that take tensors of two devices.
BETWEEN = ("aten::_to_copy", "aten::to", "aten::copy_")


class Pretended(Tensor):
    """A tensor on the pretended GPU, with its numbers on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Pretended":
        make: Any = Tensor._make_wrapper_subclass
        made: Pretended = make(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta", requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        # Autograd needs a device that this build of PyTorch has.
        return MPS

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __getitem__(self, key: Any) -> Tensor:
        # PyTorch would make an index of the numbers beside the mode, without the numbers.
        return super().__getitem__(torch.tensor(key, dtype=torch.long) if isinstance(key, list) else key)

    def tolist(self) -> Any:
        return self.inner.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, (args, kwargs))
    wrapped = [isinstance(tensor, Pretended) for tensor in tensors]
    name = func._schema.name
    if any(wrapped) and name not in BETWEEN:
        alone = [tensor for tensor, is_there in zip(tensors, wrapped, strict=True) if not is_there and tensor.dim()]
        # An index may be on the CPU.
        assert not alone or name.startswith("aten::index"), f"{name}: tensors of both devices"
    assert not any(tensor.dtype == torch.float64 for tensor in tensors if isinstance(tensor, Pretended)), name
    devices: list[torch.device] = []
    tree_map_only(torch.device, devices.append, (args, kwargs))
    # PyTorch's own code takes these tensors for such without memory, and makes more of them.
    there = devices[0].type in ("mps", "meta") if devices else any(wrapped)
    if name == "aten::copy_":
        there = wrapped[0]
    inner = tree_map_only(Pretended, lambda tensor: tensor.inner, (args, kwargs))
    values, named = tree_map_only(torch.device, lambda _device: torch.device("cpu"), inner)
    # PyTorch has no views of such tensors in its inference mode.
    with torch.inference_mode(False), torch.no_grad():
        result = func(*values, **named)
        if func._schema.is_mutable and args:
            return kwargs.get("out", args[0]) if func._schema.returns else None
        return tree_map(lambda part: Pretended(part) if there and isinstance(part, Tensor) else part, result)


class PretendedGpu(TorchDispatchMode):
    """In this block there is one."""

    def __enter__(self) -> Any:
        # A tensor of given numbers is made on the CPU, and then moved.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})
