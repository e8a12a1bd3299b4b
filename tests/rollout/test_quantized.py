"""Swapping linears computes what int8 layers compute, and leaves nothing behind."""

import numpy as np
import pytest
import torch
from torch import nn

from analysis import numerics
from analysis.numerics import Rounding
from analysis.rollout.quantized import forward_of, quantized, replaced
from analysis.sites import find_sites, preset


def loaded(world):
    model = world.load()
    return model, find_sites(model, preset(world.sites))


@pytest.mark.parametrize("mode", ["shipped", "fixed", "bf16"])
def test_swapping_and_swapping_back_gives_bit_identical_frames(world, mode):
    model, sites = loaded(world)
    before = world.rollout(model, world.scenes()[:1], clips=1, seed=0)
    with quantized(sites, mode):
        inside = world.rollout(model, world.scenes()[:1], clips=1, seed=0)
    after = world.rollout(model, world.scenes()[:1], clips=1, seed=0)
    assert np.array_equal(before, after)
    assert mode == "bf16" or not np.array_equal(before, inside)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_site_computes_the_int8_linear_of_the_contract():
    layer, x = nn.Linear(33, 7), torch.randn(2, 5, 33)
    for rounding in (Rounding.SHIPPED, Rounding.FIXED):
        codes, scales = numerics.quantize_rows(x.reshape(-1, 33), rounding)
        expected = numerics.int8_linear(codes, scales, *numerics.quantize_weight(layer.weight.detach()), layer.bias)
        found = forward_of(layer, rounding)(x)
        assert found.dtype == torch.float32 and torch.equal(found.reshape(-1, 7), expected.detach().float())
    expected = numerics.bf16_linear(x.reshape(-1, 33), layer.weight, layer.bias).float()
    assert torch.equal(forward_of(layer, "bf16")(x).reshape(-1, 7), expected)
    assert forward_of(layer, "bf16")(x.bfloat16()).dtype == torch.bfloat16
    assert not torch.equal(forward_of(layer, "shipped")(x), forward_of(layer, "fixed")(x))


def test_plain_mode_swaps_nothing_and_hooks_still_fire(world):
    model, sites = loaded(world)
    seen = []
    handle = next(iter(sites.values())).register_forward_hook(lambda *_: seen.append(1))
    with quantized(sites, "fp32"):
        assert not any("forward" in module.__dict__ for module in model.modules())
    with quantized(sites, "shipped"):
        world.rollout(model, world.scenes()[:1], clips=1, seed=0)
    handle.remove()
    assert len(seen) == 2


def test_an_exception_and_a_nested_swap_restore():
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    own = layer(x)
    with pytest.raises(RuntimeError, match="stop"), replaced({layer: lambda input: input}):
        with replaced({layer: lambda input: 2 * input}):
            assert layer(x).sum() == 8
        assert layer(x).sum() == 4
        raise RuntimeError("stop")
    assert torch.equal(layer(x), own)


def test_an_unknown_mode_leaves_the_model_alone(world):
    model, sites = loaded(world)
    with pytest.raises(ValueError, match="nearest"), quantized(sites, "nearest"):
        pass
    assert not any("forward" in module.__dict__ for module in model.modules())
