"""Closed forms against measurements, and a decomposition that adds up."""

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.measure.replay import Layer, Replay
from analysis.measure.stats import ALL_SUMS
from analysis.measure.theory import PAIRS, PARTS, SUMS, Theory, rounding_energy
from analysis.results import studies, tables, theory
from analysis.sites import Site

SITE = Site("blocks.0.self_attn.q", 0, "self", "q", "")


def layer(k=512, n=96, seed=0, rank_one=0.0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    weight += rank_one * torch.randn(n, 1, generator=generator) / k  # reads the mean of the input
    return Layer(SITE, weight.bfloat16().float(), torch.randn(n, generator=generator) * 0.1)


def inputs(rows=200, k=512, seed=1, mean=0.0):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) + mean


def measured(lay, x, calls=1):
    sums = torch.stack([Theory(rows=None).measure(lay, x, call=c) for c in range(calls)])[:, None].numpy()
    layers = pd.DataFrame([{"layer": "q", "block": 0, "attention": "self", "projection": "q"}])
    return theory.table(layers, sums, SUMS, ("shipped", "fixed")).set_index("rounding")


def test_predictions_meet_the_measurement_on_gaussian_input():
    found = measured(layer(), inputs())
    assert found["residual"].abs().max() < 0.05, "within 4 %"
    assert found["predicted_cosine"].tolist() == pytest.approx(found["error_output_cosine"].tolist(), abs=0.02)
    assert found.loc["shipped", "input_cosine"] == pytest.approx(-0.691, abs=0.01)
    assert -0.69 < found.loc["shipped", "error_output_cosine"] < -0.5, "weight rounding takes from the input's"
    assert found.loc["shipped", "amplification"] == pytest.approx(1, abs=0.1)
    only_noise = measured(layer(), inputs(seed=2)).loc["fixed"]
    assert only_noise["bias"] == 0 and abs(only_noise["error_output_cosine"]) < 0.02


def test_a_weight_that_reads_the_inputs_direction_amplifies_the_bias():
    plain, strong = (measured(layer(rank_one=r), inputs(mean=0.8)) for r in (0.0, 8.0))
    ratios = [m.loc["shipped", "rel_mse"] / m.loc["fixed", "rel_mse"] for m in (plain, strong)]
    assert strong.loc["shipped", "amplification"] > 2 * plain.loc["shipped", "amplification"]
    assert ratios[1] > 2 * ratios[0] and ratios[1] > 6
    assert strong["residual"].abs().max() < 0.2


def test_the_decomposition_adds_up_to_the_measured_error(tmp_path):
    lay, x = layer(k=96), inputs(k=96)
    found = measured(lay, x, calls=3).reset_index()
    assert found["closure"].abs().max() < 1e-6
    assert (found[[*PARTS, *PAIRS]].sum(axis=1) - 1).abs().max() < 1e-6
    sums = Replay(["shipped", "fixed"]).measure(lay, x).sum(dim=1)
    rel_mse = (sums[:, ALL_SUMS.index("sum_ee")] / sums[:, ALL_SUMS.index("sum_yy")]).tolist()
    assert found["rel_mse"].tolist() == pytest.approx(rel_mse, rel=1e-6)
    written = tables.write(studies.THEORY, found, tmp_path, "r")
    assert tables.read(studies.THEORY, tmp_path).equals(written) and (written["calls"] == 3).all()


def test_a_part_left_out_would_be_noticed():
    found = measured(layer(k=96), inputs(k=96))
    without = found["closure"] - found["weight"]
    assert without.abs().min() > 1e-3


def test_bias_is_three_quarters_of_truncations_activation_error_where_weights_are_isotropic():
    found = measured(layer(), inputs()).loc["shipped"]
    share = found["bias"] / (found["bias"] + found["noise"] + found["bias_x_noise"])
    assert share == pytest.approx(0.75, abs=0.03)


def test_rows_are_drawn_and_bad_rows_left_out():
    lay, x = layer(k=96), inputs(k=96)
    bad = x.clone()
    bad[3] = float("nan")
    study = Theory(rows=None)
    kept = torch.cat([x[:3], x[4:]])
    assert torch.equal(study.measure(lay, bad), study.measure(lay, kept))
    few = Theory(rows=16).measure(lay, x)
    assert few[0, SUMS.index("rows")] == 16 and torch.equal(few, Theory(rows=16).measure(lay, x))


def test_zero_input_and_bf16_input_are_finite():
    lay = layer(k=96)
    for x in (torch.zeros(5, 96), inputs(20, 96).bfloat16()):
        assert np.isfinite(Theory(rows=None).measure(lay, x).numpy()).all()


def test_rounding_two_nearly_equal_values_by_simulation():
    generator = torch.Generator().manual_seed(0)
    where = torch.rand(400_000, generator=generator, dtype=torch.float64)
    normal = torch.randn(400_000, generator=generator, dtype=torch.float64)
    for mean, std in ((0.0, 0.02), (0.05, 0.01), (0.3, 0.3), (0.0, 1.0), (2.4, 0.1), (0.5, 0.0)):
        e = mean + std * normal
        rounded = (where + e).round() - where.round()
        added = float((rounded**2).mean() - (e**2).mean())
        one = torch.ones(1, dtype=torch.float64)
        predicted = float(rounding_energy(mean * one, std * one, one))
        assert predicted == pytest.approx(added, abs=0.012), (mean, std)
    zero = torch.zeros(1, dtype=torch.float64)
    assert rounding_energy(zero, zero, one) == 0 and rounding_energy(one, one, zero) == 0


def test_a_large_bias_hides_the_rounding_that_both_outputs_share():
    """Outputs near 64 are rounded to steps of 0.25 or 0.5: far more than the error, but mostly alike in both."""
    lay = layer(k=96)
    lay.bias.fill_(64.0)
    found = measured(lay, inputs(k=96))
    assert found["residual"].abs().max() < 0.25, "independent rounding would be off by a factor of 8"
