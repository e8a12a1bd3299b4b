"""The measurement on a CPU, fast: rows in blocks that stay in cache, fp32 sums within a row, fp64 sums over rows.

Twin of `ReferenceEngine` with the same products and codes bit for bit; sums agree to 1e-6 of their size and counts
exactly, as the Triton passes' do (the effective error by the formula of `analysis.kernels.error_sums`). Roundings other
than `shipped` and `fixed`, and foreign kernels, quantise by their own function.

What costs time here is not arithmetic but fresh memory, PyTorch's calls (so: few, all variants in one, on blocks as
large as the cache takes) and its kernels that write bools (so: comparisons are stored as floats or int8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from analysis import numerics
from analysis.measure import stats
from analysis.measure.quantized import QuantizedInput
from analysis.measure.scratch import Blocks, Scratch
from analysis.numerics import Rounding

SCALED = 1e-36  # a row with a larger absmax has a scale: 127 / absmax does not overflow
MAX_AT = stats.OUTPUT_SUMS.index("max_abs_e")
# Row sums of outputs as they are taken; the first three and those of w as their roots until all rows are done.
ROW_BUFFERS = ("yy", "zz", "ee", "ey", "ez", "max|e|", "(wy)^2", "(we)^2", "w^2 e y")
# Where stats.OUTPUT_SUMS are among them, with a norm and without.
NORMED, PLAIN = torch.tensor([0, 2, 3, 1, 4, 5, 6, 7]), torch.tensor([0, 2, 3, 1, 4, 5, 0, 2])
KNOWN = {Rounding.SHIPPED, Rounding.FIXED}  # their codes and errors are computed here
_HALF, _ZERO = torch.tensor(0.5), torch.tensor(0.0)


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
        self._blocks = Blocks(len(self.variants))
        self._ones: dict[int, Tensor] = {}
        self._seen: tuple[Tensor, bool] | None = None  # groups, and whether all of them are 1

    def quantize(self, x: Tensor, groups: Tensor) -> QuantizedInput:
        wide = x.float()
        absmax, smallest = self._extremes(wide)
        inv, _ = numerics.row_scales(absmax[:, None])
        bad, kept, has_zeros = None, groups, False
        # NaN makes both comparisons false. Above SCALED every row has a scale and no element is zero.
        if len(x) and not (smallest.amin().item() > SCALED and absmax.amax().item() < torch.inf):
            bad = ~(absmax < torch.inf)  # such rows have s = 0 and codes 0
            kept, inv = torch.where(bad, 0, groups), torch.where(bad, 0.0, inv)
            wide, has_zeros = torch.where(bad[:, None], 0.0, wide), True
        codes = torch.empty(len(self.variants), *x.shape, dtype=torch.int8)
        scales = self._scales(inv, bad)
        for i, (variant, quantizer) in enumerate(zip(self.variants, self.quantizers, strict=True)):
            if variant not in KNOWN:
                codes[i], scales[i] = quantizer(x)
        rows = torch.zeros(len(stats.ROW_SUMS) + len(codes) * len(stats.CODE_SUMS), len(x))
        roots = self._code_rows(wide, inv, codes, rows[4:].view(len(codes), len(stats.CODE_SUMS), len(x)), has_zeros)
        _fill_row_sums(rows[:4], wide, absmax, inv, roots, bad)
        sums = _by_group(rows, None if self._whole(kept) else kept)
        if bad is not None:
            sums[:, 1] = _by_group(bad[None].float(), groups)[:, 0]
        return QuantizedInput(
            x_bf16=x.to(torch.bfloat16),
            codes=codes,
            scales=scales,
            groups=kept,
            row_sums=sums[:, :4],
            code_sums=sums[:, 4:].view(2, len(codes), len(stats.CODE_SUMS)).transpose(0, 1),
        )

    def _whole(self, groups: Tensor) -> bool:
        """Whether every row is of group 1."""
        if self._seen is None or self._seen[0] is not groups:
            self._seen = groups, bool((groups == 1).all())
        return self._seen[1]

    def _scales(self, inv: Tensor, bad: Tensor | None) -> Tensor:
        """fp32 [V, rows]; those of foreign kernels are theirs to fill in."""
        scale = 1.0 / inv
        if bad is not None:
            scale = torch.where(bad, torch.nan, torch.where(inv > 0, scale, 0.0))
        if set(self.variants) <= KNOWN:
            return scale.expand(len(self.variants), -1)
        return scale.repeat(len(self.variants), 1)

    def _extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Largest and smallest |x| of each row."""
        largest, smallest = torch.empty(2, len(x)).unbind()
        for block, at in self._blocks.of(*x.shape):
            torch.abs(x[block], out=at.work)
            torch.amax(at.work, dim=1, out=largest[block])
            torch.amin(at.work, dim=1, out=smallest[block])
        return largest, smallest

    def _code_rows(self, x: Tensor, inv: Tensor, codes: Tensor, errors: Tensor, has_zeros: bool) -> Tensor:
        """Fills the codes of known roundings and the errors [V, 5, rows] of all. Returns sqrt(sum of s^2) [rows]."""
        roots, column, (v, m, k) = torch.empty(len(x)), inv[:, None], codes.shape
        if k not in self._ones:
            self._ones = {k: torch.ones(1, k, dtype=torch.int8)}
        for block, at in self._blocks.of(m, k):
            torch.mul(x[block], column[block], out=at.s)
            torch.linalg.vector_norm(at.s, dim=1, out=roots[block])
            stored, here = codes[:, block], errors[:, :, block]
            parts = {name: (c, e.unbind()) for name, c, e in zip(self.variants, stored, here, strict=True)}
            _known_codes(at, parts)
            for variant, (of_variant, sums) in parts.items():
                if variant not in KNOWN:
                    _code_errors(at, of_variant, sums)
            # int8 throughout, and row sums as products with ones: the quickest way to count.
            masks = torch.eq(stored, 0, out=at.small)
            here[:, 3].copy_(numerics.int8_matmul(masks.view(-1, k), self._ones[k]).view(v, -1))
            if has_zeros:
                here[:, 3].sub_(torch.eq(x[block], _ZERO, out=at.work).sum(dim=1))
            masks = torch.abs(stored, out=at.small).eq_(numerics.CODE_MAX)
            here[:, 4].copy_(numerics.int8_matmul(masks.view(-1, k), self._ones[k]).view(v, -1))
        errors[:, 1].square_()
        return roots

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

        def fill(block: slice, at: Scratch) -> None:
            for e, yq in zip(at.e, yqs, strict=True):
                e.copy_(yq[block])

        return self._sums(fill, y, bias, groups, norm)

    def error_sums(
        self, q: QuantizedInput, weight: tuple[Tensor, Tensor], y: Tensor, bias: Tensor | None, norm: stats.Norm | None
    ) -> Tensor:  # fmt: skip
        """As `int8_linear` and `output_sums`; the outputs are made block by block and never kept."""
        if y.dtype == torch.float64:
            yqs = [self.int8_linear(a, s, *weight, bias) for a, s in zip(q.codes, q.scales, strict=True)]
            return self.output_sums(yqs, y, bias, q.groups, norm)
        codes, scales = (v if isinstance(v, Tensor) else torch.stack(list(v)) for v in (q.codes, q.scales))
        products = numerics.int8_matmul(codes.flatten(0, 1), weight[0]).view(*codes.shape[:2], len(weight[0]))
        columns, narrow = scales[:, :, None], None if bias is None else bias.to(torch.bfloat16)

        def fill(block: slice, at: Scratch) -> None:  # with numerics.dequantize's roundings
            at.narrow.copy_(at.e.copy_(products[:, block]).mul_(columns[:, block]).mul_(weight[1]))
            at.e.copy_(at.narrow if narrow is None else at.narrow.add_(narrow))

        return self._sums(fill, y, bias, q.groups, norm)

    def _sums(
        self,
        fill: Callable[[slice, Scratch], None],
        y: Tensor,
        bias: Tensor | None,
        groups: Tensor,
        norm: stats.Norm | None,
    ) -> Tensor:
        """fp64 [V, 2, 8]; `fill` leaves the outputs of some rows, as fp32 [V, rows, N], in the scratch's e."""
        bias = None if bias is None else bias.float()
        weight = None if norm is None else norm[0].float()
        rows = torch.zeros(len(ROW_BUFFERS), len(self.variants), len(y))
        for block, at in self._blocks.of(*y.shape):
            fill(block, at)
            reference = at.s.copy_(y[block])
            z = reference if bias is None else torch.sub(reference, bias, out=at.f)
            yy, zz, ee, ey, ez, largest, wyy, wee, wey = rows[:, :, block].unbind()
            torch.linalg.vector_norm(reference, dim=1, out=yy[0])
            torch.linalg.vector_norm(z, dim=1, out=zz[0])
            torch.linalg.vector_norm(at.e.sub_(reference), dim=2, out=ee)
            torch.sum(torch.mul(at.e, reference, out=at.product), dim=2, out=ey)
            if bias is None:
                ez.copy_(ey)
            else:
                torch.sum(torch.mul(at.e, z, out=at.product), dim=2, out=ez)
            if weight is None:
                torch.amax(at.e.abs_(), dim=2, out=largest)
            else:
                torch.amax(torch.abs(at.e, out=at.product), dim=2, out=largest)
                torch.linalg.vector_norm(reference.mul_(weight), dim=1, out=wyy[0])
                torch.linalg.vector_norm(at.e.mul_(weight), dim=2, out=wee)
                torch.sum(torch.mul(at.e, reference, out=at.product), dim=2, out=wey)
        return _output_totals(rows, None if self._whole(groups) else groups, y.shape[1], norm)


