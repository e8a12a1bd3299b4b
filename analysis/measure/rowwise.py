"""The measurement on a CPU, fast: rows in blocks that stay in cache, fp32 sums within a row, fp64 sums over rows.

Twin of `ReferenceEngine` with the same products and codes bit for bit; sums agree to 1e-6 relative and counts exactly,
as the Triton passes' do (the effective error by the formula of `analysis.kernels.error_sums`). About a third of the
reference's time. Roundings other than `shipped` and `fixed`, and foreign kernels, quantise by their own function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from analysis import numerics
from analysis.measure import stats
from analysis.numerics import Rounding

if TYPE_CHECKING:
    from analysis.measure.engine import QuantizedInput

BLOCK_BYTES = 256 * 2**10  # of one fp32 buffer: half a dozen of them fit a core's L2 cache
BELOW_HALF = 0.5 - 2.0**-25  # added with the sign of s and truncated, this rounds half away from zero, exactly
MAX_AT = stats.OUTPUT_SUMS.index("max_abs_e")


class _Buffers:
    """fp32 scratch [rows, columns], made once per width: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}

    def blocks(self, rows: int, columns: int) -> Iterator[slice]:
        step = _step(columns)
        yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def get(self, like: Tensor, name: str) -> Tensor:
        rows, columns = like.shape
        key = (columns, name)
        if key not in self._kept:
            if len(self._kept) > 64:
                self._kept.clear()
            self._kept[key] = torch.empty(_step(columns), columns)
        return self._kept[key][:rows]


