"""Which elements share a scale, and what the returned number means: found out from one call, or told.

Elements (r, k) share a scale with their block of `rows` x `cols` (None: the full extent): per row is (1, None), per
group of G is (1, G), per tensor (None, None). Every reading that fits the number of returned scales is tried, with the
three meanings; the one whose steps put the codes closest to the input wins, measured in LSB. A right reading is within
one LSB whatever the rounding, a wrong one is tens of LSB off, because the probe's magnitudes vary along both axes.

    layout, error_lsb = find_layout(x, index, scales, INT8, told=Told())
    layout.describe()                        # "per row, [16], float32, scale"
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from analysis.audit.grid import Grid

MEANINGS = ("scale", "inverse", "absmax")
MAX_ERROR_LSB = 1.5
KEPT = 0.8  # of the elements: scales never written or codes that wrapped around must not hide the layout


@dataclass(frozen=True)
class Told:
    """What the caller said about scales (None: find out). `static` is the value of a fixed scale."""

    kind: str | None = None  # per-row, per-group, per-tensor, static
    group: int | None = None
    static: float | None = None
    returns: str | None = None

    @classmethod
    def parse(cls, scales: str | None, returns: str | None) -> Told:
        """Read `--scales per-row|per-group:G|per-tensor|static:S` and `--returns scale|inverse|absmax`."""
        if returns is not None and returns not in MEANINGS:
            raise ValueError(f"unknown meaning of scales {returns!r}; known: {', '.join(MEANINGS)}")
        if scales is None:
            return cls(returns=returns)
        if scales in ("per-row", "per-tensor"):
            return cls(kind=scales, returns=returns)
        if match := re.fullmatch(r"per-group:(\d+)", scales):
            return cls(kind="per-group", group=int(match[1]), returns=returns)
        if match := re.fullmatch(r"static:([0-9.eE+-]+)", scales):
            return cls(kind="static", static=float(match[1]), returns=returns)
        raise ValueError(f"cannot read scales {scales!r}: expected per-row, per-group:G, per-tensor or static:S")


@dataclass(frozen=True)
class Layout:
    """How scales belong to elements. `shape` and `dtype` are those of the returned tensor in the probe."""

    rows: int | None
    cols: int | None
    meaning: str
    transposed: bool = False
    static: float | None = None  # the step of a fixed scale
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def blocks(self, m: int, k: int) -> tuple[int, int]:
        """Number of blocks along rows and along columns."""
        return math.ceil(m / (self.rows or max(m, 1))), math.ceil(k / (self.cols or k))

    @cache  # noqa: B019 - a handful of layouts in a run
    def group_ids(self, m: int, k: int) -> Tensor:
        """int64 [M, K]: which scale an element uses. Not to be written to."""
        _, across = self.blocks(m, k)
        row = torch.arange(m) // (self.rows or max(m, 1))
        col = torch.arange(k) // (self.cols or k)
        return row[:, None] * across + col[None, :]

    def absmax(self, x: Tensor) -> Tensor:
        """fp64 [groups] of x [M, K]."""
        m, k = x.shape
        groups = math.prod(self.blocks(m, k))
        flat = torch.zeros(groups, dtype=torch.float64)
        return flat.scatter_reduce(0, self.group_ids(m, k).flatten(), x.double().abs().flatten(), "amax")

    def steps(self, scales: Tensor | None, m: int, k: int, limit: float) -> Tensor:
        """fp64 [groups]: what one LSB is worth according to the returned scales; ValueError when they do not fit."""
        down, across = self.blocks(m, k)
        if self.static is not None:
            return torch.full((down * across,), self.static, dtype=torch.float64)
        if scales is None or scales.numel() != down * across:
            got = "no scales" if scales is None else f"scales {list(scales.shape)}"
            raise ValueError(f"{got} for an input [{m}, {k}], expected {down * across} of them")
        values = scales.double()
        values = values.reshape(across, down).t().reshape(-1) if self.transposed else values.reshape(-1)
        if self.meaning == "inverse":
            return 1.0 / values
        return values / limit if self.meaning == "absmax" else values

    def independent_rows(self) -> bool:
        """Whether no scale is shared between rows."""
        return self.rows == 1 or self.static is not None

    def describe(self) -> str:
        if self.static is not None:
            return f"static {self.static:g}"
        match self.rows, self.cols:
            case None, None:
                kind = "per tensor"
            case 1, None:
                kind = "per row"
            case 1, cols:
                kind = f"per group of {cols}"
            case None, 1:
                kind = "per column"
            case rows, cols:
                kind = f"per block of {rows or 'all'} rows x {cols or 'all'} columns"
        order = ", group-major" if self.transposed else ""
        return f"{kind}{order}, {list(self.shape)}, {self.dtype}, {self.meaning}"


PER_ROW = Layout(1, None, "scale")


def find_layout(
    x: Tensor, index: Tensor, scales: Tensor | None, grid: Grid, told: Told
) -> tuple[Layout, float]:  # fmt: skip
    """The best reading of `scales` for codes `index` of x [M, K], and its RMS error in LSB over the best `KEPT`.

    ValueError: there are no scales and none were told, or no reading comes within `MAX_ERROR_LSB`.
    """
    if scales is None and told.static is None:
        raise ValueError("no scales were returned: say --scales static:S, or return them through --adapter")
    best: tuple[Layout, float] | None = None
    for layout in _readings(x.shape, scales, told):
        error = _error_lsb(layout, x, index, scales, grid)
        if best is None or error < best[1] * 0.99:
            best = layout, error
    shape = None if scales is None else list(scales.shape)
    if best is None:
        raise ValueError(f"scales of shape {shape} fit no block of an input {list(x.shape)}; use --scales or --adapter")
    if not best[1] < MAX_ERROR_LSB:
        raise ValueError(
            f"scales of shape {shape} do not reproduce the input: read as {best[0].describe()} the codes are "
            f"{best[1]:.3g} LSB off (RMS); use --scales, --returns or --adapter"
        )
    return best


def _readings(shape: torch.Size, scales: Tensor | None, told: Told) -> Iterator[Layout]:
    m, k = shape
    meanings = MEANINGS if told.returns is None else (told.returns,)
    if told.static is not None:
        step = {"inverse": 1.0 / told.static}.get(told.returns or "", told.static)
        yield Layout(None, None, told.returns or "scale", static=step)
        return
    assert scales is not None
    dtype = str(scales.dtype).removeprefix("torch.")
    for rows, cols in _blocks(m, k, told):
        layout = Layout(rows, cols, "scale", shape=tuple(scales.shape), dtype=dtype)
        down, across = layout.blocks(m, k)
        if down * across != scales.numel():
            continue
        for meaning in meanings:
            yield replace(layout, meaning=meaning)
            natural = list(scales.shape)[-2:] == [down, across] and down != across
            if down > 1 and across > 1 and not natural:
                yield replace(layout, meaning=meaning, transposed=True)


def _blocks(m: int, k: int, told: Told) -> list[tuple[int | None, int | None]]:
    if told.kind == "per-row":
        return [(1, None)]
    if told.kind == "per-tensor":
        return [(None, None)]
    if told.kind == "per-group":
        return [(1, told.group)]
    rows = [1, None, *(2**i for i in range(1, 11) if 2**i < m)]
    cols = [None, *(2**i for i in range(11) if 2**i < k)]
    return [(r, c) for c in cols for r in rows]


def _error_lsb(layout: Layout, x: Tensor, index: Tensor, scales: Tensor | None, grid: Grid) -> float:
    m, k = x.shape
    step = layout.steps(scales, m, k, grid.limit)[layout.group_ids(m, k)]
    position = grid.position(torch.nan_to_num(x.double() / step, nan=1e9)).clamp(grid.lo, grid.hi)
    error = (index - position).abs().flatten().sort()[0]
    return float(error[: int(KEPT * len(error)) or 1].square().mean().sqrt())
