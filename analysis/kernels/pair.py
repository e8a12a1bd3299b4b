# mypy: disable-error-code="no-untyped-def"
"""Two int8 linear layers that share a weight, and their error sums, without writing either output.

    sums = pair_error_sums(a0, a0_scales, a1, a1_scales, b, b_scales, bias, y, groups, norm)      # fp64 [2, 2, 8]

Equals `gemm.int8_linear` twice followed by `error_sums.output_sums`: the outputs pass through bf16 in registers with
the same roundings, only the order of fp32 additions differs. A tile leaves one partial sum per row and statistic; a
second
kernel adds a row's tiles and takes the norm's effect, `common.combine` adds rows in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from analysis.kernels import gemm
from analysis.kernels.common import INTERPRETED, check_groups, combine, to_fp32
from analysis.kernels.error_sums import MAX_AT, STATS, Norm, check_outputs, effective_error
from analysis.kernels.gemm import Blocks, dequantized, tile_of

PAIR = Blocks(128, 128, 128, warps=8, stages=3)  # two int32 accumulators: 128 registers a thread
INTERPRETER = Blocks(32, 32, 64, warps=1, stages=1)
REFERENCE_PARTIALS = 3  # yy, zz, wyy
VARIANT_PARTIALS = 6  # ee, ey, ez, max |e|, wee, wey
PARTIALS = REFERENCE_PARTIALS + 2 * VARIANT_PARTIALS


@triton.jit
def _halves(v, M: tl.constexpr, N: tl.constexpr):
    """[M, N] as its left and right half, within registers."""
    return tl.split(tl.permute(tl.reshape(v, [M, 2, N // 2]), [0, 2, 1]))


@triton.jit
def _variant_partials(acc, a_scale, b_scale, bias, y, z, ww, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr):
    """(ee, ey, ez, max |e|, wee, wey) of one variant's block, per row. y, z: fp32 [M, N]; ww: fp32 [1, N]."""
    e = to_fp32(dequantized(acc, a_scale, b_scale, bias, HAS_BIAS, tl.bfloat16)) - y
    ee, ey, largest = tl.sum(e * e, 1), tl.sum(e * y, 1), tl.max(tl.abs(e), 1)
    ez, wee, wey = ee, ee, ee
    if HAS_BIAS:
        ez = tl.sum(e * z, 1)
    if HAS_NORM:
        we = ww * e
        wee = tl.sum(we * e, 1)
        wey = tl.sum(we * y, 1)
    return ee, ey, ez, largest, wee, wey


@triton.jit
def _add(old, new):
    return (
        old[0] + new[0],
        old[1] + new[1],
        old[2] + new[2],
        tl.maximum(old[3], new[3]),
        old[4] + new[4],
        old[5] + new[5],
    )


@triton.jit
def _store_variant(at, plane, keep, sums, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr):
    tl.store(at, sums[0], mask=keep)
    tl.store(at + plane, sums[1], mask=keep)
    if HAS_BIAS:
        tl.store(at + 2 * plane, sums[2], mask=keep)
    tl.store(at + 3 * plane, sums[3], mask=keep)
    if HAS_NORM:
        tl.store(at + 4 * plane, sums[4], mask=keep)
        tl.store(at + 5 * plane, sums[5], mask=keep)


