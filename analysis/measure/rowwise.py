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

BLOCK_BYTES = 128 * 2**10  # of one fp32 buffer: half a dozen of them fit a core's L2 cache
BELOW_HALF = 0.5 - 2.0**-25  # added with the sign of s and truncated, this rounds half away from zero, exactly
MAX_AT = stats.OUTPUT_SUMS.index("max_abs_e")


class _Buffers:
    """fp32 and bool scratch [rows, columns], made once per width: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, str, torch.dtype], Tensor] = {}

    def blocks(self, rows: int, columns: int) -> Iterator[slice]:
        step = max(8, BLOCK_BYTES // (4 * columns))
        yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def get(self, like: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        rows, columns = like.shape
        step = max(8, BLOCK_BYTES // (4 * columns))
        key = (step, columns, name, dtype)
        if key not in self._kept:
            if len(self._kept) > 64:
                self._kept.clear()
            self._kept[key] = torch.empty(step, columns, dtype=dtype)
        return self._kept[key][:rows]


class RowwiseEngine:
    """Plain PyTorch on a CPU, blocked by rows.

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

        rows = x.shape[0]
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
        squares = torch.empty(rows, dtype=torch.float64)
        errors = torch.zeros(len(pairs), rows, len(stats.CODE_SUMS))
        for block in self._buffers.blocks(*x.shape):
            at = wide[block]
            s, sign = self._buffers.get(at, "s"), self._buffers.get(at, "sign")
            nonzero = self._buffers.get(at, "nonzero", torch.bool)
            torch.mul(at, inv[block, None], out=s)
            torch.sign(s, out=sign)
            torch.ne(at, 0, out=nonzero)
            squares[block] = _squared(s)
            for i, (codes, _) in enumerate(pairs):
                if known[i]:
                    self._round(s, codes[block], self.variants[i])
                self._code_errors(codes[block], s, sign, nonzero, errors[i, block])
        return QuantizedInput(
            x_bf16=x.to(torch.bfloat16),
            codes=[codes for codes, _ in pairs],
            scales=[scales for _, scales in pairs],
            groups=kept,
            row_sums=_row_sums(wide, absmax, inv, squares, bad, groups, kept),
            code_sums=torch.stack([_by_group(e, kept) for e in errors]),
        )

    def _round(self, s: Tensor, out: Tensor, variant: str) -> None:
        """s to int8 codes: storing a float truncates, which is all that `shipped` does."""
        if variant == Rounding.FIXED:
            offset = self._buffers.get(s, "offset")
            torch.copysign(_below_half(), s, out=offset)
            s = offset.add_(s)
        out.copy_(s)

    def _code_errors(self, codes: Tensor, s: Tensor, sign: Tensor, nonzero: Tensor, out: Tensor) -> None:
        """Row sums [rows, 5] in the order of stats.CODE_SUMS. Codes have the sign of s: |code| - |s| = sign * error."""
        e, work = self._buffers.get(s, "e"), self._buffers.get(s, "work")
        mask = self._buffers.get(s, "mask", torch.bool)
        e.copy_(codes)
        e.sub_(s)
        out[:, 0] = torch.mul(e, sign, out=work).sum(dim=1)
        out[:, 1] = _squared(e)
        torch.abs(e, out=work)
        out[:, 2] = work.copy_(torch.gt(work, 0.5, out=mask)).sum(dim=1)
        torch.eq(codes, 0, out=mask)
        out[:, 3] = work.copy_(mask.logical_and_(nonzero)).sum(dim=1)
        work.copy_(codes).abs_()
        out[:, 4] = work.copy_(torch.eq(work, float(numerics.CODE_MAX), out=mask)).sum(dim=1)

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
        shared = torch.zeros(3, len(y), dtype=torch.float64)  # yy, zz, (wy)^2
        sums = torch.zeros(len(yqs), len(y), 6)  # ee, ey, ez, max|e|, (we)^2, w^2 e y
        bias = None if bias is None else bias.float()
        weight = None if norm is None else norm[0].float()
        for block in self._buffers.blocks(*y.shape):
            at = self._buffers.get(y[block], "y").copy_(y[block])
            z = at if bias is None else torch.sub(at, bias, out=self._buffers.get(at, "z"))
            shared[0, block], shared[1, block] = _squared(at), _squared(z)
            wy = None
            if weight is not None:
                wy = torch.mul(at, weight, out=self._buffers.get(at, "wy"))
                shared[2, block] = _squared(wy)
            for i, yq in enumerate(yqs):
                self._output_errors(yq[block], at, z, weight, wy, sums[i, block])
        return torch.stack([_output_totals(s.double(), *shared, groups, y.shape[1], norm) for s in sums])

    def _output_errors(
        self, yq: Tensor, y: Tensor, z: Tensor, weight: Tensor | None, wy: Tensor | None, out: Tensor
    ) -> None:  # fmt: skip
        e, work = self._buffers.get(y, "e"), self._buffers.get(y, "work")
        e.copy_(yq)
        e.sub_(y)
        out[:, 0] = _squared(e)
        out[:, 1] = torch.mul(e, y, out=work).sum(dim=1)
        out[:, 2] = out[:, 1] if z is y else torch.mul(e, z, out=work).sum(dim=1)
        out[:, 3] = torch.abs(e, out=work).amax(dim=1)
        if weight is not None and wy is not None:
            e.mul_(weight)
            out[:, 4] = _squared(e)
            out[:, 5] = torch.mul(e, wy, out=work).sum(dim=1)


def _below_half() -> Tensor:
    return torch.tensor(BELOW_HALF)


def _squared(v: Tensor) -> Tensor:
    """Sum of squares of each row, in one pass that keeps no temporary. fp32 [rows, columns] -> fp64 [rows]."""
    return torch.linalg.vector_norm(v, dim=1).double().square()


def _by_group(rows: Tensor, groups: Tensor) -> Tensor:
    """Row sums [rows, S] -> fp64 [2, S]. Rows of other groups count for nothing, NaN included."""
    wide = rows.double()
    return torch.stack([torch.where((groups == g)[:, None], wide, 0.0).sum(dim=0) for g in stats.GROUPS])


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
    sums: Tensor, yy: Tensor, zz: Tensor, wyy: Tensor, groups: Tensor, columns: int, norm: stats.Norm | None
) -> Tensor:  # fmt: skip
    """Row sums [rows, 6] -> fp64 [2, 8] in the order of stats.OUTPUT_SUMS."""
    ee, ey, ez, largest, wee, wey = sums.unbind(dim=1)
    effective_yy, effective_ee = yy, ee
    if norm is not None:
        mean_y, gained = yy / columns + norm[1], (2 * ey + ee) / columns
        r_y, r_q = mean_y.rsqrt(), (mean_y + gained).rsqrt()
        d = -gained * r_q.square() * r_y.square() / (r_q + r_y)
        effective_yy = r_y.square() * wyy
        effective_ee = (r_q.square() * wee + 2 * r_q * d * wey + d.square() * wyy).clamp(min=0)
    rows = torch.stack([yy, ee, ey, zz, ez, largest, effective_yy, effective_ee], dim=1)
    total = _by_group(rows, groups)
    for i, g in enumerate(stats.GROUPS):
        largest_of_group = torch.where(groups == g, largest, 0.0)
        total[i, MAX_AT] = largest_of_group.max() if len(largest) else 0.0
    return total
