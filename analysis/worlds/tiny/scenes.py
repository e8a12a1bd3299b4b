"""Held-out scenes on disk: one lossless WebP strip per scene, the actions in one safetensors file, and a manifest.

    write_scenes(Path("scenes"), count=16, clips=16, seed=0)   # plays the game
    scenes = read_scenes(Path("scenes"))                       # needs numpy, Pillow and safetensors only

A strip holds the frames one below the other, context first. `scenes.json` gives seed, episode index, the SHA-256 of
every file, and the SHA-256 of the pixels, which does not depend on the version of the WebP encoder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

from analysis.worlds.tiny import data
from analysis.worlds.world import Scene

MANIFEST = "scenes.json"
ACTIONS = "scenes.safetensors"
HELD_OUT = 1_000_000  # first episode index of the held-out scenes; training uses indices from 0


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save_scenes(
    folder: Path, frames: np.ndarray, actions: np.ndarray, *, seed: int, first: int, context_frames: int = 4
) -> dict[str, Any]:
    """Write frames uint8 [S, T, H, W, 3] and actions float32 [S, T, A] of episodes `first`...; returns the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"heldout-{index:02d}" for index in range(len(frames))]
    save_file(dict(zip(names, np.ascontiguousarray(actions), strict=True)), folder / ACTIONS)
    (folder / ACTIONS).chmod(0o644)
    entries = []
    for index, (name, shown) in enumerate(zip(names, frames, strict=True)):
        path = folder / f"{name}.webp"
        strip = np.ascontiguousarray(shown).reshape(-1, *shown.shape[2:])  # [T * H, W, 3]
        Image.fromarray(strip).save(path, lossless=True, quality=75, method=4)
        pixels = hashlib.sha256(strip.tobytes()).hexdigest()
        entries.append({"name": name, "episode": first + index, "sha256": file_sha256(path), "pixels_sha256": pixels})
    manifest = {
        "game": data.GAME,
        "map": data.MAP,
        "seed": seed,
        "frame": list(frames.shape[2:]),
        "frames": frames.shape[1],
        "context_frames": context_frames,
        "actions_sha256": file_sha256(folder / ACTIONS),
        "scenes": entries,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def write_scenes(
    folder: Path, *, count: int, clips: int, seed: int, workers: int = 1, first: int = HELD_OUT
) -> dict[str, Any]:
    """Play `count` held-out episodes of 4 + 4 * `clips` frames and save them. Needs `vizdoom`."""
    frames, actions = data.generate(range(first, first + count), 4 + 4 * clips, seed, workers)
    return save_scenes(folder, frames, actions, seed=seed, first=first)


def read_scenes(folder: Path) -> list[Scene]:
    """The scenes of a folder.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not the one the manifest was written for.
    """
    manifest = json.loads((folder / MANIFEST).read_text())
    check(folder / ACTIONS, manifest["actions_sha256"])
    actions = load_file(folder / ACTIONS)
    scenes = []
    kept = manifest["context_frames"]
    for entry in manifest["scenes"]:
        path = folder / f"{entry['name']}.webp"
        check(path, entry["sha256"])
        with Image.open(path) as strip:
            frames = np.array(strip.convert("RGB")).reshape(manifest["frames"], *manifest["frame"])
        told = actions[entry["name"]]
        scenes.append(Scene(entry["name"], frames[:kept], told[:kept], told[kept:], frames[kept:]))
    return scenes


def check(path: Path, expected: str) -> None:
    """Raise ValueError unless the file has the expected SHA-256, FileNotFoundError when it is missing."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; restore it from the repository")
    found = file_sha256(path)
    if found != expected:
        raise ValueError(f"{path} was altered: its SHA-256 is {found}, expected {expected}; restore it")
