# mypy: disable-error-code="no-untyped-def"
"""Triton sums of output errors: one pass over the reference and one or two quantised outputs.

    sums = output_sums([yq_shipped, yq_fixed], y, bias, groups, norm)     # fp64 [V, 2, 8], order stats.OUTPUT_SUMS

Twin of `measure.stats.output_sums`. Each row leaves fp32 sums, which `common.combine` adds in fp64; values between
1e-15 and 1e15 keep their squares inside fp32's range.

The effective error, after RMSNorm n(v) = v * r(v) * w with r(v) = 1 / sqrt(mean(v^2) + eps), comes from sums of the
same pass. With yq = y + e, r_q = r(yq), r_y = r(y):

    n(yq) - n(y) = w * (e * r_q + y * d),   d = r_q - r_y = -(mean(yq^2) - mean(y^2)) * r_q^2 * r_y^2 / (r_q + r_y)
    sum |n(yq) - n(y)|^2 = r_q^2 * sum w^2 e^2 + 2 * r_q * d * sum w^2 e y + d^2 * sum w^2 y^2

with mean(yq^2) - mean(y^2) = mean(2 e y + e^2). No two nearly equal quantities are subtracted: rounding errors are
relative to e, not to y. What cancels is the part of e along y, which the norm removes; it costs a factor of
1 / (1 - cosine(e, y)^2) in accuracy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from analysis.kernels.common import check_groups, combine, fold, launch, to_fp32

WARPS = 1
BLOCK = 512
STATS = 8  # in the order of measure.stats.OUTPUT_SUMS
MAX_AT = 5  # max_abs_e merges by maximum

Norm = tuple[Tensor, float]  # weight [N] and eps of the RMSNorm behind the layer


@triton.jit
def effective_error(yy, ee, ey, wyy, wee, wey, columns, eps):
    """(sum n(y)^2, sum (n(yq) - n(y))^2) of rows, from their plain and weighted sums."""
    mean_y = yy / columns + eps
    gained = (2.0 * ey + ee) / columns
    r_y = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean_y))
    r_q = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean_y + gained))
    d = -gained * r_q * r_q * r_y * r_y / (r_q + r_y)
    return r_y * r_y * wyy, tl.maximum(r_q * r_q * wee + 2.0 * r_q * d * wey + d * d * wyy, 0.0)


@triton.jit
def _difference(yq, y):
    """yq - y in fp32, from fp64 if y is."""
    if y.dtype == tl.float64:
        return (yq.to(tl.float64) - y).to(tl.float32)
    return to_fp32(yq) - to_fp32(y)


@triton.jit
def _variant_sums(yq, y, z, ww, wy, old, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, SIZE: tl.constexpr):
    """old + (ee, ey, ez, max |e|, wee, wey) of one block of columns."""
    e = _difference(yq, y)
    y = y.to(tl.float32) if y.dtype == tl.float64 else to_fp32(y)
    return (
        old[0] + fold(e * e, SIZE),
        old[1] + fold(e * y, SIZE),
        old[2] + fold(e * z, SIZE) if HAS_BIAS else old[2],
        tl.maximum(old[3], tl.max(tl.reshape(tl.abs(e), [SIZE // 8, 8]), axis=1)),
        old[4] + fold(e * e * ww, SIZE) if HAS_NORM else old[4],
        old[5] + fold(e * wy, SIZE) if HAS_NORM else old[5],
    )


@triton.jit
def _store_row(stats_ptr, rows, sums, yy, zz, wyy, columns, eps, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr):
    ee, ey, largest = tl.sum(sums[0], 0), tl.sum(sums[1], 0), tl.max(sums[3], 0)
    ez = tl.sum(sums[2], 0) if HAS_BIAS else ey
    effective_yy, effective_ee = yy, ee
    if HAS_NORM:
        wee, wey = tl.sum(sums[4], 0), tl.sum(sums[5], 0)
        effective_yy, effective_ee = effective_error(yy, ee, ey, wyy, wee, wey, columns, eps)
    tl.store(stats_ptr, yy)
    tl.store(stats_ptr + rows, ee)
    tl.store(stats_ptr + 2 * rows, ey)
    tl.store(stats_ptr + 3 * rows, zz)
    tl.store(stats_ptr + 4 * rows, ez)
    tl.store(stats_ptr + 5 * rows, largest)
    tl.store(stats_ptr + 6 * rows, effective_yy)
    tl.store(stats_ptr + 7 * rows, effective_ee)


@triton.jit(do_not_specialize=["rows"])
def _sums_kernel(
    y_ptr,
    y_stride,
    first_ptr,
    first_stride,
    second_ptr,
    second_stride,
    bias_ptr,
    weight_ptr,
    groups_ptr,
    stats_ptr,
    rows,
    columns,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PAIR: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(groups_ptr + row) == 0:
        return
    at = tl.arange(0, SIZE)
    none = tl.zeros([SIZE // 8], tl.float32)
    yy, zz, wyy = none, none, none
    first = (none, none, none, none, none, none)
    second = (none, none, none, none, none, none)
    for start in range(0, columns, SIZE):
        column = start + at
        inside = column < columns
        y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0)
        v = y.to(tl.float32) if y.dtype == tl.float64 else to_fp32(y)
        z, ww, wy = v, v, v
        yy += fold(v * v, SIZE)
        if HAS_BIAS:
            z = -_difference(tl.load(bias_ptr + column, mask=inside, other=0.0), y)
            zz += fold(z * z, SIZE)
        if HAS_NORM:
            w = to_fp32(tl.load(weight_ptr + column, mask=inside, other=0.0))
            ww = w * w
            wy = ww * v
            wyy += fold(wy * v, SIZE)
        yq = tl.load(first_ptr + row * first_stride + column, mask=inside, other=0.0)
        first = _variant_sums(yq, y, z, ww, wy, first, HAS_BIAS, HAS_NORM, SIZE)
        if PAIR:
            yq = tl.load(second_ptr + row * second_stride + column, mask=inside, other=0.0)
            second = _variant_sums(yq, y, z, ww, wy, second, HAS_BIAS, HAS_NORM, SIZE)
    yy = tl.sum(yy, 0)
    zz = tl.sum(zz, 0) if HAS_BIAS else yy
    wyy = tl.sum(wyy, 0) if HAS_NORM else yy
    stats_ptr += row
    _store_row(stats_ptr, rows, first, yy, zz, wyy, columns, eps, HAS_BIAS, HAS_NORM)
    if PAIR:
        _store_row(stats_ptr + 8 * rows, rows, second, yy, zz, wyy, columns, eps, HAS_BIAS, HAS_NORM)


def output_sums(
    yqs: list[Tensor], y: Tensor, bias: Tensor | None, groups: Tensor, norm: Norm | None
) -> Tensor:  # fmt: skip
    """Sums of the output error of several variants, per group.

    Args:
        yqs: quantised outputs, each fp32, fp16 or bf16 [M, N]; V >= 1.
        y: reference output [M, N]; may also be fp64.
        bias: [N] or None; z = y - bias.
        groups: uint8 [M]; rows of group 0 contribute nothing, NaN included.
        norm: weight [N] and eps of the RMSNorm that follows the layer, or None: the effective sums are the plain ones.

    Returns:
        fp64 [V, 2, 8] on y's device: group 1 and 2, in the order of stats.OUTPUT_SUMS. No host synchronisation.

    Raises:
        ValueError: no variant, or a wrong shape or dtype, naming it.
    """
    check_outputs(yqs, y, bias, norm)
    rows, columns = y.shape
    groups = check_groups(groups, rows, y.device)
    stats = torch.empty(len(yqs) * STATS, rows, device=y.device)
    y, *yqs = [v if v.stride(1) == 1 else v.contiguous() for v in (y, *yqs)]
    bias = None if bias is None else bias.contiguous()
    weight = None if norm is None else norm[0].contiguous()
    eps = 0.0 if norm is None else float(norm[1])
    size = max(16, min(BLOCK, triton.next_power_of_2(columns)))
    for i in range(0, len(yqs) if rows else 0, 2):
        first = yqs[i]
        second = yqs[i + 1] if i + 1 < len(yqs) else None
        strides = y.stride(0), first.stride(0), 0 if second is None else second.stride(0)
        launch(
            _sums_kernel,
            (rows, 1, 1),
            (y, strides[0], first, strides[1], second, strides[2], bias, weight, groups, stats[i * STATS :], rows,
             columns, eps),
            (bias is not None, weight is not None, second is not None, size),
            num_warps=WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return combine(stats, groups, period=STATS, max_at=MAX_AT)


def check_outputs(yqs: list[Tensor], y: Tensor, bias: Tensor | None, norm: Norm | None) -> None:
    if not yqs or y.ndim != 2 or y.shape[1] == 0:
        raise ValueError(f"expected at least one variant and y as [M, N], got {len(yqs)} and {list(y.shape)}")
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    for name, v, allowed in (
        ("y", y, (*narrow, torch.float64)),
        *((f"yqs[{i}]", v, narrow) for i, v in enumerate(yqs)),
    ):
        if v.shape != y.shape or v.dtype not in allowed:
            raise ValueError(
                f"expected {name} as floating {list(y.shape)}, got {v.dtype} {list(v.shape)}; "
                "measure.stats.output_sums takes any dtype"
            )
    for name, vector in (("bias", bias), ("norm weight", None if norm is None else norm[0])):
        if vector is not None and (vector.shape != y.shape[1:] or vector.dtype not in (*narrow, torch.float64)):
            raise ValueError(f"expected {name} as floating [{y.shape[1]}], got {vector.dtype} {list(vector.shape)}")
