"""From the sums of an ablation to its table: relative changes, paired intervals, the verdict on the 2 % claim.

Sums come as (calls, layers, settings) arrays. Every interval is the 95 % percentile interval of a cluster bootstrap
over calls; a change and its baseline use the same draws, so that what calls have in common cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.results import summary

CLAIM = 0.02  # C6: other factors change the error by less than 2 %
SUPPORTED, REJECTED, UNDECIDED = "supported", "rejected", "undecided"
BOTH = "both"  # main effect: geometric mean over the two roundings
INTERACTION = "shipped/fixed"
INTERACTING = ("activation_granularity", "weight_granularity")


@dataclass(frozen=True)
class Cell:
    """One change under one rounding: where its sums stand, and where its baseline's do."""

    factor: str
    level: str
    stage: str
    rounding: str
    setting: int
    baseline: int


@dataclass(frozen=True)
class Sums:
    """sum_ee and sum_yy, float64 [calls, layers, settings]; a layer that a call did not reach holds 0."""

    ee: np.ndarray
    yy: np.ndarray
    sites: Sequence[str]  # attention and projection of each layer: 'self q'
    rows: int


def verdict(lo: float, hi: float) -> str:
    """Whether |change| < 2 % for an interval of the change; undecided where there is none."""
    if lo > -CLAIM and hi < CLAIM:
        return SUPPORTED
    return REJECTED if lo > CLAIM or hi < -CLAIM else UNDECIDED


def table(sums: Sums, cells: Sequence[Cell]) -> pd.DataFrame:
    """Rows of ablation.csv: each cell, main effects over both roundings, and the interactions with rounding."""
    calls = len(sums.ee)
    weights = summary.bootstrap_weights(calls) if calls >= 3 else np.empty((0, calls))
    sites = list(dict.fromkeys(sums.sites))
    rows: list[dict[str, object]] = []
    for site in ("all", *sites):
        layers = [i for i, s in enumerate(sums.sites) if site in ("all", s)]
        point = _means(sums, layers, np.ones((1, calls)))  # [1, settings]
        drawn = _means(sums, layers, weights)  # [draws, settings]
        label = {"site": site, "layers": len(layers), "calls": calls, "rows": sums.rows}
        for cell in cells:
            at, base = cell.setting, cell.baseline
            rows.append(_row(cell, cell.rounding, point[:, at], point[:, base], drawn[:, at], drawn[:, base]) | label)
        for first, second in _pairs(cells):
            for rounding, join in ((BOTH, _geometric), (INTERACTION, np.divide)):
                if rounding == INTERACTION and first.factor not in INTERACTING:
                    continue
                joined = [
                    join(means[:, a], means[:, b])
                    for means in (point, drawn)
                    for a, b in ((first.setting, second.setting), (first.baseline, second.baseline))
                ]
                row = _row(first, rounding, *joined)
                if rounding == INTERACTION:
                    row["factor"] = f"rounding x {first.factor}"
                rows.append(row | label)
    return pd.DataFrame(rows)


def _pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """(shipped, fixed) of every change that both have; changes of the rounding itself have no main effect."""
    fixed = {(c.factor, c.level): c for c in cells if c.rounding == "fixed"}
    shipped = [c for c in cells if c.rounding == "shipped" and c.factor != "rounding"]
    return [(c, fixed[c.factor, c.level]) for c in shipped if (c.factor, c.level) in fixed]


def _geometric(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sqrt(a * b)


def _means(sums: Sums, layers: list[int], weights: np.ndarray) -> np.ndarray:
    """Mean over layers of rel_mse, [draws, settings]."""
    ee, yy = (np.einsum("dc,cls->dls", weights, part[:, layers]) for part in (sums.ee, sums.yy))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where((ee == 0) & (yy == 0), np.nan, ee / yy)
    finite = np.isfinite(relative)
    with np.errstate(invalid="ignore"):
        return np.where(finite, relative, 0.0).sum(axis=1) / finite.sum(axis=1)


def _row(
    cell: Cell, rounding: str, value: np.ndarray, base: np.ndarray, drawn: np.ndarray, drawn_base: np.ndarray
) -> dict[str, object]:
    change = _change(value, base)
    lo, hi = (np.nan, np.nan) if not len(drawn) else summary.percentile_interval(_change(drawn, drawn_base))
    return {
        "factor": cell.factor,
        "level": cell.level,
        "rounding": rounding,
        "stage": cell.stage,
        "mean_rel_mse": float(value[0]),
        "baseline": float(base[0]),
        "change": float(change[0]),
        "change_lo": float(lo),
        "change_hi": float(hi),
        "verdict": verdict(float(lo), float(hi)),
    }


def _change(value: np.ndarray, base: np.ndarray) -> np.ndarray:
    """value / base - 1, exactly 0 where both are equal, also where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(value == base, 0.0, value / base - 1)
