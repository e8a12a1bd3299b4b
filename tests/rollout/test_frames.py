"""Frame metrics on what can be worked out by hand, and their refusals."""

import numpy as np
import pytest

from analysis.rollout import frames


def noise(count=3, height=16, width=24, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def test_psnr_by_hand_and_capped_for_equal_frames():
    a = np.full((2, 12, 12, 3), 100, np.uint8)
    b = a.copy()
    b[1] += 10
    scores = frames.score(a, b)
    assert scores["mse"].tolist() == [0, 100]
    assert scores["psnr_db"][0] == frames.PSNR_CEILING_DB
    assert scores["psnr_db"][1] == pytest.approx(10 * np.log10(255**2 / 100))
    assert np.isfinite(scores["psnr_db"].mean())


def test_constant_frames_are_finite_and_do_not_poison_a_mean():
    black, white = np.zeros((2, 16, 16, 3), np.uint8), np.full((2, 16, 16, 3), 255, np.uint8)
    same, apart = frames.score(black, black), frames.score(black, white)
    assert same["ssim"].tolist() == [1, 1] and same["flip"].tolist() == [0, 0]
    assert all(np.isfinite(values).all() for values in apart.values())
    assert (apart["ssim"] < 0.01).all() and (apart["flip"] > 0.5).all() and (apart["psnr_db"] == 0).all()
    alone = frames.statistics(np.concatenate([black, noise(1, 16, 16)]))
    assert np.isnan(alone["high_frequency"][:2]).all() and np.isfinite(alone["high_frequency"][2])
    assert alone["contrast"][:2].tolist() == [0, 0] and alone["luminance"][0] == 0


def test_metrics_order_a_small_and_a_large_change():
    a = noise()
    small = np.clip(a.astype(int) + 2, 0, 255).astype(np.uint8)
    large = np.clip(a.astype(int) + 40, 0, 255).astype(np.uint8)
    near, far = frames.score(a, small), frames.score(a, large)
    assert (near["psnr_db"] > far["psnr_db"]).all()
    assert (near["ssim"] > far["ssim"]).all()
    assert (near["flip"] < far["flip"]).all()


def test_statistics_see_a_darker_a_flatter_and_a_blurred_video():
    a = noise(2, 32, 32)
    plain = frames.statistics(a)
    darker = frames.statistics((a * 0.9).astype(np.uint8))
    shifted = [np.roll(a.astype(float), (i, j), (1, 2)) for i in range(3) for j in range(3)]
    blurred = frames.statistics(np.mean(shifted, axis=0).astype(np.uint8))
    assert (darker["luminance"] < plain["luminance"]).all() and (darker["contrast"] < plain["contrast"]).all()
    assert (blurred["high_frequency"] < 0.5 * plain["high_frequency"]).all()


def test_flip_only_where_asked_and_counted_from_the_first_frame():
    a, b = noise(8), noise(8, seed=1)
    scored = np.isfinite(frames.score(a, b, flip_every=4)["flip"])
    assert scored.nonzero()[0].tolist() == [3, 7]
    scored = np.isfinite(frames.score(a, b, flip_every=4, first=2)["flip"])
    assert scored.nonzero()[0].tolist() == [1, 5]
    without = frames.score(a, b, ("psnr",))
    assert np.isnan(without["ssim"]).all() and np.isnan(without["flip"]).all()


def test_refusals():
    with pytest.raises(ValueError, match="cannot compare 2 frames of 24x16 with 3 frames of 24x16"):
        frames.score(noise(3), noise(2))
    with pytest.raises(ValueError, match=r"must be uint8 \[T, H, W, 3\], got float64"):
        frames.score(noise(2).astype(float), noise(2))
    with pytest.raises(ValueError, match="SSIM needs frames of at least 11x11 pixels, got 24x8"):
        frames.score(noise(1, 8), noise(1, 8))
    with pytest.raises(ValueError, match="unknown metric 'lpips'; known: psnr, ssim, flip"):
        frames.check_metrics(("psnr", "lpips"))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(frames._LIBRARIES, "flip", "not_there_at_all")
    with pytest.raises(ValueError, match=r"pip install 'int8-shrinkage\[video\]'.*--metrics psnr,ssim"):
        frames.check_metrics(("psnr", "flip"))
