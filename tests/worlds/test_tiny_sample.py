"""Sampling: exactness, reproducibility, refusals; and a training run of a few steps from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis.worlds.tiny import data, train
from analysis.worlds.tiny.card import render, write_card
from analysis.worlds.tiny.checkpoint import load_checkpoint, save_checkpoint, write_json
from analysis.worlds.tiny.diffusion import named_noise, psnr_db, sample_clip, timesteps, to_float, to_uint8
from analysis.worlds.tiny.model import TinyConfig, TinyModel
from analysis.worlds.tiny.recipe import TrainConfig, learning_rate, velocity_loss
from analysis.worlds.tiny.sample import VARIABLE, TinyWorld, find_folder
from analysis.worlds.tiny.scenes import HELD_OUT, file_sha256, save_scenes
from analysis.worlds.world import Call, get_world

MICRO = TinyConfig(dim=24, blocks=2, heads=2, height=16, width=24)


def made_up(count: int, frames: int, height: int = 16, width: int = 24) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    shown = rng.integers(0, 256, (count, frames, height, width, 3), dtype=np.uint8)
    return shown, rng.normal(size=(count, frames, 3)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete world with random weights: three scenes of two clips."""
    torch.manual_seed(0)
    model = TinyModel(MICRO)
    torch.nn.init.normal_(model.head.weight, std=0.05)
    save_checkpoint(tmp_path, model, {"sampler": {"steps": 3, "shift": 2.0}})
    save_scenes(tmp_path / "scenes", *made_up(3, 12), seed=0, first=HELD_OUT)
    return tmp_path


def test_a_perfect_predictor_returns_the_clean_clip() -> None:
    clean = torch.randn(2, 4, 16, 24, 3)
    noise, context, actions = torch.randn_like(clean), torch.randn_like(clean), torch.zeros(2, 8, 3)
    for steps in (1, 2, 3, 8):
        found = sample_clip(lambda frames, times, told: clean, context, actions, noise, timesteps(steps, 2.0))
        assert torch.equal(found, clean)


def test_the_sampler_follows_the_straight_path() -> None:
    clean, noise = torch.ones(1, 4, 2, 2, 3), torch.full((1, 4, 2, 2, 3), 3.0)
    seen = []

    def predict(frames: torch.Tensor, times: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        assert times[0, :4].eq(0).all()
        seen.append((float(times[0, 4]), float(frames[0, 4, 0, 0, 0])))
        return clean

    sample_clip(predict, clean, torch.zeros(1, 8, 3), noise, timesteps(4, 1.0))
    assert seen == [(1.0, 3.0), (0.75, 2.5), (0.5, 2.0), (0.25, 1.5)]


def test_timesteps() -> None:
    assert timesteps(4, 1.0) == [1, 0.75, 0.5, 0.25, 0]
    assert timesteps(2, 3.0) == [1, 0.75, 0]
    with pytest.raises(ValueError, match="steps=0"):
        timesteps(0, 1.0)


def test_noise_depends_on_its_labels_only() -> None:
    shape = (4, 16, 24, 3)
    label = {"seed": 1, "scene": "heldout-00", "clip": 2}
    noise = named_noise(shape, **label)
    torch.randn(5)
    assert torch.equal(noise, named_noise(shape, **label))
    assert noise.flatten()[:2].tolist() == pytest.approx([1.25022, -1.03028], abs=1e-4)  # pinned: never changes
    for change in ({"seed": 2}, {"scene": "heldout-01"}, {"clip": 3}, {"step": 1}):
        assert not torch.equal(noise, named_noise(shape, **{**label, **change}))


def test_uint8_survives_the_round_trip() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(to_float(every)), every)
    assert to_uint8(torch.tensor([-2.0, 2.0])).tolist() == [0, 255]
    assert psnr_db(np.full((1, 4), 10, np.uint8), np.full((1, 4), 20, np.uint8))[0] == pytest.approx(28.13, abs=0.01)


def test_rollout_calls_batches_and_seeds(folder: Path) -> None:
    world = TinyWorld(folder)
    model, scenes = world.load("cpu"), world.scenes()
    calls: list[Call] = []
    clips: list[int] = []
    both = world.rollout(model, scenes[:2], clips=2, seed=0, on_call=calls.append, on_clip=clips.append)
    assert both.shape == (2, 8, 16, 24, 3) and both.dtype == np.uint8
    assert calls == [Call("heldout-00+heldout-01", clip, step) for clip in range(2) for step in range(3)]
    assert clips == [0, 1]
    assert np.array_equal(both, world.rollout(model, scenes[:2], clips=2, seed=0))
    assert not np.array_equal(both, world.rollout(model, scenes[:2], clips=2, seed=1))
    for row in (1, 0):  # one at a time, in the other order
        alone = world.rollout(model, scenes[row : row + 1], clips=2, seed=0)[0]
        assert np.abs(alone.astype(int) - both[row]).max() <= 1


