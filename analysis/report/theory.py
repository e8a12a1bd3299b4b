"""The report's section on theory: closed forms beside measurements, and where the error of each layer comes from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.report import layout, style, text
from analysis.report.blocks import Block, Cell, Figure, Section, Table, Text
from analysis.report.chapter import Chapter
from analysis.results import studies, tables
from analysis.results.theory import PARTS

_PART_COLOURS = {"bias": style.SHIPPED, "noise": "#E69F00", "weight": style.FIXED, "output": "#8a8d94"}
_CROSS = "#CC79A7"
FAR = 0.25  # |log2| of measured over predicted beyond which the text names a layer
MOSTLY = 0.6  # share of the output part that calls for its own explanation
_NAMES = {"bias": "rounding bias", "noise": "rounding noise", "weight": "weight rounding", "output": "bf16 output"}


def error(theory: pd.DataFrame, ax: Axes) -> Axes:
    """Measured against predicted relative MSE, one point a layer and rounding; the line is agreement."""
    _scatter(theory, ax, "predicted_rel_mse", "rel_mse")
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: text.power(round(np.log10(value)))))
        axis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("predicted relative MSE")
    ax.set_ylabel("measured relative MSE")
    median, worst = (float(2**v - 1) for v in (theory["residual"].abs().median(), theory["residual"].abs().max()))
    ax.set_title(
        f"Relative MSE without a quantiser: off by {text.percent(median)} (median), {text.percent(worst)} (worst)"
    )
    return ax


def cosine(theory: pd.DataFrame, ax: Axes) -> Axes:
    """Measured against predicted cosine(error, output)."""
    _scatter(theory, ax, "predicted_cosine", "error_output_cosine")
    ax.set_xlabel("predicted cosine(error, output)")
    ax.set_ylabel("measured cosine(error, output)")
    off = (theory["error_output_cosine"] - theory["predicted_cosine"]).abs()
    ax.set_title(
        f"Cosine without a quantiser: off by {text.plain(off.median())} (median), {text.plain(off.max())} (worst)"
    )
    return ax


def _scatter(theory: pd.DataFrame, ax: Axes, x: str, y: str) -> None:
    ends = [float(theory[[x, y]].min(axis=None)), float(theory[[x, y]].max(axis=None))]
    ax.plot(ends, ends, color=style.INK, lw=0.9, zorder=1, label="measured = predicted")
    for rounding in theory["rounding"].unique():
        rows = theory[theory["rounding"] == rounding]
        look = style.colour(rounding)
        ax.plot(rows[x], rows[y], style.marker(rounding), color=look, ms=5, mew=0, alpha=0.8, label=rounding, zorder=3)
    ax.grid(True, axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def ratio(theory: pd.DataFrame, ax: Axes) -> Axes:
    """Ratio shipped/fixed of every layer against the amplification A of W; the line is 1 + 3 A."""
    pair = theory.pivot_table(index="layer", columns="rounding", values=["rel_mse", "amplification"])
    amplification = pair["amplification", "shipped"]
    ax.plot(amplification, pair["rel_mse", "shipped"] / pair["rel_mse", "fixed"], "o", color=style.SHIPPED, ms=5, mew=0)
    x = np.geomspace(min(0.5, float(amplification.min())), max(2.0, float(amplification.max())), 50)
    ax.plot(x, 1 + 3 * x, color=style.INK, lw=1.0, label="1 + 3 A: no weight or output rounding")
    ax.plot([1], [4], "s", color="#009E73", ms=7, label="isotropic W: 4", zorder=4)
    ax.set_xlabel("A: energy gain of W along sign(x) over its mean gain (no unit)")
    ax.set_ylabel("relative MSE, shipped / fixed")
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.grid(True, axis="both")
    ax.set_title("Why the ratio is not 4: W amplifies the bias, weight rounding dilutes it")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def shares(theory: pd.DataFrame, ax: Axes) -> Axes:
    """Where the output's error comes from, mean over the layers of a site, both roundings beside each other."""
    means = site_shares(theory)
    labels = [f"{r.site}, {r.rounding}" for r in means.itertuples()]
    left = np.zeros(len(means))
    for part in PARTS:
        values = 100 * means[part].to_numpy(np.float64)
        ax.barh(labels, values, left=left, color=_PART_COLOURS[part], label=_NAMES[part], height=0.75)
        left += values
    ax.plot(100 - 100 * means["cross"], labels, "|", color=style.INK, ms=11, mew=1.6, label="100 % less cross terms")
    ax.invert_yaxis()
    ax.grid(False)
    ax.set_xlabel("share of the output's squared error (%)")
    bias = float(theory.loc[theory["rounding"] == "shipped", "bias"].mean())
    ax.set_title(f"The shipped kernel's error is {text.percent(bias)} rounding bias")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def site_shares(theory: pd.DataFrame) -> pd.DataFrame:
    """Mean over layers of the parts and of all cross terms together: site, rounding, PARTS, cross."""
    table = layout.with_site(theory)
    table = table.assign(cross=1 + table["closure"] - table[list(PARTS)].sum(axis=1))
    means = table.groupby(["site", "rounding"], sort=False)[[*PARTS, "cross"]].mean().reset_index()
    order = sorted(
        range(len(means)), key=lambda i: (layout.site_order(means["site"][i]), means["rounding"][i] == "fixed")
    )
    return means.iloc[order].reset_index(drop=True)


