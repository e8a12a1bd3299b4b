"""The report's section on what happens behind a layer: the residual stream, block by block, and what attention sees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.report import layout, plots, style, text
from analysis.report.blocks import Block, Cell, Figure, Section, Table, Text
from analysis.report.chapter import Chapter
from analysis.results import studies, tables

_FLOOR = "#8a8d94"


def _places(rows: pd.DataFrame) -> list[str]:
    """Blocks in order, then the model's output."""
    blocks = sorted((p for p in rows["seen_at"].unique() if p != "output"), key=int)
    return [*blocks, "output"]


def error(propagation: pd.DataFrame, ax: Axes) -> Axes:
    """Relative MSE of the residual stream behind each block: all blocks quantised, or that block alone."""
    rows = propagation[propagation["step"] == "all"]
    places = _places(rows)
    for variant in rows["variant"].unique():
        look = _FLOOR if variant == "fp32" else style.colour(variant)
        whole = rows[(rows["variant"] == variant) & (rows["quantised"] == "all")].set_index("seen_at").loc[places]
        name = "fp32 (bf16's own rounding)" if variant == "fp32" else f"{variant}, accumulated"
        ax.plot(range(len(places)), whole["rel_mse"], "-", color=look, marker=style.marker(variant), ms=5, label=name)
        ends = whole[["rel_mse_lo", "rel_mse_hi"]].to_numpy(np.float64)
        if np.isfinite(ends).all():
            ax.fill_between(range(len(places)), ends[:, 0], ends[:, 1], color=look, alpha=0.18, lw=0)
        alone = rows[(rows["variant"] == variant) & (rows["quantised"] == rows["seen_at"])].set_index("seen_at")
        if len(alone):
            shown = [p for p in places if p in alone.index]
            x = [places.index(p) for p in shown]
            ax.plot(x, alone.loc[shown, "rel_mse"], "--", color=look, lw=1, label=f"{variant}, this block alone")
    plots.log_scale(ax)
    _dress(ax, places, "relative MSE of the residual stream")
    final = rows[(rows["quantised"] == "all") & (rows["seen_at"] == "output")].set_index("variant")["rel_mse"]
    told = ", ".join(f"{text.scientific(final[v])} {v}" for v in final.index if v != "fp32")
    ax.set_title(f"Error behind each block on the same inputs; at the output {told}")
    return ax


def shrinkage(propagation: pd.DataFrame, ax: Axes) -> Axes:
    """Percentage of its magnitude that the residual stream loses, all blocks quantised."""
    rows = propagation[(propagation["step"] == "all") & (propagation["quantised"] == "all")]
    places = _places(rows)
    ax.axhline(0, color=style.INK, lw=0.9, zorder=1)
    for variant in [v for v in rows["variant"].unique() if v != "fp32"]:
        mine = rows[rows["variant"] == variant].set_index("seen_at").loc[places]
        look = style.colour(variant)
        ax.plot(range(len(places)), 100 * mine["shrinkage"], color=look, marker=style.marker(variant), label=variant)
        ends = 100 * mine[["shrinkage_lo", "shrinkage_hi"]].to_numpy(np.float64)
        if np.isfinite(ends).all():
            ax.fill_between(range(len(places)), ends[:, 0], ends[:, 1], color=look, alpha=0.18, lw=0)
    _dress(ax, places, "magnitude lost (%)")
    ax.set_title("Does the loss of magnitude pile up along the blocks?")
    return ax


def _dress(ax: Axes, places: list[str], label: str) -> None:
    ax.set_xticks(range(len(places)), places)
    ax.set_xlabel("seen behind block")
    ax.set_ylabel(label)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def norms(per_layer: pd.DataFrame) -> pd.DataFrame:
    """q and k sites: mean relative MSE before and after the norm behind them, by kernel. Columns site, variant, ..."""
    table = layout.with_site(per_layer)
    table = table[table["projection"].isin(["q", "k"])]
    means = table.groupby(["site", "variant"], sort=False)[["rel_mse", "effective_rel_mse"]].mean().reset_index()
    means["cancelled"] = 1 - means["effective_rel_mse"] / means["rel_mse"]
    return means


def seen(attention: pd.DataFrame) -> pd.DataFrame:
    """Median over blocks of what attention sees: one row a (self/cross, quantised, kernel)."""
    whole = attention[attention["head"] == "all"]
    columns = ["rel_mse", "rel_mse_norm_frozen", "shrinkage"]
    means = whole.groupby(["attention", "quantised", "variant"], sort=False)[columns].median().reset_index()
    means["cancelled"] = 1 - means["rel_mse"] / means["rel_mse_norm_frozen"]
    return means


