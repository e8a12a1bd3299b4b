"""Where each layer stands on the axis of a per-layer figure, and which kernels it shows.

Layers stand in one group a site (self q, self k, ..., cross o) and in order of block within it, so that both trends are
seen at once: between sites, and with depth. A layer without labels goes to the group 'layers', in order of name.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from analysis.report import style

GAP = 0.09  # of the mean group's width, between two groups
_PROJECTIONS = ("q", "k", "v", "o")
_ATTENTIONS = ("self", "cross")
UNLABELLED = "layers"


@dataclass(frozen=True)
class Layout:
    """x of each layer, and (name, first x, last x) of each group."""

    x: dict[str, float]
    groups: list[tuple[str, float, float]]
    blocks: tuple[int, int] | None  # first and last labelled block


def site(attention: object, projection: object) -> str:
    """'self q'; 'layers' where neither is known."""
    words = [str(word) for word in (attention, projection) if not pd.isna(word) and word != ""]
    return " ".join(words) or UNLABELLED


def with_site(per_layer: pd.DataFrame) -> pd.DataFrame:
    """The table with a column `site`."""
    names = [site(a, p) for a, p in zip(per_layer["attention"], per_layer["projection"], strict=True)]
    return per_layer.assign(site=names)


def site_order(name: str) -> tuple[int, int, str]:
    """Sort key of sites: self before cross before others; q, k, v, o."""
    attention, _, projection = name.rpartition(" ")
    return (
        _ATTENTIONS.index(attention) if attention in _ATTENTIONS else len(_ATTENTIONS),
        _PROJECTIONS.index(projection) if projection in _PROJECTIONS else len(_PROJECTIONS),
        name,
    )


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that reads runs of digits as numbers: 'blocks.2' before 'blocks.10'."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def in_order(per_layer: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """One row a layer, with its site: by block, site and name, as the table of layers lists them."""
    records = with_site(per_layer).drop_duplicates("layer").to_dict("records")
    return sorted(records, key=lambda row: (row["block"], site_order(row["site"]), natural(row["layer"])))


def variants(per_layer: pd.DataFrame) -> list[str]:
    """The kernels of a table: shipped, fixed, then others by name."""
    found = set(per_layer["variant"].dropna())
    return [name for name in ("shipped", "fixed") if name in found] + sorted(found - {"shipped", "fixed"})


def arrange(per_layer: pd.DataFrame) -> Layout:
    """Groups and positions for the layers of a table."""
    layers = with_site(per_layer).drop_duplicates("layer")
    gap = max(1.0, GAP * len(layers))
    x: dict[str, float] = {}
    groups: list[tuple[str, float, float]] = []
    position = 0.0
    for name in sorted(layers["site"].unique(), key=site_order):
        members = layers[layers["site"] == name]
        ordered = sorted(zip(members["block"], members["layer"], strict=True), key=lambda m: (m[0], natural(m[1])))
        for offset, (_, layer) in enumerate(ordered):
            x[layer] = position + offset
        groups.append((name, position, position + len(ordered) - 1))
        position += len(ordered) + gap / max(1, layers["site"].nunique())
    labelled = layers.loc[layers["block"] >= 0, "block"]
    return Layout(x, groups, (int(labelled.min()), int(labelled.max())) if len(labelled) else None)


def dress(ax: Axes, layout: Layout) -> None:
    """Group bands, names and the x label; no tick a layer, which nobody could read."""
    pad = 0.5
    across = blended_transform_factory(ax.transData, ax.transAxes)
    for number, (_, first, last) in enumerate(layout.groups):
        if number % 2 == 0:
            ax.fill_between([first - pad, last + pad], 0, 1, transform=across, color=style.BAND, lw=0, zorder=0)
    ax.set_xticks([(first + last) / 2 for _, first, last in layout.groups], [name for name, _, _ in layout.groups])
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(layout.groups[0][1] - 1.0, layout.groups[-1][2] + 1.0)
    first, last = layout.blocks or (0, 0)
    order = f"block {first} to {last}" if last > first else "in order of name"
    named = "layer, grouped by site; within a group from left to right" if len(layout.groups) > 1 else "layer"
    ax.set_xlabel(f"{named} {order}")
