"""Closed forms of the contract beside the measurement, and an exact decomposition of the output's error.

For a row x_r with step D_r = absmax / 127 the activation error is modelled as -D_r/2 sign(x) (truncation's bias; none
for rounding) plus independent noise of variance D_r^2 / 12. With U = D sign(x) W^T the output's error energy is

    sum_ee = sum U^2 / 4  +  sum D^2 / 12 |W|^2  +  sum (x (Wq - W)^T)^2  +  bias-weight cross term  +  bf16 rounding
    sum_ey = -sum U y / 2 +  sum (x (Wq - W)^T) y

No quantiser of activations is run for this: it follows from second moments of x and sign(x), and from W. The two
outputs that are compared are both rounded to bf16 with nearly the same value: rounding adds u^2 / 6 where the error is
larger than the step u, and almost nothing where it is smaller (`rounding_energy`). With
A = sum U^2 / (sum D^2 |W|^2), the gain of W along sign(x) over its mean gain, truncation over rounding is 1 + 3 A where
weights add nothing: 4 for an isotropic W, more where W amplifies the direction of x.

The decomposition writes the measured error as e = bias + noise + weight + output, with

    bias = B sign(x) D W^T (B = -1/2 shipped, 0 fixed)     noise = (xq - x) W^T - bias
    weight = xq (Wq - W)^T                                 output = e - the three: bf16 rounding of both outputs, casts

so that sum_ee is the sum of the ten products of parts, exactly (float64).

    sums = Theory(rows=64).measure(layer, x, call=0)       # fp64 [2, SUMS], one row a rounding
"""

from __future__ import annotations

import math
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
            model = _Model(layer, picked)
            shared = model.input_sums()
            rows = [
                torch.stack([*shared, *(m[i] for m in measured), *model.predicted(r), *model.parts(r)])
                for i, r in enumerate(ROUNDINGS)
            ]
            return torch.stack(rows)


class _Model:
    """One layer on one input in fp64: what both roundings share is made once."""

    def __init__(self, layer: Layer, x: Tensor) -> None:
        self.layer, self.x, self.wide, self.w = layer, x, x.double(), layer.weight.double()
        self.b, self.b_scales = numerics.quantize_weight(layer.weight)
        self.delta = self.b.double() * self.b_scales.double()[:, None] - self.w  # Wq - W, [N, K]
        inv, _ = numerics.row_scales(x)
        self.step = torch.where(inv > 0, 1.0 / inv.double(), 0.0)[:, None]  # D, [M, 1]; 0 for a row that counts as zero
        self.along = (self.step * self.wide.sign()) @ self.w.t()  # U, [M, N]
        self.z = self.wide @ self.w.t()
        self.y = self.z if layer.bias is None else self.z + layer.bias.double()
        self.weight = self.wide @ self.delta.t()
        self.reference = numerics.bf16_linear(x, layer.weight, layer.bias).double()

    def input_sums(self) -> list[Tensor]:
        """INPUT_SUMS: what the closed forms need to know of the input and of W."""
        absmax, square = self.wide.abs().amax(dim=1), (self.wide * self.wide).mean(dim=1)
        crest = torch.where(absmax > 0, absmax / square.clamp(min=1e-300).sqrt(), 0.0)
        step2 = (self.step * self.step).sum()
        return [
            step2.new_tensor(len(self.x)),
            crest.sum(),
            step2,
            (self.step * self.wide.abs()).sum(),
            (self.wide * self.wide).sum(),
            step2.new_tensor(self.x.numel()),
            (self.along * self.along).sum(),
            step2 * (self.w * self.w).sum(),
        ]

    def predicted(self, rounding: Rounding) -> list[Tensor]:
        """PREDICTED: sum_yy, sum_ee and sum_ey of the model in the module's docstring."""
        squares = self.w * self.w
        noise = self.step * self.step / 12 * squares.sum(dim=1)  # [M, N]: every feature's uniform error
        cast = self.x.to(torch.bfloat16) == self.x
        if not bool(cast.all()):  # the reference reads bf16(x)
            noise = noise + torch.where(cast, 0.0, _bf16_variance(self.wide)) @ squares.t()
        if self.layer.bias is not None:
            noise = noise + _bf16_variance(self.z)  # the int8 path rounds z before it adds the bias
        systematic = BIAS[rounding] * self.along + self.weight
        rounded = rounding_energy(systematic, noise.sqrt(), _bf16_step(self.y))
        energy = (systematic * systematic).sum() + noise.sum() + rounded.sum()
        return [(self.y * self.y).sum(), energy, (systematic * self.y).sum()]

    def parts(self, rounding: Rounding) -> list[Tensor]:
        """PARTS, then PAIRS: sums of squares of the four parts of the error, and twice their inner products."""
        a, a_scales = numerics.quantize_rows(self.x, rounding)
        quantized = a.double() * a_scales.double()[:, None]
        error = numerics.int8_linear(a, a_scales, self.b, self.b_scales, self.layer.bias).double() - self.reference
        bias = BIAS[rounding] * self.along
        noise = (quantized - self.wide) @ self.w.t() - bias
        weight = quantized @ self.delta.t()
        parts = {"bias": bias, "noise": noise, "weight": weight, "output": error - bias - noise - weight}
        squares = [(part * part).sum() for part in parts.values()]
        return squares + [2 * (parts[p] * parts[q]).sum() for p, q in combinations(PARTS, 2)]


def rounding_energy(mean: Tensor, std: Tensor, step: Tensor) -> Tensor:
    """What rounding two values to a grid adds to the expected square of their difference.

    The difference is normal with `mean` and `std` before rounding, and lies anywhere on the grid of width `step`. With
    t = difference / step the answer is step^2 E[frac(t) (1 - frac(t))] = step^2 (1/6 - sum_k c_k / (pi k)^2), c_k =
    cos(2 pi k mean / step) exp(-2 (pi k std / step)^2); for |t| < 1 the same is E|t| - E t^2. Elementwise, in fp32;
    five terms leave an error of 0.02 step^2 where it is largest.
    """
    m, s = (mean.abs() / step).float(), (std / step).float()
    far = torch.full_like(m, 1 / 6)
    for k in range(1, 6):
        far -= torch.cos(2 * math.pi * k * m) * torch.exp(-2 * (math.pi * k * s) ** 2) / (math.pi * k) ** 2
    ratio = m / (s * math.sqrt(2)).clamp(min=1e-30)
    absolute = s * math.sqrt(2 / math.pi) * torch.exp(-(ratio**2)) + m * torch.erf(ratio)
    inside = torch.where(m + 4 * s < 1, absolute - m * m - s * s, far)
    return torch.where(step > 0, step * step * inside.double(), 0.0)


def _bf16_step(v: Tensor) -> Tensor:
    """Distance of neighbouring bf16 values (8 bits) around v, elementwise; 0 at 0."""
    _, exponent = torch.frexp(v)  # v = m 2^e with 0.5 <= |m| < 1
    return torch.where(v == 0, 0.0, torch.ldexp(torch.ones_like(v), exponent - 8))


def _bf16_variance(v: Tensor) -> Tensor:
    return _bf16_step(v) ** 2 / 12
