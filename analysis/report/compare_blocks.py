"""A comparison as blocks of text and tables: what the terminal, the Markdown file and a page say of it.

for block in pair_blocks(pair, "rel_mse"): print(markdown.block(block))
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.report import markdown, text
from analysis.report.blocks import Block, Cell, Table, Text
from analysis.results import checks
from analysis.results.compare import DISAGREES, NOT_JUDGED, Comparison, Pair

_LISTED = 20  # layers on one side that are named


def markdown_page(found: Comparison) -> str:
    """The whole comparison as Markdown, every layer of it."""
    parts = [f"# {markdown.escape(found.metric)} compared"]
    for pair in found.pairs:
        parts.append(f"## {markdown.escape(pair.b)} against {markdown.escape(pair.a)}")
        parts += [markdown.block(block) for block in pair_blocks(pair, found.metric)]
        parts.append(markdown.block(layers(pair.table, "Every layer.")))
    return "\n\n".join(parts) + "\n"


def verdict(pair: Pair) -> str:
    """What a reader should take away, in one or two sentences."""
    judged = len(pair.table) - pair.count(NOT_JUDGED)
    differences = pair.table["difference"].dropna()
    equal = " Every difference is exactly 0." if len(differences) and (differences == 0).all() else ""
    if not judged:
        return (
            "No layer can be judged: that takes an interval on both sides, from per_call.parquet or from interval "
            f"columns, and at least 3 calls. --tolerance judges without.{equal}"
        )
    wrong = pair.disagreeing()
    layers_wrong = wrong["layer"].nunique()
    rows = f"{len(wrong)} row{'s' if len(wrong) != 1 else ''}"
    named = (
        f"{rows} in {layers_wrong} layer{'s' if layers_wrong != 1 else ''} differ by more than their intervals allow"
    )
    found = named if len(wrong) else "none differs by more than its interval allows"
    said = f"Of {judged} rows (a layer and a kernel), {found}, at 5 % for all rows together."
    if equal:
        return said + equal
    single, chance = pair.excluding_zero(), judged / 20
    return f"{said} {single} single 95 % intervals exclude 0, where chance alone gives about {chance:.0f}."


def pair_blocks(pair: Pair, metric: str) -> list[Block]:
    """Verdict, where intervals come from, rank correlation, disagreeing layers, layers on one side only."""
    blocks: list[Block] = [Text(verdict(pair)), Text(f"a = {pair.a}, b = {pair.b}. Intervals: {pair.intervals}.")]
    blocks += [Text(note) for note in pair.notes]
    if unjudged := pair.count(NOT_JUDGED):
        blocks.append(Text(f"{unjudged} row(s) not judged: no interval, or no value on one side."))
    blocks.append(_ranks(pair, metric))
    disagreeing = pair.disagreeing()
    if len(disagreeing):
        blocks.append(layers(disagreeing, "Layers that disagree, largest relative difference first."))
    for name, only in ((pair.a, pair.only_a), (pair.b, pair.only_b)):
        if only:
            more = f", and {len(only) - _LISTED} more" if len(only) > _LISTED else ""
            blocks.append(Text(f"Only in {name}: {', '.join(only[:_LISTED])}{more}."))
    return blocks


def _ranks(pair: Pair, metric: str) -> Table:
    rows = []
    for row in pair.ranks.to_dict("records"):
        group = pair.table
        for name in ("variant", "reference", "tokens"):
            group = group[group[name] == row[name]]
        ratio = group["ratio"].replace([np.inf, -np.inf], np.nan)
        cells = [row["variant"], row["reference"], row["tokens"], str(row["layers"])]
        cells += [text.plain(row["spearman"]), text.plain(float(ratio.median()))]
        cells += [text.plain(float(ratio.min())), text.plain(float(ratio.max()))]
        rows.append(tuple(Cell(str(cell)) for cell in cells))
    headers = ("kernel", "reference", "tokens", "layers", "rank correlation", "median ratio", "smallest", "largest")
    caption = f"{metric} over layers: Spearman's rank correlation, and b / a."
    return Table(headers, tuple(rows), numeric=(3, 4, 5, 6, 7), caption=caption)


def layers(table: pd.DataFrame, caption: str) -> Table:
    """Rows of a comparison; reference and tokens stand in the caption where all rows have the same."""
    shared = [name for name in ("reference", "tokens") if checks.is_constant(table[name])]
    names = ["layer", "variant", *(name for name in ("reference", "tokens") if name not in shared)]
    rows = []
    for row in table.to_dict("records"):
        words = [row[name] for name in names]
        words += [text.scientific(row["a"]), text.scientific(row["b"])]
        words += [text.plain(row["ratio"], row["ratio_lo"], row["ratio_hi"])]
        words += [text.scientific(row["difference"], row["difference_lo"], row["difference_hi"])]
        tone = "bad" if row["judgement"] == DISAGREES else ""
        rows.append((*(Cell(str(word)) for word in words), Cell(row["judgement"], tone=tone)))
    headers = tuple("kernel" if name == "variant" else name for name in names)
    first = len(headers)
    said = ", ".join(f"{name} {table[name].iloc[0]}" for name in shared)
    return Table(
        (*headers, "a", "b", "ratio b / a", "difference b - a", "judgement"),
        tuple(rows),
        numeric=tuple(range(first, first + 4)),
        caption=f"{caption} ({said})" if said else caption,
    )