def words(theory: pd.DataFrame) -> str:
    """Agreement, closure, and the layers where theory and measurement part."""
    closure = float(theory["closure"].abs().max())
    said = f"The ten parts of the error add up to the measured one within {text.scientific(closure)} in every layer. "
    median = float(theory["residual"].abs().median())
    said += f"Predicted and measured relative MSE differ by {text.percent(2**median - 1)} in the median layer. "
    far = theory[theory["residual"].abs() > FAR]
    if far.empty:
        return said + f"No layer is further off than {text.percent(2**FAR - 1)}."
    named = ", ".join(f"{r.layer} ({r.rounding}, {text.signed(f'{r.residual:+.2f}')})" for r in far.itertuples())
    said += f"Further off than {text.percent(2**FAR - 1)} (log2 of measured over predicted): {named}. "
    rounded = int((far["output"] > MOSTLY).sum())
    said += (
        f"In {rounded} of these {len(far)} more than {text.percent(MOSTLY)} of the error is bf16 rounding of the two "
    )
    said += "outputs that are compared, most of which they share, and what is left is hard to predict."
    if rounded < len(far):
        said += " The others have few distinct rows, so that the error within a step is no uniform noise."
    return said


def section(chapter: Chapter) -> Section | None:
    """Scatters, the ratio, the decomposition; None where the run has no theory table."""
    theory = tables.find(studies.THEORY, chapter.run.path)
    if theory is None:
        return None
    blocks: list[Block] = [
        Text(words(theory)),
        _figure(chapter, "theory_error", theory, error, "No activation quantiser is run for the prediction."),
        _figure(chapter, "theory_cosine", theory, cosine, "Closed forms with the second moments of x and sign(x)."),
        _figure(chapter, "theory_ratio", theory, ratio, "Points below the line: weight and output rounding dilute."),
        _figure(chapter, "theory_shares", theory, shares, "Means over layers. Cross terms can be negative.", 5.2),
        _table(theory),
    ]
    return Section("theory", "Theory: predicted, measured, taken apart", tuple(blocks))


def _figure(
    chapter: Chapter, name: str, table: pd.DataFrame, draw: Callable[[pd.DataFrame, Axes], Axes], caption: str,
    height: float = 4.4,
) -> Figure:  # fmt: skip
    with style.context():
        made, ax = style.figure(wide=True, height=height)
        draw(table, ax)
        alt = ax.get_title(loc="left")
        return Figure(f"{chapter.prefix}{name}", *style.render(made), alt, caption)


def _table(theory: pd.DataFrame) -> Table:
    rows = []
    for r in theory.itertuples():
        values = (r.rel_mse, r.predicted_rel_mse)
        cells = [Cell(str(r.layer)), Cell(str(r.rounding)), *(Cell(text.scientific(v), float(v)) for v in values)]
        cells += [Cell(text.cosine(v), float(v)) for v in (r.error_output_cosine, r.predicted_cosine, r.input_cosine)]
        cells += [Cell(text.plain(v), float(v)) for v in (r.amplification, r.crest)]
        cells += [Cell(text.percent(getattr(r, part)), float(getattr(r, part))) for part in PARTS]
        rows.append(tuple(cells))
    headers = (
        *("layer", "rounding", "relative MSE", "predicted", "cosine", "predicted", "at the input"),
        *("amplification", "crest", *(_NAMES[p] for p in PARTS)),
    )
    return Table(headers, tuple(rows), numeric=tuple(range(2, len(headers))), sortable=True, short=10)
