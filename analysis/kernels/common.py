# mypy: disable-error-code="no-untyped-def"
"""What the Triton kernels share: launching, casts that the interpreter gets wrong, and the fp64 sum of row statistics.

Triton's interpreter truncates fp32 -> bf16 and drops the low bits of denormal bf16, so both casts are written out.
On a GPU they are the hardware's own (round to nearest even).

Every kernel that sums writes one fp32 statistic per row, [S, M], and `combine` adds them per group in fp64: no atomics,
so two runs give the same bits; no host synchronisation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...], **options: Any
) -> None:
    """`kernel[grid](*args, *constants, **options)` on the device of the first argument, a tensor, in fewer steps.

    Triton works out at every launch which compiled kernel its arguments need; in a hook, where a layer takes six
    launches, that is most of what the host does. Here the answer is kept by all that it depends on: dtypes, whether
    pointers and integers divide by 16, constants and options. `constants` are the kernel's last parameters.
    """
    device = args[0].get_device()
    if device != (torch.cuda.current_device() if device >= 0 else device):
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, **options)
    key = (kernel, device, *map(_kind, args), constants, *options.items())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*args, *constants)
        return None
    compiled = kernel[grid](*args, *constants, **options)
    if compiled is not None and not INTERPRETED.value:
        _compiled[key] = compiled
    return None


def _kind(arg: Any) -> Any:
    """What Triton compiles a kernel for, of one argument."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg < 2**31
    return type(arg)


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


@triton.jit
def fold(v, SIZE: tl.constexpr):
    """Add neighbours, eight to one, within a thread."""
    return tl.sum(tl.reshape(v, [SIZE // 8, 8]), axis=1)


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    stats_ptr, groups_ptr, out_ptr, rows, PERIOD: tl.constexpr, MAX_AT: tl.constexpr, BLOCK: tl.constexpr
):
    statistic = tl.program_id(0)
    stats_ptr += statistic.to(tl.int64) * rows
    out_ptr += statistic // PERIOD * 2 * PERIOD + statistic % PERIOD
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
        tl.store(out_ptr, tl.max(total_1, 0))
        tl.store(out_ptr + PERIOD, tl.max(total_2, 0))
    else:
        tl.store(out_ptr, tl.sum(total_1, 0))
        tl.store(out_ptr + PERIOD, tl.sum(total_2, 0))


def combine(stats: Tensor, groups: Tensor, period: int = 1, max_at: int = -1) -> Tensor:
    """Per-row statistics, fp32 [V * period, M], added over the rows of group 1 and of group 2 -> fp64 [V, 2, period].

    Statistic s with s % period == max_at merges by maximum (of values >= 0). Rows of other groups count for nothing,
    NaN included. groups: uint8 [M].
    """
    count, rows = stats.shape
    shape = (count // period, 2, period)
    if rows == 0:
        return torch.zeros(shape, dtype=torch.float64, device=stats.device)
    out = torch.empty(shape, dtype=torch.float64, device=stats.device)
    block = min(2048, triton.next_power_of_2(rows))
    launch(
        _combine_kernel, (count, 1, 1), (stats, groups, out, rows), (period, max_at, block),
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def check_groups(groups: Tensor, rows: int, device: torch.device) -> Tensor:
    """`groups` if it is a uint8 [rows] tensor on `device`, contiguous; ValueError otherwise."""
    if groups.dtype != torch.uint8 or groups.shape != (rows,) or groups.device != device:
        raise ValueError(
            f"expected groups as uint8 [{rows}] on {device}, got {groups.dtype} {list(groups.shape)} on {groups.device}"
        )
    return groups.contiguous()
