"""Runs side by side: layers joined by key, ratio and difference with intervals, and which layers disagree.

    found = compare([open_source("mine"), open_source("theirs/per_layer.csv")], metric="rel_mse")
    found.pairs[0].table          # one row a layer and kernel, the second against the first
    found.pairs[0].disagreeing()

Difference d = b - a, ratio b / a. Their 95 % intervals come from resampling the calls of both runs, each by itself (or
together, `paired`), where both have sums per call; else from the interval columns, whose half-widths add in squares.

A layer *disagrees* when 0 lies outside the interval of its difference after that was widened so that, of all layers
compared, one would do so by chance in 5 % of comparisons: half-widths times t(1 - 0.025 / m; n - 1) / 1.96 *
sqrt(n / (n - 1)), m layers, n the smaller number of calls (Bonferroni; Student for few calls). Sums are right to 1e-6,
so smaller relative differences never disagree. A layer without intervals is not judged, unless a tolerance is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from analysis.results import checks, resample, schema, summary
from analysis.results.compare_sources import Source

METRICS = [c.name for c in schema.METRICS]
DISAGREES, AGREES, NOT_JUDGED = "disagrees", "agrees", "not judged"
_LEVEL = 0.05
_NORMAL = 1.959963984540054  # its 97.5 % quantile
_KEY = resample.KEY
_LABELS = ["block", "attention", "projection"]
COLUMNS = (
    *(*_KEY, *_LABELS, "a", "b", "ratio", "ratio_lo", "ratio_hi", "difference", "difference_lo", "difference_hi"),
    *("calls", "judgement"),
)


@dataclass(frozen=True)
class Pair:
    """Source `b` against source `a`. Columns of `table`: COLUMNS; `ranks`: Spearman's correlation by kernel."""

    a: str
    b: str
    table: pd.DataFrame
    ranks: pd.DataFrame
    only_a: list[str]
    only_b: list[str]
    intervals: str  # where they come from
    notes: list[str] = field(default_factory=list)

    def disagreeing(self) -> pd.DataFrame:
        """Rows that disagree, largest relative difference first."""
        rows = self.table[self.table["judgement"] == DISAGREES]
        size = (rows["difference"] / rows["a"]).abs().fillna(np.inf)
        return rows.loc[size.sort_values(ascending=False, kind="stable").index]

    def count(self, judgement: str) -> int:
        """Rows with this judgement."""
        return int((self.table["judgement"] == judgement).sum())

    def excluding_zero(self) -> int:
        """Judged rows whose own 95 % interval excludes 0; of m rows that do not differ, m / 20 do so by chance."""
        t = self.table
        judged = t["judgement"] != NOT_JUDGED
        return int((judged & ((t["difference_lo"] > 0) | (t["difference_hi"] < 0))).sum())


@dataclass(frozen=True)
class Comparison:
    """The first source against each of the others."""

    metric: str
    pairs: list[Pair]

    def table(self) -> pd.DataFrame:
        """All pairs in one table, with the sources' names first."""
        parts = [pair.table.assign(source_a=pair.a, source_b=pair.b) for pair in self.pairs]
        return pd.concat(parts, ignore_index=True)[["source_a", "source_b", *COLUMNS]].assign(metric=self.metric)


def compare(
    sources: Sequence[Source], metric: str = "rel_mse", paired: bool = False, tolerance: float | None = None
) -> Comparison:
    """The first source against each of the others.

    Args:
        metric: any metric column.
        paired: resample the same calls of both runs; both must list the same calls.
        tolerance: relative difference beyond which a layer without intervals disagrees.

    Raises:
        ValueError: fewer than two sources, an unknown metric, no layer in common, or calls that cannot be paired.
    """
    if len(sources) < 2:
        raise ValueError(f"{len(sources)} run given; comparing takes at least two")
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}")
    if tolerance is not None and not 0 < tolerance < np.inf:
        raise ValueError(f"tolerance {tolerance} is not above 0; 0.05 means 5 %")
    for source in sources:
        if source.table[metric].isna().all():
            has = [name for name in METRICS if source.table[name].notna().any()]
            raise ValueError(f"{source.name} has no {metric}; it has {', '.join(has) or 'no metric'}: --metric")
    first, *others = sources
    return Comparison(
        metric, [_pair(first, other, at, metric, paired, tolerance) for at, other in enumerate(others, 1)]
    )


