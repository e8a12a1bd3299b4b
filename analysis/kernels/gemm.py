# mypy: disable-error-code="no-untyped-def"
"""Triton int8 linear layer: exact int32 products, the contract's epilogue, every tail masked.

    y = int8_linear(codes, scales, w_codes, w_scales, bias)       # [M, N] bf16, equals numerics.int8_linear bit for bit

The block shape is chosen from the problem's size, without tuning at run time: a user's first call compiles one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from analysis.kernels.common import INTERPRETED, from_fp32, to_fp32

GROUP_ROWS = 8  # block rows that share weight tiles in L2


@dataclass(frozen=True)
class Blocks:
    """A block shape [m, n] with inner step k, and how many warps and pipeline stages work on it.

    tma: fetch tiles by the copy engine of compute capability 9 where rows lie on 16-byte boundaries.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    tma: bool = False


LARGE = Blocks(256, 128, 128, warps=8, stages=3)
MEDIUM = Blocks(128, 128, 128, warps=8, stages=4)
SMALL = Blocks(64, 128, 128, warps=4, stages=4)
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
    block_m, block_n = tile_of(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(columns, N), GROUP)
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


@triton.jit(do_not_specialize=["rows"])
def _linear_tma_kernel(
    a_desc,
    a_scales_ptr,
    b_desc,
    b_scales_ptr,
    bias_ptr,
    y_ptr,
    rows,
    columns,
    inner,
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The same layer, its tiles fetched by the copy engine, which fills what lies outside with zeros."""
    block_m, block_n = tile_of(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(columns, N), GROUP)
    acc = tl.zeros([M, N], tl.int32)
    for start in range(0, inner, K):
        a = a_desc.load([block_m * M, start])
        b = b_desc.load([block_n * N, start])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    _finish(
        acc, block_m, block_n, a_scales_ptr, b_scales_ptr, bias_ptr, y_ptr, rows, columns, HAS_BIAS=HAS_BIAS, M=M, N=N
    )  # fmt: skip


def pick_blocks(rows: int) -> Blocks:
    """The block shape for a layer with so many rows."""
    if INTERPRETED.value:
        return INTERPRETER
    return LARGE if rows > 2048 else MEDIUM if rows > 512 else SMALL


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
    (rows, inner), columns = a.shape, b.shape[0]
    y = torch.empty(rows, columns, dtype=out_dtype, device=a.device) if out is None else out
    if rows == 0:
        return y
    a = a if a.stride(1) == 1 else a.contiguous()
    b = b if b.stride(1) == 1 else b.contiguous()
    if bias is not None:
        bias = (bias.to(out_dtype) if bias.dtype == torch.float64 else bias).contiguous()
    blocks = blocks or pick_blocks(rows)
    shape = {"M": blocks.m, "N": blocks.n, "K": blocks.k, "GROUP": GROUP_ROWS}
    launch = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": False}
    scales = a_scales.contiguous(), b_scales.contiguous()
    sizes = rows, columns, inner
    grid = (triton.cdiv(rows, blocks.m) * triton.cdiv(columns, blocks.n),)
    with torch.cuda.device_of(a):
        if blocks.tma and _tma_can_read(a) and _tma_can_read(b):
            a_tiles = TensorDescriptor.from_tensor(a, [blocks.m, blocks.k])
            b_tiles = TensorDescriptor.from_tensor(b, [blocks.n, blocks.k])
            _linear_tma_kernel[grid](
                a_tiles, scales[0], b_tiles, scales[1], bias, y, *sizes, HAS_BIAS=bias is not None, **shape, **launch
            )  # fmt: skip
        else:
            _linear_kernel[grid](
                a,
                a.stride(0),
                scales[0],
                b,
                b.stride(0),
                scales[1],
                bias,
                y,
                *sizes,
                HAS_BIAS=bias is not None,
                EVEN_K=inner % blocks.k == 0,
                **shape,
                **launch,
            )
    return y


def _tma_can_read(codes: Tensor) -> bool:
    aligned = codes.data_ptr() % 16 == 0 and codes.stride(0) % 16 == 0
    return aligned and (INTERPRETED.value or _capability(codes.device)[0] >= 9)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


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