def _known_codes(at: Scratch, parts: Mapping[str, tuple[Tensor, Sequence[Tensor]]]) -> None:
    """Codes and, of their errors, the first three of CODE_SUMS, for `shipped` and `fixed`. at.s holds s.

    Both follow from f = s - trunc(s), which is exact: `shipped` stores trunc(s) and is wrong by |f|; `fixed` stores
    trunc(s + f), whose sum is exact too, is wrong by |f| or 1 - |f|, and so never differs from the nearest code.
    """
    shipped, fixed = parts.get(Rounding.SHIPPED), parts.get(Rounding.FIXED)
    if shipped is None and fixed is None:
        return
    torch.frac(at.s, out=at.f)
    if fixed is not None:
        fixed[0].copy_(torch.add(at.s, at.f, out=at.work))
    if shipped is not None:
        codes, (signed, root, mismatched, *_) = shipped
        codes.copy_(at.s)  # storing a float truncates
        torch.linalg.vector_norm(at.f.abs_(), dim=1, out=root)
        torch.sum(at.f, dim=1, out=signed).neg_()
        torch.sum(torch.gt(at.f, _HALF, out=at.work), dim=1, out=mismatched)
    if fixed is not None:
        _, (signed, root, *_) = fixed
        error = torch.ge(at.f.abs_(), _HALF, out=at.work).sub_(at.f)  # |code| - |s|
        torch.sum(error, dim=1, out=signed)
        torch.linalg.vector_norm(error, dim=1, out=root)


