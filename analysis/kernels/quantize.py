# mypy: disable-error-code="no-untyped-def"
"""Triton row quantisers: `shipped` with its defect, `fixed` without it, and one pass that does both and counts errors.

Contract in `analysis.numerics`; x [M, K] is fp32, fp16 or bf16, codes int8 [M, K], scales fp32 [M]. `fixed` equals the
reference bit for bit. `shipped` keeps Triton's approximate `/`, so on a GPU a few codes in 1e5 next to a decision
boundary differ by one; in the interpreter it equals the reference too.

    codes, scales = quantize_rows(x, Rounding.FIXED)
    both = quantize_pass(x, (Rounding.SHIPPED, Rounding.FIXED), groups)      # x is read once from memory

One program takes one row. For codes alone the row stays in registers; the pass with sums needs those, and takes the row
in two sweeps, of which the second finds it in cache. Launches forbid FMA contraction: x * inv followed by an addition
must round twice, as the contract does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from analysis.kernels.common import check_groups, combine, fold, from_fp32, launch, to_fp32
from analysis.kernels.rounding import INF_BITS, code_error, half_away, inverse, store_stats, truncated
from analysis.numerics import Rounding, check_rows

WARPS, BLOCK = 2, 512  # of the pass with sums, which needs registers
CODES_WARPS, CODES_BLOCK = 4, 1024  # of the codes alone
WIDEST_KEPT = 8192  # columns of a row that is kept in registers
ROW_STATS = 4  # rows, nonfinite_rows, zero_rows, sum_crest
STATS = 9  # of a rounding: those of the row, and five in the order of measure.stats.CODE_SUMS


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x_ptr,
    x_stride,
    cast_ptr,
    shipped_ptr,
    shipped_scales_ptr,
    fixed_ptr,
    fixed_scales_ptr,
    groups_ptr,
    measured_ptr,
    stats_ptr,
    rows,
    columns,
    SHIPPED: tl.constexpr,
    FIXED: tl.constexpr,
    CAST: tl.constexpr,
    STATS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    at = tl.arange(0, SIZE)

    top = tl.zeros([SIZE], tl.float32)
    top_shipped = tl.zeros([SIZE], tl.float32)
    for start in range(0, columns, SIZE):
        x = to_fp32(tl.load(x_ptr + start + at, mask=start + at < columns, other=0.0))
        top = tl.maximum(top, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
        if SHIPPED:
            top_shipped = tl.maximum(top_shipped, tl.abs(x))
    # As integers |x| orders like |x|, with Inf and NaN on top: this maximum swallows no NaN either.
    top_bits = tl.max(top.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    finite = top_bits < INF_BITS
    inv, measurable = inverse(top_bits)
    if FIXED:
        scale = tl.where(measurable, tl.math.div_rn(1.0, inv), 0.0)
        tl.store(fixed_scales_ptr + row, tl.where(finite, scale, float("nan")))
    if SHIPPED:
        shipped_inv = 127.0 / tl.max(top_shipped, 0)
        tl.store(shipped_scales_ptr + row, 1 / shipped_inv)

    none = tl.zeros([SIZE // 8], tl.float32)
    squares = none
    sums_shipped = (none, none, none, none, none)
    sums_fixed = (none, none, none, none, none)
    for start in range(0, columns, SIZE):
        inside = start + at < columns
        x = to_fp32(tl.load(x_ptr + start + at, mask=inside, other=0.0))
        out = row * columns + start + at
        if CAST:
            tl.store(cast_ptr + out, from_fp32(x, tl.bfloat16), mask=inside)
        s = x * inv
        if STATS:
            squares += fold(s * s, SIZE)
        s = tl.where(measurable, s, 0.0)
        if SHIPPED:
            wide = truncated(x * shipped_inv)
            tl.store(shipped_ptr + out, wide.to(tl.int8), mask=inside)
            if STATS:
                # The byte that was stored: a row too small for its scale makes v infinite, far outside int8.
                code = ((wide & 0xFF) ^ 0x80) - 0x80
                e = code_error(code, s, x, SIZE)
                sums_shipped = (
                    sums_shipped[0] + e[0],
                    sums_shipped[1] + e[1],
                    sums_shipped[2] + e[2],
                    sums_shipped[3] + e[3],
                    sums_shipped[4] + e[4],
                )
        if FIXED:
            code = half_away(s).to(tl.int8)
            tl.store(fixed_ptr + out, code, mask=inside)
            if STATS:
                e = code_error(code, s, x, SIZE)
                sums_fixed = (
                    sums_fixed[0] + e[0],
                    sums_fixed[1] + e[1],
                    sums_fixed[2] + e[2],
                    sums_fixed[3] + e[3],
                    sums_fixed[4] + e[4],
                )

    if STATS:
        stats_ptr += row
        group = tl.load(groups_ptr + row)
        tl.store(measured_ptr + row, tl.where(finite, group, 0))
        counts = finite.to(tl.float32)
        rms = tl.sqrt(tl.sum(squares, 0) / columns)
        nonzero = finite & (top_bits > 0)
        crest = tl.where(nonzero, top_bits.to(tl.float32, bitcast=True) * inv / rms, 0.0)
        zero = tl.where(top_bits == 0, 1.0, 0.0)
        if SHIPPED:
            store_stats(stats_ptr, rows, finite, counts, zero, crest, sums_shipped)
            stats_ptr += 9 * rows
        if FIXED:
            store_stats(stats_ptr, rows, finite, counts, zero, crest, sums_fixed)


@triton.jit
def _codes_kernel(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    columns,
    SHIPPED: tl.constexpr,
    STEPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Codes and scales alone, of a row that stays in registers: STEPS pieces of SIZE columns, all read at once."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    pieces = ()
    for i in tl.static_range(STEPS):
        column = i * SIZE + at
        piece = tl.load(x_ptr + row * x_stride + column, mask=column < columns, other=0.0)
        pieces = pieces + (piece,)  # type: ignore[assignment]  # noqa: RUF005
    top = tl.zeros([SIZE], tl.float32)
    for i in tl.static_range(STEPS):
        size = tl.abs(to_fp32(pieces[i]))
        top = tl.maximum(top, size) if SHIPPED else tl.maximum(top, size, propagate_nan=tl.PropagateNan.ALL)
    if SHIPPED:
        inv = 127.0 / tl.max(top, 0)
        scale = 1 / inv
        measurable = True
    else:
        top_bits = tl.max(top.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        inv, measurable = inverse(top_bits)
        scale = tl.where(measurable, tl.math.div_rn(1.0, inv), 0.0)
        scale = tl.where(top_bits < INF_BITS, scale, float("nan"))
    tl.store(scales_ptr + row, scale)
    for i in tl.static_range(STEPS):
        column = i * SIZE + at
        s = to_fp32(pieces[i]) * inv
        code = truncated(s) if SHIPPED else half_away(tl.where(measurable, s, 0.0))
        tl.store(codes_ptr + row * columns + column, code.to(tl.int8), mask=column < columns)


@dataclass(frozen=True)
class QuantizedPass:
    """What one pass over x [M, K] leaves, V roundings in their order.

    x_bf16: [M, K]; codes: int8 [V, M, K]; scales: fp32 [V, M].
    groups: uint8 [M], the groups given, with rows that hold NaN or Inf set to 0.
    sums: fp64 [V, 2, 9], per rounding and group 1 and 2: rows, nonfinite_rows (by the group they had), zero_rows,
        sum_crest, and the order of `measure.stats.CODE_SUMS`.
    """

    x_bf16: Tensor
    codes: Tensor
    scales: Tensor
    groups: Tensor
    sums: Tensor

    @property
    def row_sums(self) -> Tensor:
        """fp64 [2, 4]: what does not depend on the rounding."""
        return self.sums[0, :, :ROW_STATS]

    @property
    def code_sums(self) -> Tensor:
        """fp64 [V, 2, 5]."""
        return self.sums[:, :, ROW_STATS:]


def quantize_rows(
    x: Tensor,
    rounding: Rounding,
    generator: torch.Generator | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Triton twin of `numerics.quantize_rows` for SHIPPED and FIXED.

    Args:
        x: bf16, fp16 or fp32 [M, K]; any strides; M may be 0.
        rounding: SHIPPED or FIXED.
        generator: unused, both are deterministic.
        out: contiguous (int8 [M, K], fp32 [M]) to write into.

    Returns:
        codes int8 [M, K] and scales fp32 [M].
        Zero rows: codes 0, scale 0. FIXED gives rows with NaN or Inf codes 0 and scale NaN. SHIPPED does with them what
        the public kernel does: the maximum swallows a NaN, whose code becomes 0 while the row's other codes and scale
        look sound; an Inf leaves codes 0 and scale Inf.

    Raises:
        ValueError: x is not a floating [M, K] tensor, or the rounding has no Triton kernel.
    """
    _check(x, (rounding,))
    codes, scales = out if out is not None else _outputs(x)
    _launch(x, {rounding: (codes, scales)})
    return codes, scales


