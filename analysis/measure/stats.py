"""Error sums: what one (call, layer, variant) adds to the tables. Sums only, so that they merge by adding.

Rows belong to a group: 1 (valid tokens), 2 (padding) or 0 (left out of every sum). `tokens=all` is group 1 + group 2,
`tokens=valid` is group 1. This file is the reference in fp64; `analysis.kernels` holds the fused Triton passes, which
take fp32 partials over bounded tiles and combine them in fp64. Both are right to 1e-6 relative whatever M.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis import numerics

GROUPS = (1, 2)
ROW_SUMS = ("rows", "nonfinite_rows", "zero_rows", "sum_crest")
CODE_SUMS = ("sum_magnitude_error", "sum_square_error", "mismatched", "zeroed", "saturated")
OUTPUT_SUMS = ("sum_yy", "sum_ee", "sum_ey", "sum_zz", "sum_ez", "max_abs_e", "sum_eff_yy", "sum_eff_ee")
ALL_SUMS = (*ROW_SUMS, *CODE_SUMS, *OUTPUT_SUMS)

Norm = tuple[Tensor, float]  # weight [N] and eps of the RMSNorm behind q or k


def row_sums(x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over rows of x [M, K] -> (fp64 [2, 4] in the order of ROW_SUMS, groups with non-finite rows set to 0).

    Crest factor = absmax / rms of a row; zero rows are counted apart and add none.
    """
    bad = numerics.nonfinite_rows(x)
    kept = torch.where(bad, 0, groups)
    wide = x.double()
    absmax = wide.abs().amax(dim=1)
    zero = absmax == 0
    crest = torch.where(zero, 0.0, absmax / (wide * wide).mean(dim=1).sqrt())
    sums = []
    for g in GROUPS:
        rows = kept == g
        crest_sum = torch.where(rows, crest, 0.0).sum()
        sums.append(torch.stack([rows.sum(), (bad & (groups == g)).sum(), (rows & zero).sum(), crest_sum]).double())
    return torch.stack(sums), kept


def code_sums(x: Tensor, s: Tensor, codes: Tensor, groups: Tensor) -> Tensor:
    """Sums of the activation codes' error -> fp64 [2, 5] in the order of CODE_SUMS.

    x: [M, K]; s: fp32 [M, K], the contract's scaled input; codes: int8 [M, K]. A code that differs from half-even
    rounding of s is a mismatch, unless s is an exact tie and the code is one of its two neighbours.
    """
    wide = codes.float()
    error = wide - s
    tie = (s - torch.floor(s)) == 0.5
    wrong = torch.where(tie, error.abs() != 0.5, wide != torch.round(s))
    per_row = torch.stack(
        [
            (wide.abs() - s.abs()).sum(dim=1, dtype=torch.float64),
            (error * error).sum(dim=1, dtype=torch.float64),
            wrong.sum(dim=1).double(),
            ((codes == 0) & (x != 0)).sum(dim=1).double(),
            (wide.abs() == numerics.CODE_MAX).sum(dim=1).double(),
        ],
        dim=1,
    )
    return torch.stack([torch.where((groups == g)[:, None], per_row, 0.0).sum(dim=0) for g in GROUPS])


def rms_norm(v: Tensor, norm: Norm) -> Tensor:
    """v * rsqrt(mean(v^2) + eps) * weight over the last axis, in v's dtype. v: [M, N]."""
    weight, eps = norm
    return v * torch.rsqrt((v * v).mean(dim=-1, keepdim=True) + eps) * weight.to(v.dtype)


def output_sums(
    yqs: Sequence[Tensor], y: Tensor, bias: Tensor | None, groups: Tensor, norm: Norm | None
) -> Tensor:  # fmt: skip
    """Sums of the output error of several variants -> fp64 [V, 2, 8] in the order of OUTPUT_SUMS.

    yqs: quantised outputs, each [M, N]; y: reference [M, N]; bias: [N] or None; norm: what follows the layer, or None.
    e = yq - y, both upcast first; z = y - bias; the effective sums are those after the norm.
    """
    y = y.double()
    z = y if bias is None else y - bias.double()
    yy, zz = (y * y).sum(dim=1), (z * z).sum(dim=1)
    ny = y if norm is None else rms_norm(y, norm)
    nyy = yy if norm is None else (ny * ny).sum(dim=1)
    variants = []
    for yq in yqs:
        yq = yq.double()
        e = yq - y
        ee = (e * e).sum(dim=1)
        eff = ee if norm is None else ((rms_norm(yq, norm) - ny) ** 2).sum(dim=1)
        largest = e.abs().amax(dim=1)
        rows = torch.stack([yy, ee, (e * y).sum(dim=1), zz, (e * z).sum(dim=1), largest, nyy, eff], dim=1)
        per_group = []
        for g in GROUPS:
            kept = torch.where((groups == g)[:, None], rows, 0.0)
            total = kept.sum(dim=0)
            if len(kept):
                total[5] = kept[:, 5].max()
            per_group.append(total)
        variants.append(torch.stack(per_group))
    return torch.stack(variants)
