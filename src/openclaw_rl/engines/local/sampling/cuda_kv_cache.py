"""The paged key-value cache on CUDA, and attention over it by kernels that walk the page table."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Shape
from openclaw_rl.engines.local.sampling.cuda_forward import AttendPages, CudaBatch, Pages
from openclaw_rl.engines.local.sampling.kv_cache import allocate, on_device
from openclaw_rl.engines.local.sampling.paged_attention import paged_decode
from openclaw_rl.engines.local.sampling.pages import PAGE_SIZE
from openclaw_rl.engines.local.sampling.prompt_attention import PromptRun, paged_prompts, tiles
from openclaw_rl.engines.local.sampling.scheduler import Work


class CudaKVCache:
    """Rows of one token go through one kernel over the page tables, and all prompts of a step through another."""

    def __init__(self, shape: Shape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._scale = 1 / math.sqrt(shape.head_dim)
        self.pages = Pages(*allocate(shape, pages, dtype, device))

    def batch(self, work: Sequence[Work]) -> CudaBatch:
        """The tokens of a step that reads prompts; `work` has the rows of one token first."""
        positions = [np.arange(item.start, item.stop, dtype=np.int32) for item in work]
        slots = [
            np.asarray(item.sequence.pages, np.int32)[own // PAGE_SIZE] * PAGE_SIZE + own % PAGE_SIZE
            for item, own in zip(work, positions, strict=True)
        ]
        ids = np.asarray([token for item in work for token in item.sequence.tokens[item.start : item.stop]], np.int32)
        columns = on_device(np.stack([ids, np.concatenate(positions), np.concatenate(slots)]), self.device)
        return CudaBatch(columns[0], columns[1], columns[2], self._attend(work))

    def decode(self, table: Tensor, lengths: Tensor) -> AttendPages:
        """One new token per row. All that varies is in tensors, as a CUDA graph needs it."""

        def attend(layer: int, q: Tensor) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self._attend_single(layer, q, table, lengths, out)
            return out.flatten(1)

        return attend

    def _attend(self, work: Sequence[Work]) -> AttendPages:
        single = sum(item.count == 1 for item in work)
        table = on_device(page_table([item.sequence.pages for item in work]), self.device)
        lengths = on_device(np.asarray([item.stop for item in work[:single]], np.int32), self.device)
        prompts, place = [], single
        for item in work[single:]:
            prompts.append(PromptRun(place, item.start, item.count))
            place += item.count
        cut = np.asarray(tiles(prompts, self.shape.heads // self.shape.kv_heads), np.int32).reshape(-1, 4)
        prompt_tiles = on_device(cut, self.device)

        def attend(layer: int, q: Tensor) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if single:
                self._attend_single(layer, q[:single], table[:single], lengths, out[:single])
            if prompts:
                keys, values = self.pages.keys[layer], self.pages.values[layer]
                paged_prompts(q, keys, values, table[single:], prompt_tiles, self._scale, out)
            return out.flatten(1)

        return attend

    def _attend_single(self, layer: int, q: Tensor, table: Tensor, lengths: Tensor, out: Tensor) -> None:
        paged_decode(q, self.pages.keys[layer], self.pages.values[layer], table, lengths, self._scale, out)


def page_table(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """The pages of each sequence, padded with 0."""
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    return table
