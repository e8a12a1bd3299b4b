"""The codes a quantiser may store, seen as evenly spaced indices, so that one set of rounding rules serves all of them.

`position` maps a scaled value s to index units: for int8 it is s itself; for fp8 e4m3 it is the signed bit pattern of
the neighbour toward zero plus the fraction of the gap to the next one, so half even (even last mantissa bit) is half
even on the index. One LSB is one index step. Everything here is fp64 on the CPU.

    INT8.position(torch.tensor([2.5]))         # 2.5
    FP8.position(torch.tensor([1.0625]))       # 56.5: half way between the bit patterns of 1.0 and 1.125
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_FP8_NAN = 127  # magnitude bits of an e4m3fn NaN


@dataclass(frozen=True)
class Grid:
    """A code format: `limit` is the largest |s| that a scale of absmax / limit produces, lo..hi the valid indices."""

    name: str
    dtype: torch.dtype
    limit: float
    lo: int
    hi: int

    @cached_property
    def _values(self) -> Tensor:
        """fp64 [hi + 2]: magnitude of each index, one step beyond the last valid one."""
        if self.name == "int8":
            return torch.arange(self.hi + 2, dtype=torch.float64)
        bits = torch.arange(_FP8_NAN, dtype=torch.uint8)
        return torch.cat([bits.view(torch.float8_e4m3fn).double(), torch.tensor([480.0], dtype=torch.float64)])

    def index(self, codes: Tensor) -> Tensor:
        """int64 of the same shape. An fp8 NaN is index +-127, which no finite value has."""
        if self.name == "int8":
            return codes.long()
        bits = codes.contiguous().view(torch.uint8).long()
        magnitude = bits & 127
        return torch.where(bits > 127, -magnitude, magnitude)

    def position(self, s: Tensor) -> Tensor:
        """Index units of scaled values, fp64; beyond the last value the last gap is continued."""
        s = s.double()
        if self.name == "int8":
            return s
        v = self._values
        magnitude = s.abs()
        j = (torch.searchsorted(v, magnitude.contiguous(), right=True) - 1).clamp(0, len(v) - 2)
        p = j + (magnitude - v[j]) / (v[j + 1] - v[j])
        return torch.where(s < 0, -p, p)

    def value(self, p: Tensor) -> Tensor:
        """Scaled value at index position p: the inverse of `position`."""
        p = p.double()
        if self.name == "int8":
            return p
        v = self._values
        j = p.abs().floor().long().clamp(0, len(v) - 2)
        value = v[j] + (p.abs() - j) * (v[j + 1] - v[j])
        return torch.where(p < 0, -value, value)

    def decode(self, index: Tensor) -> Tensor:
        """Scaled value of a stored code, fp64; NaN for an fp8 NaN."""
        value = self.value(index)
        return value if self.name == "int8" else torch.where(index.abs() > self.hi, torch.nan, value)


INT8 = Grid("int8", torch.int8, 127.0, -128, 127)
FP8 = Grid("fp8_e4m3", torch.float8_e4m3fn, 448.0, -126, 126)
_BY_DTYPE = {grid.dtype: grid for grid in (INT8, FP8)}


def grid_of(dtype: torch.dtype) -> Grid | None:
    """The grid whose codes have this dtype, or None."""
    return _BY_DTYPE.get(dtype)