def quantize_pass(x: Tensor, roundings: tuple[Rounding, ...], groups: Tensor) -> QuantizedPass:
    """Quantise x by one or both kernels, cast it to bf16 and add up the errors of the codes, reading x once.

    Args:
        x: bf16, fp16 or fp32 [M, K]; any strides; M may be 0.
        roundings: (SHIPPED, FIXED), or either alone.
        groups: uint8 [M]; 0 leaves a row out of the sums, 1 and 2 are summed apart.

    Errors are measured against the contract's s, with its correctly rounded division. Sums are fp32 within a row and
    fp64 over rows; counts are exact. A bf16 x is not copied.

    Raises:
        ValueError: as `quantize_rows`; groups is not uint8 [M].
    """
    _check(x, roundings)
    groups = check_groups(groups, x.shape[0], x.device)
    ordered, positions = _order(roundings)
    codes = torch.empty(len(ordered), *x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(len(ordered), x.shape[0], device=x.device)
    cast = x if x.dtype == torch.bfloat16 else torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    measured = torch.empty_like(groups)
    stats = torch.empty(STATS * len(ordered), x.shape[0], device=x.device)
    variants = dict(zip(ordered, zip(codes, scales, strict=True), strict=True))
    _launch(x, variants, cast=None if cast is x else cast, groups=groups, measured=measured, stats=stats)
    sums = combine(stats, groups, period=STATS)
    if positions is not None:
        codes, scales, sums = codes[positions], scales[positions], sums[positions]
    return QuantizedPass(cast, codes, scales, measured, sums)


def _check(x: Tensor, roundings: tuple[Rounding, ...]) -> None:
    check_rows(x)
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"expected x as fp32, fp16 or bf16, got {x.dtype}; cast it first")
    _order(roundings)


