# mypy: disable-error-code="no-untyped-def"
"""What the Triton kernels share: casts that the interpreter gets wrong, and the fp64 sum of per-row statistics.

Triton's interpreter truncates fp32 -> bf16 and drops the low bits of denormal bf16, so both casts are written out.
On a GPU they are the hardware's own (round to nearest even).

Every kernel that sums writes one fp32 statistic per row, [S, M], and `combine` adds them per group in fp64: no atomics,
so two runs give the same bits; no host synchronisation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_fp32(v):
    """Exact upcast of fp32, fp16 or bf16."""
    if v.dtype == tl.bfloat16:
        wide = v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return wide.to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@triton.jit
def from_fp32(v, dtype: tl.constexpr):
    """fp32 rounded to `dtype`, nearest even, NaN kept."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = v.to(tl.uint32, bitcast=True)
        rounded = tl.where(v == v, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return v.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    stats_ptr, groups_ptr, out_ptr, rows, PERIOD: tl.constexpr, MAX_AT: tl.constexpr, BLOCK: tl.constexpr
):
    statistic = tl.program_id(0)
    stats_ptr += statistic.to(tl.int64) * rows
    offsets = tl.arange(0, BLOCK)
    total_1 = tl.zeros([BLOCK], tl.float64)
    total_2 = tl.zeros([BLOCK], tl.float64)
    for start in range(0, rows, BLOCK):
        at = start + offsets
        group = tl.load(groups_ptr + at, mask=at < rows, other=0)
        value = tl.load(stats_ptr + at, mask=at < rows, other=0.0).to(tl.float64)
        first = tl.where(group == 1, value, 0.0)
        second = tl.where(group == 2, value, 0.0)
        if statistic % PERIOD == MAX_AT:
            total_1 = tl.maximum(total_1, first)
            total_2 = tl.maximum(total_2, second)
        else:
            total_1 += first
            total_2 += second
    if statistic % PERIOD == MAX_AT:
        tl.store(out_ptr + 2 * statistic, tl.max(total_1, 0))
        tl.store(out_ptr + 2 * statistic + 1, tl.max(total_2, 0))
    else:
        tl.store(out_ptr + 2 * statistic, tl.sum(total_1, 0))
        tl.store(out_ptr + 2 * statistic + 1, tl.sum(total_2, 0))


def combine(stats: Tensor, groups: Tensor, period: int = 1, max_at: int = -1) -> Tensor:
    """Per-row statistics, fp32 [S, M], added over the rows of group 1 and of group 2 -> fp64 [S, 2].

    Statistic s with s % period == max_at merges by maximum (of values >= 0). Rows of other groups count for nothing,
    NaN included. groups: uint8 [M].
    """
    count, rows = stats.shape
    if rows == 0:
        return torch.zeros(count, 2, dtype=torch.float64, device=stats.device)
    out = torch.empty(count, 2, dtype=torch.float64, device=stats.device)
    with torch.cuda.device_of(stats):
        _combine_kernel[(count,)](
            stats,
            groups,
            out,
            rows,
            PERIOD=period,
            MAX_AT=max_at,
            BLOCK=min(2048, triton.next_power_of_2(rows)),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


def check_groups(groups: Tensor, rows: int, device: torch.device) -> Tensor:
    """`groups` if it is a uint8 [rows] tensor on `device`, contiguous; ValueError otherwise."""
    if groups.dtype != torch.uint8 or groups.shape != (rows,) or groups.device != device:
        raise ValueError(
            f"expected groups as uint8 [{rows}] on {device}, got {groups.dtype} {list(groups.shape)} on {groups.device}"
        )
    return groups.contiguous()
