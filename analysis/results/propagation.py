"""From the sums of `shrinkage propagate` to propagation.csv and attention.csv."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.results import summary

_SUMS = ["sum_yy", "sum_ee", "sum_ey"]


def table(sums: pd.DataFrame) -> pd.DataFrame:
    """Rows of propagation.csv, per denoising step and over all of them, with intervals over calls (from 3 calls on)."""
    rows = []
    for step in ("all", *sorted(sums["step"].unique())):
        part = sums if step == "all" else sums[sums["step"] == step]
        for key, group in part.groupby(["variant", "quantised", "seen_at"], sort=False):
            label = dict(zip(("variant", "quantised", "seen_at"), key, strict=True))
            rows.append(label | {"step": str(step)} | _row(group.sort_values("call")))
    return pd.DataFrame(rows)


def _row(group: pd.DataFrame) -> dict[str, Any]:
    values = group[_SUMS].to_numpy(np.float64)  # [calls, 3]
    calls = len(values)
    drawn = summary.bootstrap_weights(calls) @ values if calls >= 3 else np.empty((0, 3))
    total, point = values.sum(axis=0), _metrics(values.sum(axis=0)[None])
    row: dict[str, Any] = {"calls": calls} | dict(zip(_SUMS, total, strict=True))
    row |= {name: float(value[0]) for name, value in point.items()}
    draws = _metrics(drawn)
    for name in ("rel_mse", "shrinkage"):
        lo, hi = summary.percentile_interval(draws[name]) if calls >= 3 else (np.nan, np.nan)
        row |= {f"{name}_lo": float(lo), f"{name}_hi": float(hi)}
    return row


def _metrics(sums: np.ndarray) -> dict[str, np.ndarray]:
    yy, ee, ey = sums.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "rel_mse": np.where((ee == 0) & (yy == 0), 0.0, ee / yy),
            "error_output_cosine": ey / np.sqrt(ee * yy),
            "shrinkage": -ey / yy,
        }


def attention_table(sums: pd.DataFrame) -> pd.DataFrame:
    """Rows of attention.csv: each head, and all heads of an attention together."""
    keys = ["layer", "block", "attention", "quantised", "variant"]
    columns = [*_SUMS, "frozen_ee"]
    heads = sums.groupby([*keys, "head"], sort=False)[columns].sum(min_count=1).reset_index()
    whole = sums.groupby(keys, sort=False)[columns].sum(min_count=1).reset_index().assign(head="all")
    joined = pd.concat([whole, heads], ignore_index=True)
    found = _metrics(joined[_SUMS].to_numpy(np.float64))
    frozen = joined["frozen_ee"].astype("float64") / joined["sum_yy"]
    with np.errstate(divide="ignore", invalid="ignore"):
        cancelled = 1 - found["rel_mse"] / frozen
    return joined[[*keys, "head"]].assign(
        calls=int(sums["call"].nunique()),
        rel_mse=found["rel_mse"],
        rel_mse_norm_frozen=frozen,
        cancelled=cancelled,
        shrinkage=found["shrinkage"],
    )
