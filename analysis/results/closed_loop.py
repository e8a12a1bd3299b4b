"""From frames to verdicts: paired differences, tests, equivalence and drift. Torch-free, DataFrame -> DataFrame.

The unit is the scene. Frames are averaged within a rollout, seeds within a scene, and everything after that is paired
by scene: a scene-seed pair is not an independent observation of what the kernel does, a scene is (nearly) one.

Each question is about a paired difference D over scenes, negative D being worse:

    against  baseline    D, for PSNR                                     tested
    true     bf16        PSNR(variant, game) - PSNR(bf16, game)          |D| < margin
    true     fixed       PSNR(shipped, game) - PSNR(fixed, game)         |D| < margin
    bf16     fixed       PSNR(shipped, bf16) - PSNR(fixed, bf16)         |D| < margin
    bf16     other_seed  PSNR(variant, bf16) - PSNR(other seed, bf16)    D > -margin: no further than a new seed
    bf16     fp32        PSNR(variant, bf16) - PSNR(fp32, bf16)          D > -margin: no further than rounding

    equivalent  the equivalence test rejects at 5 %: two one-sided tests for |D| < margin (the 90 % t interval of D lies
                within it), the lower of them alone for D > -margin
    degraded    not equivalent, and the 95 % t interval of D lies below 0: there is a loss, and it is not shown to be
                smaller than the margin
    undecided   anything else, and always below 3 scenes

A loss can be significant and the verdict still `equivalent`: then it is measured to be smaller than the margin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

ALPHA = 0.05
LEAST_SCENES, LEAST_WILCOXON = 3, 6
MARGINS = {"psnr_db": 0.5, "ssim": 0.01, "flip": 0.01}
HIGHER_IS_BETTER = {"psnr_db": True, "ssim": True, "flip": False}
STATISTICS = ("luminance", "contrast", "high_frequency")
QUESTIONS = (  # against, baseline, two-sided
    ("true", "bf16", True),
    ("true", "fixed", True),
    ("bf16", "fixed", True),
    ("bf16", "other_seed", False),
    ("bf16", "fp32", False),
)
EQUIVALENT, DEGRADED, UNDECIDED = "equivalent", "degraded", "undecided"
_ROLLOUT = ["variant", "against", "scene", "seed"]


@dataclass(frozen=True)
class Decision:
    """A paired comparison over scenes. NaN where there are too few of them."""

    mean: float
    lo: float
    hi: float
    p_value: float
    p_wilcoxon: float
    p_equivalence: float
    verdict: str


def decide(differences: np.ndarray, margin: float | None, two_sided: bool = True) -> Decision:
    """Judge paired differences, one a scene, oriented so that negative is worse.

    Args:
        differences: float [scenes].
        margin: positive, in the metric's unit; None: no equivalence test and an empty verdict.
        two_sided: False if being better than the baseline is no news: only D > -margin is tested.
    """
    if margin is not None and not margin > 0:
        raise ValueError(f"the equivalence margin must be positive, got {margin}")
    d = np.asarray(differences, np.float64)
    n = len(d)
    mean = float(d.mean()) if n else np.nan
    undecided = UNDECIDED if margin is not None else ""
    if n < LEAST_SCENES:
        return Decision(mean, np.nan, np.nan, np.nan, np.nan, np.nan, undecided)
    error = float(d.std(ddof=1) / np.sqrt(n))
    # Equal differences have no error; floating-point dust in their mean must not pass for one.
    error = 0.0 if np.ptp(d) <= 1e-12 * max(1.0, abs(mean)) else error
    half = float(stats.t.ppf(1 - ALPHA / 2, n - 1)) * error
    lo, hi = mean - half, mean + half
    p_value = 2 * _tail(abs(mean), error, n)
    p_wilcoxon = float(stats.wilcoxon(d).pvalue) if n >= LEAST_WILCOXON and d.any() else np.nan
    if margin is None:
        return Decision(mean, lo, hi, min(p_value, 1.0), p_wilcoxon, np.nan, "")
    p_equivalence = _tail(mean + margin, error, n)
    if two_sided:
        p_equivalence = max(p_equivalence, _tail(margin - mean, error, n))
    verdict = EQUIVALENT if p_equivalence < ALPHA else DEGRADED if hi < 0 else UNDECIDED
    return Decision(mean, lo, hi, min(p_value, 1.0), p_wilcoxon, p_equivalence, verdict)


def _tail(distance: float, error: float, n: int) -> float:
    """One-sided p of a mean that lies `distance` beyond the bound it is tested against."""
    if error == 0:
        return 0.0 if distance > 0 else 0.5 if distance == 0 else 1.0
    return float(stats.t.sf(distance / error, n - 1))


def by_scene(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Mean of a metric, seeds averaged after frames: index scene, one column a (variant, against).

    Empty cells (FLIP on frames that were not scored, the spectrum of constant frames) are left out of the means.
    """
    keys = [k for k in _ROLLOUT if k in table.columns]
    rollouts = table.groupby(keys, sort=True)[metric].mean().reset_index()
    columns = [k for k in ("variant", "against") if k in keys]
    return rollouts.pivot_table(index="scene", columns=columns, values=metric, aggfunc="mean", sort=True)