@cache
def _order(roundings: tuple[Rounding, ...]) -> tuple[tuple[Rounding, ...], list[int] | None]:
    """The roundings as the kernel takes them, SHIPPED first, and where the caller's lie among those; None: the same."""
    if not roundings or len(set(roundings)) != len(roundings):
        raise ValueError(f"expected one or two different roundings, got {[str(r) for r in roundings]}")
    for rounding in roundings:
        if rounding not in (Rounding.SHIPPED, Rounding.FIXED):
            raise ValueError(
                f"rounding {str(rounding)!r} has no Triton kernel, only 'shipped' and 'fixed' do; "
                "use analysis.numerics.quantize_rows, the reference, for it"
            )
    ordered = tuple(r for r in (Rounding.SHIPPED, Rounding.FIXED) if r in roundings)
    return ordered, None if ordered == roundings else [ordered.index(rounding) for rounding in roundings]


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return codes, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def _launch(
    x: Tensor,
    variants: dict[Rounding, tuple[Tensor, Tensor]],
    cast: Tensor | None = None,
    groups: Tensor | None = None,
    measured: Tensor | None = None,
    stats: Tensor | None = None,
) -> None:
    rows, columns = x.shape
    if rows == 0:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    if stats is None and columns <= WIDEST_KEPT:
        ((rounding, (codes, scales)),) = variants.items()
        size = max(16, min(CODES_BLOCK, triton.next_power_of_2(columns)))
        launch(
            _codes_kernel,
            (rows, 1, 1),
            (x, x.stride(0), codes, scales, columns),
            (rounding == Rounding.SHIPPED, triton.cdiv(columns, size), size),
            num_warps=CODES_WARPS,
            enable_fp_fusion=False,
        )
        return
    shipped, fixed = variants.get(Rounding.SHIPPED, (None, None)), variants.get(Rounding.FIXED, (None, None))
    size = max(16, min(BLOCK, triton.next_power_of_2(columns)))
    launch(
        _rows_kernel,
        (rows, 1, 1),
        (x, x.stride(0), cast, *shipped, *fixed, groups, measured, stats, rows, columns),
        (Rounding.SHIPPED in variants, Rounding.FIXED in variants, cast is not None, stats is not None, size),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
