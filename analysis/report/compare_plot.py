"""The figure of a comparison: every layer's ratio (or difference) with its interval, disagreeing layers marked.

figure, ax = style.figure(wide=True)
compare_plot.draw(found.pairs[0], "rel_mse", ax)
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from analysis.report import layout, style, text
from analysis.results.compare import DISAGREES, NOT_JUDGED, Pair

_NAMED = 12  # disagreeing layers that get their name beside the point
_SIGNED = ("error_output_cosine", "error_output_cosine_nobias", "shrinkage", "magnitude_bias_lsb", "sqnr_db")


def draw(pair: Pair, metric: str, ax: Axes) -> Axes:
    """Layers of a pair, kernels in their colours. Ratio b / a for metrics that are never negative, else b - a."""
    value, neutral = ("difference", 0.0) if metric in _SIGNED else ("ratio", 1.0)
    placed = layout.arrange(pair.table)
    layout.dress(ax, placed)
    ax.axhline(neutral, color=style.INK, lw=0.9, zorder=1)
    kernels = layout.variants(pair.table)
    for slot, variant in enumerate(kernels):
        rows = pair.table[pair.table["variant"] == variant]
        beside = 0.5 * (slot - (len(kernels) - 1) / 2) / len(kernels)  # kernels of a layer stand beside each other
        x = rows["layer"].map(placed.x).to_numpy(np.float64) + beside
        y, low, high = (rows[name].to_numpy(np.float64) for name in (value, f"{value}_lo", f"{value}_hi"))
        look, kind = style.colour(variant, kernels), style.marker(variant, kernels)
        barred = np.isfinite(y) & np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore"):
            bars = np.stack([np.maximum(y - low, 0.0), np.maximum(high - y, 0.0)])
        ax.errorbar(x[barred], y[barred], bars[:, barred], fmt="none", ecolor=look, elinewidth=0.9, alpha=0.6, zorder=2)
        judged = (rows["judgement"] != NOT_JUDGED).to_numpy()
        drawn = np.isfinite(y)
        ax.plot(x[drawn & judged], y[drawn & judged], kind, color=look, ms=3.4, mew=0, label=variant, zorder=3)
        if (drawn & ~judged).any():
            said = f"{variant}, not judged"
            ax.plot(x[drawn & ~judged], y[drawn & ~judged], kind, color=look, mfc="none", ms=4, label=said, zorder=3)
    _mark(pair, value, placed, ax)
    words = metric.replace("_", " ")
    ax.set_ylabel(f"{words}, {'b / a' if value == 'ratio' else 'b - a'}")
    finite = pair.table.loc[np.isfinite(pair.table[value]), value]
    middle = f"; median {value} of {words} {text.plain(float(finite.median()))}" if len(finite) else ""
    wrong, layers = pair.disagreeing()["layer"].nunique(), pair.table["layer"].nunique()
    ax.set_title(f"{wrong} of {layers} layers disagree{middle}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _mark(pair: Pair, value: str, placed: layout.Layout, ax: Axes) -> None:
    """A ring around each layer that disagrees, and the names of the first few."""
    wrong = pair.disagreeing()
    wrong = wrong[np.isfinite(wrong[value])].drop_duplicates("layer")
    if wrong.empty:
        return
    x, y = wrong["layer"].map(placed.x).to_numpy(np.float64), wrong[value].to_numpy(np.float64)
    ax.plot(x, y, "o", color=style.INK, mfc="none", ms=11, mew=1.3, ls="none", label=DISAGREES, zorder=4)
    middle = float(np.mean(ax.get_xlim()))
    for layer, across, up in list(zip(wrong["layer"], x, y, strict=True))[:_NAMED]:
        side, anchor = (9, "left") if across < middle else (-9, "right")  # towards the middle: never off the axes
        ax.annotate(
            str(layer), (across, up), (side, 6), textcoords="offset points", ha=anchor, fontsize=8, zorder=5
        )  # fmt: skip
