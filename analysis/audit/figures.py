"""The numbers beside a verdict, in LSB, on Gaussian rows: biases with intervals, RMS, gain, mismatch without ties."""

from __future__ import annotations

from typing import Any

import torch
from scipy import special
from torch import Tensor

from analysis.audit.grid import Grid
from analysis.audit.rules import EPSILON, Batch, is_tie

CONFIDENCE = 0.95


def measure(batch: Batch, step: Tensor, grid: Grid, by_row: bool = True) -> dict[str, Any]:
    """Statistics of codes against s = x / step, both in index units. `step` fp64 [elements].

    Intervals: rows are the clusters, or scale groups where those span rows (`by_row` False), for under one scale the
    fractions of narrow inputs lie on a lattice and are not independent.

    magnitude_bias_lsb: mean of |code| - |s|. mean_error_lsb: mean of code - s. rmse_lsb: RMS of code - s.
    code_mismatch: fraction of codes that differ from half even, ties excepted (exact, or within fp32
    rounding of one); ties: how many there were.
    row_gain: projection of the dequantised row (returned scale, where there is one) on the row.
    """
    s = batch.x / step
    p = grid.position(s)
    error = batch.index - p
    magnitude = batch.index.abs() - p.abs()
    ties = is_tie(p, EPSILON)
    rows = _numbers(batch.probe * (1 << 32) + batch.row if by_row else batch.group)
    returned = torch.where(torch.isfinite(batch.returned), batch.returned, step)
    dequantised = grid.value(batch.index) * returned
    gain = _row_sums(dequantised * batch.x, rows) / _row_sums(batch.x.square(), rows)
    nearest = torch.round(p).clamp(grid.lo, grid.hi)
    counts = _row_sums(torch.ones_like(s), rows)
    bias, bias_interval = _mean(_row_sums(magnitude, rows) / counts)
    mean, mean_interval = _mean(_row_sums(error, rows) / counts)
    row_gain, gain_interval = _mean(gain[torch.isfinite(gain)])
    return {
        "elements": len(s),
        "code_mismatch": float(((batch.index != nearest) & ~ties).double().mean()),
        "ties": int(ties.sum()),
        "magnitude_bias_lsb": bias,
        "magnitude_bias_lsb_interval": bias_interval,
        "mean_error_lsb": mean,
        "mean_error_lsb_interval": mean_interval,
        "rmse_lsb": float(error.square().mean().sqrt()),
        "row_gain": row_gain,
        "row_gain_interval": gain_interval,
    }


def _numbers(labels: Tensor) -> Tensor:
    """0..n-1 over the distinct labels."""
    return torch.unique(labels, return_inverse=True)[1]


def _row_sums(values: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(int(rows.max()) + 1, dtype=torch.float64).index_add(0, rows, values)


def _mean(values: Tensor) -> tuple[float, list[float]]:
    """Mean over clusters and its Student interval; with fewer than two the interval is empty."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, []
    half = float(values.std() / len(values) ** 0.5 * special.stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2))
    return mean, [mean - half, mean + half]
