"""Game frames: a walk through MAP01 of Freedoom 2, with the exact action behind every frame.

An episode is a pure function of (seed, episode index), whatever the number of workers: it has its own random
generator, starts at one of `STARTS`, and a depth-steered policy walks on. `actions[t]` is what the engine was told to
get from frame t - 1 to frame t. Frames are 96 x 64 at 17.5 Hz (two tics), brightened by gamma 0.6.

    frames, actions = generate(2, 68, seed=0)      # uint8 [2, 68, 64, 96, 3], float32 [2, 68, 3]
    play(0, 0, 68).poses                           # float32 [68, 4]: x, y, z in map units, angle in degrees
"""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

MAP = "MAP01"
GAME = "freedoom2.wad"
HEIGHT, WIDTH = 64, 96
TICS = 2  # of 35 a second, per frame
GAMMA = 0.6
WARM_UP = 8  # frames played and dropped, so that every episode starts in motion
BUTTONS = ("TURN_LEFT_RIGHT_DELTA", "MOVE_FORWARD_BACKWARD_DELTA", "MOVE_LEFT_RIGHT_DELTA")
ACTION_SCALE = np.array([6.0, 32.0, 32.0])  # turn right in degrees a tic, forward, right in engine units
# Where the map puts its player, players of a deathmatch, weapons and guards: all on open floor.
# fmt: off
STARTS = (
    (-192, -1024), (-192, -240), (-160, 0), (-96, -864), (-48, -1088), (56, -832), (208, -232), (208, -24),
    (272, -664), (288, 176), (404, -1160), (416, 264), (448, -328), (448, -160), (496, -816), (600, 128),
    (672, -608), (792, -296), (800, -1024), (832, 240), (840, 1304), (848, -128), (912, 784), (992, -768),
    (1000, -432), (1024, 328), (1088, -192), (1136, 832), (1208, 680), (1232, 192), (1240, -968), (1248, -752),
    (1328, -432), (1344, -32), (1472, -1088), (1504, -440), (1504, 960), (1536, -160), (1576, 128), (1656, -952),
    (1672, -728), (1736, -232), (1824, -680), (1856, -480), (1952, 48), (2016, -928), (2024, -448), (2088, -224),
)
# fmt: on
_ANGLES = np.linspace(-42, 42, 16)  # of the 16 columns the policy sees, degrees to the right
_BRIGHT = np.rint(255 * (np.arange(4 * 255 + 1) / (4 * 255)) ** GAMMA).astype(np.uint8)  # by the sum of 2 x 2 pixels


@dataclass(frozen=True)
class Episode:
    """What the screen showed, what the engine was told, and where the player stood."""

    frames: np.ndarray  # uint8 [T, 64, 96, 3]
    actions: np.ndarray  # float32 [T, 3], engine values over ACTION_SCALE
    poses: np.ndarray  # float32 [T, 4]