def _pair(a: Source, b: Source, number: int, metric: str, paired: bool, tolerance: float | None) -> Pair:
    left, right = (source.table.set_index(_KEY) for source in (a, b))
    keys = left.index[left.index.isin(right.index)]
    if keys.empty:
        raise ValueError(_nothing_joins(a, b))
    l, r = left.loc[keys], right.loc[keys]  # noqa: E741
    table = l[_LABELS].reset_index()
    for name in ("attention", "projection"):
        table[name] = table[name].where(table[name] != "", r[name].to_numpy())
    table["a"], table["b"] = l[metric].to_numpy(np.float64), r[metric].to_numpy(np.float64)
    same = (table["a"] == table["b"]).to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        table["ratio"] = np.where(same & (table["a"] != 0), 1.0, table["b"] / table["a"])
        table["difference"] = np.where(same, 0.0, table["b"] - table["a"])
    if paired:
        _check_paired(a, b)
    if a.clusters is not None and b.clusters is not None:
        seeds = (summary.BOOTSTRAP_SEED, summary.BOOTSTRAP_SEED + (0 if paired else number))
        bounds = _from_draws(a, b, keys, metric, seeds)
        origin = f"{a.unit} of both resampled {'together' if paired else 'independently'}"
    elif f"{metric}_lo" in left:
        bounds, origin = _from_columns(l, r, metric), "the interval columns of both tables"
    else:
        bounds, origin = np.full((4, len(keys)), np.nan), f"none: {metric} has no interval columns"
    table[["ratio_lo", "ratio_hi", "difference_lo", "difference_hi"]] = bounds.T
    table["calls"] = np.minimum(l["clusters"].to_numpy(np.float64), r["clusters"].to_numpy(np.float64))
    table["judgement"] = _judge(table, tolerance)
    only = [
        [_say(key) for key in one.index[~one.index.isin(other.index)]] for one, other in ((left, right), (right, left))
    ]
    return Pair(a.name, b.name, table[list(COLUMNS)], _ranks(table), only[0], only[1], origin, [*a.notes, *b.notes])


