"""Figures of a run: each function takes a per_layer table and axes, draws, and returns the axes. No I/O, no torch.

The table holds one run, one reference and one choice of tokens; one kernel or several. Error bars are the 95 %
intervals of the table and are left out where it has none. A title states what is seen, with numbers from the table.

    plots.cosine(run.per_layer)                  # one line in a notebook; returns the axes
    figure, ax = style.figure(wide=True)
    plots.cosine(run.per_layer, ax)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from analysis.report import heatmap as heat
from analysis.report import layout, style, text
from analysis.report.claims import ISSUE

IDEAL_RATIO = 4.0  # truncation against rounding at fine quantisation, activation error only
_NAMED_IN_TITLES = 2  # kernels; shipped and fixed come first, and a title has one line
_CELL_NAMES = {"ratio": "relative output MSE", "error_output_cosine": "cosine(error, output)"}
_ANNOTATE_UP_TO = 12  # blocks, beyond which numbers in a heatmap's cells would overlap


def rel_mse(per_layer: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Relative output MSE of every layer, log axis, one colour a kernel."""
    ax = style.axes(ax)
    _per_layer(per_layer, ax, "rel_mse")
    log_scale(ax)
    ax.set_ylabel("relative output MSE (no unit)")
    means = _means(per_layer, "rel_mse")
    ax.set_title("Output error by layer; mean " + _versus({v: text.scientific(m) for v, m in means.items()}))
    return _legend(ax)