def test_rollout_feeds_back_what_it_showed(folder: Path) -> None:
    world = TinyWorld(folder)
    model, scene = world.load("cpu"), world.scenes()[2]
    seen: list[torch.Tensor] = []
    handle = model.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, :4].clone()))
    shown = world.rollout(model, [scene], clips=2, seed=0)
    handle.remove()
    assert torch.equal(seen[0][0], to_float(scene.context))
    assert torch.equal(seen[3][0], to_float(shown[0, :4]))


def test_rollout_refuses_what_it_cannot_do(folder: Path) -> None:
    world = TinyWorld(folder)
    model = world.load("cpu")
    with pytest.raises(ValueError, match="'heldout-01' has actions for 2 clips, 3 were asked for"):
        world.rollout(model, [world.scenes()[1]], clips=3, seed=0)
    with pytest.raises(ValueError, match="at least one scene"):
        world.rollout(model, [], clips=1, seed=0)


def test_weights_are_bfloat16_values_in_float32(folder: Path) -> None:
    model, card = load_checkpoint(folder)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, tensor.bfloat16().float()), name
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert TinyWorld(folder).checkpoint_sha256() == card["weights_sha256"]


def test_an_altered_checkpoint_is_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"model\.safetensors was altered"):
        TinyWorld(folder).load("cpu")
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        TinyWorld(folder).checkpoint_sha256()


def test_a_checkpoint_of_another_shape_is_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"

    def rewrite(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, weights)
        card = json.loads((folder / "card.json").read_text())
        write_json(folder / "card.json", {**card, "weights_sha256": file_sha256(weights)})

    good = load_file(weights)
    name = "blocks.1.cross_attn.k.weight"
    rewrite({**good, name: torch.zeros(24, 25)})
    with pytest.raises(ValueError, match=rf"'{name}' has shape \[24, 25\], expected \[24, 24\]"):
        load_checkpoint(folder)
    rewrite({key: tensor for key, tensor in good.items() if key != name})
    with pytest.raises(ValueError, match=f"lacks tensor '{name}'"):
        load_checkpoint(folder)
    rewrite({**good, "blocks.9.new": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"unknown tensor 'blocks\.9\.new'"):
        load_checkpoint(folder)


def test_where_the_files_are_looked_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(folder))
    assert find_folder() == folder
    assert get_world("tiny").clip_frames == 4
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere; set SHRINKAGE_TINY_WORLD"):
        get_world("tiny")


def generated(
    episodes: int | range, frames_per_episode: int, seed: int, workers: int = 1, progress: object = None
) -> tuple[np.ndarray, np.ndarray]:
    return made_up(episodes if isinstance(episodes, int) else len(episodes), frames_per_episode)


@pytest.mark.parametrize("schedule", [{"steps": 6}, {"seconds": 2.0}])
def test_training_from_end_to_end(schedule: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "generate", generated)
    small = {"episodes": 2, "frames_per_episode": 10, "batch": 2, "warm_up": 2, "timed_steps": 3, "eval_every": 5}
    config = TrainConfig(
        **schedule, **small, eval_scenes=2, scenes=2, clips=2, device="cpu", compile=False, model=MICRO
    )
    lines: list[str] = []
    card = train.train(config, tmp_path, say=lines.append)
    assert card["finished"] and card["steps"] == schedule.get("steps", card["steps"]) >= 6
    assert len(card["held_out"]) == 13 and len(card["rollout_psnr_db"]) == 2
    assert card["log"][-1]["step"] == card["steps"] and np.isfinite(card["log"][-1]["loss"])
    world = TinyWorld(tmp_path)
    assert world.rollout(world.load("cpu"), world.scenes(), clips=2, seed=0).shape == (2, 8, 16, 24, 3)
    assert (tmp_path / "contact-sheet.png").is_file()
    text = write_card(tmp_path).read_text()
    assert card["weights_sha256"] in text and f"{card['parameters']:,}" in text
    with pytest.raises(ValueError, match="held_out"):
        render({key: value for key, value in card.items() if key != "held_out"})


def test_a_failing_evaluation_keeps_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "generate", generated)
    monkeypatch.setattr(train.evaluate, "final", lambda *args: 1 / 0)
    config = TrainConfig(
        steps=2, episodes=2, frames_per_episode=10, batch=2, eval_scenes=2, scenes=2, clips=1, device="cpu",
        compile=False, model=MICRO,
    )  # fmt: skip
    lines: list[str] = []
    train.train(config, tmp_path, say=lines.append)
    assert "ZeroDivisionError" in "".join(lines)
    assert load_checkpoint(tmp_path)[1]["steps"] == 2


def test_learning_rate_and_loss() -> None:
    config = TrainConfig(steps=1000, warm_up=100)
    rates = [learning_rate(step, 1000, config) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-5) and rates[99:700] == [1e-3] * 601
    assert rates[850] == pytest.approx(5e-4) and 0 < rates[-1] < 1e-5
    clean, times = torch.zeros(2, 4, 2, 2, 3), torch.tensor([[0.0, 0.5], [0.0, 0.01]])
    loss = velocity_loss(torch.full_like(clean, 0.1), clean, times)
    assert float(loss) == pytest.approx((0.01 / 0.25 + 0.01 / 0.0025) / 2)
    with pytest.raises(ValueError, match="either steps or seconds"):
        TrainConfig()