def _from_draws(a: Source, b: Source, keys: pd.MultiIndex, metric: str, seeds: tuple[int, int]) -> np.ndarray:
    """[ratio_lo, ratio_hi, difference_lo, difference_hi] x layers."""
    drawn = []
    for source, seed in zip((a, b), seeds, strict=True):
        assert source.clusters is not None
        at = pd.MultiIndex.from_frame(source.clusters.keys).get_indexer(keys)
        values = resample.draw(source.clusters, [metric], seed)[metric][:, at]
        values[:, at < 0] = np.nan
        drawn.append(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio, difference = drawn[1] / drawn[0], drawn[1] - drawn[0]
        return np.stack([*summary.percentile_interval(ratio), *summary.percentile_interval(difference)])


def _from_columns(left: pd.DataFrame, right: pd.DataFrame, metric: str) -> np.ndarray:
    """The same from two intervals of independent estimates: half-widths add in squares (Zou and Donner's MOVER)."""
    (a, a_lo, a_hi), (b, b_lo, b_hi) = (
        [frame[name].to_numpy(np.float64) for name in (metric, f"{metric}_lo", f"{metric}_hi")]
        for frame in (left, right)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        d = b - a
        low, high = d - np.hypot(b - b_lo, a_hi - a), d + np.hypot(b_hi - b, a - a_lo)
        la, la_lo, la_hi, lb, lb_lo, lb_hi = (
            np.log(np.where(v > 0, v, np.nan)) for v in (a, a_lo, a_hi, b, b_lo, b_hi)
        )
        ratio_low = np.exp(lb - la - np.hypot(lb - lb_lo, la_hi - la))
        ratio_high = np.exp(lb - la + np.hypot(lb_hi - lb, la - la_lo))
    return np.stack([ratio_low, ratio_high, low, high])


def _judge(table: pd.DataFrame, tolerance: float | None) -> np.ndarray:
    d, low, high = (table[name].to_numpy(np.float64) for name in ("difference", "difference_lo", "difference_hi"))
    size = np.maximum(table["a"].abs(), table["b"].abs()).to_numpy(np.float64)
    judged = np.isfinite(d) & np.isfinite(low) & np.isfinite(high)
    calls = np.where(np.isnan(table["calls"]), np.inf, table["calls"])
    k = widening(int(judged.sum()), calls)
    below, above = np.maximum(d - low, 0.0), np.maximum(high - d, 0.0)
    with np.errstate(invalid="ignore"):
        outside = (d - k * below > 0) | (d + k * above < 0)
        disagrees = judged & outside & (np.abs(d) > checks.SUM_ACCURACY * size)
        if tolerance is not None:
            known = ~np.isnan(d)
            disagrees |= ~judged & known & (np.abs(d) > tolerance * table["a"].abs().to_numpy())
            judged |= known
    return np.where(disagrees, DISAGREES, np.where(judged, AGREES, NOT_JUDGED))


def widening(layers: int, calls: np.ndarray) -> np.ndarray:
    """How many times wider than the 95 % interval of one layer the interval is that decides, for `layers` compared."""
    from scipy import special  # here, because importing it takes time that most commands need not spend

    quantile = 1 - _LEVEL / 2 / max(1, layers)
    n = np.maximum(calls, 2.0)
    with np.errstate(invalid="ignore"):
        few = special.stdtrit(np.minimum(n - 1, 1e9), quantile) * np.sqrt(np.where(np.isinf(n), 1.0, n / (n - 1)))
    return few / _NORMAL


def _ranks(table: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation over layers, by kernel, reference and tokens."""
    rows: list[dict[str, Any]] = []
    for key, group in table.groupby(["variant", "reference", "tokens"], sort=True):
        pair = group[["a", "b"]].dropna().rank()
        varied = not (checks.is_constant(pair["a"]) or checks.is_constant(pair["b"]))
        value = np.nan
        if len(pair) > 2 and varied:
            value = 1.0 if (pair["a"] == pair["b"]).all() else float(pair["a"].corr(pair["b"]))
        names = dict(zip(["variant", "reference", "tokens"], key, strict=True))
        rows.append(names | {"layers": len(pair), "spearman": value})
    return pd.DataFrame(rows)


def _check_paired(a: Source, b: Source) -> None:
    if a.calls is None or b.calls is None:
        missing = a if a.calls is None else b
        raise ValueError(f"{missing.name} has no {schema.PER_CALL}; calls cannot be paired: leave --paired out")
    if not a.calls.equals(b.calls):
        raise ValueError(
            f"{a.name} and {b.name} list different calls (by call, scene, clip, step); "
            "calls cannot be paired: leave --paired out"
        )


def _nothing_joins(a: Source, b: Source) -> str:
    """What keeps two tables apart: the first part of the key that they do not share."""
    remedies = {
        "layer": "rename layers with `shrinkage import --layer-regex ... --layer-name ...`",
        "variant": "name the kernel alike with `shrinkage import --set variant=...`",
    }
    for name in _KEY:
        here, there = ([str(v) for v in source.table[name].unique()] for source in (a, b))
        if not set(here) & set(there):
            seen = f"{a.name} has {', '.join(here[:3])}{', ...' if len(here) > 3 else ''}"
            seen += f"; {b.name} has {', '.join(there[:3])}{', ...' if len(there) > 3 else ''}"
            return f"no {name} in common: {seen}; {remedies.get(name, 'they measured different things')}"
    return f"{a.name} and {b.name} share no row: every layer that both have was measured with other kernels or tokens"


def _say(key: tuple[str, ...]) -> str:
    layer, *rest = key
    return f"{layer} ({', '.join(rest)})"