def cosine(per_layer: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Cosine between error and output of every layer; the issue's range is shaded."""
    ax = style.axes(ax)
    ax.axhspan(*ISSUE.cosine, color=style.SHIPPED, alpha=0.13, lw=0, zorder=0.5, label="the issue's range")
    ax.axhline(0, color=style.INK, lw=0.9, zorder=1)
    _per_layer(per_layer, ax, "error_output_cosine")
    ax.set_ylabel("cosine(error, output) (no unit)")
    _keep_in(ax, -1.0, 1.0, at_least=(-0.95, 0.15))
    means = _means(per_layer, "error_output_cosine")
    ax.set_title("Does the error point against the output? mean cosine " + _versus(_texts(means, text.cosine)))
    return _legend(ax)


def shrinkage(per_layer: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Percentage of its magnitude that the output loses, every layer."""
    ax = style.axes(ax)
    ax.axhline(0, color=style.INK, lw=0.9, zorder=1)
    _per_layer(per_layer, ax, "shrinkage", scale=100)
    ax.set_ylabel("magnitude lost by the output (%)")
    means = _means(per_layer, "shrinkage")
    ax.set_title("Magnitude shrinkage by layer; mean " + _versus(_texts(means, text.percent)))
    return _legend(ax)


def cosine_by_site(per_layer: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Strip plot: one point a layer, kernels beside each other within a site, a bar at each mean."""
    ax = style.axes(ax)
    table = layout.with_site(per_layer).dropna(subset=["error_output_cosine"])
    sites = sorted(table["site"].unique(), key=layout.site_order)
    shown = layout.variants(table)
    ax.axhspan(*ISSUE.cosine, color=style.SHIPPED, alpha=0.13, lw=0, zorder=0.5, label="the issue's range")
    ax.axhline(0, color=style.INK, lw=0.9, zorder=1)
    width = 0.8 / max(1, len(shown))
    for slot, variant in enumerate(shown):
        look = style.colour(variant, shown)
        for place, name in enumerate(sites):
            values = table.loc[(table["site"] == name) & (table["variant"] == variant)]
            values = values.sort_values(["block", "layer"])["error_output_cosine"].to_numpy(np.float64)
            if not len(values):
                continue
            centre = place + (slot - (len(shown) - 1) / 2) * width
            # Spread by block, not at random: the eye can follow depth, and every build draws the same figure.
            spread = np.linspace(-0.32, 0.32, len(values)) * width if len(values) > 1 else np.zeros(1)
            label = variant if place == 0 else None
            ax.scatter(centre + spread, values, s=16, color=look, alpha=0.65, lw=0, label=label, zorder=3)
            ax.plot([centre - 0.4 * width, centre + 0.4 * width], [values.mean()] * 2, color=look, lw=2.4, zorder=4)
    ax.set_xticks(range(len(sites)), sites)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("site (attention, projection); one point a layer, bar = mean")
    ax.set_ylabel("cosine(error, output) (no unit)")
    _keep_in(ax, -1.0, 1.0, at_least=(-0.95, 0.15))
    ax.set_title("Cosine by site: is the bias everywhere or in some projections only?")
    return _legend(ax)


def heatmap(per_layer: pd.DataFrame, ax: Axes | None = None, value: str = "ratio", variant: str = "shipped") -> Axes:
    """Sites x blocks. value 'ratio': rel_mse of `variant` over fixed; or any metric column, of `variant`.

    Raises:
        ValueError: the table has no labelled block, or no kernel that the value needs.
    """
    ax = style.axes(ax, 3.6)
    pivot = heat.pivot(heatmap_cells(per_layer, value, variant))
    values = np.ma.masked_invalid(pivot.to_numpy(np.float64))
    norm = style.scale(float(values.min()), float(values.max()))
    mesh = ax.pcolormesh(values, cmap=style.HEAT, norm=norm, edgecolors="white", linewidth=0.6)
    ax.invert_yaxis()
    ax.grid(False)
    ax.set_yticks(np.arange(len(pivot.index)) + 0.5, pivot.index)
    every = max(1, math.ceil(len(pivot.columns) / 16))
    ax.set_xticks((np.arange(len(pivot.columns)) + 0.5)[::every], [str(b) for b in pivot.columns[::every]])
    ax.tick_params(length=0)
    ax.set_xlabel("transformer block")
    ax.set_ylabel("site")
    if len(pivot.columns) <= _ANNOTATE_UP_TO:
        _annotate(ax, values, norm)
    name = _CELL_NAMES.get(value, value.replace("_", " ")) + f", {variant}" + (" / fixed" if value == "ratio" else "")
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.015, aspect=18)
    bar.set_label(f"{name.removeprefix('relative output ')} (no unit)")
    bar.outline.set_visible(False)
    if isinstance(norm, LogNorm):
        _plain_ticks(bar.ax.yaxis)
    show = text.cosine if value == "error_output_cosine" else text.plain
    low, high = (show(float(end)) for end in (values.min(), values.max()))
    ax.set_title(f"{name[0].upper()}{name[1:]}: {low} … {high} over blocks and sites")
    return ax


def heatmap_cells(per_layer: pd.DataFrame, value: str = "ratio", variant: str = "shipped") -> pd.DataFrame:
    """layer, site, block and value of every labelled layer. ValueError as `heatmap`."""
    table = layout.with_site(per_layer)
    table = table[table["block"] >= 0]
    if table.empty:
        raise ValueError("no layer has a block number: a heatmap of blocks and sites needs labelled layers")
    cells = (
        ratios(table, variant)["ratio"] if value == "ratio" else _of(table, variant, value).set_index("layer")[value]
    )
    place = table.drop_duplicates("layer").set_index("layer").loc[cells.index]
    return place[["site", "block"]].assign(value=cells.to_numpy(np.float64)).reset_index()


def ratio_histogram(per_layer: pd.DataFrame, ax: Axes | None = None, variant: str = "shipped") -> Axes:
    """How many times the error of `variant` is that of fixed, over layers, with the two means and the issue's 5.7."""
    ax = style.axes(ax)
    table = ratios(per_layer, variant)
    finite = table[np.isfinite(table["ratio"]) & (table["ratio"] > 0)]
    if finite.empty:
        raise ValueError(f"no layer has a finite ratio of {variant} to fixed")
    of_means = finite[variant].mean() / finite["fixed"].mean()
    low = min(finite["ratio"].min(), of_means, IDEAL_RATIO)
    high = max(finite["ratio"].max(), of_means, ISSUE.ratio)
    margin = (high / low) ** 0.04
    bins = np.geomspace(low / margin, high * margin, int(np.clip(3 * np.sqrt(len(finite)), 12, 36)))
    ax.set_xscale("log")
    _plain_ticks(ax.xaxis)
    ax.hist(finite["ratio"], bins=bins.tolist(), color=style.colour(variant), alpha=0.55, histtype="stepfilled", lw=0)
    marks = (
        (finite["ratio"].mean(), "mean of ratios", style.INK, "-"),
        (of_means, "ratio of means", style.FIXED, "--"),
        (ISSUE.ratio, "the issue, ratio of means", "#009E73", "-."),
        (IDEAL_RATIO, "theory, activation error only", "#8a8d94", ":"),
    )
    for x, label, colour, dash in marks:
        ax.axvline(x, color=colour, ls=dash, lw=1.8, label=f"{label}: {text.plain(x)}", zorder=3)
    ax.set_xlabel(f"relative output MSE, {variant} / fixed (no unit)")
    ax.set_ylabel("layers (count)")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    above = int((finite["ratio"] > 1).sum())
    ax.set_title(f"In {above} of {len(finite)} layers {variant} has the larger error")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def ratios(per_layer: pd.DataFrame, variant: str = "shipped") -> pd.DataFrame:
    """index layer; rel_mse of `variant` and of fixed, and their ratio. ValueError where a kernel is missing."""
    pair = pd.DataFrame(
        {name: _of(per_layer, name, "rel_mse").set_index("layer")["rel_mse"] for name in (variant, "fixed")}
    ).dropna()
    with np.errstate(divide="ignore", invalid="ignore"):
        pair["ratio"] = pair[variant] / pair["fixed"]
    return pair


def log_scale(ax: Axes) -> None:
    """A log y axis labelled 10⁻³, and 2 × 10⁻³ where it spans less than two decades."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    narrow = high / low < 100
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
    ax.yaxis.set_major_formatter(FuncFormatter(_power_label))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _power_label(value: float, _position: object) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    mantissa = value / 10.0**exponent
    return text.power(exponent) if abs(mantissa - 1) < 1e-6 else f"{mantissa:.0f} × {text.power(exponent)}"


def _of(per_layer: pd.DataFrame, variant: str, metric: str) -> pd.DataFrame:
    rows = per_layer.loc[per_layer["variant"] == variant, ["layer", metric]]
    if rows.empty:
        raise ValueError(f"no variant {variant!r}; the table has {', '.join(layout.variants(per_layer))}")
    return rows


def _per_layer(per_layer: pd.DataFrame, ax: Axes, metric: str, scale: float = 1.0) -> None:
    """Points, a thin line along each group, and error bars where the table has intervals."""
    placed = layout.arrange(per_layer)
    layout.dress(ax, placed)
    shown = layout.variants(per_layer)
    size = 4.6 if len(placed.x) <= 100 else 2.8
    for variant in shown:
        rows = per_layer[per_layer["variant"] == variant].set_index("layer")
        rows = rows.assign(x=pd.Series(placed.x)).sort_values("x")
        values = rows[metric].to_numpy(np.float64) * scale
        drawn = np.isfinite(values)
        x, look = rows["x"].to_numpy(np.float64), style.colour(variant, shown)
        bars = _bars(rows, metric, scale, values)
        kind = style.marker(variant, shown)
        for _, first, last in placed.groups:
            inside = drawn & (x >= first) & (x <= last)
            ax.plot(x[inside], values[inside], color=look, lw=0.8, alpha=0.45, zorder=2)
        ax.plot(x[drawn], values[drawn], kind, color=look, ms=size, mew=0, label=variant, zorder=4)
        if bars is not None:
            good = drawn & np.isfinite(bars).all(axis=0)
            ax.errorbar(x[good], values[good], bars[:, good], fmt="none", ecolor=look, elinewidth=1.0, zorder=3)


def _bars(rows: pd.DataFrame, metric: str, scale: float, values: np.ndarray) -> np.ndarray | None:
    if f"{metric}_lo" not in rows:
        return None
    low, high = (rows[f"{metric}_{end}"].to_numpy(np.float64) * scale for end in ("lo", "hi"))
    with np.errstate(invalid="ignore"):  # inf - inf is an empty bar, which is left out
        # A percentile interval of few calls may leave the point outside: a bar then has length 0 on that side.
        bars = np.stack([np.maximum(values - low, 0.0), np.maximum(high - values, 0.0)])
    return None if np.isnan(bars).all() else bars


def _plain_ticks(axis: Axis) -> None:
    """1, 2, 5, 10, 20 ... on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())


