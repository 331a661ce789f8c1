"""The experts of a layer in Transformers' code, with an adapter for each expert.

Transformers keeps the weights of all experts of a layer in two parameters, and its own code computes them where no
adapter is on them. Where one is, rows are sorted by expert here, and each product and its adapter computed in groups.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.local.model.language_model import Adapt, ExpertRows, Projection

#: The parameters, in the order in which they are used.
GATE_UP, DOWN = "gate_up_proj", "down_proj"
#: CUDA's product in groups wants rows of a multiple of so many bytes.
ALIGNED_BYTES = 16


def has_experts(module: Any) -> bool:
    """Whether a module holds experts in a form that is known here, which is the form in which PEFT adapts them."""
    shapes = [tuple(getattr(getattr(module, name, None), "shape", ())) for name in (GATE_UP, DOWN)]
    alike = all(len(shape) == 3 for shape in shapes) and len({shape[0] for shape in shapes}) == 1
    return alike and not getattr(module, "has_post_expert_norm", False)


def inputs_first(module: Any) -> bool:
    """Whether its weights are [experts, in, out]; else [experts, out, in]."""
    gate_up, down = module.gate_up_proj.shape, module.down_proj.shape
    return bool(gate_up[1] == down[2] and gate_up[2] == 2 * down[1])


def adapted_experts(
    adapt: Adapt,
    layer: int,
    projections: tuple[Projection, Projection],
    module: Any,
    hidden: Tensor,
    chosen: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """What the experts that were chosen for each token make of it together.

    Without `chosen`, each expert has its own rows in `hidden`, as many as the others, and their results are returned.
    """
    experts = module.gate_up_proj.shape[0]
    numbers = torch.arange(experts, device=hidden.device)
    if chosen is None or shares is None:
        tokens = len(hidden) // experts
        places = torch.arange(tokens, device=hidden.device).repeat(experts)
        rows = ExpertRows(places, (tokens * (numbers + 1)).int(), numbers.repeat_interleave(tokens))
        return through(module, partial(adapt, layer), projections, hidden, rows)
    of_row, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(of_row, numbers.to(of_row.dtype), right=True, out_int32=True)
    rows = ExpertRows(order // chosen.shape[1], ends, of_row)
    results = through(module, partial(adapt, layer), projections, hidden[rows.tokens], rows)
    results = results * shares.flatten()[order, None]
    # Added up in the order of the choice, and so always alike.
    return results[order.argsort()].view(*chosen.shape, -1).sum(1).to(hidden.dtype)


def through(
    module: Any, adapt: Callable[..., Tensor], projections: tuple[Projection, Projection], x: Tensor, rows: ExpertRows
) -> Tensor:
    """Each row's result of its expert."""
    for name, projection in zip((GATE_UP, DOWN), projections, strict=True):
        y = grouped(x, getattr(module, name), rows.ends, outputs_first=not inputs_first(module))
        if getattr(module, "has_bias", False):
            y = y + getattr(module, f"{name}_bias")[rows.experts]
        y = adapt(projection, x, y, rows)
        x = gated(module, y) if name == GATE_UP else y
    return x


def gated(module: Any, gate_up: Tensor) -> Tensor:
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return up * module.act_fn(gate)  # type: ignore[no-any-return]


def grouped(x: Tensor, weights: Any, ends: Tensor, *, outputs_first: bool) -> Tensor:
    """Rows, of which those of group i end at ends[i], times the weight of their group.

    The weights are [groups, out, in] or [groups, in, out]. On CUDA in bfloat16 the host does not wait for the device,
    unless the weights are quantised.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and isinstance(weights, Tensor):
        sizes = weights.shape[1:]
        if all(size * weights.itemsize % ALIGNED_BYTES == 0 for size in sizes):
            return F.grouped_mm(x, weights.mT if outputs_first else weights, offs=ends)
    stops = [0, *ends.tolist()]
    # Splitting and unbinding collect the gradients of all groups once.
    pieces = torch.split(x, [stop - start for start, stop in pairwise(stops)])
    each = weights.unbind(0) if isinstance(weights, Tensor) else weights
    used = [(piece, each[group]) for group, piece in enumerate(pieces) if len(piece)]
    return torch.cat([piece @ (weight.mT if outputs_first else weight) for piece, weight in used])