def _step(columns: int) -> int:
    return max(8, BLOCK_BYTES // (4 * columns))


class RowwiseEngine:
    """Plain PyTorch on a CPU, blocked by rows.

    Comparisons are stored as floats: PyTorch's kernels that write bools are several times slower.

    Args:
        variants: names, in order; quantizers: their functions.
    """

    name = "rowwise"

    def __init__(
        self, variants: Sequence[str], quantizers: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]
    ) -> None:
        self.variants, self.quantizers = list(variants), list(quantizers)
        self._buffers = _Buffers()

    def quantize(self, x: Tensor, groups: Tensor) -> QuantizedInput:
        from analysis.measure.engine import QuantizedInput

        wide = x.float()
        inv, absmax = numerics.row_scales(wide)
        bad = ~torch.isfinite(absmax)
        if bool(bad.any()):  # such rows have s = 0 and codes 0
            wide, inv = torch.where(bad[:, None], 0.0, wide), torch.where(bad, 0.0, inv)
        kept = torch.where(bad, 0, groups)
        scales = torch.where(bad, torch.nan, torch.where(inv > 0, 1.0 / inv, 0.0))
        known = [v in (Rounding.SHIPPED, Rounding.FIXED) for v in self.variants]
        pairs = [
            (torch.empty(x.shape, dtype=torch.int8), scales) if ours else quantizer(x)
            for ours, quantizer in zip(known, self.quantizers, strict=True)
        ]
        squares = [torch.empty(0, dtype=torch.float64)]
        errors = [torch.empty(len(pairs), len(stats.CODE_SUMS), 0)]
        for block in self._buffers.blocks(*x.shape):
            at = wide[block]
            s, sign, nonzero = (self._buffers.get(at, name) for name in ("s", "sign", "nonzero"))
            torch.mul(at, inv[block, None], out=s)
            torch.sign(s, out=sign)
            torch.ne(at, 0, out=nonzero)
            squares.append(_squared(s))
            sums = []
            for ours, variant, (codes, _) in zip(known, self.variants, pairs, strict=True):
                if ours:
                    self._round(s, sign, codes[block], variant)
                sums.append(self._code_errors(codes[block], s, sign, nonzero))
            errors.append(torch.stack(sums))
        return QuantizedInput(
            x_bf16=x.to(torch.bfloat16),
            codes=[codes for codes, _ in pairs],
            scales=[scales for _, scales in pairs],
            groups=kept,
            row_sums=_row_sums(wide, absmax, inv, torch.cat(squares), bad, groups, kept),
            code_sums=torch.stack([_by_group(rows, kept) for rows in torch.cat(errors, dim=2)]),
        )

    def _round(self, s: Tensor, sign: Tensor, out: Tensor, variant: str) -> None:
        """s to int8 codes: storing a float truncates, which is all that `shipped` does."""
        if variant == Rounding.FIXED:
            s = torch.mul(sign, BELOW_HALF, out=self._buffers.get(s, "offset")).add_(s)
        out.copy_(s)

    def _code_errors(self, codes: Tensor, s: Tensor, sign: Tensor, nonzero: Tensor) -> Tensor:
        """Row sums [5, rows] in the order of stats.CODE_SUMS. Codes have the sign of s: |code| - |s| = sign * error."""
        wide, e, work = (self._buffers.get(s, name) for name in ("codes", "e", "work"))
        torch.sub(wide.copy_(codes), s, out=e)
        magnitude = torch.mul(e, sign, out=work).sum(dim=1)
        square = _squared(e).float()
        mismatched = torch.abs(e, out=work).gt_(0.5).sum(dim=1)
        zeroed = torch.eq(wide, 0, out=work).mul_(nonzero).sum(dim=1)
        saturated = wide.abs_().eq_(numerics.CODE_MAX).sum(dim=1)
        return torch.stack([magnitude, square, mismatched, zeroed, saturated])

    def quantize_weight(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return numerics.quantize_weight(w)

    def int8_linear(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None
    ) -> Tensor:  # fmt: skip
        """As numerics.int8_linear, in place: the same products and roundings."""
        wide = numerics.int8_matmul(a, b).float().mul_(a_scales[:, None]).mul_(b_scales)
        y = wide.to(torch.bfloat16)
        return y if bias is None else y.add_(bias.to(torch.bfloat16))

    def output_sums(
        self, yqs: Sequence[Tensor], y: Tensor, bias: Tensor | None, groups: Tensor, norm: stats.Norm | None
    ) -> Tensor:  # fmt: skip
        if y.dtype == torch.float64:  # e must be taken before anything is narrowed
            return stats.output_sums(yqs, y, bias, groups, norm)
        bias = None if bias is None else bias.float()
        weight = None if norm is None else norm[0].float()
        shared = [torch.empty(3, 0, dtype=torch.float64)]  # yy, zz, (wy)^2
        sums = [torch.empty(len(yqs), 6, 0, dtype=torch.float64)]
        for block in self._buffers.blocks(*y.shape):
            at = self._buffers.get(y[block], "y").copy_(y[block])
            z = at if bias is None else torch.sub(at, bias, out=self._buffers.get(at, "z"))
            wy = None if weight is None else torch.mul(at, weight, out=self._buffers.get(at, "wy"))
            yy = _squared(at)
            shared.append(torch.stack([yy, yy if z is at else _squared(z), yy if wy is None else _squared(wy)]))
            sums.append(torch.stack([self._output_errors(yq[block], at, z, weight, wy) for yq in yqs]))
        variants, common = torch.cat(sums, dim=2), torch.cat(shared, dim=1)
        return torch.stack([_output_totals(rows, common, groups, y.shape[1], norm) for rows in variants])

    def _output_errors(
        self, yq: Tensor, y: Tensor, z: Tensor, weight: Tensor | None, wy: Tensor | None
    ) -> Tensor:  # fmt: skip
        """Row sums fp64 [6, rows]: ee, ey, ez, max|e|, (we)^2, w^2 e y."""
        e, work = self._buffers.get(y, "e"), self._buffers.get(y, "work")
        e.copy_(yq).sub_(y)
        ee = wee = _squared(e)
        ey = wey = torch.mul(e, y, out=work).sum(dim=1)
        ez = ey if z is y else torch.mul(e, z, out=work).sum(dim=1)
        largest = torch.abs(e, out=work).amax(dim=1)
        if weight is not None and wy is not None:
            wee = _squared(e.mul_(weight))
            wey = torch.mul(e, wy, out=work).sum(dim=1)
        return torch.stack([ee, ey.double(), ez.double(), largest.double(), wee, wey.double()])


def _squared(v: Tensor) -> Tensor:
    """Sum of squares of each row, in one pass that keeps no temporary. fp32 [rows, columns] -> fp64 [rows]."""
    return torch.linalg.vector_norm(v, dim=1).double().square()


def _by_group(sums: Tensor, groups: Tensor) -> Tensor:
    """Row sums [S, rows] -> fp64 [2, S]. Rows of other groups count for nothing, NaN included."""
    wide = sums.double()
    return torch.stack([torch.where(groups == g, wide, 0.0).sum(dim=1) for g in stats.GROUPS])


def _row_sums(
    wide: Tensor, absmax: Tensor, inv: Tensor, squares: Tensor, bad: Tensor, groups: Tensor, kept: Tensor
) -> Tensor:
    """fp64 [2, 4] in the order of stats.ROW_SUMS; squares are those of the scaled rows, which cannot overflow."""
    zero = absmax == 0
    rms = (squares / wide.shape[1]).sqrt()
    crest = torch.where(zero | bad, 0.0, absmax.double() * inv / rms)
    tiny = (inv == 0) & ~zero & ~bad  # too small for a scale, but not zero
    if bool(tiny.any()):
        crest[tiny] = absmax[tiny].double() / wide[tiny].double().square().mean(dim=1).sqrt()
    sums = []
    for g in stats.GROUPS:
        rows = kept == g
        counts = torch.stack([rows.sum(), (bad & (groups == g)).sum(), (rows & zero).sum()]).double()
        sums.append(torch.cat([counts, torch.where(rows, crest, 0.0).sum()[None]]))
    return torch.stack(sums)


def _output_totals(
    sums: Tensor, shared: Tensor, groups: Tensor, columns: int, norm: stats.Norm | None
) -> Tensor:  # fmt: skip
    """Row sums [6, rows] and those that variants share [3, rows] -> fp64 [2, 8] in the order of stats.OUTPUT_SUMS."""
    (ee, ey, ez, largest, wee, wey), (yy, zz, wyy) = sums, shared
    effective_yy, effective_ee = yy, ee
    if norm is not None:
        mean_y, gained = yy / columns + norm[1], (2 * ey + ee) / columns
        r_y, r_q = mean_y.rsqrt(), (mean_y + gained).rsqrt()
        d = -gained * r_q.square() * r_y.square() / (r_q + r_y)
        effective_yy = r_y.square() * wyy
        effective_ee = (r_q.square() * wee + 2 * r_q * d * wey + d.square() * wyy).clamp(min=0)
    total = _by_group(torch.stack([yy, ee, ey, zz, ez, largest, effective_yy, effective_ee]), groups)
    for i, g in enumerate(stats.GROUPS):
        total[i, MAX_AT] = torch.where(groups == g, largest, 0.0).max() if len(largest) else 0.0
    return total
