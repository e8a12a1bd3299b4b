"""The inputs of the rounding verdict: seeded, both signs, in the dtype under test, over a wide range of scales.

- `spread`: magnitudes vary along rows and columns, so that a wrong reading of the scales cannot fit.
- `design`: the absmax of every scale group is limit * 2^e, so the step is exactly 2^e whatever formula the kernel uses,
  and the elements sit at exact ties, at quarters and at other fractions of a step.
- `fine`: Gaussian rows, on which the figures are taken; `coarse`: heavy tails and flat rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from analysis.audit.grid import Grid
from analysis.audit.layout import Layout

_FRACTIONS = (0.5, 0.5, 0.5, 0.25, 0.75, 0.6, 0.4, 0.1, 0.9, 0.0)
CREST = 40.0
Maker = Callable[[int, int, torch.dtype, torch.Generator, Layout], Tensor]


def spread(m: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Gaussian times 2^U{-3..3} per row and per 16 columns. [M, K]"""
    x = torch.randn(m, k, generator=generator, dtype=torch.float64)
    down = torch.randint(-3, 4, (m, 1), generator=generator)
    across = torch.randint(-3, 4, (1, -(-k // 16)), generator=generator).repeat_interleave(16, dim=1)[:, :k]
    return (x * torch.exp2((down + across).double())).to(dtype)


def design(
    m: int, k: int, dtype: torch.dtype, generator: torch.Generator, layout: Layout, grid: Grid, limit: float
) -> Tensor:
    """Ties and fractions under an exact power-of-two step. [M, K]"""
    positions = torch.randint(0, grid.hi, (m, k), generator=generator).double()
    small = torch.rand(m, k, generator=generator) < 0.3
    positions = torch.where(small, torch.randint(0, 4, (m, k), generator=generator).double(), positions)
    fractions = torch.tensor(_FRACTIONS, dtype=torch.float64)
    pick = torch.randint(0, len(fractions), (m, k), generator=generator)
    s = grid.value(positions + fractions[pick]).clamp(max=min(limit, grid.limit))
    s = _signed(s, generator)
    ids = layout.group_ids(m, k)
    groups = int(ids.max()) + 1
    if layout.static is not None:
        return (s * layout.static).to(dtype)
    order = torch.randperm(m * k, generator=generator)
    anchor = torch.zeros(groups, dtype=torch.int64)
    anchor[ids.flatten()[order]] = order  # the last write to a group wins: one random element of each
    s.view(-1)[anchor] = _signed(torch.full((groups,), limit, dtype=torch.float64), generator)
    exponent = torch.randint(-5, 6, (groups,), generator=generator).double()
    return (s * torch.exp2(exponent)[ids]).to(dtype)


def fine(m: int, k: int, dtype: torch.dtype, generator: torch.Generator, layout: Layout) -> Tensor:
    """Gaussian rows, of different size where rows have scales of their own; within range of a static step. [M, K]"""
    x = torch.randn(m, k, generator=generator, dtype=torch.float64)
    if layout.static is not None:
        return (x.clamp(-3.9, 3.9) * 32 * layout.static).to(dtype)
    return (x * _row_sizes(m, generator, layout)).to(dtype)


def coarse(m: int, k: int, dtype: torch.dtype, generator: torch.Generator, layout: Layout) -> Tensor:
    """A third each of rows with one outlier of `CREST` sigma, Laplace rows and uniform rows. [M, K]"""
    x = torch.randn(m, k, generator=generator, dtype=torch.float64)
    uniform = torch.rand(m, k, generator=generator, dtype=torch.float64) * 2 - 1
    where = torch.randint(0, k, (m,), generator=generator)
    x[torch.arange(0, m, 3), where[::3]] = CREST
    x[1::3] = x[1::3].sign() * -torch.log(uniform[1::3].abs().clamp(min=1e-12))
    x[2::3] = uniform[2::3]
    if layout.static is not None:
        return (x / x.abs().amax(dim=1, keepdim=True) * 127 * layout.static).to(dtype)
    return (x * _row_sizes(m, generator, layout)).to(dtype)


def _row_sizes(m: int, generator: torch.Generator, layout: Layout) -> Tensor:
    sizes = torch.exp2(torch.rand(m, 1, generator=generator, dtype=torch.float64) * 8 - 4)
    return sizes if layout.independent_rows() else sizes[:1]


def _signed(s: Tensor, generator: torch.Generator) -> Tensor:
    return torch.where(torch.rand(s.shape, generator=generator) < 0.5, -s, s)
