"""Verdicts on planted differences, the equivalence test against SciPy, pairing by scene, drift."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.results.closed_loop import by_scene, decide, drift, summarize


def spread(mean, sd, n, seed=0):
    """n values with exactly this mean and standard deviation."""
    v = np.random.default_rng(seed).normal(size=n)
    return mean + sd * (v - v.mean()) / v.std(ddof=1)


@pytest.mark.parametrize(
    ("mean", "sd", "verdict"),
    [
        (0.0, 0.2, "equivalent"),
        (-0.2, 0.1, "equivalent"),  # a significant loss, shown to be below the margin
        (-2.0, 0.5, "degraded"),
        (-0.45, 0.6, "degraded"),  # a loss, not shown to be below the margin
        (-0.3, 2.0, "undecided"),
        (0.0, 3.0, "undecided"),
        (3.0, 0.1, "undecided"),  # better than the margin is neither a loss nor equivalence
    ],
)
def test_verdicts_at_16_scenes(mean, sd, verdict):
    assert decide(spread(mean, sd, 16), 0.5).verdict == verdict


def test_being_better_is_no_news_to_the_one_sided_question():
    assert decide(spread(10.0, 3.0, 16), 0.5, two_sided=False).verdict == "equivalent"
    assert decide(spread(-10.0, 3.0, 16), 0.5, two_sided=False).verdict == "degraded"


def test_the_numbers_are_scipys():
    d = spread(-0.3, 0.7, 16)
    found = decide(d, 0.5)
    test = stats.ttest_1samp(d, 0)
    interval = test.confidence_interval(0.95)
    lower = stats.ttest_1samp(d, -0.5, alternative="greater").pvalue
    upper = stats.ttest_1samp(d, 0.5, alternative="less").pvalue
    assert found.p_value == pytest.approx(test.pvalue)
    assert (found.lo, found.hi) == pytest.approx((interval.low, interval.high))
    assert found.p_equivalence == pytest.approx(max(lower, upper))
    assert found.p_wilcoxon == pytest.approx(stats.wilcoxon(d).pvalue)
    ninety = test.confidence_interval(0.90)
    assert (found.p_equivalence < 0.05) == (ninety.low > -0.5 and ninety.high < 0.5)


def test_equal_differences_are_decided_without_a_division_by_zero():
    nothing = decide(np.zeros(5), 0.5)
    assert (nothing.verdict, nothing.mean, nothing.lo, nothing.hi, nothing.p_value) == ("equivalent", 0, 0, 0, 1)
    assert decide(np.full(5, -2.0), 0.5).verdict == "degraded"
    assert decide(np.full(7, -0.1), 0.5).verdict == "equivalent"


@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_scenes_have_no_interval_and_no_verdict(n):
    found = decide(np.full(n, -9.0), 0.5)
    assert found.verdict == "undecided" and np.isnan([found.lo, found.hi, found.p_value, found.p_equivalence]).all()


def test_a_margin_must_be_positive():
    with pytest.raises(ValueError, match="margin must be positive, got 0"):
        decide(np.zeros(5), 0)


def test_the_error_rates_are_the_nominal_ones():
    rng = np.random.default_rng(1)
    at_margin = [decide(rng.normal(-0.5, 1, 16), 0.5).verdict for _ in range(2000)]
    assert 0.0 < np.mean([v == "equivalent" for v in at_margin]) < 0.065, "5 % at the margin"
    no_loss = [decide(rng.normal(0, 1, 16), 0.5).verdict for _ in range(2000)]
    assert np.mean([v == "degraded" for v in no_loss]) < 0.035, "2.5 % where there is no loss"


def frames(values, clips=4, seeds=(0, 1)):
    """Per-frame rows; values: (variant, against) -> function of (scene, seed, clip) -> psnr_db."""
    rows = []
    for (variant, against), value in values.items():
        for scene in range(6):
            for seed in seeds:
                for clip in range(clips):
                    row = {"variant": variant, "against": against, "scene": f"s{scene}", "seed": seed, "frame": clip}
                    psnr = value(scene, seed, clip)
                    row |= {"clip": clip, "mse": 1.0, "psnr_db": psnr, "ssim": np.nan, "flip": np.nan}
                    rows.append(row)
    return pd.DataFrame(rows)


def plain(scene, seed, clip):
    return 20 + 3 * scene + seed - clip


LOOK = pd.DataFrame(
    [
        {"variant": v, "scene": f"s{s}", "seed": k, "frame": c, "clip": c, "luminance": 0.5 - 0.01 * (v == "shipped"),
         "contrast": 0.2 + 0.01 * s, "high_frequency": np.nan if c == 0 else 0.1}
        for v in ("bf16", "shipped") for s in range(6) for k in (0, 1) for c in range(4)
    ]
)  # fmt: skip


def test_differences_are_paired_by_scene():
    """Scenes differ by 15 dB, kernels by 0.2: only a paired comparison can see that."""
    made = frames({("bf16", "true"): plain, ("shipped", "true"): lambda *a: plain(*a) - 0.2 - 0.01 * a[0]})
    table = summarize(made, LOOK)
    row = table[(table["metric"] == "psnr_db") & (table["window"] == "all")].iloc[0]
    assert row["difference"] == pytest.approx(-0.225) and row["difference_hi"] < 0
    assert row["verdict"] == "equivalent" and row["p_value"] < 0.001
    assert row["scenes"] == 6 and row["pairs"] == 12
    unpaired = by_scene(made, "psnr_db").diff().dropna().abs()
    assert (unpaired > 1).all().all(), "the scenes are far apart"


def test_every_question_is_asked_once_and_only_where_it_has_an_answer():
    values = {(v, a): plain for v in ("bf16", "fp32", "shipped", "fixed") for a in ("true", "bf16")}
    del values["bf16", "bf16"]
    values["other_seed", "bf16"] = lambda *a: plain(*a) - 10
    table = summarize(frames(values), LOOK)
    asked = table[(table["metric"] == "psnr_db") & (table["window"] == "all")]
    found = {(r.variant, r.against, r.baseline) for r in asked.itertuples()}
    assert found == {
        *((v, "true", "bf16") for v in ("fp32", "shipped", "fixed")),
        ("shipped", "true", "fixed"), ("shipped", "bf16", "fixed"),
        *((v, "bf16", "other_seed") for v in ("fp32", "shipped", "fixed")),
        *((v, "bf16", "fp32") for v in ("shipped", "fixed")),
    }  # fmt: skip
    assert set(table["window"]) == {"all", "last_quarter"}
    far = asked[asked["baseline"] == "other_seed"]
    assert (far["verdict"] == "equivalent").all() and (far["difference"] > 5).all()


def test_statistics_need_no_reference_and_skip_empty_cells():
    table = summarize(frames({("bf16", "true"): plain, ("shipped", "true"): plain}), LOOK)
    look = table[(table["against"] == "nothing") & (table["window"] == "all")].set_index("metric")
    assert look.loc["luminance", "difference"] == pytest.approx(-0.01)
    assert look.loc["high_frequency", "value"] == pytest.approx(0.1), "constant frames are left out"
    assert (look["verdict"] == "").all()


def test_a_metric_that_falls_when_frames_get_better_is_turned_round():
    made = frames({("bf16", "true"): plain, ("shipped", "true"): plain})
    rng = np.random.default_rng(0)
    made["flip"] = np.where(made["variant"] == "shipped", 0.3, 0.2) + rng.normal(0, 1e-3, len(made))
    row = summarize(made, LOOK).query("metric == 'flip' and window == 'all'").iloc[0]
    assert row["difference"] == pytest.approx(0.1, abs=1e-3) and row["verdict"] == "degraded"
    assert row["difference_lo"] < row["difference"] < row["difference_hi"]


def test_drift_by_clip_with_bands_over_scenes():
    made = frames({("bf16", "true"): plain, ("shipped", "true"): lambda s, k, c: plain(s, k, c) - c})
    curve = drift(made, "psnr_db", "true")
    bf16 = curve[curve["variant"] == "bf16"].sort_values("clip")
    assert bf16["mean"].tolist() == pytest.approx([28, 27, 26, 25])
    assert (bf16["lo"] < bf16["mean"]).all() and (bf16["scenes"] == 6).all()
    half = stats.t.ppf(0.975, 5) * np.std(3.0 * np.arange(6), ddof=1) / np.sqrt(6)
    assert (bf16["hi"] - bf16["mean"]).tolist() == pytest.approx([half] * 4)
    paired = drift(made, "psnr_db", "true", baseline="bf16")
    assert paired["variant"].unique().tolist() == ["shipped"]
    assert paired["mean"].tolist() == pytest.approx([0, -1, -2, -3]) and paired["hi"].tolist()[3] == pytest.approx(-3)
