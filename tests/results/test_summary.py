"""Metrics against numbers worked out by hand, and the promises about zeros, intervals and order."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.results import schema, summary

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))
from synthetic import make_calls


def sums(**given_sums: float) -> dict[str, float]:
    """One layer's sums: all 0 but what is given; 2 rows of 4 features."""
    return dict.fromkeys(schema.SUM_NAMES, 0.0) | {"rows": 2, "in_features": 4} | given_sums


def test_metrics_by_hand():
    # y = (3, 4), e = (-0.3, -0.4): every output loses a tenth. z = y - 1 = (2, 3).
    found = summary.metrics(
        sums(
            sum_yy=25.0,
            sum_ee=0.25,
            sum_ey=-2.5,
            sum_zz=13.0,
            sum_ez=-1.8,
            sum_eff_yy=2.0,
            sum_eff_ee=0.01,
            sum_magnitude_error=-4.0,
            sum_square_error=2.0,
            mismatched=4,
            zeroed=1,
            saturated=2,
            sum_crest=3.0,
            zero_rows=1,
        )
    )
    by_hand = {
        "rel_mse": 0.01,
        "error_output_cosine": -1.0,
        "shrinkage": 0.1,
        "residual_rel_mse": 0.0,
        "rel_mse_nobias": 0.25 / 13,
        "error_output_cosine_nobias": -1.8 / np.sqrt(0.25 * 13),
        "effective_rel_mse": 0.005,
        "sqnr_db": 20.0,
        "magnitude_bias_lsb": -0.5,
        "rmse_lsb": 0.5,
        "code_mismatch": 0.5,
        "zeroed_fraction": 0.125,
        "saturated_fraction": 0.25,
        "crest": 3.0,
    }
    assert set(found) == set(by_hand) == {c.name for c in schema.METRICS}
    for name, value in by_hand.items():
        assert found[name] == pytest.approx(value, abs=1e-15), name


def test_zero_denominators():
    exact = summary.metrics(sums())
    assert exact["rel_mse"] == 0
    assert np.isnan(exact["error_output_cosine"])
    assert np.isnan(exact["shrinkage"])
    assert summary.metrics(sums(sum_ee=1.0))["rel_mse"] == np.inf
    no_error = summary.metrics(sums(sum_yy=1.0))
    assert no_error["rel_mse"] == 0
    assert no_error["residual_rel_mse"] == 0
    assert np.isnan(no_error["error_output_cosine"])
    assert no_error["sqnr_db"] == np.inf


def test_no_rows_is_empty_and_not_perfect():
    nothing = summary.metrics(sums(rows=0))
    assert all(np.isnan(value) for value in nothing.values())


# No squares that underflow: outputs are bf16, whose smallest square is far above the smallest fp64 number.
NUMBERS = st.floats(-1e3, 1e3).filter(lambda x: x == 0 or abs(x) > 1e-30)


@given(st.lists(NUMBERS, min_size=2, max_size=20), NUMBERS)
def test_cosine_stays_a_cosine(values, factor):
    y = np.array(values)
    e = factor * y[::-1]
    found = summary.metrics(sums(sum_yy=y @ y, sum_ee=e @ e, sum_ey=e @ y))["error_output_cosine"]
    assert np.isnan(found) or abs(found) <= 1 + 1e-9


def test_bootstrap_is_deterministic():
    first, second = summary.bootstrap_weights(7), summary.bootstrap_weights(7)
    assert (first == second).all()
    assert (first.sum(axis=1) == 7).all()
    assert not (first == summary.bootstrap_weights(7, seed=1)).all()
    calls = make_calls(8, 5)
    pd.testing.assert_frame_equal(summary.summarize(calls, "w"), summary.summarize(calls, "w"))


def test_summary_does_not_depend_on_the_order_of_rows():
    calls = make_calls(8, 5)
    shuffled = calls.sample(frac=1, random_state=3).reset_index(drop=True)
    a, b = summary.summarize(calls, "w"), summary.summarize(shuffled, "w")
    assert a["layer"].tolist() == b["layer"].tolist()
    numbers = a.select_dtypes("number").columns
    np.testing.assert_allclose(a[numbers].to_numpy(float), b[numbers].to_numpy(float), rtol=1e-12)


@pytest.mark.parametrize(("calls", "has_interval"), [(1, False), (2, False), (3, True)])
def test_interval_needs_three_calls(calls, has_interval):
    table = summary.summarize(make_calls(2, calls), "w")
    ends = table[[c.name for c in schema.INTERVALS]]
    assert ends.notna().to_numpy().all() if has_interval else ends.isna().to_numpy().all()
    means = summary.mean_over_layers_interval(make_calls(2, calls))
    assert means["lo"].notna().all() == has_interval
    if has_interval:
        assert (table["rel_mse_lo"] <= table["rel_mse_hi"]).all()
        assert (means["lo"] <= means["mean"]).all()
        assert (means["mean"] <= means["hi"]).all()


def test_layers_are_sums_over_calls():
    calls = make_calls(1, 4, variants=("fixed",))
    layer = summary.summarize(calls, "w").iloc[0]
    assert layer["calls"] == 4
    assert layer["sum_ee"] == pytest.approx(calls["sum_ee"].sum(), rel=1e-15)
    assert layer["max_abs_e"] == calls["max_abs_e"].max()
    assert layer["rel_mse"] == pytest.approx(calls["sum_ee"].sum() / calls["sum_yy"].sum(), rel=1e-15)


def test_headline_and_paired_by_hand():
    table = summary.summarize(make_calls(2, 1), "w")
    table["rel_mse"] = np.where(table["variant"] == "shipped", 0.4, 0.1)
    table.loc[0, "rel_mse"] = 0.2
    assert table.loc[0, "variant"] == "fixed"
    head = summary.headline(table).set_index("variant")
    assert head.loc["fixed", "mean_rel_mse"] == pytest.approx(0.15)
    pair = summary.paired(table)
    assert (pair["min_ratio"], pair["max_ratio"]) == (pytest.approx(2), pytest.approx(4))
    assert pair["ratio_of_means"] == pytest.approx(0.4 / 0.15)
    assert pair["p_value"] is None
    with pytest.raises(ValueError, match="no variant half_even; the table has fixed, shipped"):
        summary.paired(table, "half_even")


def test_variants_with_different_calls_are_drawn_together():
    calls = make_calls(4, 6)
    short = calls[(calls["variant"] != "fixed") | (calls["call"] < 5)]
    means = summary.mean_over_layers_interval(short).set_index("variant")
    assert means.loc["shipped", "mean"] > means.loc["fixed", "mean"]
    assert means.index.tolist() == ["fixed", "shipped", "shipped/fixed"]


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="no calls were measured"):
        summary.summarize(make_calls(1, 1).iloc[:0], "w")
