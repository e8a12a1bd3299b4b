"""Blocks of rows and the memory to work them off in: one for all shapes, kept from call to call.

    blocks = Blocks(variants=2)
    for block, at in blocks.of(rows=768, columns=256):    # block: slice of rows; at.e: fp32 [2, rows of block, 256]
        torch.mul(x[block], 2, out=at.s)

Contents do not outlive a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 2**18  # elements of one variant's fp32 buffer


class Scratch(NamedTuple):
    """Buffers of one block of rows: [rows, columns], and [V, rows, columns] of all variants. A name is one buffer."""

    s: Tensor
    f: Tensor
    work: Tensor
    e: Tensor  # [V, ...] like the three below
    product: Tensor
    narrow: Tensor  # bf16
    small: Tensor  # int8


class Blocks:
    """The blocks of rows that a tensor is worked off in, and their scratch: one memory for all shapes, kept."""

    def __init__(self, variants: int) -> None:
        self.variants, self._size = variants, 0
        self._views: dict[tuple[int, int], Scratch] = {}

    def of(self, rows: int, columns: int) -> Iterator[tuple[slice, Scratch]]:
        step = max(8, BLOCK // columns)
        for start in range(0, rows, step):
            size = min(step, rows - start)
            at = self._views.get((size, columns))
            yield slice(start, start + size), self._new(size, columns) if at is None else at

    @torch.inference_mode(False)  # else it could not be written to outside of inference mode
    def _new(self, rows: int, columns: int) -> Scratch:
        n, v = rows * columns, self.variants
        if n > self._size or len(self._views) > 64:
            self._views.clear()
        if n > self._size:
            self._size = n
            self._wide = [torch.empty(copies * n) for copies in (1, 1, 1, v, v)]
            self._narrow, self._small = (torch.empty(v * n, dtype=t) for t in (torch.bfloat16, torch.int8))
        single = [flat[:n].view(rows, columns) for flat in self._wide[:3]]
        stacked = [flat[: v * n].view(v, rows, columns) for flat in (*self._wide[3:], self._narrow, self._small)]
        self._views[rows, columns] = Scratch(*single, *stacked)
        return self._views[rows, columns]