def _annotate(ax: Axes, values: np.ma.MaskedArray, norm: Normalize) -> None:
    for (row, column), value in np.ma.ndenumerate(values):
        _, colour = style.heat(float(norm(float(value))))
        ax.text(column + 0.5, row + 0.5, text.plain(float(value)), ha="center", va="center", color=colour, fontsize=8)


def _means(per_layer: pd.DataFrame, metric: str) -> dict[str, float]:
    means = {}
    for variant in layout.variants(per_layer):
        values = per_layer.loc[per_layer["variant"] == variant, metric].to_numpy(np.float64)
        values = values[np.isfinite(values)]
        means[variant] = float(values.mean()) if len(values) else math.nan
    return means


def _texts(means: dict[str, float], show: Callable[[float], str]) -> dict[str, str]:
    return {variant: show(mean) for variant, mean in means.items()}


def _versus(words: dict[str, str]) -> str:
    return ", ".join(f"{words[variant]} {variant}" for variant in list(words)[:_NAMED_IN_TITLES])


def _keep_in(ax: Axes, low: float, high: float, at_least: tuple[float, float]) -> None:
    """Limits that show `at_least` and the data, with a margin, but nothing beyond what a cosine can be."""
    bottom, top = ax.get_ylim()
    ax.set_ylim(max(low * 1.02, min(bottom, at_least[0])), min(high * 1.02, max(top, at_least[1])))


def _legend(ax: Axes) -> Axes:
    """Beside the axes, where no point can lie under it."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=1.3)
    return ax
