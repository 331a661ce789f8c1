"""Which layers keep their activations for the backward pass, by the memory that is free.

A layer that keeps them is computed once. One that does not keeps only its input, and is computed again in the backward
pass: about a third more work for that layer.
"""

import torch

from openclaw_rl.engines.host import usable_memory
from openclaw_rl.engines.local.model.decoder import Shape

#: Of the free memory, what activations may take: gradients, logits and fragments need some too.
ACTIVATION_SHARE = 0.8
#: A layer's backward pass has about three times what the layer kept, at its peak.
WORKING_LAYERS = 3
#: Where autograd decides what is kept (if all weights are trained), it is about twice as much.
RECORDED_SHARE = 2


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return usable_memory()


def recomputed_layers(shape: Shape, tokens: int, itemsize: int, free: int, *, recorded: bool) -> int:
    """How many layers are computed twice, so that the activations of so many tokens fit into the free memory.

    `recorded`: whether autograd decides what is kept.
    """
    residual = tokens * itemsize * shape.hidden
    kept = tokens * itemsize * kept_numbers(shape) * (RECORDED_SHARE if recorded else 1)
    room = free * ACTIVATION_SHARE - shape.layers * residual - WORKING_LAYERS * kept
    return shape.layers - max(0, min(shape.layers, int(room // (kept - residual))))


def kept_numbers(shape: Shape) -> int:
    """Numbers per token that a layer keeps: two residuals, the heads before and after rotation, attention, the gate."""
    heads = shape.q_size + 2 * shape.kv_size
    return 2 * shape.hidden + 2 * heads + shape.q_size + 2 * shape.intermediate
