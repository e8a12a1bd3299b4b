"""Quantisers with one planted fault each, in PyTorch. `ROUNDINGS` maps the verdict to a kernel, `EDGES` the check."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.numerics import half_away


def scaled(x: Tensor, limit: float = 127.0) -> tuple[Tensor, Tensor]:
    """fp32 s [M, K] and scales [M]; a zero row has scale 0."""
    absmax = x.float().abs().amax(dim=1)
    scale = absmax / limit
    s = x.float() / torch.where(scale > 0, scale, 1.0)[:, None]
    return torch.where(torch.isfinite(absmax)[:, None], s, 0.0), torch.where(torch.isfinite(absmax), scale, torch.nan)


def half_even(x: Tensor) -> tuple[Tensor, Tensor]:
    s, scale = scaled(x)
    return torch.round(s).to(torch.int8), scale


def half_away_inverse(x: Tensor) -> tuple[Tensor, Tensor]:
    """Half away, multiplying by 127 / absmax, returning the inverse scale as [M, 1]."""
    absmax = x.float().abs().amax(dim=1, keepdim=True)
    inverse = 127.0 / absmax
    s = torch.where(torch.isfinite(inverse), x.float() * inverse, 0.0)
    return half_away(torch.nan_to_num(s)).to(torch.int8), inverse


def half_away_eps(x: Tensor) -> tuple[Tensor, Tensor]:
    """Half away by adding 0.5 in fp32 before the cast, with an epsilon added to the scale."""
    scale = x.float().abs().amax(dim=1) / 127.0 + 1e-7
    s = torch.nan_to_num(x.float() / scale[:, None])
    return (s + torch.where(s >= 0, 0.5, -0.5)).to(torch.int8), scale


def truncate(x: Tensor) -> tuple[Tensor, Tensor]:
    s, scale = scaled(x)
    return (s + (0.5 * torch.sign(s)).to(torch.int8)).to(torch.int8), scale


def floor(x: Tensor) -> tuple[Tensor, Tensor]:
    s, scale = scaled(x)
    return torch.floor(s).clamp(-128, 127).to(torch.int8), scale


def floor_half(x: Tensor) -> tuple[Tensor, Tensor]:
    s, scale = scaled(x)
    return torch.floor(s + 0.5).to(torch.int8), scale


def stochastic(x: Tensor) -> tuple[Tensor, Tensor]:
    s, scale = scaled(x)
    return torch.floor(s + torch.rand_like(s)).clamp(-127, 127).to(torch.int8), scale


def stochastic_frozen(x: Tensor) -> tuple[Tensor, Tensor]:
    s, scale = scaled(x)
    u = torch.rand(s.shape, generator=torch.Generator().manual_seed(5))
    return torch.floor(s + u).clamp(-127, 127).to(torch.int8), scale


def double_rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    s, scale = scaled(x)
    return torch.round(s.to(torch.bfloat16).float()).to(torch.int8), scale


def other_by_sign(x: Tensor) -> tuple[Tensor, Tensor]:
    s, scale = scaled(x)
    return torch.where(s > 0, torch.round(s), torch.trunc(s)).to(torch.int8), scale


ROUNDINGS = {
    "truncate": truncate,
    "floor": floor,
    "floor_half": floor_half,
    "half_away": half_away_inverse,
    "half_even": half_even,
    "stochastic": stochastic,
    "double_rounded": double_rounded,
    "other": other_by_sign,
}
CORRECT = (half_even, half_away_inverse, half_away_eps)


def zero_row_nan(x: Tensor) -> tuple[Tensor, Tensor]:
    absmax = x.float().abs().amax(dim=1)
    inverse = 127.0 / absmax
    return torch.round(torch.nan_to_num(x.float() * inverse[:, None])).to(torch.int8), 1 / inverse * absmax / absmax


def zero_row_leak(x: Tensor) -> tuple[Tensor, Tensor]:
    """The guard replaces every scale once a single row is zero."""
    scale = x.float().abs().amax(dim=1) / 127.0
    if bool((scale == 0).any()):
        scale = scale + 1e-3
    return torch.round(torch.nan_to_num(x.float() / scale[:, None])).clamp(-127, 127).to(torch.int8), scale


def nan_spreads(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = half_even(x)
    return codes, scale + 0 * x.float().sum()


def wraps(x: Tensor) -> tuple[Tensor, Tensor]:
    """128 as the limit and no clamp: the maximum of a row wraps to -128."""
    s, scale = scaled(x, limit=128.0)
    return torch.round(s).int().to(torch.int8), scale


def wrong_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = half_even(x)
    return codes, scale * 1.01


def bf16_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = half_even(x)
    return codes, scale.to(torch.bfloat16)


def tail_truncates(x: Tensor) -> tuple[Tensor, Tensor]:
    """A vector body of eights rounds, the scalar tail truncates."""
    s, scale = scaled(x)
    body = x.shape[1] // 8 * 8
    codes = torch.cat([torch.round(s[:, :body]), torch.trunc(s[:, body:])], dim=1)
    return codes.to(torch.int8), scale


def last_lanes_truncate(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every eighth element truncates, whatever K."""
    s, scale = scaled(x)
    codes = torch.round(s)
    codes[:, 7::8] = torch.trunc(s[:, 7::8])
    return codes.to(torch.int8), scale


