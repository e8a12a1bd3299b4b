"""The frozen table of factors: no change is exactly nothing, each change is the one it names."""

import numpy as np
import pytest
import torch

from analysis import numerics
from analysis.measure.ablation import FACTORS, GROUP, KNOWN, Ablation, Setting, _Stages, pick_factors, sample
from analysis.measure.replay import Layer
from analysis.numerics import Rounding
from analysis.results import studies, tables
from analysis.results.ablation import Cell, Sums, table, verdict
from analysis.sites import Site

SITE = Site("blocks.0.self_attn.q", 0, "self", "q", "")


def layer(k=160, n=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Layer(SITE, torch.randn(n, k, generator=generator) * 0.2, torch.randn(n, generator=generator))


def inputs(rows=40, k=160, seed=1):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.2, 3, rows)[:, None]


def output(setting, lay=None, x=None):
    lay, x = lay or layer(), inputs() if x is None else x
    return _Stages(lay, x, x.abs().max(), "key").output(setting)


def change_of(name, level=None):
    return next(c for c in FACTORS if c.factor == name and level in (None, c.level))


@pytest.mark.parametrize("rounding", [Rounding.SHIPPED, Rounding.FIXED])
def test_the_baseline_is_the_contracts_layer_bit_for_bit(rounding):
    lay, x = layer(), inputs()
    codes, scales = numerics.quantize_rows(x, rounding)
    expected = numerics.int8_linear(codes, scales, *numerics.quantize_weight(lay.weight), lay.bias)
    assert torch.equal(output(Setting(rounding)), expected)


def test_every_change_changes_what_it_names_and_nothing_else():
    for change in FACTORS:
        base = Setting(Rounding.SHIPPED)
        differing = {f for f, value in vars(change.applied(base)).items() if value != getattr(base, f)}
        assert differing <= {f for f, _ in change.fields}
        if change.factor not in ("none", "rounding"):
            assert differing, f"{change.factor} {change.level} changes nothing"


def test_accumulation_in_fp32_is_exact_up_to_1040_features_and_not_far_beyond():
    for k, exact in ((1040, True), (5000, False)):
        lay, x = layer(k=k), torch.ones(4, k) + inputs(4, k) / 1000
        lay.weight.fill_(1.0)
        lay.weight[:, ::7] = 0.77
        a, b = (output(Setting(Rounding.FIXED, accumulation=how, output="fp32"), lay, x) for how in ("int32", "fp32"))
        assert torch.equal(a, b) == exact, k


def test_granularity_by_hand():
    x = inputs()
    stages = _Stages(layer(), x, x.abs().max(), "key")
    codes, scales = stages._activation(Rounding.FIXED, "tensor")
    s = x.abs().max() / 127
    assert torch.equal(codes, numerics.half_away(x * (127 / x.abs().max())).to(torch.int8))
    assert scales.unique().numel() == 1 and scales[0, 0] == pytest.approx(float(s), rel=1e-6)
    codes, scales = stages._activation(Rounding.FIXED, "group128")
    assert codes.shape == x.shape and scales.shape == (40, 2)
    first, first_scales = numerics.quantize_rows(x[:, :GROUP], Rounding.FIXED)
    last, last_scales = numerics.quantize_rows(x[:, GROUP:], Rounding.FIXED)
    assert torch.equal(codes, torch.cat([first, last], 1))
    assert torch.equal(scales, torch.stack([first_scales, last_scales], 1))


def test_groups_cost_nothing_but_help_and_one_scale_per_tensor_hurts():
    lay, x = layer(), inputs()
    y = numerics.bf16_linear(x, lay.weight, lay.bias).double()
    error = {
        g: float(((output(Setting(Rounding.SHIPPED, activation=g)).double() - y) ** 2).sum())
        for g in ("token", "tensor", "group128")
    }
    assert error["group128"] < error["token"] < error["tensor"]
    weights = {w: output(Setting(Rounding.FIXED, weight=w)).double() for w in ("channel", "tensor")}
    assert ((weights["tensor"] - y) ** 2).sum() > ((weights["channel"] - y) ** 2).sum()


def test_scales_in_bf16_change_the_product_but_not_the_codes():
    stages = _Stages(layer(), inputs(), inputs().abs().max(), "key")
    stages.output(Setting(Rounding.FIXED))
    before = {k: v[0].clone() for k, v in stages._activations.items()}
    y = stages.output(Setting(Rounding.FIXED, activation_scale="bf16"))
    assert not torch.equal(y, stages.output(Setting(Rounding.FIXED)))
    assert all(torch.equal(stages._activations[k][0], v) for k, v in before.items())


def test_nothing_quantised_leaves_the_bf16_layer_up_to_its_second_rounding():
    lay, x = layer(), inputs()
    y = numerics.bf16_linear(x, lay.weight, lay.bias).double()
    alone = ((output(Setting(None, weight=None)).double() - y) ** 2).sum()
    weight = ((output(Setting(None)).double() - y) ** 2).sum()
    whole = ((output(Setting(Rounding.FIXED)).double() - y) ** 2).sum()
    assert alone < 0.5 * weight < weight < whole


