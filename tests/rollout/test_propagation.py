"""Same inputs through every model: where errors appear, how they add up, and what attention sees of them."""

import numpy as np
import pytest
import torch

from analysis.results import propagation as results
from analysis.results import studies, tables
from analysis.rollout.attention import attention_errors, find_attentions
from analysis.rollout.propagation import blocks_of, propagate, record
from analysis.rollout.quantized import quantized
from analysis.sites import SitePattern, find_sites, preset
from tests.helpers import ToyModel


@pytest.fixture(scope="module")
def recorded(world):
    model = world.load()
    sites = find_sites(model, preset(world.sites))
    return model, sites, record(world, model, sites, world.scenes()[:2], clips=1, seed=0)


@pytest.fixture(scope="module")
def sums(recorded):
    model, sites, calls = recorded
    return propagate(model, sites, calls, ("shipped", "fixed"))


def test_the_recorded_inputs_are_the_bf16_models(recorded):
    model, _, calls = recorded
    assert [(c.label.scene, c.label.step) for c in calls] == [("s0", 0), ("s0", 1), ("s1", 0), ("s1", 1)]
    assert calls[0].args[0].shape == (1, 8, 16, 24, 3)
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_errors_by_block_are_those_of_a_direct_comparison(recorded, sums):
    model, sites, calls = recorded
    seen = {}
    for mode in ("bf16", "shipped"):
        handle = model.blocks[1].register_forward_hook(lambda _, __, y, m=mode: seen.__setitem__(m, y.double()))
        with quantized(sites, mode):
            model(*calls[2].args)
        handle.remove()
    expected = float(((seen["shipped"] - seen["bf16"]) ** 2).sum())
    row = sums.query("call == 2 and variant == 'shipped' and quantised == 'all' and seen_at == '1'").iloc[0]
    assert row["sum_ee"] == pytest.approx(expected, rel=1e-9)
    assert row["sum_yy"] == pytest.approx(float((seen["bf16"] ** 2).sum()), rel=1e-9)


def test_what_is_quantised_and_where_it_is_seen(sums, tmp_path):
    found = tables.write(studies.PROPAGATION, results.table(sums), tmp_path, "r")
    whole = found[found["step"] == "all"].set_index(["variant", "quantised", "seen_at"])
    assert set(whole.loc["shipped"].index) == {
        *(("all", at) for at in ("0", "1", "output")), ("0", "0"), ("0", "output"), ("1", "1"), ("1", "output"),
    }  # fmt: skip
    assert set(whole.loc["fp32"].index) == {("all", "0"), ("all", "1"), ("all", "output")}
    mse = whole["rel_mse"]
    assert mse["shipped", "all", "0"] == mse["shipped", "0", "0"], "nothing before block 0"
    assert mse["shipped", "all", "output"] > mse["fixed", "all", "output"] > mse["fp32", "all", "output"]
    assert mse["shipped", "all", "1"] > mse["shipped", "1", "1"], "errors of both blocks against those of one"
    assert (whole["calls"] == 4).all() and (whole["rel_mse_lo"] <= whole["rel_mse_hi"]).all()
    steps = found[found["step"] != "all"]
    assert set(steps["step"]) == {"0", "1"} and steps["rel_mse_lo"].isna().all(), "two calls a step: no interval"
    total = steps.groupby(["variant", "quantised", "seen_at"])["sum_ee"].sum()
    assert np.allclose(total.sort_index(), whole["sum_ee"].sort_index())


def test_sites_without_block_numbers_are_refused():
    model = ToyModel()
    sites = find_sites(model, SitePattern("flat", r"blocks\.0\.self_attn\.(?P<projection>[qkvo])"))
    with pytest.raises(ValueError, match="no block numbers"):
        blocks_of(model, sites)


def test_a_pure_gain_on_q_and_k_cancels_in_the_norm_and_on_v_does_not(recorded, monkeypatch):
    from analysis.rollout import quantized as swap

    model, sites, calls = recorded

    def shrunk(module, mode, engine="auto"):
        y = own(module, "bf16")
        return y if mode == "bf16" else lambda input: 0.9 * y(input)

    own = swap.forward_of
    monkeypatch.setattr(swap, "forward_of", shrunk)
    found = results.attention_table(attention_errors(model, sites, calls, ("shipped",)))
    whole = found[found["head"] == "all"].set_index(["layer", "quantised"])
    qk, v = (whole.xs(what, level="quantised") for what in ("qk", "v"))
    assert qk["rel_mse"].max() < 1e-8 < qk["rel_mse_norm_frozen"].min()
    assert (qk["cancelled"] > 0.99).all()
    assert v["rel_mse"].tolist() == pytest.approx([0.01] * 4, rel=1e-3)
    assert v["shrinkage"].tolist() == pytest.approx([0.1] * 4, rel=1e-3) and v["cancelled"].isna().all()


def test_attention_of_the_kernels(recorded, tmp_path):
    model, sites, calls = recorded
    made = results.attention_table(attention_errors(model, sites, calls, ("shipped", "fixed")))
    found = tables.write(studies.ATTENTION, made, tmp_path, "r")
    assert len(found) == 4 * 2 * 2 * 3  # attentions, qk and v, kernels, two heads and all
    mean = found[found["head"] == "all"].groupby(["quantised", "variant"])["rel_mse"].mean()
    assert mean["v", "shipped"] > 1.5 * mean["v", "fixed"] > 0
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_model_without_whole_attentions_is_refused():
    model = ToyModel()
    sites = find_sites(model, SitePattern("some", r"blocks\.(?P<block>\d+)\.self_attn\.(?P<projection>[qk])"))
    with pytest.raises(ValueError, match="no module has q, k, v and o among the sites"):
        find_attentions(model, sites)
    assert torch.is_grad_enabled()
