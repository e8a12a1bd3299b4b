"""From the sums of the theory study to theory.csv: predicted beside measured, and the shares of the error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

PARTS = ("bias", "noise", "weight", "output")


def table(layers: pd.DataFrame, sums: np.ndarray, names: Sequence[str], roundings: Sequence[str]) -> pd.DataFrame:
    """Rows of theory.csv.

    Args:
        layers: one row a layer: layer, block, attention, projection.
        sums: float64 [calls, layers, roundings, names].
        names: of the last axis, as `measure.theory.SUMS`.
        roundings: of the axis before it.
    """
    total = sums.sum(axis=0)  # [layers, roundings, names]
    rows = []
    for place, layer in enumerate(layers.to_dict("records")):
        for number, rounding in enumerate(roundings):
            s = dict(zip(names, total[place, number], strict=True))
            calls = int((sums[:, place, number, list(names).index("rows")] > 0).sum())
            rows.append(layer | {"rounding": rounding, "calls": calls} | _derived(s, rounding == "shipped"))
    return pd.DataFrame(rows)


def _derived(s: dict[str, float], biased: bool) -> dict[str, float]:
    with np.errstate(divide="ignore", invalid="ignore"):
        f = {k: np.float64(v) for k, v in s.items()}
        rel_mse, predicted = f["sum_ee"] / f["sum_yy"], f["predicted_ee"] / f["predicted_yy"]
        spread = f["step_abs"] / np.sqrt(f["features"] / f["rows"] * f["step2"] * f["xx"])
        shares = {name: f[name] / f["sum_ee"] for name in names_of_shares()}
        return {
            "rows": int(f["rows"]),
            "rel_mse": rel_mse,
            "predicted_rel_mse": predicted,
            "residual": np.log2(rel_mse / predicted),
            "error_output_cosine": f["sum_ey"] / np.sqrt(f["sum_ee"] * f["sum_yy"]),
            "predicted_cosine": f["predicted_ey"] / np.sqrt(f["predicted_ee"] * f["predicted_yy"]),
            "input_cosine": -np.sqrt(3) / 2 * spread if biased else 0.0,
            "crest": f["sum_crest"] / f["rows"],
            "mean_abs_over_rms": spread,
            "amplification": f["direction"] / f["gain"],
            **shares,
            "closure": sum(shares.values()) - 1,
        }


def names_of_shares() -> list[str]:
    """The ten columns that add up to one."""
    pairs = [f"{a}_x_{b}" for i, a in enumerate(PARTS) for b in PARTS[i + 1 :]]
    return [*PARTS, *pairs]
