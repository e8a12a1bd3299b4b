"""Frame metrics: how far two videos are apart, and what one video looks like by itself. NumPy only, no torch.

Frames are uint8 RGB [T, H, W, 3]. Each metric gives one number a frame:

    psnr   dB, from the mean squared error over pixels and channels; capped at 60 dB as in libvmaf (6 dB a bit + 12),
           so that two equal frames are 60 dB apart and no mean is infinite
    ssim   Wang et al. 2004: Gaussian window, sigma 1.5; mean of the three channels (scikit-image)
    flip   Andersson et al. 2020, LDR, 67 pixels a degree; 0 equal, 1 far apart (NVIDIA's flip-evaluator). The slow
           one: scored on every `flip_every`-th frame, empty on the others

    score(reference, frames)       # {"mse": [T], "psnr_db": [T], "ssim": [T], "flip": [T]}
    statistics(frames)             # {"luminance": [T], "contrast": [T], "high_frequency": [T]}
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PSNR_CEILING_DB = 60.0
METRICS = ("psnr", "ssim", "flip")
COLUMNS = {"psnr": "psnr_db", "ssim": "ssim", "flip": "flip"}
SSIM_WINDOW = 11  # pixels: sigma 1.5 cut at 3.5 sigma
HIGH_FREQUENCY = 0.25  # cycles a pixel: half of what a pixel grid can hold
_LUMA = np.array([0.2126, 0.7152, 0.0722])  # BT.709, on the gamma-coded values
_LIBRARIES = {"ssim": "skimage.metrics", "flip": "flip_evaluator"}


def check_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    """The metrics, each known and its library installed. Raises ValueError that says what to do."""
    if unknown := [name for name in metrics if name not in METRICS]:
        raise ValueError(f"unknown metric {', '.join(map(repr, unknown))}; known: {', '.join(METRICS)}")
    for name in metrics:
        if name in _LIBRARIES:
            _library(name)
    return tuple(metrics)


def _library(metric: str) -> Any:
    try:
        return importlib.import_module(_LIBRARIES[metric])
    except ImportError:
        left = ",".join(m for m in METRICS if m != metric)
        raise ValueError(
            f"metric {metric!r} needs a library that is not installed: pip install 'int8-shrinkage[video]', "
            f"or score without it: --metrics {left}"
        ) from None


def check_alike(reference: np.ndarray, frames: np.ndarray) -> None:
    """Raise ValueError unless both are uint8 [T, H, W, 3] of one shape."""
    for name, video in (("reference", reference), ("frames", frames)):
        if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3:
            raise ValueError(f"{name} must be uint8 [T, H, W, 3], got {video.dtype} {list(video.shape)}")
    if reference.shape != frames.shape:
        raise ValueError(
            f"cannot compare {len(frames)} frames of {frames.shape[2]}x{frames.shape[1]} with "
            f"{len(reference)} frames of {reference.shape[2]}x{reference.shape[1]}; both need one size and length"
        )


def mse(reference: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """Mean squared error in squared 8-bit steps, float64 [T]."""
    error = frames.astype(np.int32) - reference.astype(np.int32)
    return (error * error).reshape(len(error), -1).mean(axis=1)


def psnr_db(errors: np.ndarray) -> np.ndarray:
    """PSNR in dB of mean squared errors in squared 8-bit steps, capped at PSNR_CEILING_DB."""
    with np.errstate(divide="ignore"):
        return np.minimum(10 * np.log10(255.0**2 / np.asarray(errors, np.float64)), PSNR_CEILING_DB)


def ssim(reference: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """Structural similarity, float64 [T]; 1 for equal frames, constant ones too."""
    if min(frames.shape[1:3]) < SSIM_WINDOW:
        raise ValueError(
            f"SSIM needs frames of at least {SSIM_WINDOW}x{SSIM_WINDOW} pixels, got "
            f"{frames.shape[2]}x{frames.shape[1]}; score without it: --metrics psnr,flip"
        )
    compare = _library("ssim").structural_similarity
    options = {"channel_axis": -1, "data_range": 255, "gaussian_weights": True, "sigma": 1.5}
    return np.array(
        [compare(a, b, use_sample_covariance=False, **options) for a, b in zip(reference, frames, strict=True)]
    )


def flip(reference: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """Mean FLIP of each frame, float64 [T]."""
    evaluate = _library("flip").evaluate
    pairs = zip(reference, frames, strict=True)
    options = {"inputsRGB": True, "applyMagma": False, "computeMeanError": True}
    return np.array([evaluate(_unit(a), _unit(b), "LDR", **options)[1] for a, b in pairs])


def _unit(frame: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(frame, dtype=np.float32) / np.float32(255)


def score(
    reference: np.ndarray, frames: np.ndarray, metrics: Sequence[str] = METRICS, flip_every: int = 1, first: int = 0
) -> dict[str, np.ndarray]:  # fmt: skip
    """Every metric of every frame against the reference's frame of the same index.

    Args:
        reference, frames: uint8 [T, H, W, 3].
        metrics: of METRICS; the columns of others are empty (NaN).
        flip_every: FLIP is scored where (index + 1) % flip_every == 0, the index counted from `first`.
        first: index of the first frame, for videos that are scored piece by piece.

    Returns:
        float64 [T] under `mse`, `psnr_db`, `ssim` and `flip`.

    Raises:
        ValueError: shapes differ, frames too small, or a metric's library is missing.
    """
    check_alike(reference, frames)
    empty = np.full(len(frames), np.nan)
    errors = mse(reference, frames)
    picked = (np.arange(len(frames)) + first + 1) % flip_every == 0
    flips = empty.copy()
    if "flip" in metrics and picked.any():
        flips[picked] = flip(reference[picked], frames[picked])
    return {
        "mse": errors,
        "psnr_db": psnr_db(errors),
        "ssim": ssim(reference, frames) if "ssim" in metrics else empty,
        "flip": flips,
    }


def statistics(frames: np.ndarray) -> dict[str, np.ndarray]:
    """What needs no reference: a shrinking rollout may darken, flatten or blur. float64 [T] each.

    luminance: mean BT.709 luma of the coded values, 0 to 1; contrast: its standard deviation; high_frequency: share of
    the luma's variance above a quarter cycle a pixel, empty for a constant frame, which has no variance.
    """
    luma = frames.astype(np.float64) @ (_LUMA / 255)  # [T, H, W]
    height, width = luma.shape[1:]
    mean = luma.mean(axis=(1, 2))
    power = np.abs(np.fft.fft2(luma - mean[:, None, None])) ** 2
    radius = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    contrast = luma.std(axis=(1, 2))
    total = power.sum(axis=(1, 2))
    share = np.divide(power[:, radius > HIGH_FREQUENCY].sum(axis=1), total, out=np.full(len(luma), np.nan), where=contrast > 1e-9)  # fmt: skip  # noqa: E501
    return {"luminance": mean, "contrast": contrast, "high_frequency": share}