@triton.jit(do_not_specialize=["rows"])
def _pair_kernel(
    first_ptr,
    first_stride,
    first_scales_ptr,
    second_ptr,
    second_stride,
    second_scales_ptr,
    b_ptr,
    b_stride,
    b_scales_ptr,
    bias_ptr,
    weight_ptr,
    y_ptr,
    y_stride,
    partials_ptr,
    rows,
    columns,
    inner,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    block_m, block_n = tile_of(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(columns, N), GROUP)
    at_m = block_m * M + tl.arange(0, M)
    at_n = block_n * N + tl.arange(0, N)
    at_k = tl.arange(0, K)
    wrapped = (at_m % rows).to(tl.int64)[:, None]
    first_ptrs = first_ptr + wrapped * first_stride + at_k[None, :]  # [M, K]
    second_ptrs = second_ptr + wrapped * second_stride + at_k[None, :]  # [M, K]
    b_ptrs = b_ptr + (at_n % columns).to(tl.int64)[None, :] * b_stride + at_k[:, None]  # [K, N]
    acc_first = tl.zeros([M, N], tl.int32)
    acc_second = tl.zeros([M, N], tl.int32)
    for start in range(0, inner, K):
        if EVEN_K:
            first = tl.load(first_ptrs)
            second = tl.load(second_ptrs)
            b = tl.load(b_ptrs)
        else:
            first = tl.load(first_ptrs, mask=at_k[None, :] < inner - start, other=0)
            second = tl.load(second_ptrs, mask=at_k[None, :] < inner - start, other=0)
            b = tl.load(b_ptrs, mask=at_k[:, None] < inner - start, other=0)
        acc_first = tl.dot(first, b, acc_first, out_dtype=tl.int32)
        acc_second = tl.dot(second, b, acc_second, out_dtype=tl.int32)
        first_ptrs += K
        second_ptrs += K
        b_ptrs += K

    in_m = at_m < rows
    first_scale = tl.load(first_scales_ptr + at_m, mask=in_m, other=0.0)
    second_scale = tl.load(second_scales_ptr + at_m, mask=in_m, other=0.0)
    y_rows = y_ptr + at_m.to(tl.int64)[:, None] * y_stride
    none = tl.zeros([M], tl.float32)
    yy, zz, wyy = none, none, none
    sums_first = (none, none, none, none, none, none)
    sums_second = (none, none, none, none, none, none)
    # Half a tile at a time: both accumulators and everything that the sums need would not fit in registers.
    halves_first = _halves(acc_first, M, N)
    halves_second = _halves(acc_second, M, N)
    for half in tl.static_range(2):
        at_n = block_n * N + half * (N // 2) + tl.arange(0, N // 2)
        in_n = at_n < columns
        b_scale = tl.load(b_scales_ptr + at_n, mask=in_n, other=0.0)
        bias = tl.load(bias_ptr + at_n, mask=in_n, other=0.0) if HAS_BIAS else None
        y = to_fp32(tl.load(y_rows + at_n[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0))
        yy += tl.sum(y * y, 1)
        z, ww = y, y
        if HAS_BIAS:
            z = y - to_fp32(bias)[None, :]  # columns past the end: 0 - 0
            zz += tl.sum(z * z, 1)
        if HAS_NORM:
            w = to_fp32(tl.load(weight_ptr + at_n, mask=in_n, other=0.0))
            ww = (w * w)[None, :]
            wyy += tl.sum(ww * y * y, 1)
        new = _variant_partials(halves_first[half], first_scale, b_scale, bias, y, z, ww, HAS_BIAS, HAS_NORM)
        sums_first = _add(sums_first, new)
        new = _variant_partials(halves_second[half], second_scale, b_scale, bias, y, z, ww, HAS_BIAS, HAS_NORM)
        sums_second = _add(sums_second, new)

    # partials [tile of N, statistic, row]
    at = partials_ptr + (block_n * 15).to(tl.int64) * rows + at_m
    tl.store(at, yy, mask=in_m)
    if HAS_BIAS:
        tl.store(at + rows, zz, mask=in_m)
    if HAS_NORM:
        tl.store(at + 2 * rows, wyy, mask=in_m)
    _store_variant(at + 3 * rows, rows, in_m, sums_first, HAS_BIAS, HAS_NORM)
    _store_variant(at + 9 * rows, rows, in_m, sums_second, HAS_BIAS, HAS_NORM)


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    partials_ptr,
    stats_ptr,
    rows,
    tiles,
    columns,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Add the tiles of SIZE rows for one variant, partials [tiles, 15, rows] -> stats [2 * 8, rows]."""
    variant = tl.program_id(1)
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = row < rows
    reference_ptrs = partials_ptr + row
    variant_ptrs = reference_ptrs + (3 + 6 * variant).to(tl.int64) * rows
    none = tl.zeros([SIZE], tl.float32)
    yy, zz, wyy, ee, ey, ez, largest, wee, wey = none, none, none, none, none, none, none, none, none
    for _ in range(tiles):
        yy += tl.load(reference_ptrs, mask=inside, other=0.0)
        ee += tl.load(variant_ptrs, mask=inside, other=0.0)
        ey += tl.load(variant_ptrs + rows, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.load(variant_ptrs + 3 * rows, mask=inside, other=0.0))
        if HAS_BIAS:
            zz += tl.load(reference_ptrs + rows, mask=inside, other=0.0)
            ez += tl.load(variant_ptrs + 2 * rows, mask=inside, other=0.0)
        if HAS_NORM:
            wyy += tl.load(reference_ptrs + 2 * rows, mask=inside, other=0.0)
            wee += tl.load(variant_ptrs + 4 * rows, mask=inside, other=0.0)
            wey += tl.load(variant_ptrs + 5 * rows, mask=inside, other=0.0)
        reference_ptrs += 15 * rows
        variant_ptrs += 15 * rows
    effective_yy, effective_ee = yy, ee
    if HAS_NORM:
        effective_yy, effective_ee = effective_error(yy, ee, ey, wyy, wee, wey, columns, eps)
    out = stats_ptr + (8 * variant).to(tl.int64) * rows + row
    tl.store(out, yy, mask=inside)
    tl.store(out + rows, ee, mask=inside)
    tl.store(out + 2 * rows, ey, mask=inside)
    tl.store(out + 3 * rows, zz if HAS_BIAS else yy, mask=inside)
    tl.store(out + 4 * rows, ez if HAS_BIAS else ey, mask=inside)
    tl.store(out + 5 * rows, largest, mask=inside)
    tl.store(out + 6 * rows, effective_yy, mask=inside)
    tl.store(out + 7 * rows, effective_ee, mask=inside)


def pair_error_sums(
    a0: Tensor,
    a0_scales: Tensor,
    a1: Tensor,
    a1_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    y: Tensor,
    groups: Tensor,
    norm: Norm | None = None,
    *,
    blocks: Blocks | None = None,
) -> Tensor:
    """Error sums of two bf16 int8 layers against y.

    Args:
        a0, a1: int8 [M, K], codes of the same input; a0_scales, a1_scales: fp32 [M].
        b: int8 [N, K]; b_scales: fp32 [N]; bias: [N] or None.
        y: reference output, bf16, fp16 or fp32 [M, N].
        groups, norm: as `error_sums.output_sums`.

    Returns:
        fp64 [2, 2, 8]: variant, group, statistic, as `error_sums.output_sums`. No host synchronisation.

    Raises:
        ValueError: a wrong dtype or shape, naming it.
    """
    for a, a_scales in ((a0, a0_scales), (a1, a1_scales)):
        gemm.check_operands(a, a_scales, b, b_scales, bias, torch.bfloat16)
    rows, columns = a0.shape[0], b.shape[0]
    if a1.shape != a0.shape or y.shape != (rows, columns) or y.dtype == torch.float64:
        raise ValueError(
            f"expected a1 as {list(a0.shape)} and y as [{rows}, {columns}], not fp64; "
            f"got {list(a1.shape)} and {y.dtype} {list(y.shape)}"
        )
    check_outputs([y], y, bias, norm)
    groups = check_groups(groups, rows, y.device)
    stats = torch.empty(2 * STATS, rows, device=y.device)
    if rows:
        blocks = blocks or (INTERPRETER if INTERPRETED.value else PAIR)
        a0, a1, b, y = (v if v.stride(1) == 1 else v.contiguous() for v in (a0, a1, b, y))
        _launch(a0, a0_scales, a1, a1_scales, b, b_scales, bias, y, norm, stats, blocks)
    return combine(stats, groups, period=STATS, max_at=MAX_AT).view(2, STATS, 2).transpose(1, 2)


def _launch(
    a0: Tensor,
    a0_scales: Tensor,
    a1: Tensor,
    a1_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    y: Tensor,
    norm: Norm | None,
    stats: Tensor,
    blocks: Blocks,
) -> None:
    (rows, inner), columns = a0.shape, b.shape[0]
    tiles = triton.cdiv(columns, blocks.n)
    partials = torch.empty(tiles, PARTIALS, rows, device=y.device)
    has = {"HAS_BIAS": bias is not None, "HAS_NORM": norm is not None}
    with torch.cuda.device_of(y):
        _pair_kernel[(triton.cdiv(rows, blocks.m) * tiles,)](
            a0,
            a0.stride(0),
            a0_scales.contiguous(),
            a1,
            a1.stride(0),
            a1_scales.contiguous(),
            b,
            b.stride(0),
            b_scales.contiguous(),
            None if bias is None else bias.contiguous(),
            None if norm is None else norm[0].contiguous(),
            y,
            y.stride(0),
            partials,
            rows,
            columns,
            inner,
            **has,
            EVEN_K=inner % blocks.k == 0,
            M=blocks.m,
            N=blocks.n,
            K=blocks.k,
            GROUP=gemm.GROUP_ROWS,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            enable_fp_fusion=False,
        )
        size = 32 if INTERPRETED.value else 128
        _rows_kernel[(triton.cdiv(rows, size), 2)](
            partials,
            stats,
            rows,
            tiles,
            columns,
            0.0 if norm is None else float(norm[1]),
            **has,
            SIZE=size,
            num_warps=4,
            enable_fp_fusion=True,
        )
