"""Blocks x sites: the numbers of a heatmap and the cells that the page can point at. The figure is `plots.heatmap`.

found = plots.heatmap_cells(per_layer, "ratio", "shipped")      # layer, site, block, value
block = heatmap(figure, found, names)                           # for the page: values on hover and by keyboard
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from analysis.report import layout, style, text
from analysis.report.blocks import Figure, HeatCell, Heatmap

_STEPS = 9  # colours of the scale's bar


def pivot(found: pd.DataFrame) -> pd.DataFrame:
    """Sites x blocks in the order of the report; a cell of several layers is their mean."""
    table = found.pivot_table(index="site", columns="block", values="value", sort=True)
    return table.reindex(sorted(table.index, key=layout.site_order))


def heatmap(
    figure: Figure, found: pd.DataFrame, names: Sequence[str], show: Callable[[float], str] = text.plain
) -> Heatmap:
    """The page's heatmap.

    Args:
        found: layer, site, block, value, one row a layer.
        names: the layers in the order of the page's table, into which a cell leads.
        show: prints a value.
    """
    finite = found[np.isfinite(found["value"].to_numpy(np.float64))]
    table = pivot(finite)
    low, high = float(np.nanmin(table.to_numpy())), float(np.nanmax(table.to_numpy()))
    place = style.scale(low, high)
    row_of = {name: number for number, name in enumerate(names)}
    held = dict(list(finite.groupby(["site", "block"])))
    rows = []
    for site in table.index:
        row: list[HeatCell | None] = []
        for block in table.columns:
            group = held.get((site, block))
            if group is None:
                row.append(None)
                continue
            value = float(table.loc[site, block])
            share = float(place(value)) if high > low else 0.5
            layers = group["layer"].tolist()
            which = layers[0] if len(layers) == 1 else f"mean of {len(layers)} layers"
            said = f"{site}, block {block}: {show(value)} ({which})"
            row.append(HeatCell(show(value), said, *style.heat(share), row_of.get(layers[0], -1)))
        rows.append(tuple(row))
    scale = tuple(style.heat(step / (_STEPS - 1))[0] for step in range(_STEPS))
    blocks = tuple(str(block) for block in table.columns)
    ends = (show(low), show(high))
    return Heatmap(figure, tuple(map(str, table.index)), blocks, tuple(rows), scale, ends)
