"""The game: what depends on the seed, which action belongs to which frame, and scenes on disk."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vizdoom", reason="frames come from vizdoom: pip install vizdoom")

from analysis.worlds.tiny import data
from analysis.worlds.tiny.scenes import HELD_OUT, read_scenes, write_scenes


def test_episodes_do_not_depend_on_workers_or_order() -> None:
    frames, actions = data.generate(3, 6, seed=5, workers=2)
    assert frames.shape == (3, 6, 64, 96, 3) and frames.dtype == np.uint8
    assert actions.shape == (3, 6, 3) and actions.dtype == np.float32
    done = []
    again = data.generate([2, 0, 1], 6, seed=5, workers=1, progress=lambda *now: done.append(now))
    assert np.array_equal(again[0], frames[[2, 0, 1]]) and np.array_equal(again[1], actions[[2, 0, 1]])
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert data.sha256(frames, actions) != data.sha256(*again)
    other = data.generate(1, 6, seed=6)
    assert not np.array_equal(other[0][0], frames[0])


def test_frames_are_bright_and_the_player_walks() -> None:
    episode = data.play(0, 4, 60)
    assert 40 < episode.frames.mean() < 160
    assert np.abs(episode.actions).max() <= 1.0
    walked = np.hypot(*np.diff(episode.poses[:, :2], axis=0).T)
    assert (walked > 4).mean() > 0.5  # map units a frame


def test_an_action_belongs_to_the_frame_it_leads_to() -> None:
    rng = np.random.default_rng(0)
    episode = data.play(3, 1, 40, policy=lambda depth: np.array([np.rint(rng.normal(0, 2) * 64) / 64, 0, 0]))
    turned = np.diff(np.unwrap(episode.poses[:, 3], period=360))  # degrees to the left
    told = -episode.actions[:, 0] * data.ACTION_SCALE[0] * data.TICS
    np.testing.assert_allclose(turned, told[1:], atol=0.02)
    assert np.abs(turned - told[:-1]).max() > 1  # the neighbour's action does not explain it

    rows = episode.frames.mean(-1)[:, 28:36]

    def shift(one: np.ndarray, two: np.ndarray) -> int:
        errors = [((one[:, 16 + s : 80 + s] - two[:, 16:80]) ** 2).mean() for s in range(-16, 17)]
        return int(np.argmin(errors)) - 16

    shifts = np.array([shift(one, two) for one, two in pairwise(rows)])
    assert np.corrcoef(shifts, -told[1:])[0, 1] > 0.9
    assert np.corrcoef(shifts, -told[:-1])[0, 1] < 0.6


def test_scenes_survive_the_disk(tmp_path: Path) -> None:
    manifest = write_scenes(tmp_path, count=2, clips=1, seed=0)
    scenes = read_scenes(tmp_path)
    assert [scene.name for scene in scenes] == ["heldout-00", "heldout-01"]
    assert [entry["episode"] for entry in manifest["scenes"]] == [HELD_OUT, HELD_OUT + 1]
    frames, actions = data.generate([HELD_OUT + 1], 8, seed=0)
    assert np.array_equal(np.concatenate((scenes[1].context, scenes[1].frames)), frames[0])
    assert np.array_equal(np.concatenate((scenes[1].context_actions, scenes[1].actions)), actions[0])

    path = tmp_path / "heldout-01.webp"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"heldout-01\.webp was altered"):
        read_scenes(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"heldout-01\.webp is missing"):
        read_scenes(tmp_path)


def test_committed_scenes_are_what_the_game_shows() -> None:
    folder = Path(__file__).parents[2] / "data" / "tiny-world" / "scenes"
    if not folder.is_dir():
        pytest.skip("no committed scenes")
    manifest = json.loads((folder / "scenes.json").read_text())
    entry, scene = manifest["scenes"][3], read_scenes(folder)[3]
    episode = data.play(manifest["seed"], entry["episode"], manifest["frames"])
    assert np.array_equal(np.concatenate((scene.context, scene.frames)), episode.frames)
    assert np.array_equal(np.concatenate((scene.context_actions, scene.actions)), episode.actions)
