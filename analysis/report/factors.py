"""The report's section on factors: one change at a time and what it does to the error. C6 is judged in study_claims."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.report import layout, style, text
from analysis.report.blocks import Block, Cell, Figure, Section, Table, Text
from analysis.report.chapter import Chapter
from analysis.report.study_claims import IN_ISSUE, change_percent, name_of, overall
from analysis.results import studies, tables
from analysis.results.ablation import BOTH, CLAIM, INTERACTION, REJECTED, SUPPORTED

WORDS = {SUPPORTED: "yes", REJECTED: "no", "undecided": "undecided"}
_TONES = {SUPPORTED: "good", REJECTED: "bad", "undecided": "open"}
_ROUNDINGS = ("shipped", "fixed")


def changes(ablation: pd.DataFrame, ax: Axes) -> Axes:
    """Relative change of the mean relative MSE by each change, both roundings; the 2 % of the claim is shaded."""
    ax.axvspan(-100 * CLAIM, 100 * CLAIM, color=style.BAND, lw=0, zorder=0.5, label=f"± {100 * CLAIM:.0f} %")
    ax.axvline(0, color=style.INK, lw=0.9, zorder=1)
    first = overall(ablation, _ROUNDINGS[0])
    labels = [name_of(f, lv) for f, lv in zip(first["factor"], first["level"], strict=True)]
    for offset, rounding in ((-0.16, "shipped"), (0.16, "fixed")):
        rows = overall(ablation, rounding)
        y = np.arange(len(rows)) + offset
        values = 100 * rows["change"].to_numpy(np.float64)
        ends = 100 * rows[["change_lo", "change_hi"]].to_numpy(np.float64).T
        bars = np.stack([np.maximum(values - ends[0], 0), np.maximum(ends[1] - values, 0)])
        look = style.colour(rounding)
        ax.plot(values, y, style.marker(rounding), color=look, ms=5.5, mew=0, label=rounding, zorder=4)
        good = np.isfinite(bars).all(axis=0)
        ax.errorbar(values[good], y[good], xerr=bars[:, good], fmt="none", ecolor=look, elinewidth=1.0, zorder=3)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xscale("symlog", linthresh=10, linscale=1.2)
    ticks = [-90, -50, -10, -2, 0, 2, 10, 100, 1000]
    low, high = ax.get_xlim()
    ax.set_xticks([t for t in ticks if low <= t <= high], [text.signed(f"{t:+d}") for t in ticks if low <= t <= high])
    ax.minorticks_off()
    ax.grid(True, axis="x")
    ax.set_xlabel("change of the mean relative MSE (%)")
    broken = int((first["verdict"] == REJECTED).sum())
    ax.set_title(f"{broken} of {len(first)} changes move the shipped kernel's error by more than {100 * CLAIM:.0f} %")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def section(chapter: Chapter) -> Section | None:
    """Figure, table, interactions, sites; None where the run has no ablation."""
    ablation = tables.find(studies.ABLATION, chapter.run.path)
    if ablation is None:
        return None
    blocks: list[Block] = [Text(_words(ablation))]
    with style.context():
        made, ax = style.figure(wide=True, height=5.2)
        changes(ablation, ax)
        alt = ax.get_title(loc="left")
        caption = "Each point: one change against the contract's layer. Bars: 95 % interval over calls, paired. "
        caption += "Linear within ±10 %, logarithmic beyond."
        blocks.append(Figure(f"{chapter.prefix}factors", *style.render(made), alt, caption))
    blocks += [_table(ablation), _by_site(ablation)]
    return Section("factors", "Which factors change the error", tuple(blocks))


def _words(ablation: pd.DataFrame) -> str:
    rows = overall(ablation, "shipped")
    parts = []
    for verdict, said in ((SUPPORTED, "below 2 %"), (REJECTED, "more than 2 %"), ("undecided", "not decided")):
        chosen = rows[rows["verdict"] == verdict]
        if len(chosen):
            listed = (f"{name_of(r.factor, r.level)} ({change_percent(r.change)})" for r in chosen.itertuples())
            parts.append(f"{said}: {', '.join(listed)}")
    crossed = ablation[(ablation["rounding"] == INTERACTION) & (ablation["site"] == "all")]
    told = "; ".join(
        f"{name_of(r.factor.removeprefix('rounding x '), r.level)} changes the ratio shipped/fixed from "
        f"{text.plain(r.baseline)} to {text.plain(r.mean_rel_mse)}"
        for r in crossed.itertuples()
    )
    calls = int(ablation["calls"].max())
    start = f"Shipped kernel, {calls} calls. " + ". ".join(p[0].upper() + p[1:] for p in parts) + "."
    return start + (f" Interaction with the rounding: {told}." if told else "")


def _table(ablation: pd.DataFrame) -> Table:
    chosen = ablation[(ablation["site"] == "all") & (ablation["factor"] != "none")]
    rows = []
    for (factor, level), group in chosen.groupby(["factor", "level"], sort=False):
        if str(factor).startswith("rounding x"):
            continue
        by = group.set_index("rounding")
        cells = [Cell(name_of(str(factor), str(level))), Cell(str(group["stage"].iloc[0]))]
        for rounding in _ROUNDINGS:
            row = by.loc[rounding]
            cells.append(Cell(change_percent(row["change"], row["change_lo"], row["change_hi"]), float(row["change"])))
            cells.append(Cell(WORDS[row["verdict"]], tone="" if factor == "rounding" else _TONES[row["verdict"]]))
        main = change_percent(by.loc[BOTH, "change"]) if BOTH in by.index else text.EMPTY
        rows.append((*cells, Cell(main)))
    headers = ("change", "stage", "shipped", "< 2 %?", "fixed", "< 2 %?", "main effect")
    said = "Change of the mean over layers of the relative MSE. Main effect: geometric mean over both roundings."
    return Table(headers, tuple(rows), numeric=(2, 4, 6), caption=said)


def _by_site(ablation: pd.DataFrame) -> Table:
    sites = sorted(set(ablation["site"]) - {"all"}, key=layout.site_order)
    keyed = ablation.set_index(["factor", "level", "rounding", "site"])["change"]
    rows = []
    for site in sites:
        cells = [Cell(site)]
        for key in IN_ISSUE:
            values = [keyed.get((*key, rounding, site), np.nan) for rounding in _ROUNDINGS]
            cells.append(Cell(" / ".join(change_percent(v) if np.isfinite(v) else text.EMPTY for v in values)))
        rows.append(tuple(cells))
    headers = ("site", *(name_of(*key) for key in IN_ISSUE))
    return Table(headers, tuple(rows), numeric=tuple(range(1, len(headers))), caption="By site: shipped / fixed.")
