"""ErrorSums: what one (call, layer, variant) adds to the tables. Sums only, so that they merge by adding.

Every sum is taken so that its relative error stays below 1e-6 whatever the number of rows: on a CPU the products are
taken in fp64; on a GPU `analysis.kernels.error_sums` takes fp32 partials over bounded tiles and combines them in fp64.

    sums = output_sums(y_quantised, y_reference, bias) | code_sums(x, codes)
"""

from __future__ import annotations

import torch
from torch import Tensor

from analysis import numerics

OUTPUT_SUMS = ("sum_yy", "sum_ee", "sum_ey", "sum_zz", "sum_ez", "max_abs_e")
CODE_SUMS = ("sum_magnitude_error", "sum_square_error", "mismatched", "zeroed", "saturated")


def output_sums(y_quantised: Tensor, y: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Sums of the output error. y_quantised, y: [M, N] any float dtype; bias [N] or None -> 0-d fp64 tensors.

    e = y_quantised - y with both upcast first; z = y - bias.
    """
    y = y.double()
    e = y_quantised.double() - y
    z = y if bias is None else y - bias.double()
    return {
        "sum_yy": (y * y).sum(),
        "sum_ee": (e * e).sum(),
        "sum_ey": (e * y).sum(),
        "sum_zz": (z * z).sum(),
        "sum_ez": (e * z).sum(),
        "max_abs_e": e.abs().max() if e.numel() else e.new_zeros(()),
    }


def code_sums(s: Tensor, nonzero: Tensor, codes: Tensor) -> dict[str, Tensor]:
    """Sums of the codes' error. s: fp32 [M, K] scaled input; nonzero: bool [M, K], x != 0; codes: int8 [M, K].

    A code that differs from half-even rounding of s is a mismatch, unless s is an exact tie and the code is one of
    its two neighbours.
    """
    wide = codes.float()
    error = wide - s
    tie = (s - torch.floor(s)) == 0.5
    wrong = torch.where(tie, error.abs() != 0.5, wide != torch.round(s))
    return {
        "sum_magnitude_error": (wide.abs() - s.abs()).sum(dtype=torch.float64),
        "sum_square_error": (error * error).sum(dtype=torch.float64),
        "mismatched": wrong.sum(),
        "zeroed": ((codes == 0) & nonzero).sum(),
        "saturated": (wide.abs() == numerics.CODE_MAX).sum(),
    }


def crest_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over nonzero rows of absmax / rms, number of zero rows) of finite x [M, K]."""
    wide = x.double()
    absmax = wide.abs().amax(dim=1)
    rms = (wide * wide).mean(dim=1).sqrt()
    zero = absmax == 0
    return torch.where(zero, 0.0, absmax / rms.where(~zero, 1.0)).sum(), zero.sum()
