"""The network: names that the site preset finds, RoPE, patches, timesteps, and what depends on what."""

import pytest
import torch

from analysis.sites import PRESETS, find_sites
from analysis.worlds.tiny.model import TinyConfig, TinyModel, rope_tables, rotate

MICRO = TinyConfig(dim=24, blocks=2, heads=2, height=16, width=24)


def micro(seed: int = 0) -> TinyModel:
    torch.manual_seed(seed)
    model = TinyModel(MICRO).eval()
    torch.nn.init.normal_(model.head.weight, std=0.1)  # a fresh head is zero and would hide everything
    return model


def inputs(batch: int = 2, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    times = torch.zeros(batch, 8)
    times[:, 4:] = 0.7
    frames = torch.randn(batch, 8, 16, 24, 3, generator=generator)
    return frames, times, torch.randn(batch, 8, 3, generator=generator)


def test_the_preset_finds_64_layers_and_the_checkpoint_fits() -> None:
    with torch.device("meta"):
        model = TinyModel(TinyConfig())
    sites = find_sites(model, PRESETS["matrix-game-3"])
    expected = {
        f"blocks.{block}.{attention}.{projection}"
        for block in range(8)
        for attention in ("self_attn", "cross_attn")
        for projection in "qkvo"
    }
    assert {site.name for site in sites} == expected
    assert all(module.bias is not None for module in sites.values())
    modules = dict(model.named_modules())
    assert all(site.norm in modules for site in sites if site.projection in "qk")
    assert 2 * sum(p.numel() for p in model.parameters()) <= 20e6  # bytes in bfloat16


def test_shape_and_seed() -> None:
    first, again, other = micro(), micro(), micro(seed=5)
    with torch.no_grad():
        out = first(*inputs())
        assert out.shape == (2, 4, 16, 24, 3)
        assert torch.equal(out, again(*inputs()))
        assert not torch.equal(out, other(*inputs()))


def test_patches_are_inverted() -> None:
    model, frames = micro(), inputs()[0]
    patches = model.patchify(frames)
    assert patches.shape == (2, 8, 6, 192)
    assert torch.equal(patches[0, 3, 4], frames[0, 3, 8:16, 8:16].flatten())  # row 1, column 1 of a 2 x 3 grid
    assert torch.equal(model.unpatchify(patches), frames)


def test_rope_depends_on_relative_positions_only() -> None:
    config = TinyConfig(dim=64, heads=2, height=32, width=40)
    cos, sin = (table.double() for table in rope_tables(config))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(32, generator=generator, dtype=torch.float64) for _ in range(2))

    def token(frame: int, row: int, column: int) -> int:
        return (frame * 4 + row) * 5 + column

    def score(one: int, two: int) -> torch.Tensor:
        return rotate(q, cos[one], sin[one]) @ rotate(k, cos[two], sin[two])

    here = score(token(1, 0, 2), token(3, 1, 1))
    moved = score(token(4, 2, 4), token(6, 3, 3))
    torch.testing.assert_close(here, moved, rtol=0, atol=1e-4)
    for other in (token(4, 1, 1), token(3, 2, 1), token(3, 1, 3)):  # another frame, row or column
        assert (here - score(token(1, 0, 2), other)).abs() > 1e-2
    assert torch.allclose(rotate(q, cos[77], sin[77]).norm(), q.norm(), rtol=1e-5)


def test_projections_of_one_attention_read_the_same_tensor() -> None:
    model, seen = micro(), {}
    handles = [
        site_module.register_forward_pre_hook(lambda _, args, name=site.name: seen.__setitem__(name, args[0]))
        for site, site_module in find_sites(model, PRESETS["matrix-game-3"]).items()
    ]
    with torch.no_grad():
        model(*inputs())
    for handle in handles:
        handle.remove()
    assert len(seen) == 16
    for block in range(2):
        path = f"blocks.{block}."
        assert seen[path + "self_attn.q"] is seen[path + "self_attn.k"] is seen[path + "self_attn.v"]
        assert seen[path + "cross_attn.k"] is seen[path + "cross_attn.v"]
        assert seen[path + "cross_attn.k"].shape == (2, 9, 24)
        assert seen[path + "cross_attn.q"].shape == (2, 8 * 6, 24)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_input_matters_and_batches_do_not_mix(which: int) -> None:
    model = micro()
    plain = list(inputs())
    changed = [part.clone() for part in plain]
    changed[which][1, 6] += 0.1
    with torch.no_grad():
        before, after = model(*plain), model(*changed)
    torch.testing.assert_close(before[0], after[0])
    assert (before[1] - after[1]).abs().max() > 1e-5


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"frames must be \[B, 8, 16, 24, 3\], got \[2, 7, 16, 24, 3\]"):
        model_inputs = inputs()
        micro()(model_inputs[0][:, 1:], *model_inputs[1:])
    with pytest.raises(ValueError, match="heads"):
        TinyConfig(dim=30, heads=4)
    with pytest.raises(ValueError, match="patch 8"):
        TinyConfig(height=60)
