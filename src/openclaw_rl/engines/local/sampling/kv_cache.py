"""The memory of the paged key-value cache, and attention over it on the CPU (on CUDA: `cuda_kv_cache`).

Keys and values are [layers, pages, page, kv heads, dim]. A step is what `scheduler` planned: rows of new tokens, each
of which attends to all of its own sequence and to nothing else. The CPU attends over a view where a sequence's pages
are consecutive, which they mostly are. CUDA uses kernels that walk the page table.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Attend, Shape
from openclaw_rl.engines.local.sampling.pages import PAGE_SIZE
from openclaw_rl.engines.local.sampling.scheduler import Work


def bytes_per_page(shape: Shape, dtype: torch.dtype) -> int:
    """Memory of one page, over all layers."""
    return 2 * shape.layers * PAGE_SIZE * shape.kv_size * dtype.itemsize


def token_slots(work: Sequence[Work]) -> list[int]:
    """Where in the flat cache each new token's key and value go."""
    return [
        item.sequence.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        for item in work
        for position in range(item.start, item.stop)
    ]


def allocate(shape: Shape, pages: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for keys and for values. It is not filled: on the CPU, memory that is never used takes no room."""
    size = (shape.layers, pages, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    return torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device)


class CpuKVCache:
    """One attention call per row: rows are few, and mixed lengths then cost no padding."""

    def __init__(self, shape: Shape, pages: int, dtype: torch.dtype) -> None:
        self.shape = shape
        keys, values = allocate(shape, pages, dtype, torch.device("cpu"))
        self.keys, self.values = keys.flatten(1, 2), values.flatten(1, 2)

    def attend(self, work: Sequence[Work]) -> Attend:
        slots = torch.tensor(token_slots(work))
        rows = [CpuRow(self, item) for item in work]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer].index_copy_(0, slots, k)
            self.values[layer].index_copy_(0, slots, v)
            outputs, start = [], 0
            for row in rows:
                outputs.append(row.attend(layer, q[start : start + row.count]))
                start += row.count
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return attend


class CpuRow:
    """One sequence's part of a step: its new queries against everything it has in the cache."""

    def __init__(self, cache: CpuKVCache, work: Work) -> None:
        self.cache, self.count, self.length = cache, work.count, work.stop
        self.mask = None if work.count in (1, work.stop) else causal_mask(work.count, work.stop, cache.keys.dtype)
        pages = work.sequence.pages
        first = pages[0]
        self.index: Tensor | None = None
        if all(page == first + i for i, page in enumerate(pages)):
            span = slice(first * PAGE_SIZE, first * PAGE_SIZE + self.length)
            self.keys = cache.keys[:, None, span].transpose(2, 3).unbind(0)
            self.values = cache.values[:, None, span].transpose(2, 3).unbind(0)
        else:
            starts = torch.tensor(pages) * PAGE_SIZE
            self.index = (starts[:, None] + torch.arange(PAGE_SIZE)).flatten()[: self.length]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv heads, length, dim]: a view if the pages are consecutive, else gathered."""
        if self.index is None:
            return self.keys[layer], self.values[layer]
        keys = self.cache.keys[layer].index_select(0, self.index)
        values = self.cache.values[layer].index_select(0, self.index)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self.read(layer)
        if self.count == 1:
            # The query heads that share a kv head see the same keys: they can be one block of queries.
            grouped = q.view(1, self.cache.shape.kv_heads, -1, q.shape[-1])
            return F.scaled_dot_product_attention(grouped, keys, values).view(1, -1)
        whole = self.count == self.length
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=self.mask, is_causal=whole, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(self.count, -1)


def causal_mask(count: int, length: int, dtype: torch.dtype) -> Tensor:
    """For the last `count` of `length` tokens: minus infinity where a token may not attend."""
    mask = torch.full((count, length), float("-inf"), dtype=dtype)
    return mask.triu_(length - count + 1)


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
