"""Histograms of the activation codes: one figure of all layers near zero, and what the page draws of each layer.

Truncation sends everything between -1 and 1 to 0, rounding only what lies between -1/2 and 1/2: the zero bin of the
one is twice as wide, which nothing but a histogram of codes shows at a glance.

    table = codes.of(chapter)                # None where the run counted no codes
    codes.near_zero(table, ax)
    codes.compact(table, names, kernels)     # plain JSON for details.build
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from analysis.report import layout, style, text
from analysis.report.blocks import Block, Figure
from analysis.results import codes as counts

if TYPE_CHECKING:
    from analysis.report.chapter import Chapter

UNIT = 1e-5  # the page holds shares as integer multiples of this
_NEAR = 8  # codes to either side of zero in the figure
_NAMED_IN_TITLE = 2


def of(chapter: Chapter) -> pd.DataFrame | None:
    """The run's counts, of the run id and choice of tokens that the chapter is about; None where there are none."""
    table = chapter.run.codes
    if table is None:
        return None
    run_id, _, tokens = chapter.slice
    mine = table[(table["run_id"] == run_id) & (table["tokens"] == tokens)]
    return mine.reset_index(drop=True) if len(mine) else None


def compact(table: pd.DataFrame, names: Sequence[str], kernels: Sequence[str]) -> dict[str, Any]:
    """{'unit', 'sample', 'layers'}: per layer and kernel [first code, shares in units, share of zeros, codes counted].

    Tails that are zero units on both ends are left out. A layer or kernel that was not counted is null.
    """
    wide = counts.wide_counts(table)
    places = {key: place for place, key in enumerate(wide.index)}
    held = [
        [_one(wide.to_numpy(), places.get((name, kernel))) for kernel in kernels] if len(kernels) else []
        for name in names
    ]
    return {"unit": UNIT, "sample": counts.SAMPLE, "layers": held}


def _one(wide: np.ndarray, place: int | None) -> list[Any] | None:
    if place is None:
        return None
    row = wide[place]
    total = row.sum()
    units = np.round(row / total / UNIT).astype(np.int64)
    (found,) = np.nonzero(units)
    first, last = int(found[0]), int(found[-1])
    zeros = text.percent(float(row[-counts.LOWEST] / total))
    return [first + counts.LOWEST, units[first : last + 1].tolist(), zeros, f"{int(total):,}"]


def near_zero(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Mean over layers of the share of each code from -8 to 8, kernels beside each other."""
    ax = style.axes(ax)
    means = mean_shares(table)
    shown = layout.variants(table)
    width = 0.84 / len(shown)
    at = np.arange(-_NEAR, _NEAR + 1)
    for slot, variant in enumerate(shown):
        left = at - 0.42 + (slot + 0.5) * width
        ax.bar(left, means.loc[variant, list(at)], width, color=style.colour(variant, shown), label=variant)
    ax.set_xticks(at, [text.signed(str(code)) for code in at])
    ax.tick_params(axis="x", length=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    ax.set_xlabel("activation code (int8)")
    ax.set_ylabel("share of codes (%), mean over layers")
    zeros = [f"{v} {text.percent(float(means.loc[v, 0]))}" for v in shown[:_NAMED_IN_TITLE]]
    ax.set_title("How many codes are 0: " + ", ".join(zeros))
    ax.legend(loc="upper right")
    return ax


def mean_shares(table: pd.DataFrame) -> pd.DataFrame:
    """Plain mean over layers of the share of each code, one row a kernel."""
    return counts.shares(table).groupby(level="variant").mean()


def figure(chapter: Chapter) -> tuple[Block, ...]:
    """The figure of all layers, where codes were counted."""
    table = of(chapter)
    if table is None:
        return ()
    with style.context():
        made, ax = style.figure(wide=True, height=3.6)
        near_zero(table, ax)
        caption = (
            "Truncation turns everything between −1 and 1 into 0, rounding only what lies between −½ and ½. "
            f"Counted in {counts.SAMPLE}. The panel of a layer shows its own histogram."
        )
        return (Figure(f"{chapter.prefix}codes", *style.render(made), ax.get_title(loc="left"), caption),)
