# mypy: disable-error-code="no-untyped-def"
"""Triton int8 linear layer: exact int32 products, the contract's epilogue, every tail masked.

    y = int8_linear(codes, scales, w_codes, w_scales, bias)       # [M, N] bf16, equals numerics.int8_linear bit for bit
    ys = int8_linears(codes, scales, w_codes, w_scales, bias)     # the same for codes [V, M, K], in one launch

The block shape is chosen from the problem's size, without tuning at run time: a user's first call compiles one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from analysis.kernels.common import INTERPRETED, from_fp32, launch, to_fp32

GROUP_ROWS = 8  # block rows that share weight tiles in L2


@dataclass(frozen=True)
class Blocks:
    """A block shape [m, n] with inner step k, and how many warps and pipeline stages work on it."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


LARGE = Blocks(128, 128, 128, warps=4, stages=3)  # two of them share a multiprocessor
SMALL = Blocks(64, 128, 128, warps=4, stages=3)
INTERPRETER = Blocks(32, 32, 64, warps=1, stages=1)


@triton.jit
def tile_of(pid, blocks_m, blocks_n, GROUP: tl.constexpr):
    """Program id -> (block row, block column), GROUP block rows at a time, so that they meet their weights in L2."""
    width = GROUP * blocks_n
    first = (pid // width) * GROUP
    height = tl.minimum(blocks_m - first, GROUP)
    return first + (pid % width) % height, (pid % width) // height


@triton.jit
def dequantized(acc, a_scale, b_scale, bias, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """The contract's epilogue: DTYPE(fp32(acc) * a_scale * b_scale), then + DTYPE(bias), in DTYPE."""
    y = from_fp32(acc.to(tl.float32) * a_scale[:, None] * b_scale[None, :], DTYPE)
    if HAS_BIAS:
        bias = to_fp32(from_fp32(to_fp32(bias), DTYPE))
        y = from_fp32(to_fp32(y) + bias[None, :], DTYPE)
    return y


@triton.jit
def _finish(
    acc,
    block_m,
    block_n,
    a_scales_ptr,
    b_scales_ptr,
    bias_ptr,
    y_ptr,
    rows,
    columns,
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Scale a finished tile, add the bias and store what lies inside y [rows, columns]."""
    at_m = block_m * M + tl.arange(0, M)
    at_n = block_n * N + tl.arange(0, N)
    in_m, in_n = at_m < rows, at_n < columns
    a_scale = tl.load(a_scales_ptr + at_m, mask=in_m, other=0.0)
    b_scale = tl.load(b_scales_ptr + at_n, mask=in_n, other=0.0)
    bias = tl.load(bias_ptr + at_n, mask=in_n, other=0.0) if HAS_BIAS else None
    y = dequantized(acc, a_scale, b_scale, bias, HAS_BIAS, y_ptr.dtype.element_ty)
    y_ptrs = y_ptr + at_m.to(tl.int64)[:, None] * columns + at_n[None, :]
    tl.store(y_ptrs, y, mask=in_m[:, None] & in_n[None, :])


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    a_ptr,
    a_plane,
    a_stride,
    a_scales_ptr,
    b_ptr,
    b_stride,
    b_scales_ptr,
    bias_ptr,
    y_ptr,
    rows,
    columns,
    inner,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    blocks_m, blocks_n = tl.cdiv(rows, M), tl.cdiv(columns, N)
    plane = (tl.program_id(0) // (blocks_m * blocks_n)).to(tl.int64)
    block_m, block_n = tile_of(tl.program_id(0) % (blocks_m * blocks_n), blocks_m, blocks_n, GROUP)
    a_ptr += plane * a_plane
    a_scales_ptr += plane * rows
    y_ptr += plane * rows * columns
    at_m = block_m * M + tl.arange(0, M)
    at_n = block_n * N + tl.arange(0, N)
    at_k = tl.arange(0, K)
    # Past the last row the load wraps to rows that exist; what comes of them is never stored.
    a_ptrs = a_ptr + (at_m % rows).to(tl.int64)[:, None] * a_stride + at_k[None, :]  # [M, K]
    b_ptrs = b_ptr + (at_n % columns).to(tl.int64)[None, :] * b_stride + at_k[:, None]  # [K, N]
    acc = tl.zeros([M, N], tl.int32)
    for start in range(0, inner, K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=at_k[None, :] < inner - start, other=0)
            b = tl.load(b_ptrs, mask=at_k[:, None] < inner - start, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        a_ptrs += K
        b_ptrs += K
    _finish(
        acc, block_m, block_n, a_scales_ptr, b_scales_ptr, bias_ptr, y_ptr, rows, columns, HAS_BIAS=HAS_BIAS, M=M, N=N
    )  # fmt: skip


def pick_blocks(rows: int) -> Blocks:
    """The block shape for a layer with so many rows."""
    if INTERPRETED.value:
        return INTERPRETER
    return LARGE if rows > 512 else SMALL


def int8_linear(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Triton twin of `numerics.int8_linear`.

    Args:
        a: int8 [M, K]; M may be 0.
        a_scales: fp32 [M].
        b: int8 [N, K].
        b_scales: fp32 [N].
        bias: [N] of any floating dtype, rounded to out_dtype first; or None.
        out_dtype: bf16, fp16 or fp32.
        out: contiguous [M, N] of out_dtype to write into.
        blocks: block shape; None picks one.

    Raises:
        ValueError: a wrong dtype or shape, naming it.
    """
    check_operands(a, a_scales, b, b_scales, bias, out_dtype)
    y = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device) if out is None else out
    _multiply(a if a.stride(1) == 1 else a.contiguous(), a_scales, b, b_scales, bias, y, 1, blocks)
    return y


def int8_linears(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, *, blocks: Blocks | None = None
) -> Tensor:
    """`int8_linear` of V inputs of one shape, in one launch: the last tiles of one keep company with the next's first.

    a: int8 [V, M, K], contiguous; a_scales: fp32 [V, M], contiguous -> bf16 [V, M, N]. The rest as `int8_linear`.
    """
    check_operands(a[0], a_scales[0], b, b_scales, bias, torch.bfloat16)
    if not a.is_contiguous() or not a_scales.is_contiguous():
        raise ValueError("expected codes and scales contiguous, got a view; stack them first")
    y = torch.empty(*a.shape[:2], b.shape[0], dtype=torch.bfloat16, device=a.device)
    _multiply(a, a_scales, b, b_scales, bias, y, len(a), blocks)
    return y


def _multiply(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, y: Tensor, planes: int,
    blocks: Blocks | None,
) -> None:  # fmt: skip
    """Fill y [(V,) M, N] from a [(V,) M, K]."""
    rows, inner = a.shape[-2:]
    columns = b.shape[0]
    if rows == 0:
        return
    b = b if b.stride(1) == 1 else b.contiguous()
    if bias is not None:
        bias = (bias.to(y.dtype) if bias.dtype == torch.float64 else bias).contiguous()
    blocks = blocks or pick_blocks(rows)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": False}
    scales = a_scales.contiguous(), b_scales.contiguous()
    has_bias, shape = bias is not None, (blocks.m, blocks.n, blocks.k, GROUP_ROWS)
    grid = (planes * triton.cdiv(rows, blocks.m) * triton.cdiv(columns, blocks.n), 1, 1)
    args = (a, rows * inner, a.stride(-2), scales[0], b, b.stride(0), scales[1], bias, y, rows, columns, inner)
    launch(_linear_kernel, grid, args, (has_bias, inner % blocks.k == 0, *shape), **options)


def check_operands(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> None:  # fmt: skip
    for name, codes, scales in (("a", a, a_scales), ("b", b, b_scales)):
        if codes.dtype != torch.int8 or codes.ndim != 2:
            raise ValueError(f"expected {name} as int8 [rows, K], got {codes.dtype} {list(codes.shape)}")
        if scales.dtype != torch.float32 or scales.shape != codes.shape[:1]:
            raise ValueError(
                f"expected {name}_scales as float32 [{codes.shape[0]}], got {scales.dtype} {list(scales.shape)}"
            )
    if a.shape[1] != b.shape[1] or a.shape[1] == 0:
        raise ValueError(f"inner sizes differ or are 0: a is {list(a.shape)}, b is {list(b.shape)}")
    if bias is not None and bias.shape != b.shape[:1]:
        raise ValueError(f"expected bias as [{b.shape[0]}], got {list(bias.shape)}")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"expected out_dtype bfloat16, float16 or float32, got {out_dtype}")