def windows(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """('all', everything) and, from four clips on, ('last_quarter', frames of the last quarter of the clips)."""
    yield "all", table
    clips = int(table["clip"].max()) + 1
    if clips >= 4:
        yield "last_quarter", table[table["clip"] >= clips - clips // 4]


def summarize(
    frames: pd.DataFrame, statistics: pd.DataFrame, margins: dict[str, float] | None = None
) -> pd.DataFrame:  # fmt: skip
    """The rows of closed_loop.csv from the two per-frame tables; see the module's docstring for the questions."""
    margins = MARGINS | (margins or {})
    rows: list[dict[str, object]] = []
    for window, part in windows(frames):
        for metric, margin in margins.items():
            if part[metric].notna().any():
                table = by_scene(part, metric)
                rows += [row | {"window": window} for row in _questions(table, metric, margin)]
    for window, part in windows(statistics):
        for metric in STATISTICS:
            table = by_scene(part, metric)
            for variant in [v for v in table.columns if v not in ("bf16", "true")]:
                row = _row(table[variant], table["bf16"], None)
                rows.append(row | _labels(variant, "", "bf16", metric) | {"window": window})
    return pd.DataFrame(rows).assign(pairs=len(frames[["scene", "seed"]].drop_duplicates()))


def _questions(table: pd.DataFrame, metric: str, margin: float) -> Iterator[dict[str, object]]:
    sign = 1.0 if HIGHER_IS_BETTER[metric] else -1.0
    for against, baseline, two_sided in QUESTIONS:
        if (baseline, against) not in table.columns:
            continue
        unasked = {baseline, "bf16", "other_seed"} | ({"fp32"} if baseline == "fixed" else set())
        for variant in [v for v, a in table.columns if a == against and v not in unasked]:
            row = _row(table[variant, against], table[baseline, against], margin, two_sided, sign)
            yield row | _labels(variant, against, baseline, metric)


def _labels(variant: str, against: str, baseline: str, metric: str) -> dict[str, object]:
    return {"variant": variant, "against": against or "nothing", "baseline": baseline, "metric": metric}


def _row(
    value: pd.Series, baseline: pd.Series, margin: float | None, two_sided: bool = True, sign: float = 1.0
) -> dict[str, object]:  # fmt: skip
    pair = pd.DataFrame({"value": value, "baseline": baseline}).dropna()
    found = decide(sign * (pair["value"] - pair["baseline"]).to_numpy(), margin, two_sided)
    ends = sorted([sign * found.lo, sign * found.hi])
    return {
        "scenes": len(pair),
        "value": pair["value"].mean(),
        "baseline_value": pair["baseline"].mean(),
        "difference": sign * found.mean,
        "difference_lo": ends[0],
        "difference_hi": ends[1],
        "p_value": found.p_value,
        "p_wilcoxon": found.p_wilcoxon,
        "margin": margin,
        "p_equivalence": found.p_equivalence,
        "verdict": found.verdict,
    }


def drift(frames: pd.DataFrame, metric: str, against: str, baseline: str | None = None) -> pd.DataFrame:
    """Mean over scenes of a metric by clip with pointwise 95 % t bands: variant, clip, scenes, mean, lo, hi.

    baseline: subtract this variant's curve scene by scene, which takes out what scenes have in common.
    """
    part = frames[frames["against"] == against] if "against" in frames else frames
    rollouts = part.groupby(["variant", "scene", "seed", "clip"])[metric].mean().reset_index()
    scenes = rollouts.pivot_table(index=["scene", "clip"], columns="variant", values=metric, aggfunc="mean")
    if baseline is not None:
        scenes = scenes.sub(scenes[baseline], axis=0).drop(columns=baseline)
    rows = []
    for variant in scenes.columns:
        for clip, values in scenes[variant].groupby("clip"):
            found = decide(values.dropna().to_numpy(), None)
            row = {"variant": variant, "clip": clip, "scenes": int(values.notna().sum())}
            rows.append(row | {"mean": found.mean, "lo": found.lo, "hi": found.hi})
    return pd.DataFrame(rows, columns=["variant", "clip", "scenes", "mean", "lo", "hi"])