def _code_errors(at: Scratch, codes: Tensor, sums: Sequence[Tensor]) -> None:
    """The first three of CODE_SUMS for any codes. at.s holds s."""
    torch.sub(torch.abs(at.work.copy_(codes), out=at.work), torch.abs(at.s, out=at.f), out=at.work)
    torch.sum(at.work, dim=1, out=sums[0])
    torch.linalg.vector_norm(at.work.copy_(codes).sub_(at.s), dim=1, out=sums[1])
    torch.sum(at.work.abs_().gt_(_HALF), dim=1, out=sums[2])


def _by_group(rows: Tensor, groups: Tensor | None) -> Tensor:
    """Row sums [S, M] -> fp64 [2, S]; groups None: all are 1. Rows of other groups count for nothing, NaN included."""
    if groups is None:
        total = rows.sum(dim=-1, dtype=torch.float64)
        return torch.stack([total, torch.zeros_like(total)])
    wide = rows.double()
    return torch.stack([torch.where(groups == g, wide, 0.0).sum(dim=-1) for g in stats.GROUPS])


def _fill_row_sums(
    out: Tensor, wide: Tensor, absmax: Tensor, inv: Tensor, roots: Tensor, bad: Tensor | None
) -> None:  # fmt: skip
    """out [4, M], zeros on entry, in the order of stats.ROW_SUMS; roots are those of scaled rows: no overflow."""
    out[0] = 1
    torch.div(absmax * inv, roots, out=out[3]).mul_(wide.shape[1] ** 0.5)
    if bad is not None:
        unscaled = inv == 0  # zero rows, bad rows, and rows too small for a scale
        tiny = unscaled & (absmax > 0) & ~bad
        out[2] = absmax == 0
        out[3, unscaled] = 0
        out[3, tiny] = (absmax[tiny].double() / wide[tiny].double().square().mean(dim=1).sqrt()).float()


def _output_totals(rows: Tensor, groups: Tensor | None, columns: int, norm: stats.Norm | None) -> Tensor:
    """Row sums [9, V, M], order ROW_BUFFERS, overwritten here -> fp64 [V, 2, 8], order stats.OUTPUT_SUMS."""
    rows[:2, 1:] = rows[:2, :1]  # of the reference: the same for all variants
    rows[:3].square_()
    order = PLAIN if norm is None else NORMED
    if norm is not None:
        yy, _, ee, ey, *_ = wide = rows.double()
        wyy, wee, wey = wide[6, :1].square(), wide[7].square(), wide[8]
        mean_y, gained = yy / columns + norm[1], torch.add(ee, ey, alpha=2).div_(columns)
        r_y, r_q = mean_y.rsqrt(), (mean_y + gained).rsqrt()
        y2, q2 = r_y.square(), r_q.square()
        d = (gained * y2 * q2).div_(r_q + r_y).neg_()
        rows[6], rows[7] = y2 * wyy, (q2 * wee + d * (2 * r_q * wey + d * wyy)).clamp_(min=0)
    v, m = rows.shape[1:]
    sums = _by_group(rows[:8].reshape(8 * v, m), groups).view(2, 8, v).index_select(1, order).permute(2, 0, 1)
    if m and groups is None:
        sums[:, 0, MAX_AT] = rows[5].amax(dim=1)
    elif m and groups is not None:
        sums[:, :, MAX_AT] = torch.stack(
            [torch.where(groups == g, rows[5], 0.0).amax(dim=1) for g in stats.GROUPS], dim=1
        ).double()
    return sums