def section(chapter: Chapter) -> Section | None:
    """Figures and the table of steps; attention where it was measured. None where the run has no propagation."""
    propagation = tables.find(studies.PROPAGATION, chapter.run.path)
    attention = tables.find(studies.ATTENTION, chapter.run.path)
    if propagation is None and attention is None:
        return None
    blocks: list[Block] = []
    if propagation is not None:
        caption = "Teacher-forced: every model gets the inputs of the bf16 trajectory. Bands: 95 % over calls."
        blocks.append(_figure(chapter, "propagation", propagation, error, caption))
        caption = "−Σey / Σy² of the residual stream; y: the bf16 model's, on the same inputs."
        blocks.append(_figure(chapter, "propagation_shrinkage", propagation, shrinkage, caption))
        blocks.append(_steps(propagation))
    if attention is not None:
        blocks += [
            Text(words(chapter.per_layer, attention)),
            _norm_table(chapter.per_layer),
            _attention_table(attention),
        ]
    return Section("propagation", "Behind the layer: propagation, and what attention sees", tuple(blocks))


def _figure(chapter: Chapter, name: str, table: pd.DataFrame, draw: Callable[[pd.DataFrame, Axes], Axes], caption: str) -> Figure:  # fmt: skip  # noqa: E501
    with style.context():
        made, ax = style.figure(wide=True)
        draw(table, ax)
        alt = ax.get_title(loc="left")
        return Figure(f"{chapter.prefix}{name}", *style.render(made), alt, caption)


def _steps(propagation: pd.DataFrame) -> Table:
    at_output = propagation[(propagation["quantised"] == "all") & (propagation["seen_at"] == "output")]
    alone = propagation[(propagation["seen_at"] == "output") & (propagation["quantised"] != "all")]
    isolated = alone.groupby(["variant", "step"])["rel_mse"].sum()
    rows = []
    for r in at_output.to_dict("records"):
        added = float(isolated.get((r["variant"], r["step"]), np.nan))
        rows.append(
            (
                *(Cell(str(r["variant"])), Cell(str(r["step"])), Cell(str(r["calls"]))),
                Cell(text.scientific(r["rel_mse"], r["rel_mse_lo"], r["rel_mse_hi"]), float(r["rel_mse"])),
                Cell(text.scientific(added)),
                Cell(text.cosine(r["error_output_cosine"])),
                Cell(text.percent(r["shrinkage"])),
            )
        )
    headers = ("kernel", "denoising step", "calls", "relative MSE", "sum of single blocks", "cosine", "shrinkage")
    said = "At the model's output. Sum of single blocks: each block quantised alone, their errors added; where the "
    said += "whole lies above it, the blocks' errors point the same way."
    return Table(headers, tuple(rows), numeric=(2, 3, 4, 5, 6), caption=said)


def words(per_layer: pd.DataFrame, attention: pd.DataFrame) -> str:
    """How much of the defect's error the norms take away, and how far that explains the closed loop."""
    by_kernel = norms(per_layer).groupby("variant")["cancelled"].mean()
    kernels = [v for v in layout.variants(per_layer) if v in by_kernel.index]
    parts = [f"{text.percent(by_kernel[kernel])} of the {kernel} kernel's error" for kernel in kernels]
    said = [f"The norms behind q and k take away {' and '.join(parts)} (mean over the sites)."] if parts else []
    behind = seen(attention[attention["attention"] == "self"])
    shipped = behind[behind["variant"] == "shipped"].set_index("quantised")
    if {"qk", "v"} <= set(shipped.index):
        qk, v = shipped.loc["qk"], shipped.loc["v"]
        frozen, real = (float(value / v["rel_mse"]) for value in (qk["rel_mse_norm_frozen"], qk["rel_mse"]))
        said.append(
            f"In self-attention q and k together bring {text.plain(real)} times the error of v into o; with frozen "
            f"norms it would be {text.plain(frozen)} times. The norms explain why q and k do little harm, and no more: "
            f"v has no norm behind it and shrinks what enters o by {text.percent(float(v['shrinkage']))}."
        )
    return " ".join(said) or "The run has no kernel whose norms could be judged."


def _norm_table(per_layer: pd.DataFrame) -> Table:
    rows = [
        (
            *(Cell(str(r.site)), Cell(str(r.variant))),
            *(Cell(text.scientific(value)) for value in (r.rel_mse, r.effective_rel_mse)),
            Cell(text.percent(r.cancelled)),
        )
        for r in norms(per_layer).itertuples()
    ]
    headers = ("site", "kernel", "relative MSE", "after the norm", "taken away by the norm")
    return Table(headers, tuple(rows), numeric=(2, 3, 4), caption="Means over layers, from per_layer.csv.")


def _attention_table(attention: pd.DataFrame) -> Table:
    rows = [
        (
            *(Cell(str(r.attention)), Cell(str(r.quantised)), Cell(str(r.variant))),
            *(Cell(text.scientific(value)) for value in (r.rel_mse, r.rel_mse_norm_frozen)),
            *(Cell(text.percent(value)) for value in (r.cancelled, r.shrinkage)),
        )
        for r in seen(attention).itertuples()
    ]
    headers = ("attention", "quantised", "kernel", "relative MSE into o", "with frozen norms", "cancelled", "shrinkage")
    said = "The tensor that enters o, softmax(q k) v, when only q and k or only v are quantised; medians over blocks. "
    said += "Frozen norms divide by the size that the bf16 projection had, so that nothing cancels."
    return Table(headers, tuple(rows), numeric=(3, 4, 5, 6), caption=said)
