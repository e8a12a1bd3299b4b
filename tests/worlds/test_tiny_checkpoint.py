"""The committed world model is what its card says, and predicts the game."""

import numpy as np
import pytest

from analysis.sites import find_sites, preset
from analysis.worlds.tiny import card
from analysis.worlds.tiny.diffusion import psnr_db
from analysis.worlds.tiny.sample import TinyWorld, find_folder


@pytest.fixture(scope="module")
def world():
    return TinyWorld()


def test_the_model_card_is_written_from_the_card(world):
    assert (find_folder() / card.NAME).read_text() == card.render(world.card)


def test_the_checkpoint_is_small_and_has_64_layers(world):
    assert (find_folder() / "model.safetensors").stat().st_size <= 20e6
    assert len(find_sites(world.load(), preset(world.sites))) == 64


def test_the_first_clip_is_nearer_to_the_game_than_a_still(world):
    scenes, model = world.scenes()[:2], world.load()
    predicted = world.rollout(model, scenes, clips=1, seed=0)
    true = np.stack([scene.frames[: world.clip_frames] for scene in scenes])
    still = np.stack([np.repeat(scene.context[-1:], world.clip_frames, axis=0) for scene in scenes])
    assert psnr_db(predicted, true).mean() > psnr_db(still, true).mean() + 1


def test_the_card_reaches_the_aim_on_its_own_sampler(world):
    sampler = world.card["sampler"]
    row = next(r for r in world.card["held_out"] if (r["steps"], r["shift"]) == (sampler["steps"], sampler["shift"]))
    assert row["psnr_db"] >= 19
