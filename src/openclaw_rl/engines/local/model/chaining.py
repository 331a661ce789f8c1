"""Kernels that begin before the kernel before them has ended (programmatic dependent launch, from Hopper on).

A chained kernel starts while the one before it still runs. It may read what no kernel of the chain writes, such as
weights, then waits until the one before is done. A step of few rows is a chain of short kernels, so that the time
between them counts.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: The first compute capability that can do it.
HOPPER = (9, 0)


def chained(tensor: Tensor) -> dict[str, Any]:
    """Arguments of a launch whose kernel calls `wait_for_previous` before it reads or writes what others do."""
    possible = tensor.is_cuda and supports_chaining(tensor.device)
    return {"CHAINED": True, "launch_pdl": True} if possible else {"CHAINED": False}


@functools.cache
def supports_chaining(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= HOPPER


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Let the next kernel begin, then wait for the end of the one before."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