def tail_ignored(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum is taken over whole blocks of 16 only."""
    whole = max(16, x.shape[1] // 16 * 16)
    scale = x[:, :whole].float().abs().amax(dim=1) / 127.0
    s = torch.nan_to_num(x.float() / torch.where(scale > 0, scale, 1.0)[:, None])
    return torch.round(s).clamp(-127, 127).to(torch.int8), scale


def reads_beyond(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of a row looks at one element of memory too many."""
    flat = x.new_empty(0).set_(x.untyped_storage())
    start = x.storage_offset()
    ends = [flat[start : start + (r + 1) * x.shape[1] + 1][r * x.shape[1] :] for r in range(x.shape[0])]
    absmax = torch.stack([end.float().abs().amax() for end in ends]) if ends else x.float().sum(dim=1)
    scale = absmax / 127.0
    s = torch.nan_to_num(x.float() / torch.where(scale > 0, scale, 1.0)[:, None])
    return torch.round(s).to(torch.int8), scale


def unwritten(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = half_even(x)
    out = torch.empty(x.shape, dtype=torch.int8)
    out[:, :-1] = codes[:, :-1]
    return out, scale


def unwritten_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = half_even(x)
    out = torch.empty_like(scale)
    out[:-1] = scale[:-1]
    return codes, out


def modifies_input(x: Tensor) -> tuple[Tensor, Tensor]:
    result = half_even(x)
    x.abs_()
    return result


def not_deterministic(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = half_even(x)
    flip = torch.rand(x.shape) < 0.02
    return torch.where(flip & (codes.abs() < 100), codes + 1, codes).to(torch.int8), scale


def rows_of_16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows beyond the last whole block of 16 get the scale of row 0."""
    s, scale = scaled(x)
    whole = x.shape[0] // 16 * 16
    if 0 < whole < x.shape[0]:
        scale[whole:] = scale[0]
        s = torch.nan_to_num(x.float() / torch.where(scale > 0, scale, 1.0)[:, None]).clamp(-127, 127)
    return torch.round(s).to(torch.int8), scale


def ignores_strides(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.new_empty(0).set_(x.untyped_storage())
    return half_even(flat[x.storage_offset() : x.storage_offset() + x.numel()].view(x.shape))


def large_rows_overflow(x: Tensor) -> tuple[Tensor, Tensor]:
    """x * 127 before the division, in fp16."""
    s = (x.half() * 127 / x.half().abs().amax(dim=1, keepdim=True)).float()
    return torch.round(torch.nan_to_num(s, posinf=127, neginf=-127)).to(torch.int8), x.float().abs().amax(1) / 127


def static_wraps(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.round(x.float() * 8).int().to(torch.int8), torch.tensor(0.125)


EDGES = {
    "zero_row": zero_row_nan,
    "row_independence": zero_row_leak,
    "nan": nan_spreads,
    "wrap": wraps,
    "scale_used": wrong_scale,
    "positions": tail_truncates,
    "tails": tail_ignored,
    "unwritten": unwritten,
    "input_modified": modifies_input,
    "two_runs": not_deterministic,
    "rows": rows_of_16,
    "noncontiguous": ignores_strides,
    "huge_absmax": large_rows_overflow,
    "saturation": static_wraps,
}


def refuses_odd(x: Tensor) -> tuple[Tensor, Tensor]:
    assert x.shape[1] % 64 == 0, f"K must be a multiple of 64, got {x.shape[1]}"
    assert x.is_contiguous(), "x must be contiguous"
    return half_even(x)
