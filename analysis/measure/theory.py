"""Closed forms of the contract beside the measurement, and an exact decomposition of the output's error.

For a row x_r with step D_r = absmax / 127 the activation error is modelled as -D_r/2 sign(x) (truncation's bias; none
for rounding) plus independent noise of variance D_r^2 / 12. With U = D sign(x) W^T the output's error energy is

    sum_ee = sum U^2 / 4  +  sum D^2 / 12 |W|^2  +  sum (x (Wq - W)^T)^2  +  bias-weight cross term  +  bf16 rounding
    sum_ey = -sum U y / 2 +  sum (x (Wq - W)^T) y

No quantiser of activations is run for this: it follows from second moments of x and sign(x), and from W. With
A = sum U^2 / (sum D^2 |W|^2), the gain of W along sign(x) over its mean gain, truncation over rounding is 1 + 3 A where
weights add nothing: 4 for an isotropic W, more where W amplifies the direction of x.

The decomposition writes the measured error as e = bias + noise + weight + output, with

    bias = B sign(x) D W^T (B = -1/2 shipped, 0 fixed)     noise = (xq - x) W^T - bias
    weight = xq (Wq - W)^T                                 output = e - the three: bf16 rounding of both outputs, casts

so that sum_ee is the sum of the ten products of parts, exactly (float64).

    sums = Theory(rows=64).measure(layer, x, call=0)       # fp64 [2, SUMS], one row a rounding
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from analysis import numerics
from analysis.measure import stats
from analysis.measure.ablation import sample
from analysis.measure.replay import Layer, Replay
from analysis.numerics import Rounding

ROUNDINGS = (Rounding.SHIPPED, Rounding.FIXED)
BIAS = {Rounding.SHIPPED: -0.5, Rounding.FIXED: 0.0}  # mean of code - s, in the direction of sign(x)
PARTS = ("bias", "noise", "weight", "output")
PAIRS = tuple(f"{a}_x_{b}" for a, b in combinations(PARTS, 2))
INPUT_SUMS = ("rows", "sum_crest", "step2", "step_abs", "xx", "features", "direction", "gain")
MEASURED = ("sum_yy", "sum_ee", "sum_ey")
PREDICTED = ("predicted_yy", "predicted_ee", "predicted_ey")
SUMS = (*INPUT_SUMS, *MEASURED, *PREDICTED, *PARTS, *PAIRS)


@dataclass
class Theory:
    """Measures a layer, predicts it, and takes its error apart.

    Args:
        rows: rows of each input, drawn without replacement; None: all.
        seed: of the draw, which depends on (seed, layer, call) only.
    """

    rows: int | None = 64
    seed: int = 0
    replay: Replay = field(default_factory=lambda: Replay([r.value for r in ROUNDINGS], engine="reference"))

    @torch.no_grad()
    def measure(self, layer: Layer, x: Tensor, groups: Tensor | None = None, call: int = 0) -> Tensor:
        """Sums of one input, fp64 [2, SUMS] on x's device; rows with NaN or Inf and of group 0 are left out.

        Args:
            layer: the layer.
            x: its input, floating [..., K].
            groups: uint8, one per row.
            call: label of the forward pass.
        """
        with torch.autocast(x.device.type, enabled=False):
            picked, _ = sample(x, groups, self.rows, f"{self.seed}/{layer.site.name}/{call}")
            replayed = self.replay.measure(layer, picked).sum(dim=1)  # [2, ALL_SUMS]
            self.replay.forget()
            measured = [replayed[:, stats.ALL_SUMS.index(name)] for name in MEASURED]
            rows = [
                torch.stack(
                    [
                        *_inputs(layer, picked),
                        *(m[i] for m in measured),
                        *_predicted(layer, picked, r),
                        *_parts(layer, picked, r),
                    ]
                )
                for i, r in enumerate(ROUNDINGS)
            ]
            return torch.stack(rows)


def _step(x: Tensor) -> Tensor:
    """D_r = absmax / 127, fp64 [M, 1]; 0 for a row that counts as zero."""
    inv, _ = numerics.row_scales(x)
    return torch.where(inv > 0, 1.0 / inv.double(), 0.0)[:, None]


def _inputs(layer: Layer, x: Tensor) -> list[Tensor]:
    """INPUT_SUMS: what the closed forms need to know of the input and of W."""
    wide, step, w = x.double(), _step(x), layer.weight.double()
    absmax, square = wide.abs().amax(dim=1), (wide * wide).mean(dim=1)
    crest = torch.where(absmax > 0, absmax / square.clamp(min=1e-300).sqrt(), 0.0)
    along = (step * wide.sign()) @ w.t()  # U, [M, N]
    return [
        torch.tensor(float(len(x)), dtype=torch.float64, device=x.device),
        crest.sum(),
        (step * step).sum(),
        (step * wide.abs()).sum(),
        (wide * wide).sum(),
        torch.tensor(float(x.shape[1] * len(x)), dtype=torch.float64, device=x.device),
        (along * along).sum(),
        (step * step).sum() * (w * w).sum(),
    ]


def _predicted(layer: Layer, x: Tensor, rounding: Rounding) -> list[Tensor]:
    """PREDICTED: sum_yy, sum_ee and sum_ey of the model in the module's docstring."""
    wide, step, w = x.double(), _step(x), layer.weight.double()
    codes, scales = numerics.quantize_weight(layer.weight)
    weight = wide @ (codes.double() * scales.double()[:, None] - w).t()  # [M, N]
    bias = BIAS[rounding] * (step * wide.sign()) @ w.t()
    z = wide @ w.t()
    y = z if layer.bias is None else z + layer.bias.double()
    columns = (w * w).sum(dim=0)  # [K]: energy that an error of 1 in feature k brings to the output
    cast = torch.where(x.to(torch.bfloat16) == x, 0.0, _bf16_variance(wide))  # the reference reads bf16(x)
    noise = (step * step).sum() / 12 * columns.sum() + (cast @ columns).sum()
    rounded = 2 * _bf16_variance(y).sum() if layer.bias is None else (2 * _bf16_variance(y) + _bf16_variance(z)).sum()
    systematic = bias + weight
    return [
        (y * y).sum(),
        (systematic * systematic).sum() + noise + rounded,
        (systematic * y).sum(),
    ]


