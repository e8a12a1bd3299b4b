"""Hypotheses about how a code was made: which step (scale), whether the quotient was narrowed first, which rounding.

A hypothesis predicts every code from the input alone, in fp64. Kernels compute in fp32 with their own order of
operations, so each prediction is made twice, with the quotient pushed down and up by `epsilon`: where the two differ
the element sits on a decision boundary and decides nothing (an exact tie is such a place, and is counted apart).

    Hypothesis(STEPS[0], None, "half_even").predict(batch, INT8, 1e-6)   # -> low, high: int64 codes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.audit.grid import Grid
from analysis.numerics import half_away

RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "half_even": torch.round,
    "half_away": half_away,
    "floor_half": lambda p: torch.floor(p + 0.5),
    "truncate": torch.trunc,
    "floor": torch.floor,
}
NEAREST = ("half_even", "half_away", "floor_half")
NARROW = (torch.bfloat16, torch.float16)
EPSILON = 1e-6  # a few fp32 roundings; also the 2 ulp of an approximate GPU division


@dataclass(frozen=True)
class Batch:
    """Elements to explain, flattened: fp64 x, fp64 absmax of the element's group, fp64 returned step, int64 index."""

    x: Tensor
    absmax: Tensor
    returned: Tensor  # NaN where the kernel returned no usable scale
    index: Tensor
    row: Tensor
    col: Tensor
    group: Tensor
    probe: Tensor

    def where(self, keep: Tensor) -> Batch:
        return Batch(**{name: value[keep] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Step:
    """What one LSB is worth: a function of absmax and of the returned step. `limit` is what absmax maps to."""

    name: str
    limit: float | None
    of: Callable[[Tensor, Tensor], Tensor]


RETURNED = Step("returned scale", None, lambda absmax, returned: returned)


def steps(grid: Grid, static: bool) -> list[Step]:
    """Candidate steps, most ordinary first. A static scale can only be the returned one."""
    if static:
        return [RETURNED]
    limits = (128.0, 127.5) if grid.name == "int8" else (240.0, 256.0)
    found = [*(absmax_step(limit) for limit in (grid.limit, *limits)), RETURNED]
    for dtype in NARROW:
        found += [_narrow_step(limit, dtype, inverse) for limit in (grid.limit, limits[0]) for inverse in (False, True)]
    return found


def absmax_step(limit: float) -> Step:
    """The exact absmax / limit."""
    return Step(f"absmax/{limit:g}", limit, lambda absmax, returned: absmax / limit)


def _narrow_step(limit: float, dtype: torch.dtype, inverse: bool) -> Step:
    short = str(dtype).removeprefix("torch.")
    if inverse:
        return Step(f"1/{short}({limit:g}/absmax)", limit, lambda absmax, _: 1.0 / (limit / absmax).to(dtype).double())
    return Step(f"{short}(absmax/{limit:g})", limit, lambda absmax, _: (absmax / limit).to(dtype).double())


@dataclass(frozen=True)
class Hypothesis:
    """step -> s = x / step -> optionally rounded to `quotient` -> `rule` on the grid -> clamped to the grid."""

    step: Step
    quotient: torch.dtype | None
    rule: str
    epsilon: float = EPSILON

    def scaled(self, batch: Batch) -> Tensor:
        """fp64 s of each element, before any narrowing."""
        return batch.x / self.step.of(batch.absmax, batch.returned)

    def position(self, s: Tensor, grid: Grid) -> Tensor:
        if self.quotient is not None:
            s = s.float().to(self.quotient).double()
        return grid.position(s)

    def ends(self, batch: Batch, grid: Grid) -> tuple[Tensor, Tensor]:
        """Index positions at the two ends of the uncertainty of s, fp64."""
        s = self.scaled(batch)
        return self.position(s * (1 - self.epsilon), grid), self.position(s * (1 + self.epsilon), grid)

    def predict(self, batch: Batch, grid: Grid) -> tuple[Tensor, Tensor]:
        """Codes at the two ends of the uncertainty of s, int64, clamped to the grid."""
        ends = (RULES[self.rule](end) for end in self.ends(batch, grid))
        low, high = (torch.nan_to_num(end, nan=0.0, posinf=2**30, neginf=-(2**30)).long() for end in ends)
        return torch.minimum(low, high).clamp(grid.lo, grid.hi), torch.maximum(low, high).clamp(grid.lo, grid.hi)

    def mismatch(self, batch: Batch, grid: Grid) -> tuple[Tensor, Tensor]:
        """(wrong, decided), both bool: `wrong` elements are decided and have another code."""
        low, high = self.predict(batch, grid)
        decided = low == high
        return decided & (batch.index != low), decided


def is_tie(p: Tensor, epsilon: float = 0.0) -> Tensor:
    """bool: index positions half way between two codes, exactly or within a relative `epsilon`."""
    return (p - p.floor() - 0.5).abs() <= epsilon * p.abs()
