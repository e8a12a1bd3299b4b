"""Score videos that another program made: the same rollout by the bf16, shipped and fixed model, streamed.

    roles = {"bf16": Path("a.mp4"), "shipped": Path("b.mp4"), "fixed": Path("c.mp4")}
    frames, statistics = score_videos(pair_videos(roles), Scoring(), clip_frames=40)

A role's path is a video, or a folder of videos; folders are matched by file name, and each name is a scene. The roles
`true` (the game's frames) and `other_seed` (the bf16 model with other noise) are optional and give noise floors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pandas as pd

from analysis.rollout.scoring import Scorer, Scoring
from analysis.rollout.video import Video, check_same_format

CHUNK = 8  # frames that are held and scored at a time
SUFFIXES = (".mp4", ".mkv", ".mov", ".webm", ".avi")


def pair_videos(roles: Mapping[str, Path]) -> dict[str, dict[str, Path]]:
    """{scene: {role: video}}. A single video is the scene of its stem.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: files and folders are mixed, a folder holds no video, or the folders' file names differ.
    """
    for role, path in roles.items():
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; give the video of {role!r}, or a folder of them")
    folders = {role: path for role, path in roles.items() if path.is_dir()}
    if not folders:
        return {roles["bf16"].stem: dict(roles)}
    if len(folders) < len(roles):
        raise ValueError(
            f"give either videos or folders of them; folders are {', '.join(map(str, folders.values()))} only"
        )
    found = {role: {p.name: p for p in sorted(path.iterdir()) if p.suffix in SUFFIXES} for role, path in roles.items()}
    names = set(found["bf16"])
    if not names:
        raise ValueError(f"{roles['bf16']} holds no video ({', '.join(SUFFIXES)})")
    for role, videos in found.items():
        if odd := sorted(names ^ set(videos)):
            raise ValueError(
                f"{roles[role]} and {roles['bf16']} do not hold the same file names: {', '.join(odd[:6])}; "
                "a scene has one name in every folder"
            )
    return {Path(name).stem: {role: found[role][name] for role in roles} for name in sorted(names)}


def score_videos(
    scenes: Mapping[str, Mapping[str, Path]],
    scoring: Scoring,
    clip_frames: int,
    on_scene: Callable[[], None] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Per-frame comparisons and statistics, the columns of the closed-loop tables; memory is a few chunks of frames.

    clip_frames: frames a point of the drift curve.

    Raises:
        ValueError: the videos of a scene differ in size, rate or length; one is not a video.
    """
    with Scorer(scoring) as scorer:
        for scene, paths in scenes.items():
            with ExitStack() as stack:
                videos = {role: stack.enter_context(Video(path)) for role, path in paths.items()}
                check_same_format(videos)
                first = 0
                for chunks in zip(*(video.chunks(CHUNK) for video in videos.values()), strict=True):
                    part = dict(zip(videos, chunks, strict=True))
                    for role, frames in part.items():
                        where = {"scene": scene, "seed": -1}
                        if role != "other_seed":
                            scorer.describe({"variant": role} | where, frames, clip_frames, first)
                        for against in ("true", "bf16"):
                            unasked = role in (against, "true") or (role == "other_seed" and against == "true")
                            if against in part and not unasked:
                                label = {"variant": role, "against": against} | where
                                scorer.compare(label, part[against], frames, clip_frames, first)
                    first += len(part["bf16"])
            if on_scene is not None:
                on_scene()
        return scorer.tables()