def _bf16_variance(v: Tensor) -> Tensor:
    """Variance of rounding to bf16 (8 bits), with a step of 2^(exponent - 7), elementwise."""
    _, exponent = torch.frexp(v)  # v = m 2^e with 0.5 <= |m| < 1
    step = torch.ldexp(torch.ones_like(v), exponent - 8)
    return torch.where(v == 0, 0.0, step * step / 12)


def _parts(layer: Layer, x: Tensor, rounding: Rounding) -> list[Tensor]:
    """PARTS, then PAIRS: sums of squares of the four parts of the error, and twice their inner products."""
    wide, step, w = x.double(), _step(x), layer.weight.double()
    a, a_scales = numerics.quantize_rows(x, rounding)
    b, b_scales = numerics.quantize_weight(layer.weight)
    quantized = a.double() * a_scales.double()[:, None]
    measured = numerics.int8_linear(a, a_scales, b, b_scales, layer.bias).double()
    error = measured - numerics.bf16_linear(x, layer.weight, layer.bias).double()
    bias = BIAS[rounding] * (step * wide.sign()) @ w.t()
    noise = (quantized - wide) @ w.t() - bias
    weight = quantized @ (b.double() * b_scales.double()[:, None] - w).t()
    parts = {"bias": bias, "noise": noise, "weight": weight, "output": error - bias - noise - weight}
    squares = [(part * part).sum() for part in parts.values()]
    return squares + [2 * (parts[p] * parts[q]).sum() for p, q in combinations(PARTS, 2)]
