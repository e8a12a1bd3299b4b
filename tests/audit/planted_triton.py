"""Triton quantisers with one planted fault each, small enough for the interpreter."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    x_ptr, stride, out_ptr, scale_ptr, k, seed,
    BLOCK: tl.constexpr, RULE: tl.constexpr, LIMIT: tl.constexpr, OTHER: tl.constexpr, GUARD: tl.constexpr,
    TAIL: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < k
    if OTHER:
        x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * stride + at, mask=inside).to(tl.float32)
    scale = tl.max(tl.abs(x)) / LIMIT
    if GUARD:
        s = x / tl.where(scale > 0, scale, 1.0)
    else:
        s = x / scale
        scale = scale / scale * scale
    floor = tl.floor(s)
    even = floor + tl.where(s - floor == 0.5, floor - 2 * tl.floor(floor / 2), (s - floor > 0.5).to(tl.float32))
    sign = tl.where(s >= 0, 1.0, -1.0)
    if RULE == "half_even":
        code = even
    elif RULE == "half_away":
        code = s + 0.5 * sign
    elif RULE == "libdevice":
        code = libdevice.round(s)
    elif RULE == "truncate":
        code = s + (0.5 * sign).to(tl.int8)
    elif RULE == "floor":
        code = floor
    elif RULE == "floor_half":
        code = tl.floor(s + 0.5)
    elif RULE == "double_rounded":
        narrow = s.to(tl.bfloat16).to(tl.float32)
        code = tl.floor(narrow + 0.5)
    elif RULE == "other":
        code = tl.where(s > 0, even, s)
    else:
        code = floor + (tl.rand(seed, row * BLOCK + at) < s - floor).to(tl.float32)
    if TAIL:
        code = tl.where(at < k // 8 * 8, code, s)
    if RULE == "floor":
        code = tl.maximum(code, -128.0)
    tl.store(out_ptr + row * k + at, code.to(tl.int32).to(tl.int8), mask=at < k - LAST)
    tl.store(scale_ptr + row, scale)


def _quantize(
    x: Tensor,
    rule: str = "half_even",
    limit: float = 127.0,
    other: bool = True,
    guard: bool = True,
    tail: bool = False,
    last: int = 0,
    strided: bool = False,
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    x = x if strided else x.contiguous()
    codes = torch.empty(m, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    stride = k if strided else x.stride(0)
    if m > 0:
        _rows[(m,)](x, stride, codes, scales, k, 7, block, rule, limit, other, guard, tail, last)
    return codes, scales


half_even = functools.partial(_quantize, rule="half_even")
half_away = functools.partial(_quantize, rule="half_away")
truncate = functools.partial(_quantize, rule="truncate")

ROUNDINGS = {
    rule: functools.partial(_quantize, rule=rule)
    for rule in ("half_even", "half_away", "truncate", "floor", "floor_half", "double_rounded", "stochastic", "other")
}
ROUNDINGS_IN_LIBDEVICE = {"half_away": functools.partial(_quantize, rule="libdevice")}
EDGES = {
    "undefined_lanes": functools.partial(_quantize, other=False),
    "zero_row": functools.partial(_quantize, guard=False),
    "wrap": functools.partial(_quantize, limit=128.0),
    "positions": functools.partial(_quantize, tail=True),
    "unwritten": functools.partial(_quantize, last=1),
    "noncontiguous": functools.partial(_quantize, strided=True),
}


@triton.autotune(configs=[triton.Config({}, num_warps=1), triton.Config({}, num_warps=2)], key=["k"])
@triton.jit
def _tuned(x_ptr, out_ptr, scale_ptr, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * k + at, mask=at < k, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)) / 127.0, 1e-30)
    tl.store(out_ptr + row * k + at, libdevice.rint(x / scale).to(tl.int8), mask=at < k)
    tl.store(scale_ptr + row, scale)


def autotuned(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    codes, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])
    if x.shape[0] > 0:
        _tuned[(x.shape[0],)](x, codes, scales, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return codes, scales
