"""Pairing, planted degradations, noise floors: the closed loop on a micro world."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from analysis.results import closed_loop as verdict
from analysis.results import studies, tables
from analysis.rollout.closed_loop import Plan, check_pairing, closed_loop
from analysis.rollout.quantized import forward_of, quantized, replaced
from analysis.rollout.scoring import Scoring
from analysis.sites import find_sites, preset
from analysis.worlds.tiny.diffusion import named_noise

PSNR = Scoring(("psnr",))


def run(world, plan=None, scoring=PSNR):
    model = world.load()
    sites = find_sites(model, preset(world.sites))
    return closed_loop(world, model, partial(quantized, sites), world.scenes(), plan or Plan(clips=2), scoring)


@pytest.fixture(scope="module")
def result(world):
    return run(world)


def test_every_mode_is_scored_on_every_frame(world, result, tmp_path):
    counted = result.frames.groupby(["variant", "against"]).size()
    frames = len(world.scenes()) * 8
    assert counted["bf16", "true"] == counted["shipped", "bf16"] == counted["other_seed", "bf16"] == frames
    assert ("bf16", "bf16") not in counted and ("other_seed", "true") not in counted
    assert set(result.statistics["variant"]) == {"bf16", "fp32", "shipped", "fixed", "true"}
    assert result.frames.groupby("frame")["clip"].first().tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    for table, frame in ((studies.CLOSED_LOOP_FRAMES, result.frames), (studies.CLOSED_LOOP_STATISTICS, result.statistics)):  # fmt: skip  # noqa: E501
        written = tables.write(table, frame, tmp_path, "r")
        assert tables.read(table, tmp_path).equals(written)


def test_scenes_in_a_batch_get_the_frames_that_they_get_alone(world, result):
    batched = run(world, Plan(clips=2, batch=3))
    a, b = (r.frames.sort_values(["variant", "against", "scene", "frame"])["psnr_db"] for r in (result, batched))
    assert np.allclose(a, b, atol=1.0), "another batch may round differently, no more"


def test_two_seeds_serve_each_other_as_the_noise_floor(world):
    frames = run(world, Plan(("fixed",), 1, (0, 7))).frames
    floor = frames[frames["variant"] == "other_seed"]
    assert sorted(floor["seed"].unique()) == [0, 7]
    a, b = (floor[floor["seed"] == s].sort_values(["scene", "frame"])["mse"].to_numpy() for s in (0, 7))
    assert np.array_equal(a, b)


def test_scoring_in_two_processes_gives_the_same_table(world):
    plan = Plan(("fixed",), 1)
    one, two = (run(world, plan, Scoring(("psnr", "ssim", "flip"), 2, workers)).frames for workers in (1, 2))
    assert one.equals(two)


def verdicts(world, gain, layer):
    """{(against, baseline): row} of the bf16 model with the output of one layer multiplied by `gain`."""
    model = world.load()
    sites = find_sites(model, preset(world.sites))
    halves = {m: forward_of(m, "bf16") for m in sites.values()}
    module = model.get_submodule(layer)
    inner = halves.get(module, module.forward)
    modes = {"fp32": {}, "bf16": halves, "planted": halves | {module: lambda input: gain * inner(input)}}
    result = closed_loop(world, model, lambda m: replaced(modes[m]), world.scenes(), Plan(("planted",), 2), PSNR)
    summary = verdict.summarize(result.frames, result.statistics)
    mine = summary[(summary["variant"] == "planted") & (summary["metric"] == "psnr_db")]
    return {(row["against"], row["baseline"]): row for row in mine.to_dict("records")}


def test_a_planted_degradation_of_5_percent_is_degraded(world):
    found = verdicts(world, 0.95, "patch_embedding")
    assert found["true", "bf16"]["verdict"] == "degraded"
    assert found["true", "bf16"]["difference_hi"] < 0
    assert found["bf16", "fp32"]["verdict"] == "degraded"


def test_a_planted_degradation_of_one_attention_projection_is_seen_above_the_rounding_noise(world):
    assert verdicts(world, 0.95, "blocks.1.self_attn.o")["bf16", "fp32"]["verdict"] == "degraded"


def test_a_planted_no_op_is_equivalent(world):
    found = verdicts(world, 1.0, "patch_embedding")
    assert {row["verdict"] for row in found.values()} == {"equivalent"}
    row = found["true", "bf16"]
    assert row["difference"] == row["difference_lo"] == row["difference_hi"] == 0 and row["p_value"] == 1


def test_order_dependent_noise_makes_the_pairing_test_fail(world):
    model = world.load()
    check_pairing(world, model, world.scenes(), 0)
    generator = torch.Generator().manual_seed(0)
    careless = replace(world, noise=lambda shape, **_: torch.randn(tuple(shape), generator=generator))
    with pytest.raises(ValueError, match="fed different noise when scenes run in another order"):
        check_pairing(careless, model, careless.scenes(), 0)
    with pytest.raises(ValueError, match="cannot be paired"):
        run(careless)
    one = replace(careless, made=careless.made[:1])
    with pytest.raises(ValueError, match="cannot be paired"):
        check_pairing(one, model, one.scenes(), 0)
    deaf = replace(world, noise=lambda shape, *, seed, **labels: named_noise(shape, seed=0, **labels))
    with pytest.raises(ValueError, match="the same noise, so there is no noise floor"):
        check_pairing(deaf, model, deaf.scenes(), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": ()}, "at least one"),
        ({"variants": ("bf16",)}, "bf16 is rolled out anyway"),
        ({"seeds": (1, 1)}, "seeds must be distinct"),
    ],
)
def test_plans_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Plan(**options)
