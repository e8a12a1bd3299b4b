"""The numeric contract in plain PyTorch: row quantisers, weight quantiser, int8 linear and bf16 reference.

M = rows (tokens), K = in_features, N = out_features. A row x_r is scaled to +-127 and rounded,

    amax_r = max_k |x_rk|,  inv_r = 127 / amax_r,  s_rk = x_rk * inv_r,  code_rk = ROUND(s_rk),  scale_r = 1 / inv_r,

every step in correctly rounded fp32. The Triton kernels in `analysis.kernels` repeat this bit for bit; nothing else
in the project defines a rounding, a scale or a product.

    codes, scales = quantize_rows(x, Rounding.FIXED)                  # int8 [M, K], fp32 [M]
    w_codes, w_scales = quantize_weight(w)                            # int8 [N, K], fp32 [N]
    y = int8_linear(codes, scales, w_codes, w_scales, bias)           # bf16 [M, N]
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

CODE_MAX = 127
EXACT_FP32_K = 1040  # 127**2 * K < 2**24: up to here an fp32 matmul of codes is exact
WEIGHT_SCALE_MIN = 1e-12


class Rounding(StrEnum):
    """How s is turned into a code. `shipped` and `fixed` are the two kernels; the rest exist for ablation and audit."""

    SHIPPED = "shipped"  # s + int8(0.5 * sign(s)) stored to int8: truncation toward zero (the defect)
    FIXED = "fixed"  # half away from zero
    HALF_EVEN = "half_even"
    FLOOR = "floor"
    FLOOR_HALF = "floor_half"  # floor(s + 0.5)
    STOCHASTIC = "stochastic"  # floor(s + u), u ~ U[0, 1)


def parse_rounding(name: str) -> Rounding:
    """The rounding called `name`; ValueError lists the known ones."""
    try:
        return Rounding(name)
    except ValueError:
        raise ValueError(f"unknown rounding {name!r}; known: {', '.join(Rounding)}") from None


def half_away(s: Tensor) -> Tensor:
    """Round half away from zero, exactly, for any float `s` with |s| < 2**22.

    `trunc(s + 0.5 * sign(s))` is the usual formula, and is wrong for one fp32 value: at s = 0.5 - 2**-25 the addition
    rounds up to 1. Comparing the exact remainder `s - trunc(s)` has no such case and costs the same.
    """
    t = torch.trunc(s)
    return t + torch.trunc(2 * (s - t))


def round_codes(s: Tensor, rounding: Rounding, generator: torch.Generator | None = None) -> Tensor:
    """Apply a rounding to scaled values. fp32 in, integral fp32 of the same shape out (not yet stored to int8).

    `generator` seeds STOCHASTIC and must be given for it.
    """
    match rounding:
        case Rounding.SHIPPED:
            return torch.trunc(s)
        case Rounding.FIXED:
            return half_away(s)
        case Rounding.HALF_EVEN:
            return torch.round(s)
        case Rounding.FLOOR:
            return torch.floor(s).clamp(min=-128)
        case Rounding.FLOOR_HALF:
            return torch.floor(s + 0.5)
        case Rounding.STOCHASTIC:
            if generator is None:
                raise ValueError("stochastic rounding needs a generator: pass torch.Generator().manual_seed(seed)")
            u = torch.rand(s.shape, generator=generator, device=generator.device, dtype=torch.float32)
            return torch.floor(s + u.to(s.device)).clamp(-CODE_MAX, CODE_MAX)


def row_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """absmax scaling of rows. x: float [M, K] -> (inv, absmax), both fp32 [M].

    `inv` is 0 for a zero row and for a row so small that 127 / absmax overflows fp32: such a row counts as zero.
    """
    absmax = x.float().abs().amax(dim=1)
    inv = torch.full_like(absmax, CODE_MAX) / absmax  # `127 / absmax` would be reciprocal * 127: two roundings
    return torch.where(torch.isinf(inv), 0.0, inv), absmax


def nonfinite_rows(x: Tensor) -> Tensor:
    """bool [M]: rows of x [M, K] that hold a NaN or an Inf."""
    return ~torch.isfinite(x.float().abs().amax(dim=1))


def scaled(x: Tensor) -> Tensor:
    """s = x * inv, fp32 [M, K]: what a correct kernel rounds. Zero rows give 0, rows with NaN or Inf give 0."""
    inv, absmax = row_scales(x)
    s = x.float() * inv[:, None]
    return torch.where(torch.isfinite(absmax)[:, None], s, 0.0)


def quantize_rows(
    x: Tensor, rounding: Rounding, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantise each row of x to int8 by its own absmax.

    Args:
        x: bf16, fp16 or fp32 [M, K]; any strides; M may be 0.
        rounding: how s is rounded.
        generator: needed by STOCHASTIC only.

    Returns:
        codes int8 [M, K] and scales fp32 [M], so that codes * scales approximates x.
        Zero rows: codes 0, scale 0. Rows with NaN or Inf: codes 0, scale NaN, so that their output is NaN and cannot
        be mistaken for a result (`shipped` swallows a NaN on a GPU; such rows are left out of every measurement).

    Raises:
        ValueError: x is not a floating [M, K] tensor with K >= 1.
    """
    check_rows(x)
    inv, absmax = row_scales(x)
    finite = torch.isfinite(absmax)
    codes = round_codes(scaled(x), rounding, generator).to(torch.int8)
    scales = torch.where(inv > 0, 1.0 / inv, 0.0)
    return codes, torch.where(finite, scales, torch.nan)


