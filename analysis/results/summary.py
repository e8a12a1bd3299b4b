"""DataFrame -> DataFrame: metrics from sums, layers from calls, intervals, and the paired test between two kernels.

No number here depends on the order of rows, ranks or files: sums add, metrics follow from sums, and resampling is
seeded. Intervals are 95 % percentile intervals of a cluster bootstrap whose cluster is a call (one forward pass).

    per_layer = summarize(per_call, world="tiny")
    headline(per_layer)        # one row per variant: mean over layers, pooled, median
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.results import schema

BOOTSTRAP_DRAWS = 2000
BOOTSTRAP_SEED = 90
_GROUP = [*schema.PER_LAYER_KEY, *schema.LABEL_NAMES]


def _ratio(numerator: Any, denominator: Any) -> Any:
    """numerator / denominator with 0/0 = NaN (an empty cell) and x/0 = inf, silently."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerator, dtype=np.float64) / np.asarray(denominator, dtype=np.float64)


def metrics(sums: Any) -> dict[str, np.ndarray]:
    """Every metric of the contract from a mapping of sums (columns of a frame, or a dict of equal-shaped arrays).

    Zero denominators: y = 0 and e = 0 everywhere gives rel_mse 0 and an empty cosine; y = 0 and e > 0 gives inf.
    Needs in_features beside the sums for the statistics of codes.
    """
    s = {name: np.asarray(sums[name], dtype=np.float64) for name in (*schema.SUM_NAMES, "in_features")}
    codes = s["rows"] * s["in_features"]
    cosine = _ratio(s["sum_ey"], np.sqrt(s["sum_ee"]) * np.sqrt(s["sum_yy"]))
    cosine_nobias = _ratio(s["sum_ez"], np.sqrt(s["sum_ee"]) * np.sqrt(s["sum_zz"]))
    rel_mse = _relative(s["sum_ee"], s["sum_yy"], s["rows"])
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr_db = -10 * np.log10(rel_mse)
    return {
        "rel_mse": rel_mse,
        "error_output_cosine": cosine,
        "shrinkage": -_ratio(s["sum_ey"], s["sum_yy"]),
        "residual_rel_mse": np.where(s["sum_ee"] == 0, rel_mse, rel_mse * (1 - cosine**2)),
        "rel_mse_nobias": _relative(s["sum_ee"], s["sum_zz"], s["rows"]),
        "error_output_cosine_nobias": cosine_nobias,
        "effective_rel_mse": _relative(s["sum_eff_ee"], s["sum_eff_yy"], s["rows"]),
        "sqnr_db": sqnr_db,
        "magnitude_bias_lsb": _ratio(s["sum_magnitude_error"], codes),
        "rmse_lsb": np.sqrt(_ratio(s["sum_square_error"], codes)),
        "code_mismatch": _ratio(s["mismatched"], codes),
        "zeroed_fraction": _ratio(s["zeroed"], codes),
        "saturated_fraction": _ratio(s["saturated"], codes),
        "crest": _ratio(s["sum_crest"], s["rows"] - s["zero_rows"]),
    }


def _relative(ee: np.ndarray, yy: np.ndarray, rows: np.ndarray) -> np.ndarray:
    exact = (ee == 0) & (yy == 0) & (rows > 0)
    return np.where(exact, 0.0, _ratio(ee, yy))


def add_calls(per_call: pd.DataFrame) -> pd.DataFrame:
    """Sums of each (layer, variant, reference, tokens) over its calls; max_abs_e by maximum; `calls` counted."""
    how = {name: ("max" if name == "max_abs_e" else "sum") for name in schema.SUM_NAMES}
    grouped = per_call.groupby(_GROUP, sort=False, dropna=False)
    summed = grouped.agg(how)
    summed["calls"] = grouped["call"].nunique()
    return summed.reset_index()


def bootstrap_weights(calls: int, draws: int = BOOTSTRAP_DRAWS, seed: int = BOOTSTRAP_SEED) -> np.ndarray:
    """How often each call is drawn: int [draws, calls], rows summing to `calls`. Same seed, same weights."""
    return np.random.default_rng(seed).multinomial(calls, np.full(calls, 1 / calls), size=draws)


