"""What the page shows of one layer when it is chosen: both kernels side by side, codes, and how its error evolves.

    held = build(per_layer, per_call, names)      # plain JSON, one entry a layer, in the order of `names`

Curves come from the sums of per_call: a point is a ratio of sums, so a point over several calls is exact too. Numbers
are printed here, by the same functions as everywhere in the report; the page only draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.report import codes as histograms
from analysis.report import layout, style, text
from analysis.results import schema, summary

_POINTS = 60_000  # of all curves together; beyond, a point covers several calls
_MOST, _FEWEST = 144, 24  # points a curve
_DIGITS = 4
METRICS: tuple[tuple[str, str, Callable[..., str]], ...] = (
    ("relative MSE", "rel_mse", text.scientific),
    ("after the norm behind q or k", "effective_rel_mse", text.scientific),
    ("what no output gain could repair", "residual_rel_mse", text.scientific),
    ("SQNR (dB)", "sqnr_db", text.plain),
    ("cosine(error, output)", "error_output_cosine", text.cosine),
    ("shrinkage", "shrinkage", text.percent),
    ("largest |error|", "max_abs_e", text.scientific),
    ("magnitude bias of codes (LSB)", "magnitude_bias_lsb", text.cosine),
    ("rms error of codes (LSB)", "rmse_lsb", text.plain),
    ("crest factor of the input", "crest", text.plain),
)
COUNTS = (
    ("differ from round-to-nearest", "mismatched"),
    ("set to zero", "zeroed"),
    ("saturated at ±127", "saturated"),
)
_SUMS = ("sum_ee", "sum_yy", "sum_ey")
_COLOURS = {"shipped": "var(--shipped)", "fixed": "var(--fixed)"}


def build(
    per_layer: pd.DataFrame,
    per_call: pd.DataFrame | None,
    names: Sequence[str],
    subject: str | None = None,
    unit: str = "call",
    codes: pd.DataFrame | None = None,
) -> dict[str, Any]:
    """Everything that the page draws of the layers `names`.

    Args:
        per_layer, per_call: one run, reference and choice of tokens; without per_call there are no curves.
        subject: the kernel whose error is set against fixed, None where there is no pair.
        unit: what a row of per_call is: a call, or a run.
        codes: how often each activation code occurs (`codes.of`); None: no histograms.
    """
    kernels = layout.variants(per_layer)
    tables = {v: per_layer[per_layer["variant"] == v].set_index("layer").reindex(list(names)) for v in kernels}
    # Columns as lists: one look-up a cell in a frame would take seconds for a model of many layers.
    columns = {v: {name: table[name].to_numpy(object) for name in table} for v, table in tables.items()}
    layers = [_layer(columns, place, name, subject, unit) for place, name in enumerate(names)]
    held: dict[str, Any] = {
        "kernels": [[v, _COLOURS.get(v) or style.colour(v, kernels)] for v in kernels],
        "metrics": [label for label, _, _ in METRICS],
        "counts": [label for label, _ in COUNTS],
        "unit": unit,
    }
    if per_call is not None and len(per_call):
        for kind, (labels, each, curves) in _curves(per_call, names, kernels, unit).items():
            held[kind] = {"labels": labels, "each": each}
            for layer, values in zip(layers, curves, strict=True):
                layer[kind] = values
    if codes is not None:
        found = histograms.compact(codes, names, kernels)
        for layer, values in zip(layers, found.pop("layers"), strict=True):
            layer["codes"] = values
        held["codes"] = found
    return held | {"layers": layers}


def _layer(columns: dict[str, Any], place: int, name: str, subject: str | None, unit: str) -> dict[str, Any]:
    rows = [{key: values[place] for key, values in table.items()} for table in columns.values()]
    known = next(row for row in rows if not pd.isna(row["rows"]))
    site = layout.site(known["attention"], known["projection"])
    about = [] if site == layout.UNLABELLED else [site]
    about += [f"block {known['block']}"] if known["block"] >= 0 else []
    about += [f"{known['in_features']} → {known['out_features']}"]
    about += [f"{known['rows']:,} rows in {known['calls']} call{'' if known['calls'] == 1 else 's'}"]
    if subject is not None:
        pair = [columns[v]["rel_mse"][place] for v in (subject, "fixed")]
        if not any(pd.isna(pair)) and pair[1] > 0:
            about.append(f"{subject} / fixed {text.plain(pair[0] / pair[1])}")
    return {
        "name": name,
        "about": about,
        "metrics": [[_shown(row, metric, show) for row in rows] for _, metric, show in METRICS],
        "counts": [[_counted(row, count) for row in rows] for _, count in COUNTS],
    }


def _shown(row: dict[str, Any], metric: str, show: Callable[..., str]) -> str:
    if pd.isna(row[metric]):
        return text.EMPTY
    ends = [row.get(f"{metric}_{end}") for end in ("lo", "hi")]
    return show(float(row[metric]), *(None if end is None or pd.isna(end) else float(end) for end in ends))


def _counted(row: dict[str, Any], count: str) -> list[Any]:
    """[share of the codes, text]; null where nothing was counted."""
    if pd.isna(row[count]) or not row["rows"]:
        return [None, text.EMPTY]
    share = int(row[count]) / (int(row["rows"]) * int(row["in_features"]))
    return [float(f"{share:.{_DIGITS}g}"), f"{text.percent(share)} ({int(row[count]):,})"]


def _curves(
    per_call: pd.DataFrame, names: Sequence[str], kernels: Sequence[str], unit: str
) -> dict[str, tuple[list[str], int, list[Any]]]:
    """{'steps' or 'calls': (labels of the points, calls a point, per layer [metric][kernel][point])}."""
    table = per_call[per_call["layer"].isin(list(names))]
    calls = table.drop_duplicates("call").sort_values("call", kind="stable")
    out: dict[str, tuple[list[str], int, list[Any]]] = {}
    steps = sorted(int(step) for step in calls["step"].dropna().unique())
    if len(steps) > 1:
        place = table["step"].map({step: number for number, step in enumerate(steps)})
        out["steps"] = ([f"step {step}" for step in steps], 0, _points(table, place, len(steps), names, kernels))
    most = int(np.clip(_POINTS // max(1, len(names) * len(kernels)), _FEWEST, _MOST))
    each = -(-len(calls) // most)
    if len(calls) > 1:
        where = {int(call): number // each for number, call in enumerate(calls["call"])}
        labels = [_label(row, unit) for row in calls.to_dict("records")]
        labels = [
            f"{labels[at]} … {labels[min(at + each, len(labels)) - 1]}" if each > 1 else labels[at]
            for at in range(0, len(labels), each)
        ]
        out["calls"] = (labels, each, _points(table, table["call"].map(where), len(labels), names, kernels))
    return out


def _label(call: dict[str, Any], unit: str) -> str:
    words = [f"{unit} {call['call']}"]
    words += [str(call["scene"])] if isinstance(call["scene"], str) and call["scene"] else []
    words += [f"{name} {call[name]}" for name in ("clip", "step") if not pd.isna(call[name])]
    return ", ".join(words)


def _points(
    table: pd.DataFrame, place: pd.Series, count: int, names: Sequence[str], kernels: Sequence[str]
) -> list[Any]:
    """[layer][metric][kernel][point]: relative MSE and cosine from the sums of each point; null where it has none."""
    kept = place.notna().to_numpy()
    table, at = table[kept], place[kept].to_numpy(np.int64)
    layer = pd.Categorical(table["layer"], categories=list(dict.fromkeys(names))).codes.astype(np.int64)
    kernel = pd.Categorical(table["variant"], categories=list(kernels)).codes.astype(np.int64)
    flat = (layer * len(kernels) + kernel) * count + at
    shape = (len(names), len(kernels), count)
    size = int(np.prod(shape))
    columns = dict.fromkeys((*schema.SUM_NAMES, "in_features"), 0.0)
    sums: dict[str, Any] = {name: np.full(shape, value) for name, value in columns.items()}
    for name in (*_SUMS, "rows"):
        sums[name] = np.bincount(flat, table[name].to_numpy(np.float64), minlength=size).reshape(shape)
    found = summary.metrics(sums)
    pair = [found[name] for name in ("rel_mse", "error_output_cosine")]
    return [[_rounded(values[number]) for values in pair] for number in range(len(names))]


def _rounded(values: np.ndarray) -> list[list[float | None]]:
    return [[float(f"{v:.{_DIGITS}g}") if np.isfinite(v) else None for v in row] for row in values.tolist()]