def quantize_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight per output channel, half to even, as the model does when it loads.

    w: float [N, K] -> codes int8 [N, K], scales fp32 [N] with scale = max(absmax / 127, 1e-12).
    """
    check_rows(w)
    w = w.float()
    absmax = w.abs().amax(dim=1)
    scales = (absmax / torch.full_like(absmax, CODE_MAX)).clamp(min=WEIGHT_SCALE_MIN)
    return torch.round(w / scales[:, None]).clamp(-128, CODE_MAX).to(torch.int8), scales


def check_rows(x: Tensor) -> None:
    if x.ndim != 2 or not x.is_floating_point() or x.shape[1] == 0:
        raise ValueError(f"expected a floating [rows, K] tensor with K >= 1, got {x.dtype} {list(x.shape)}; reshape")


@cache
def _cpu_int_mm_is_exact() -> bool:
    """Whether this CPU's int8 matmul survives the largest products (without VNNI some saturate in int16)."""
    a = torch.full((32, 64), CODE_MAX, dtype=torch.int8)
    b = torch.full((32, 64), -128, dtype=torch.int8)
    try:
        products = [torch._int_mm(a, b.t()), torch._int_mm(b, b.t())]
    except RuntimeError:
        return False
    return bool((products[0] == -127 * 128 * 64).all() and (products[1] == 128 * 128 * 64).all())


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Exact a @ b.T of int8 codes: a [M, K], b [N, K] -> int32 [M, N]."""
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"inner sizes differ: a is {list(a.shape)}, b is {list(b.shape)}, both need [rows, K]")
    # With one column PyTorch's CPU kernel returns memory that it never wrote.
    if a.device.type == "cpu" and a.shape[0] > 0 and a.shape[1] > 1 and _cpu_int_mm_is_exact():
        return torch._int_mm(a.contiguous(), b.contiguous().t())
    acc = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for k in range(0, a.shape[1], 1024):
        acc += (a[:, k : k + 1024].float() @ b[:, k : k + 1024].float().t()).to(torch.int32)
    return acc


def dequantize(acc: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """y = out_dtype(fp32(acc) * a_scale * b_scale), in that order; then + bias in out_dtype. int32 [M, N] -> [M, N]."""
    y = (acc.float() * a_scales[:, None] * b_scales[None, :]).to(out_dtype)
    return y if bias is None else y + bias.to(out_dtype)


def int8_linear(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """int8 linear layer on codes: a int8 [M, K], b int8 [N, K], scales fp32 [M] and [N], bias [N] or None -> [M, N].

    A row of zeros gives exactly 0 + bias.
    """
    return dequantize(int8_matmul(a, b), a_scales, b_scales, bias, out_dtype)


def bf16_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """bf16 linear layer on bf16-cast x [M, K], w [N, K] and bias [N]: fp32 accumulation, one rounding to bf16 [M, N].

    On a CPU without bf16 products they are taken by the fp32 matmul, which is the same arithmetic and faster there.
    """
    x, w = x.to(torch.bfloat16), w.to(torch.bfloat16)
    bias = None if bias is None else bias.to(torch.bfloat16)
    if x.device.type != "cpu" or _multiplies_bf16():
        return torch.nn.functional.linear(x, w, bias)
    y = torch.nn.functional.linear(x.float(), w.float(), None if bias is None else bias.float())
    return y.to(torch.bfloat16)


@cache
def _multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 values with fp32 accumulation."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
