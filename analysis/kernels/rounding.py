# mypy: disable-error-code="no-untyped-def"
"""What a row quantiser does to a row, as Triton device functions: its scale, both roundings, and the codes' errors."""

from __future__ import annotations

import triton
import triton.language as tl

from analysis.kernels.common import fold

INF_BITS = tl.constexpr(0x7F800000)
TINY_GAIN = tl.constexpr(2.0**126)  # lifts a row too small for 127 / absmax to where its crest factor can be taken
SIGN_BIT = tl.constexpr(-(2**31))
BELOW_HALF_BITS = tl.constexpr(0x3EFFFFFF)  # 0.5 - 2**-25
HALF_AS_INT8 = tl.constexpr(int(0.5))


@triton.jit
def half_away(s):
    """What truncation turns into s rounded half away from zero, for every fp32 |s| < 2**22.

    The offset is the fp32 below 0.5 with the sign of s: with 0.5 itself s = 0.5 - 2**-25 would be carried up to 1, and
    from |s| = 0.5 on the sum rounds up to the integer that ties need.
    """
    offset = (s.to(tl.int32, bitcast=True) & SIGN_BIT) | BELOW_HALF_BITS
    return s + offset.to(tl.float32, bitcast=True)


@triton.jit
def truncated(v):
    """int32 codes of the kernel under study, frozen on purpose: its offset is cast to int8, which makes it 0, before it
    is added, and storing the float to int8 then truncates toward zero."""
    v += tl.where(v >= 0, 1, -1) * HALF_AS_INT8
    return v.to(tl.int32)


@triton.jit
def inverse(top_bits):
    """(127 / absmax correctly rounded, whether codes can be made with it); top_bits: a row's absmax as an integer."""
    inv = tl.math.div_rn(127.0, top_bits.to(tl.float32, bitcast=True))
    measurable = (top_bits < INF_BITS) & (inv < float("inf"))
    return tl.where(measurable, inv, TINY_GAIN), measurable


@triton.jit
def code_error(code, s, x, SIZE: tl.constexpr):
    """The five sums of `measure.stats.code_sums`, folded.

    code - s is exact, so |code - s| > 0.5 says that the code is neither the nearest integer nor one of a tie's two.
    """
    code = code.to(tl.float32)
    error = code - s
    size = tl.abs(code)
    wrong = (tl.abs(error) > 0.5).to(tl.float32)
    zeroed = ((code == 0.0) & (x != 0.0)).to(tl.float32)
    saturated = (size == 127.0).to(tl.float32)
    return (
        fold(size - tl.abs(s), SIZE),
        fold(error * error, SIZE),
        fold(wrong, SIZE),
        fold(zeroed, SIZE),
        fold(saturated, SIZE),
    )


@triton.jit
def store_stats(stats_ptr, rows, finite, counts, zero, crest, sums):
    """A row's nine statistics of one rounding: rows, nonfinite, zero, crest, and the five of its codes."""
    tl.store(stats_ptr, counts)
    tl.store(stats_ptr + rows, 1.0 - counts)
    tl.store(stats_ptr + 2 * rows, zero)
    tl.store(stats_ptr + 3 * rows, crest)
    for i in tl.static_range(5):
        tl.store(stats_ptr + (4 + i) * rows, tl.where(finite, tl.sum(sums[i], 0), 0.0))