def test_rows_are_drawn_by_label_and_bad_rows_are_left_out():
    x = inputs(100)
    a, top = sample(x, None, 10, "0/q/3")
    b, _ = sample(x, None, 10, "0/q/3")
    assert torch.equal(a, b) and not torch.equal(a, sample(x, None, 10, "0/q/4")[0])
    assert top == x.abs().max(), "the scale per tensor is that of the whole input"
    x[5], x[7, 3] = float("nan"), float("inf")
    groups = torch.ones(100, dtype=torch.uint8)
    groups[:50] = 0
    kept, top = sample(x, groups, None, "")
    assert len(kept) == 50 and torch.equal(kept, x[50:]) and top == x[50:].abs().max()
    assert len(sample(x, None, None, "")[0]) == 98


def test_unknown_factors_are_listed():
    with pytest.raises(ValueError, match=r"unknown factor 'colour'; known: none, accumulation, weight_scale"):
        Ablation(["weight_scale", "colour"])
    assert {c.factor for c in pick_factors(["output"])} == {"output", "none"}
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        Ablation(rows=0)


def test_the_table_of_factors_is_frozen():
    named = "none accumulation weight_scale activation_scale activation_granularity weight_granularity"
    assert [*KNOWN] == [*named.split(), "rounding", "only", "output"]
    assert len({(c.factor, c.level) for c in FACTORS}) == len(FACTORS) == 19


def run(calls=4, rows=None, factors=None, x=inputs):
    ablation = Ablation(factors, rows)
    sums = torch.stack([ablation.measure(layer(), x(seed=c), call=c) for c in range(calls)]).numpy()[:, None]
    control = ablation.changes[0]
    cells = [
        Cell(c.factor, c.level, c.stage, r.value, ablation.index(c, r), ablation.index(control, r))
        for r in (Rounding.SHIPPED, Rounding.FIXED)
        for c in ablation.changes
    ]
    return table(Sums(sums[..., 0], sums[..., 1], ["self q"], 40 * calls), cells)


def test_no_change_gives_exactly_zero(tmp_path):
    found = tables.write(studies.ABLATION, run(), tmp_path, "r")
    none = found[found["factor"] == "none"]
    assert len(none) == 2 * 3  # sites all and self q; shipped, fixed, both
    assert (none[["change", "change_lo", "change_hi"]] == 0).all(axis=None) and (none["verdict"] == "supported").all()
    exact = found[(found["factor"] == "accumulation") & (found["level"] == "fp32")]
    assert (exact["change"] == 0).all(), "sums of 160 codes are exact in fp32"
    same = found[(found["factor"] == "rounding") & (found["level"] == found["rounding"])]
    assert (same["change"] == 0).all()


def test_changes_of_the_rounding_and_of_the_granularity_are_seen():
    found = run()
    overall = found[found["site"] == "all"].set_index(["factor", "level", "rounding"])
    assert overall.loc[("rounding", "fixed", "shipped"), "change"] < -0.5
    assert overall.loc[("rounding", "shipped", "fixed"), "change"] > 1
    per_tensor = overall.loc[("activation_granularity", "tensor", "fixed")]
    assert per_tensor["verdict"] == "rejected" and per_tensor["change_lo"] > 0.02
    interaction = overall.loc[("rounding x activation_granularity", "tensor", "shipped/fixed")]
    ratio = [overall.loc[("activation_granularity", "tensor", r), "mean_rel_mse"] for r in ("shipped", "fixed")]
    base = [overall.loc[("activation_granularity", "tensor", r), "baseline"] for r in ("shipped", "fixed")]
    assert interaction["change"] == pytest.approx((ratio[0] / ratio[1]) / (base[0] / base[1]) - 1)
    main = overall.loc[("activation_granularity", "tensor", "both"), "change"]
    assert main == pytest.approx(np.sqrt(ratio[0] * ratio[1] / base[0] / base[1]) - 1)


def test_intervals_are_paired_with_the_baseline():
    """Calls whose errors differ a hundredfold: the change of the scale's dtype is nearly the same in each."""

    def uneven(seed):
        return inputs(seed=seed) * 10.0**seed

    row = run(6, None, ["weight_scale"], uneven).query("site == 'all' and level == 'bf16' and rounding == 'fixed'").iloc[0]  # fmt: skip  # noqa: E501
    assert row["change_hi"] - row["change_lo"] < 0.05


def test_fewer_than_three_calls_have_no_interval():
    found = run(2)
    assert found["change_lo"].isna().all() and (found["verdict"] == "undecided").all()


@pytest.mark.parametrize(
    ("lo", "hi", "expected"),
    [(-0.01, 0.019, "supported"), (0.021, 0.5, "rejected"), (-0.9, -0.03, "rejected"), (0.01, 0.03, "undecided")],
)
def test_verdicts(lo, hi, expected):
    assert verdict(lo, hi) == expected and verdict(np.nan, np.nan) == "undecided"
