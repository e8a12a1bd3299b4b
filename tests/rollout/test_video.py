"""Videos that another program made: streamed, paired, refused where they do not fit together."""

import numpy as np
import pytest
from PIL import Image

from analysis.results.closed_loop import summarize
from analysis.rollout import external, video
from analysis.rollout.scoring import Scoring

ROLES = ("bf16", "shipped", "fixed")


def clip(count=11, height=32, width=48, seed=0):
    """Smooth moving colours, so that a codec keeps them well."""
    t, y, x = np.meshgrid(np.arange(count) / 9, np.arange(height) / height, np.arange(width) / width, indexing="ij")
    waves = [0.5 + 0.4 * np.sin(6 * (x * (k + 1) + y) + t + seed + k) for k in range(3)]
    return (255 * np.stack(waves, axis=-1)).astype(np.uint8)


def save(path, frames, rate=10.0):
    video.write_mp4(path, frames, rate)
    return path


def test_a_video_is_read_back_in_chunks(tmp_path):
    frames = clip()
    with video.Video(save(tmp_path / "a.mp4", frames)) as found:
        assert (found.width, found.height, found.rate, len(found)) == (48, 32, 10.0, 11)
        chunks = list(found.chunks(4))
    assert [len(c) for c in chunks] == [4, 4, 3]
    read = np.concatenate(chunks).astype(float)
    lost, reversed_ = (np.sqrt(((read - f) ** 2).mean()) for f in (frames, frames[::-1]))
    assert lost < 16, "H.264 loses a little"
    assert reversed_ > 2 * lost, "the order of frames would be noticed"


def test_three_videos_are_scored(tmp_path):
    frames = clip()
    darker = (frames * 0.8).astype(np.uint8)
    paths = {"bf16": frames, "shipped": darker, "fixed": frames}
    roles = {role: save(tmp_path / f"{role}.mp4", v) for role, v in paths.items()}
    scenes = external.pair_videos(roles)
    assert list(scenes) == ["bf16"]
    compared, described = external.score_videos(scenes, Scoring(flip_every=5), clip_frames=5)
    psnr = compared.groupby("variant")["psnr_db"].mean()
    assert psnr["fixed"] == 60 and psnr["shipped"] < 25
    assert compared[compared["variant"] == "fixed"]["frame"].tolist() == list(range(11))
    assert compared["clip"].max() == 2 and np.isfinite(compared["flip"]).sum() == 4
    look = described.groupby("variant")["luminance"].mean()
    assert look["shipped"] < 0.9 * look["bf16"]
    summary = summarize(compared, described)
    assert (summary.loc[summary["margin"].notna(), "verdict"] == "undecided").all(), "one scene decides nothing"
    assert summary["difference_lo"].isna().all()


def test_folders_are_matched_by_name_and_give_floors_and_verdicts(tmp_path):
    for role, gain in (("bf16", 1.0), ("shipped", 0.9), ("fixed", 1.0), ("true", 0.98), ("other_seed", 0.95)):
        (tmp_path / role).mkdir()
        for scene in range(3):
            save(tmp_path / role / f"scene{scene}.mp4", (clip(4, seed=scene) * gain).astype(np.uint8))
    roles = {role: tmp_path / role for role in (*ROLES, "true", "other_seed")}
    scenes = external.pair_videos(roles)
    assert list(scenes) == ["scene0", "scene1", "scene2"]
    summary = summarize(*external.score_videos(scenes, Scoring(("psnr",)), clip_frames=4))
    found = summary[summary["metric"] == "psnr_db"].set_index(["variant", "against", "baseline"])["verdict"]
    assert found["shipped", "true", "bf16"] == "degraded" and found["fixed", "true", "bf16"] == "equivalent"
    assert found["shipped", "bf16", "other_seed"] == "degraded" and found["fixed", "bf16", "other_seed"] == "equivalent"


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({"count": 9}, r"11 frames of 48x32 at 10 a second.*9 frames of 48x32"),
        ({"height": 48}, r"48x32.*48x48"),
        ({"rate": 12.0}, r"at 10 a second.*at 12 a second"),
    ],
)
def test_videos_of_different_length_size_or_rate(tmp_path, other, shown):
    rate = other.pop("rate", 10.0)
    a, b = save(tmp_path / "a.mp4", clip()), save(tmp_path / "b.mp4", clip(**other), rate)
    scenes = external.pair_videos({"bf16": a, "shipped": b, "fixed": a})
    with pytest.raises(ValueError, match=rf"differ in size, rate or length.*{shown}"):
        external.score_videos(scenes, Scoring(("psnr",)), 40)


def test_paths_that_do_not_fit(tmp_path):
    good = save(tmp_path / "a.mp4", clip(3))
    with pytest.raises(FileNotFoundError, match="the video of 'fixed', or a folder"):
        external.pair_videos({"bf16": good, "shipped": good, "fixed": tmp_path / "none.mp4"})
    with pytest.raises(ValueError, match="either videos or folders"):
        external.pair_videos({"bf16": good, "shipped": tmp_path, "fixed": good})
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="holds no video"):
        external.pair_videos({"bf16": tmp_path / "x", "fixed": tmp_path / "y"})
    save(tmp_path / "x" / "one.mp4", clip(2))
    with pytest.raises(ValueError, match=r"same file names: one\.mp4"):
        external.pair_videos({"bf16": tmp_path / "x", "fixed": tmp_path / "y"})
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(ValueError, match=r"text.mp4 is not a video that ffmpeg can read"):
        video.Video(tmp_path / "text.mp4")


def test_side_by_side_preview_and_the_amplified_difference(tmp_path):
    a = clip(4)[None]
    shown = {"bf16": a, "fp32": a, "shipped": np.clip(a.astype(int) + 3, 0, 255).astype(np.uint8), "fixed": a}
    panels = video.comparison(shown, 0)
    assert list(panels) == ["bf16", "shipped", "fixed", "8 x (shipped - bf16)"]
    assert np.median(panels["8 x (shipped - bf16)"]) == 128 + 8 * 3
    frames = list(video.side_by_side(panels, scale=2))
    assert len(frames) == 4 and frames[0].shape == (16 + 64, 4 * 96, 3)
    video.write_webp(tmp_path / "a.webp", frames, 10)
    with Image.open(tmp_path / "a.webp") as preview:
        assert preview.n_frames == 4 and preview.size == (384, 80)
    with pytest.raises(ValueError, match="no frame to write"):
        video.write_mp4(tmp_path / "b.mp4", [], 10)
    assert not list(tmp_path.glob("*b.mp4"))
