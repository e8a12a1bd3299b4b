"""The measurement on a CPU, fast: rows in blocks that stay in cache, fp32 sums within a row, fp64 sums over rows.

Twin of `ReferenceEngine` with the same products and codes bit for bit; sums agree to 1e-6 of their size and counts
exactly, as the Triton passes' do (the effective error by the formula of `analysis.kernels.error_sums`). Roundings other
than `shipped` and `fixed`, and foreign kernels, quantise by their own function.

What costs time here is not arithmetic but fresh memory, PyTorch's calls (so: few, on blocks as large as the cache
takes) and its kernels that write bools (so: comparisons are stored as floats).
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

BLOCK_BYTES = 256 * 2**10  # of one fp32 buffer: PyTorch splits no operation below this among threads
BELOW_HALF = 0.5 - 2.0**-25  # added with the sign of s and truncated, this rounds half away from zero, exactly
MAX_AT = stats.OUTPUT_SUMS.index("max_abs_e")
VARIANT_SUMS = 6  # ee, ey, ez, max|e|, (we)^2, w^2 e y; the squares as their roots until all rows are done
_BELOW_HALF, _HALF, _ZERO, _MAX = (torch.tensor(v) for v in (BELOW_HALF, 0.5, 0.0, float(numerics.CODE_MAX)))


class _Scratch:
    """fp32 and bf16 scratch [rows, columns] of one block; a name is one buffer."""

    def __init__(self, rows: int, columns: int) -> None:
        shape = (rows, columns)
        self.s, self.sign, self.nonzero, self.offset = (torch.empty(shape) for _ in range(4))
        self.wide, self.e, self.work = (torch.empty(shape) for _ in range(3))
        self.y, self.z, self.wy = self.s, self.sign, self.nonzero  # never needed at the same time
        self.narrow = torch.empty(shape, dtype=torch.bfloat16)


class _Blocks:
    """The blocks of rows that a tensor is worked off in, each with its scratch, which is kept for the next tensor."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Scratch] = {}

    def of(self, rows: int, columns: int) -> Iterator[tuple[slice, _Scratch]]:
        step = max(8, BLOCK_BYTES // (4 * columns))
        for start in range(0, rows, step):
            size = min(step, rows - start)
            if (size, columns) not in self._kept:
                if len(self._kept) > 16:
                    self._kept.clear()
                self._kept[size, columns] = _Scratch(size, columns)
            yield slice(start, start + size), self._kept[size, columns]


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
        self._blocks = _Blocks()

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
        roots = torch.empty(len(x))
        errors = torch.empty(len(pairs), len(stats.CODE_SUMS), len(x))
        column = inv[:, None]
        for block, at in self._blocks.of(*x.shape):
            here = wide[block]
            torch.mul(here, column[block], out=at.s)
            torch.sign(at.s, out=at.sign)
            torch.ne(here, _ZERO, out=at.nonzero)
            torch.linalg.vector_norm(at.s, dim=1, out=roots[block])
            for i, (codes, _) in enumerate(pairs):
                stored = codes[block]
                if known[i]:
                    _round(at, stored, self.variants[i])
                _code_errors(at, stored, errors[i, :, block].unbind())
        errors[:, 1].square_()
        return QuantizedInput(
            x_bf16=x.to(torch.bfloat16),
            codes=[codes for codes, _ in pairs],
            scales=[scales for _, scales in pairs],
            groups=kept,
            row_sums=_row_sums(wide, absmax, inv, roots.double().square(), bad, groups, kept),
            code_sums=_by_group(errors, kept),
        )

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
        return self._sums([_Stored(yq) for yq in yqs], y, bias, groups, norm)

    def error_sums(
        self, q: QuantizedInput, weight: tuple[Tensor, Tensor], y: Tensor, bias: Tensor | None, norm: stats.Norm | None
    ) -> Tensor:  # fmt: skip
        """As `int8_linear` and `output_sums`; the outputs are made block by block and never kept."""
        narrow = None if bias is None else bias.to(torch.bfloat16)
        products = [
            _Product(numerics.int8_matmul(codes, weight[0]), scales[:, None], weight[1], narrow)
            for codes, scales in zip(q.codes, q.scales, strict=True)
        ]
        return self._sums(products, y, bias, q.groups, norm)

    def _sums(
        self,
        outputs: Sequence[_Stored | _Product],
        y: Tensor,
        bias: Tensor | None,
        groups: Tensor,
        norm: stats.Norm | None,
    ) -> Tensor:
        if y.dtype == torch.float64:  # e must be taken before anything is narrowed
            return stats.output_sums([output.whole() for output in outputs], y, bias, groups, norm)
        bias = None if bias is None else bias.float()
        weight = None if norm is None else norm[0].float()
        shared = torch.zeros(3, len(y))  # yy, zz, (wy)^2, as roots
        sums = torch.zeros(len(outputs), VARIANT_SUMS, len(y))
        for block, at in self._blocks.of(*y.shape):
            at.y.copy_(y[block])
            z = at.y if bias is None else torch.sub(at.y, bias, out=at.z)
            yy, zz, wyy = shared[:, block].unbind()
            torch.linalg.vector_norm(at.y, dim=1, out=yy)
            torch.linalg.vector_norm(z, dim=1, out=zz)
            if weight is not None:
                torch.linalg.vector_norm(torch.mul(at.y, weight, out=at.wy), dim=1, out=wyy)
            for i, output in enumerate(outputs):
                output.block(block, at)
                _output_errors(at, z, weight, sums[i, :, block].unbind())
        common = shared.double().square()
        return torch.stack([_output_totals(rows.double(), common, groups, y.shape[1], norm) for rows in sums])


def _round(at: _Scratch, out: Tensor, variant: str) -> None:
    """s to int8 codes: storing a float truncates, which is all that `shipped` does."""
    out.copy_(torch.mul(at.sign, _BELOW_HALF, out=at.offset).add_(at.s) if variant == Rounding.FIXED else at.s)


def _code_errors(at: _Scratch, codes: Tensor, out: tuple[Tensor, ...]) -> None:
    """Row sums, each [rows], in the order of stats.CODE_SUMS. Codes have the sign of s: |code| - |s| = sign * error."""
    torch.sub(at.wide.copy_(codes), at.s, out=at.e)
    torch.sum(torch.mul(at.e, at.sign, out=at.work), dim=1, out=out[0])
    torch.linalg.vector_norm(at.e, dim=1, out=out[1])
    torch.sum(at.e.abs_().gt_(_HALF), dim=1, out=out[2])
    torch.sum(torch.eq(at.wide, _ZERO, out=at.work).mul_(at.nonzero), dim=1, out=out[3])
    torch.sum(at.wide.abs_().eq_(_MAX), dim=1, out=out[4])


def _output_errors(at: _Scratch, z: Tensor, weight: Tensor | None, out: tuple[Tensor, ...]) -> None:
    """Row sums, each [rows], in the order of VARIANT_SUMS. at.e holds the output, and is overwritten."""
    torch.linalg.vector_norm(at.e.sub_(at.y), dim=1, out=out[0])
    torch.sum(torch.mul(at.e, at.y, out=at.work), dim=1, out=out[1])
    if z is at.y:
        out[2].copy_(out[1])
    else:
        torch.sum(torch.mul(at.e, z, out=at.work), dim=1, out=out[2])
    torch.amax(torch.abs(at.e, out=at.work), dim=1, out=out[3])
    if weight is not None:
        torch.linalg.vector_norm(at.e.mul_(weight), dim=1, out=out[4])
        torch.sum(torch.mul(at.e, at.wy, out=at.work), dim=1, out=out[5])


class _Stored:
    """An output that is there."""

    def __init__(self, yq: Tensor) -> None:
        self.yq = yq

    def whole(self) -> Tensor:
        return self.yq

    def block(self, rows: slice, at: _Scratch) -> None:
        """Its rows, as fp32, into at.e."""
        at.e.copy_(self.yq[rows])


class _Product:
    """An output that is made from int32 products, block by block, with numerics.dequantize's roundings."""

    def __init__(self, acc: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
        self.acc, self.a_scales, self.b_scales, self.bias = acc, a_scales, b_scales, bias

    def whole(self) -> Tensor:
        return numerics.dequantize(self.acc, self.a_scales[:, 0], self.b_scales, self.bias, torch.bfloat16)

    def block(self, rows: slice, at: _Scratch) -> None:
        """Its rows, as fp32, into at.e."""
        at.narrow.copy_(at.e.copy_(self.acc[rows]).mul_(self.a_scales[rows]).mul_(self.b_scales))
        at.e.copy_(at.narrow if self.bias is None else at.narrow.add_(self.bias))


def _by_group(sums: Tensor, groups: Tensor) -> Tensor:
    """Row sums [..., S, rows] -> fp64 [..., 2, S]. Rows of other groups count for nothing, NaN included."""
    wide = sums.double()
    return torch.stack([torch.where(groups == g, wide, 0.0).sum(dim=-1) for g in stats.GROUPS], dim=-2)


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
    counted = _by_group(torch.stack([torch.ones_like(crest), zero.double(), crest]), kept)
    lost = _by_group(bad[None], groups)
    return torch.cat([counted[:, :1], lost, counted[:, 1:]], dim=1)


def _output_totals(
    sums: Tensor, shared: Tensor, groups: Tensor, columns: int, norm: stats.Norm | None
) -> Tensor:  # fmt: skip
    """Row sums [6, rows] and those that variants share [3, rows] -> fp64 [2, 8] in the order of stats.OUTPUT_SUMS."""
    (e, ey, ez, largest, we, wey), (yy, zz, wyy) = sums, shared
    ee = e.square()
    effective_yy, effective_ee = yy, ee
    if norm is not None:
        mean_y, gained = yy / columns + norm[1], (2 * ey + ee) / columns
        r_y, r_q = mean_y.rsqrt(), (mean_y + gained).rsqrt()
        d = -gained * r_q.square() * r_y.square() / (r_q + r_y)
        effective_yy = r_y.square() * wyy
        effective_ee = (r_q.square() * we.square() + 2 * r_q * d * wey + d.square() * wyy).clamp(min=0)
    total = _by_group(torch.stack([yy, ee, ey, zz, ez, largest, effective_yy, effective_ee]), groups)
    for i, g in enumerate(stats.GROUPS):
        total[i, MAX_AT] = torch.where(groups == g, largest, 0.0).max() if len(largest) else 0.0
    return total
