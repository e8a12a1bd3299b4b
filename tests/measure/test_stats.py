"""Every metric against fp64 taken from the definitions, and the negative controls."""

import numpy as np
import pytest
import torch

from analysis import numerics
from analysis.measure import stats
from analysis.measure.replay import Layer, Replay
from analysis.numerics import Rounding
from analysis.results import summary
from analysis.sites import Site

SITE = Site("blocks.0.self_attn.q", 0, "self", "q", "blocks.0.self_attn.norm_q")


def layer(k=96, n=40, *, bias=True, norm=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.2
    b = torch.randn(n, generator=generator) if bias else None
    return Layer(SITE, weight, b, (torch.rand(n, generator=generator) + 0.5, 1e-6) if norm else None)


def metrics_of(sums, k):
    """Metrics from fp64 [2, S] sums of one variant, groups added."""
    both = dict(zip(stats.ALL_SUMS, (sums[0] + sums[1]).tolist(), strict=True))
    return {name: float(v) for name, v in summary.metrics(both | {"in_features": k}).items()}


def expected_metrics(x, lay, rounding, reference):
    """The definitions of the contract, element by element in fp64 numpy."""
    codes, scales = numerics.quantize_rows(x, rounding)
    w_codes, w_scales = numerics.quantize_weight(lay.weight)
    yq = numerics.int8_linear(codes, scales, w_codes, w_scales, lay.bias).double().numpy()
    bias = np.zeros(len(lay.weight)) if lay.bias is None else lay.bias.double().numpy()
    if reference == "bf16":
        y = numerics.bf16_linear(x, lay.weight, lay.bias).double().numpy()
    else:
        y = x.double().numpy() @ lay.weight.double().numpy().T + bias
    e, z = yq - y, y - bias
    s, c = numerics.scaled(x).double().numpy(), codes.double().numpy()
    ties = np.abs(s - np.floor(s)) == 0.5
    off = np.where(ties, np.abs(c - s) != 0.5, c != np.rint(s))
    weight, eps = lay.norm[0].double().numpy(), lay.norm[1]
    normed = [v / np.sqrt((v**2).mean(axis=1, keepdims=True) + eps) * weight for v in (y, yq)]
    xd = x.double().numpy()
    return {
        "rel_mse": (e**2).sum() / (y**2).sum(),
        "error_output_cosine": (e * y).sum() / np.sqrt((e**2).sum() * (y**2).sum()),
        "shrinkage": -(e * y).sum() / (y**2).sum(),
        "rel_mse_nobias": (e**2).sum() / (z**2).sum(),
        "error_output_cosine_nobias": (e * z).sum() / np.sqrt((e**2).sum() * (z**2).sum()),
        "effective_rel_mse": ((normed[1] - normed[0]) ** 2).sum() / (normed[0] ** 2).sum(),
        "magnitude_bias_lsb": (np.abs(c) - np.abs(s)).mean(),
        "rmse_lsb": np.sqrt(((c - s) ** 2).mean()),
        "code_mismatch": off.mean(),
        "zeroed_fraction": ((c == 0) & (xd != 0)).mean(),
        "saturated_fraction": (np.abs(c) == 127).mean(),
        "crest": (np.abs(xd).max(axis=1) / np.sqrt((xd**2).mean(axis=1))).mean(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reference", ["bf16", "fp64"])
@pytest.mark.parametrize("rounding", [Rounding.SHIPPED, Rounding.FIXED])
def test_every_metric_against_fp64(rounding, reference, dtype):
    lay = layer()
    x = (torch.randn(57, 96, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
    sums = Replay([rounding], reference).measure(lay, x)[0]
    found, expected = metrics_of(sums, 96), expected_metrics(x, lay, rounding, reference)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-12), name


def test_shipped_is_far_from_fixed_where_the_tolerance_is_1e_5():
    lay, x = layer(), torch.randn(57, 96)
    sums = Replay(["shipped", "fixed"]).measure(lay, x)
    shipped, fixed = (metrics_of(s, 96) for s in sums)
    assert shipped["magnitude_bias_lsb"] == pytest.approx(-0.5, abs=0.02)
    assert shipped["error_output_cosine"] < -0.5 < abs(fixed["error_output_cosine"]) + 0.2 < 0.5
    assert fixed["code_mismatch"] == 0 and shipped["code_mismatch"] == pytest.approx(0.5, abs=0.05)
    assert shipped["rel_mse"] > 2 * fixed["rel_mse"]


def test_rows_with_nan_or_inf_are_counted_and_leave_every_other_sum_alone():
    lay, good = layer(), torch.randn(20, 96)
    bad = torch.cat([good[:7], torch.full((1, 96), float("nan")), good[7:], good[:1] * float("inf")])
    replay = Replay(["shipped", "fixed"])
    clean, dirty = replay.measure(lay, good), replay.measure(lay, bad)
    assert dirty[0, 0, 1] == 2 and clean[0, 0, 1] == 0
    dirty[:, :, 1] = 0
    torch.testing.assert_close(dirty, clean, rtol=1e-12, atol=1e-12)


def test_zero_rows_give_the_bias_and_no_nan():
    lay = layer()
    sums = Replay(["shipped", "fixed"]).measure(lay, torch.zeros(5, 96))
    named = dict(zip(stats.ALL_SUMS, sums[0, 0].tolist(), strict=True))
    assert named["rows"] == named["zero_rows"] == 5
    assert torch.isfinite(sums).all() and named["sum_ee"] == 0


def test_groups_split_the_sums():
    lay, x = layer(), torch.randn(30, 96)
    groups = torch.tensor([1] * 20 + [2] * 8 + [0] * 2, dtype=torch.uint8)
    replay = Replay(["shipped", "fixed"])
    sums = replay.measure(lay, x, groups=groups)
    for g, rows in ((0, slice(0, 20)), (1, slice(20, 28))):
        alone = replay.measure(lay, x[rows].clone())[:, 0]
        torch.testing.assert_close(sums[:, g], alone, rtol=1e-12, atol=0)


def test_sums_add_over_any_split():
    lay, x = layer(), torch.randn(101, 96)
    replay = Replay(["shipped"])
    whole = replay.measure(lay, x)
    parts = [replay.measure(lay, part.clone()) for part in x.split(13)]
    total = torch.stack(parts).sum(dim=0)
    peak = stats.ALL_SUMS.index("max_abs_e")
    total[..., peak] = torch.stack(parts)[..., peak].amax(dim=0)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-9)


def test_empty_batch_adds_nothing():
    sums = Replay(["fixed"]).measure(layer(), torch.empty(0, 96))
    assert (sums == 0).all()


def test_the_input_of_q_k_v_is_quantised_once(monkeypatch):
    replay, x, count = Replay(["shipped", "fixed"]), torch.randn(9, 96), []
    quantize = replay.engine.quantize
    monkeypatch.setattr(replay.engine, "quantize", lambda *a: count.append(1) or quantize(*a))
    first = [replay.measure(layer(seed=s), x) for s in range(3)]
    assert len(count) == 1
    x.mul_(2)
    changed = replay.measure(layer(seed=0), x)
    assert len(count) == 2, "an in-place write must not be missed"
    assert not torch.equal(changed, first[0])


def test_weight_codes_follow_a_changed_weight():
    replay, lay, x = Replay(["fixed"]), layer(), torch.randn(9, 96)
    before = replay.measure(lay, x)
    lay.weight.mul_(3)
    after = replay.measure(lay, x)
    assert after[0, 0, stats.ALL_SUMS.index("sum_yy")] > 2 * before[0, 0, stats.ALL_SUMS.index("sum_yy")]


def test_autocast_does_not_reach_the_measurement():
    lay, x = layer(), torch.randn(9, 96)
    plain = Replay(["shipped"]).measure(lay, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = Replay(["shipped"]).measure(lay, x)
    assert torch.equal(plain, cast)


def test_bad_arguments_name_the_value_and_the_remedy():
    with pytest.raises(ValueError, match="unknown reference 'fp8'; known: bf16, as_run, fp64"):
        Replay(["fixed"], "fp8")
    with pytest.raises(ValueError, match="widths differ"):
        Replay(["fixed"]).measure(layer(), torch.randn(3, 5))
    with pytest.raises(ValueError, match="needs the layer's output"):
        Replay(["fixed"], "as_run").measure(layer(), torch.randn(3, 96))
    with pytest.raises(ValueError, match="distinct"):
        Replay(["fixed", "fixed"])