def percentile_interval(values: np.ndarray, axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile interval along an axis of bootstrap draws; empty (NaN) where a draw is not a number."""
    low, high = np.quantile(values, [0.025, 0.975], axis=axis)
    return low, high


def _intervals(sums: np.ndarray, in_features: int, weights: dict[int, np.ndarray]) -> dict[str, float]:
    """Interval columns of one layer from its sums per call [sums, calls]."""
    calls = sums.shape[1]
    names = [f"{metric}_{end}" for metric in schema.INTERVAL_OF for end in ("lo", "hi")]
    if calls < 3:
        return dict.fromkeys(names, np.nan)  # too few clusters: no interval
    if calls not in weights:
        weights[calls] = bootstrap_weights(calls).astype(np.float64)
    w = weights[calls]
    drawn = {name: w @ values for name, values in zip(schema.SUM_NAMES, sums, strict=True)}
    drawn["in_features"] = np.full(len(w), in_features)
    drawn_metrics = metrics(drawn)
    out: dict[str, float] = {}
    for metric in schema.INTERVAL_OF:
        low, high = percentile_interval(drawn_metrics[metric])
        out[f"{metric}_lo"], out[f"{metric}_hi"] = float(low), float(high)
    return out


def summarize(per_call: pd.DataFrame, world: str) -> pd.DataFrame:
    """per_layer from per_call: sums over calls, metrics, intervals (empty below 3 calls). Rows sorted by key."""
    if per_call.empty:
        raise ValueError("no calls were measured: nothing to summarise")
    # In order of calls, whatever order the rows come in: a sum of floats depends on it in its last digit.
    ordered = per_call.sort_values("call", kind="stable").reset_index(drop=True)
    frame = add_calls(ordered).set_index(_GROUP)
    weights: dict[int, np.ndarray] = {}
    sums = ordered[schema.SUM_NAMES].to_numpy(np.float64).T.copy()
    features = ordered["in_features"].to_numpy(np.int64)
    grouped = ordered.groupby(_GROUP, sort=False, dropna=False).indices
    intervals = {key: _intervals(sums[:, rows], features[rows[0]], weights) for key, rows in grouped.items()}
    frame = frame.join(pd.DataFrame.from_dict(intervals, orient="index").rename_axis(_GROUP)).reset_index()
    for name, values in metrics(frame).items():
        frame[name] = values
    frame["schema_version"], frame["world"] = schema.SCHEMA_VERSION, world
    frame = schema.conform(frame, schema.PER_LAYER_COLUMNS, "summary")
    return frame.sort_values([*_order(), "variant"], kind="stable").reset_index(drop=True)


def _order() -> list[str]:
    return ["run_id", "reference", "tokens", "block", "attention", "projection", "layer"]


def headline(per_layer: pd.DataFrame) -> pd.DataFrame:
    """One row per (run_id, variant, reference, tokens): layers, mean / pooled / median rel_mse, cosine range, ..."""
    rows = []
    for key, group in per_layer.groupby(["run_id", "variant", "reference", "tokens"], sort=True):
        finite = group[np.isfinite(group["rel_mse"])]
        rows.append(
            dict(zip(["run_id", "variant", "reference", "tokens"], key, strict=True))
            | {
                "layers": len(group),
                "mean_rel_mse": finite["rel_mse"].mean(),
                "pooled_rel_mse": float(_ratio(group["sum_ee"].sum(), group["sum_yy"].sum())),
                "median_rel_mse": finite["rel_mse"].median(),
                "mean_cosine": group["error_output_cosine"].mean(),
                "min_cosine": group["error_output_cosine"].min(),
                "max_cosine": group["error_output_cosine"].max(),
                "mean_shrinkage": group["shrinkage"].mean(),
                "mean_effective_rel_mse": group["effective_rel_mse"].mean(),
            }
        )
    return pd.DataFrame(rows)


def mean_over_layers_interval(per_call: pd.DataFrame, metric: str = "rel_mse") -> pd.DataFrame:
    """Per variant: plain mean over layers of a metric with its interval, calls drawn jointly for all layers.

    Columns: variant, mean, lo, hi; and a row 'A/B' for the ratio of every ordered pair of variants that names
    `fixed` last. Expects one run, reference and tokens choice.
    """
    drawn: dict[str, np.ndarray] = {}
    point: dict[str, float] = {}
    # One list of calls for all variants: a draw takes the same calls for each, also where one variant lacks some.
    index = np.unique(per_call["call"].to_numpy(np.int64))
    weights = bootstrap_weights(len(index)) if len(index) >= 3 else np.empty((0, len(index)))
    for variant, group in per_call.groupby("variant", sort=True):
        sums, features = _stack(group, index)
        for target, w in ((point, np.ones((1, len(index)))), (drawn, weights)):
            layers = metrics({name: w @ values for name, values in sums.items()} | {"in_features": features})[metric]
            means = _finite_mean(layers)
            target[str(variant)] = float(means[0]) if target is point else means  # type: ignore[assignment]
    rows = [_mean_row(v, point[v], drawn[v]) for v in point]
    for variant in point:
        if variant != "fixed" and "fixed" in point:
            rows.append(_mean_row(f"{variant}/fixed", point[variant] / point["fixed"], drawn[variant] / drawn["fixed"]))
    return pd.DataFrame(rows)


def _mean_row(name: str, mean: float, draws: np.ndarray) -> dict[str, Any]:
    low, high = percentile_interval(draws) if len(draws) else (np.nan, np.nan)
    return {"variant": name, "mean": mean, "lo": float(low), "hi": float(high)}


def _finite_mean(layers: np.ndarray) -> np.ndarray:
    """Mean along the layers, [draws, layers] -> [draws], over what is finite; NaN where nothing is."""
    finite = np.isfinite(layers)
    return _ratio(np.where(finite, layers, 0.0).sum(axis=1), finite.sum(axis=1))


def _stack(group: pd.DataFrame, calls: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """{sum name: float [calls, layers]} and in_features [layers]; a layer that a call did not reach adds 0."""
    layer, names = pd.factorize(group["layer"], sort=True)
    place = np.searchsorted(calls, group["call"].to_numpy(np.int64)) * len(names) + layer
    shape = (len(calls), len(names))
    sums = {
        name: np.bincount(place, group[name].to_numpy(np.float64), minlength=len(calls) * len(names)).reshape(shape)
        for name in schema.SUM_NAMES
    }
    return sums, group.groupby("layer", sort=True)["in_features"].first().to_numpy(np.float64)


def paired(per_layer: pd.DataFrame, a: str = "shipped", b: str = "fixed", metric: str = "rel_mse") -> dict[str, Any]:
    """Compare two variants layer by layer: ratios a/b, and Wilcoxon's signed-rank test on log ratios.

    Returns layers, median_ratio, min_ratio, max_ratio, ratio_of_means and p_value (None below 6 layers).
    """
    from scipy import stats  # here, because importing it takes seconds that most commands need not spend

    table = per_layer.pivot_table(index="layer", columns="variant", values=metric, sort=False)
    if missing := {a, b} - set(table.columns):
        raise ValueError(f"no variant {', '.join(sorted(missing))}; the table has {', '.join(table.columns)}")
    pair = table[[a, b]].dropna()
    ratios = pair[a] / pair[b]
    usable = ratios[np.isfinite(ratios) & (ratios > 0)]
    p_value = float(stats.wilcoxon(np.log(usable)).pvalue) if len(usable) >= 6 and (usable != 1).any() else None
    return {
        "layers": len(pair),
        "median_ratio": float(ratios.median()),
        "min_ratio": float(ratios.min()),
        "max_ratio": float(ratios.max()),
        "ratio_of_means": float(_ratio(pair[a].mean(), pair[b].mean())),
        "p_value": p_value,
    }
