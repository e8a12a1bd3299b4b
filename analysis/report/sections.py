"""The sections of a run's chapter, in order. A section is a function Chapter -> Section, or None where it has no table.

To add one, write such a function and add it to SECTIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.report import (
    closed_loop,
    codes,
    details,
    factors,
    heatmap,
    kernel_times,
    layout,
    plots,
    pooled,
    propagation,
    provenance,
    public_kernels,
    style,
    text,
    theory,
)
from analysis.report.blocks import Block, Cell, Definitions, Figure, Image, Section, Table, Text
from analysis.report.chapter import Chapter
from analysis.report.claims import Verdict
from analysis.report.definitions import DEFINITIONS
from analysis.results import summary

CONTACT_SHEET = "contact_sheet.png"
_TONES = {Verdict.VALUE: "good", Verdict.KIND: "good", Verdict.NOT: "bad"}
_MARKDOWN_ROWS = 10


def claims_table(chapter: Chapter) -> Section:
    """Value in the issue, value here, verdict; the rules below."""
    rows = tuple(
        (
            Cell(f.claim.id),
            Cell(f.claim.statement),
            Cell(f.claim.issue),
            Cell(f.value),
            Cell(str(f.verdict), tone=_TONES.get(f.verdict, "open"), note=f.note),
        )
        for f in chapter.findings
    )
    headers = ("", "claim", "in the issue", f"here: {chapter.evidence.world}", "verdict")
    caption = (
        f"Means are plain means over layers. Brackets: 95 % interval of a bootstrap over {chapter.unit}s. "
        "The rule behind each verdict stands under Definitions."
    )
    return Section("claims", "The issue's claims and this run", (Table(headers, rows, caption=caption, stack=True),))


def main_figure(chapter: Chapter) -> Section | None:
    """Shrinkage by layer, on the first screen."""
    caption = (
        "Shrinkage = −Σey / Σy²: the part of the output's magnitude that the quantised layer loses. "
        "Unbiased rounding loses none."
    )
    made = _figure(chapter, "shrinkage", plots.shrinkage, caption)
    return Section("shrinkage", "Magnitude shrinkage", (made,))


def headline(chapter: Chapter) -> Section:
    """One row a kernel, every reference and choice of tokens; then what the codes themselves show."""
    order = layout.variants(chapter.run.per_layer)
    records = summary.headline(chapter.run.per_layer).to_dict("records")
    records.sort(key=lambda row: (row["reference"], row["tokens"], order.index(row["variant"])))
    several = any(len({row[key] for row in records}) > 1 for key in ("reference", "tokens"))
    rows = tuple(
        (
            Cell(row["variant"]),
            *([Cell(row["reference"]), Cell(row["tokens"])] if several else []),
            Cell(str(row["layers"])),
            *(Cell(text.scientific(row[f"{kind}_rel_mse"])) for kind in ("mean", "pooled", "median")),
            Cell(text.cosine(row["mean_cosine"])),
            Cell(f"{text.cosine(row['min_cosine'])} … {text.cosine(row['max_cosine'])}"),
            Cell(text.percent(row["mean_shrinkage"])),
            Cell(text.scientific(row["mean_effective_rel_mse"])),
        )
        for row in records
    )
    headers = (
        *("kernel", *(("reference", "tokens") if several else ()), "layers", "relative MSE, mean", "pooled", "median"),
        *("cosine, mean", "cosine, range", "shrinkage, mean", "effective MSE, mean"),
    )
    return Section(
        "headline",
        "Summary by kernel",
        (
            Table(headers, rows, numeric=tuple(range(headers.index("layers"), len(headers)))),
            *_codes(chapter),
            *codes.figure(chapter),
        ),
    )


def _codes(chapter: Chapter) -> tuple[Block, ...]:
    shown = {
        "magnitude_bias_lsb": text.cosine,
        "rmse_lsb": text.plain,
        "code_mismatch": text.percent,
        "zeroed_fraction": text.percent,
        "saturated_fraction": text.percent,
        "crest": text.plain,
    }
    means = chapter.per_layer.groupby("variant")[list(shown)].mean()
    rows = [
        (Cell(variant), *(Cell(show(means.loc[variant, name])) for name, show in shown.items()))
        for variant in chapter.variants
    ]
    ideal = (("truncation, ideal", "−0.500", "0.577", "about 50 %"), ("rounding, ideal", "0.000", "0.289", "0 %"))
    rows += [(*map(Cell, words), Cell(""), Cell(""), Cell("")) for words in ideal]
    headers = (
        *("kernel", "magnitude bias (LSB)", "rms error (LSB)", "differs from round-to-nearest", "set to zero"),
        *("saturated", "crest factor"),
    )
    said = "The activation codes by themselves, mean over layers. 1 LSB is one step of the int8 code."
    return Text(said), Table(headers, tuple(rows), numeric=tuple(range(1, len(headers))))


def error(chapter: Chapter) -> Section:
    """Error and its direction, layer by layer."""
    band = "Shaded: the range that the issue reports for truncation."
    blocks = [
        _figure(chapter, "rel_mse", plots.rel_mse, f"Bars: 95 % interval over {chapter.unit}s. Lower is better."),
        _figure(
            chapter,
            "cosine",
            plots.cosine,
            f"−1: the error is a pure loss of magnitude; 0: it is unrelated to the output. {band}",
        ),
    ]
    if len(layout.with_site(chapter.per_layer)["site"].unique()) > 1:
        blocks.append(_figure(chapter, "cosine_by_site", plots.cosine_by_site, band))
    return Section("error", "Error by layer and its direction", tuple(blocks))


def blocks_and_sites(chapter: Chapter) -> Section | None:
    """Heatmaps and the histogram of ratios; needs a pair of kernels or block numbers."""
    made: list[Block] = []
    labelled = len(chapter.per_layer.loc[chapter.per_layer["block"] >= 0, "layer"].unique()) > 1
    subject = chapter.subject
    if subject is not None and len(finite_ratios(chapter.per_layer, subject)):
        caption = "The mean of the layers' ratios is not the ratio of the two means; the issue reports the latter."
        draw = partial(plots.ratio_histogram, variant=subject)
        made.append(_figure(chapter, "ratio_histogram", draw, caption))
        if labelled:
            made += _heatmap(chapter, "ratio", subject, f"Above 1: {subject} has the larger error.")
    first = chapter.variants[0]
    cosines = chapter.per_layer.loc[chapter.per_layer["variant"] == first, "error_output_cosine"]
    if labelled and cosines.notna().any():
        caption = "The more negative, the more systematic the shrinkage."
        made += _heatmap(chapter, "error_output_cosine", first, caption)
    return Section("sites", "Blocks and sites", tuple(made)) if made else None


def _heatmap(chapter: Chapter, value: str, variant: str, caption: str) -> list[Block]:
    found = plots.heatmap_cells(chapter.per_layer, value, variant)
    if not np.isfinite(found["value"].to_numpy(np.float64)).any():
        return []
    name = "heatmap_ratio" if value == "ratio" else "heatmap_cosine"
    figure = _figure(chapter, name, partial(plots.heatmap, value=value, variant=variant), caption)
    names = [row["layer"] for row in layout.in_order(chapter.per_layer)]
    return [heatmap.heatmap(figure, found, names, text.plain if value == "ratio" else text.cosine)]


def finite_ratios(per_layer: pd.DataFrame, variant: str) -> pd.Series:
    """Ratios of the layers that both kernels have, infinite ones left out."""
    found = plots.ratios(per_layer, variant)["ratio"]
    return found[np.isfinite(found)]


def rollout(chapter: Chapter) -> Section | None:
    """True frames against predicted ones, where the run holds the picture."""
    path = chapter.run.path / CONTACT_SHEET
    if not path.is_file():
        return None
    caption = "True frames and the model's own, from the rollout whose layers were measured."
    picture = Image(f"{chapter.prefix}contact_sheet", path.read_bytes(), "frames of the rollout", caption)
    return Section("rollout", "The rollout", (picture,))


def layer_table(chapter: Chapter) -> Section:
    """One row a layer; metrics of each kernel beside each other."""
    table = chapter.per_layer
    names = chapter.variants
    first = {v: table[table["variant"] == v].set_index("layer") for v in names}
    ratio = plots.ratios(table, chapter.subject)["ratio"] if chapter.subject else pd.Series(dtype="float64")
    records = layout.in_order(table)
    rows = []
    for place, layer in enumerate(records):
        name = layer["layer"]
        block = "" if layer["block"] < 0 else str(layer["block"])
        shape = f"{layer['in_features']} → {layer['out_features']}"
        cells = [Cell(name, place), Cell(layer["site"]), Cell(block, _number(layer["block"])), Cell(shape)]
        values = [first[v].loc[name] if name in first[v].index else None for v in names]
        cells += [_measured(row, "rel_mse", text.scientific) for row in values]
        if chapter.subject:
            value = float(ratio.get(name, np.nan))
            cells.append(Cell(text.plain(value), _number(value)))
        cells += [_measured(row, "error_output_cosine", text.cosine) for row in values]
        cells += [_measured(row, "shrinkage", text.percent) for row in values]
        rows.append(tuple(cells))
    headers = ("layer", "site", "block", "in → out", *(f"relative MSE, {v}" for v in names))
    headers += (f"{chapter.subject} / fixed",) if chapter.subject else ()
    headers += (*(f"cosine, {v}" for v in names), *(f"shrinkage, {v}" for v in names))
    said = "Every column of the run's table, with units, is described in data/README.md."
    names_in_order = [row["layer"] for row in records]
    counted = codes.of(chapter)
    shown = details.build(table, chapter.per_call, names_in_order, chapter.subject, chapter.unit, counted)
    numeric = (2, *range(4, len(headers)))
    made = Table(headers, tuple(rows), numeric, sortable=True, short=_MARKDOWN_ROWS, caption=said, details=shown)
    return Section("layers", f"All {len(rows)} layers", (made,))


def _measured(row: Any, metric: str, show: Callable[..., str]) -> Cell:
    if row is None or pd.isna(row[metric]):
        return Cell(text.EMPTY, None)
    ends = [float(row[name]) if pd.notna(row[name]) else None for name in (f"{metric}_lo", f"{metric}_hi")]
    return Cell(show(float(row[metric]), *ends), _number(row[metric]))


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


def definitions(chapter: Chapter) -> Section:
    """Symbols, formulas, and the rules behind the verdicts."""
    rules = tuple((Cell(f.claim.id), Cell(f.claim.rule)) for f in chapter.findings)
    return Section(
        "definitions",
        "Definitions",
        (Definitions(DEFINITIONS[chapter.unit]), Table(("claim", "rule of its verdict"), rules, stack=True)),
    )


def _figure(chapter: Chapter, name: str, draw: Callable[[pd.DataFrame, Axes], Axes], caption: str) -> Figure:
    with style.context():
        made, ax = style.figure(wide=True, height=3.6 if name.startswith("heatmap") else 4.2)
        draw(chapter.per_layer, ax)
        alt = ax.get_title(loc="left")
        return Figure(f"{chapter.prefix}{name}", *style.render(made), alt, caption)


SECTIONS: tuple[Callable[[Chapter], Section | None], ...] = (
    claims_table,
    main_figure,
    headline,
    error,
    blocks_and_sites,
    rollout,
    factors.section,
    theory.section,
    propagation.section,
    closed_loop.section,
    kernel_times.section,
    layer_table,
    pooled.section,
    public_kernels.section,
    definitions,
    provenance.section,
    provenance.reproduce,
)