class Walker:
    """The policy: steers to open space with a slowly changing preference, forward most of the time, smoothly.

    Its values are rounded to 1/64, so that sums in another order (on another CPU) give the same walk.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.told = np.zeros(3)  # turn, forward, side in engine units
        self.bias, self.side, self.left = 0.0, 0.0, 0  # preferred heading, strafing goal, frames until the next
        self.escape = 0.0  # the side it turns to while a wall is ahead

    def act(self, depth: np.ndarray) -> np.ndarray:
        """Engine values for the next frame from what is seen now: uint8 [160, 256] -> float64 [3]."""
        if self.left == 0:
            self.left = int(self.rng.integers(20, 60))
            self.bias = float(self.rng.normal(0, 25))
            self.side = float(self.rng.choice([0, 0, 0, -16, 16]))
        self.left -= 1
        reach = np.median(depth[70:96].reshape(26, 16, 16), axis=(0, 2))  # [16], left to right
        ahead = float(depth[70:96, 96:160].min(axis=0).mean())
        weight = reach**2 * np.exp(-(((_ANGLES - self.bias) / 35) ** 2))
        heading = float((weight * _ANGLES).sum() / (weight.sum() + 1e-9))
        if ahead < 10:  # too near a wall: turn to the more open side and stay with that side
            self.escape = self.escape or (1.0 if reach[8:].sum() >= reach[:8].sum() else -1.0)
            turn = 4.0 * self.escape
        else:
            self.escape = 0.0
            turn = float(np.clip(0.12 * heading, -3, 3))
        goal = np.array([turn, 28 * np.clip((ahead - 4) / 10, 0, 1), self.side])
        self.told = np.rint((0.7 * self.told + 0.3 * goal) * 64) / 64
        return self.told


def open_game(folder: Path) -> Any:
    """A `vizdoom.DoomGame` on the map, without monsters, weapon, HUD or messages; its settings go to `folder`."""
    import vizdoom as vzd

    game = vzd.DoomGame()
    game.set_doom_game_path(str(Path(vzd.__file__).parent / GAME))
    game.set_doom_config_path(str(folder / "vizdoom.ini"))
    game.set_doom_map(MAP)
    game.set_screen_resolution(vzd.ScreenResolution.RES_256X160)
    game.set_screen_format(vzd.ScreenFormat.RGB24)
    game.set_depth_buffer_enabled(True)
    for part in ("hud", "weapon", "messages", "crosshair", "decals", "particles", "screen_flashes"):
        getattr(game, f"set_render_{part}")(False)
    game.set_window_visible(False)
    for name in BUTTONS:
        game.add_available_button(getattr(vzd.Button, name))
    for name in ("POSITION_X", "POSITION_Y", "POSITION_Z", "ANGLE"):
        game.add_available_game_variable(getattr(vzd.GameVariable, name))
    game.add_game_args("-nomonsters +movebob 0 +stillbob 0")
    game.set_episode_start_time(14)  # earlier, turns are ignored
    game.set_episode_timeout(0)
    game.init()
    return game


def shrink(screen: np.ndarray) -> np.ndarray:
    """The middle 192 x 128 of a screen at half size, brightened: uint8 [160, 256, 3] -> [64, 96, 3]."""
    middle = screen[16:144, 32:224].astype(np.uint16)
    return _BRIGHT[middle[::2, ::2] + middle[1::2, ::2] + middle[::2, 1::2] + middle[1::2, 1::2]]


def play(seed: int, index: int, count: int, policy: Callable[[np.ndarray], np.ndarray] | None = None) -> Episode:
    """Episode `index` of `seed`, `count` frames long; `policy` (depth -> engine values) replaces the walker."""
    rng = np.random.default_rng([seed, index])
    x, y = STARTS[rng.integers(len(STARTS))]
    act = policy or Walker(rng).act
    # a fresh game and settings: animations, lights and options would carry over to the next episode
    with tempfile.TemporaryDirectory() as folder:
        game = open_game(Path(folder))
        try:
            game.set_seed(int(rng.integers(2**31)))
            game.new_episode()
            game.send_game_command("god")
            game.send_game_command(f"warp {x} {y}")
            game.make_action([float(rng.uniform(-90, 90)), 0.0, 0.0], TICS)
            records = []
            for _ in range(WARM_UP + count):
                told = act(game.get_state().depth_buffer)
                game.make_action([float(value) for value in told], TICS)
                state = game.get_state()
                records.append((shrink(state.screen_buffer), told / ACTION_SCALE, state.game_variables))
        finally:
            game.close()
    frames, actions, poses = zip(*records[WARM_UP:], strict=True)
    return Episode(np.stack(frames), np.array(actions, np.float32), np.array(poses, np.float32))


def _arrays(index: int, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    episode = play(seed, index, count)
    return episode.frames, episode.actions


def generate(
    episodes: int | Sequence[int],
    frames_per_episode: int,
    seed: int,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Episodes (a number, or their indices): frames uint8 [E, T, 64, 96, 3] and actions float32 [E, T, 3]."""
    indices = range(episodes) if isinstance(episodes, int) else list(episodes)
    frames = np.empty((len(indices), frames_per_episode, HEIGHT, WIDTH, 3), np.uint8)
    actions = np.empty((len(indices), frames_per_episode, 3), np.float32)
    job = partial(_arrays, seed=seed, count=frames_per_episode)
    method = "fork" if sys.platform == "linux" else "spawn"  # a spawned worker would import torch first
    with multiprocessing.get_context(method).Pool(workers) as pool:
        for row, (shown, told) in enumerate(pool.imap(job, indices)):
            frames[row], actions[row] = shown, told
            if progress:
                progress(row + 1, len(indices))
    return frames, actions


def sha256(frames: np.ndarray, actions: np.ndarray) -> str:
    """Hash of a set: the bytes of its frames, then of its actions."""
    digest = hashlib.sha256(np.ascontiguousarray(frames).data)
    digest.update(np.ascontiguousarray(actions).data)
    return digest.hexdigest()
