"""Score rollouts in the background: frame metrics are slower than the model on a GPU, and need no torch.

with Scorer(Scoring(("psnr", "ssim"))) as scorer:
    scorer.compare({"variant": "shipped", "against": "true", ...}, reference, frames, clip_frames=4)
    scorer.describe({"variant": "shipped", ...}, frames, clip_frames=4)
    frames_table, statistics_table = scorer.tables()
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import pandas as pd

from analysis.rollout import frames as metrics

_QUEUED = 8  # jobs a worker that may wait


@dataclass(frozen=True)
class Scoring:
    """What is scored: metrics of `frames.METRICS`, FLIP on every n-th frame, in how many processes (1: in this one)."""

    metrics: tuple[str, ...] = metrics.METRICS
    flip_every: int = 1
    workers: int = 1

    def __post_init__(self) -> None:
        metrics.check_metrics(self.metrics)
        if self.flip_every < 1 or self.workers < 1:
            raise ValueError(f"flip_every and workers must be at least 1, got {self.flip_every} and {self.workers}")


class Scorer:
    """Takes rollouts uint8 [T, H, W, 3] with their labels; the tables come out in the order in which they went in."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        self._pool: ProcessPoolExecutor | None = None
        self._jobs: dict[str, list[tuple[dict[str, Any], int, int, Future[Any]]]] = {"compare": [], "describe": []}
        self._waiting: list[Future[Any]] = []

    def __enter__(self) -> Scorer:
        if self.scoring.workers > 1:
            # Spawned, not forked: a forked child would inherit the parent's CUDA context and thread pools.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.scoring.workers, mp_context=context, initializer=_one_thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def compare(
        self, labels: dict[str, Any], reference: np.ndarray, frames: np.ndarray, clip_frames: int, first: int = 0
    ) -> None:  # fmt: skip
        """Score frames `first`... of one rollout against another's. Raises ValueError where their shapes differ."""
        metrics.check_alike(reference, frames)
        options = (self.scoring.metrics, self.scoring.flip_every, first)
        self._submit("compare", labels, clip_frames, first, metrics.score, reference, frames, *options)

    def describe(self, labels: dict[str, Any], frames: np.ndarray, clip_frames: int, first: int = 0) -> None:
        """Statistics of frames `first`... of one rollout by itself."""
        self._submit("describe", labels, clip_frames, first, metrics.statistics, frames)

    def _submit(
        self, kind: str, labels: dict[str, Any], clip_frames: int, first: int, job: Callable[..., Any], *args: Any
    ) -> None:  # fmt: skip
        if self._pool is not None:
            done = self._pool.submit(job, *args)
            self._waiting = [f for f in self._waiting if not f.done()] + [done]
            if len(self._waiting) > _QUEUED * self.scoring.workers:  # bounds the frames held for scoring
                wait(self._waiting, return_when=FIRST_COMPLETED)
        else:
            done = Future()
            done.set_result(job(*args))
        self._jobs[kind].append((labels, clip_frames, first, done))

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """(comparisons, statistics): the labels, `clip` and `frame`, and one column a metric. Waits for what runs."""
        return self._table("compare"), self._table("describe")

    def _table(self, kind: str) -> pd.DataFrame:
        parts = []
        for labels, clip_frames, first, done in self._jobs[kind]:
            scores = done.result()
            frame = first + np.arange(len(next(iter(scores.values()))))
            parts.append(pd.DataFrame(labels | {"frame": frame, "clip": frame // clip_frames} | scores))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _one_thread() -> None:
    """One thread a worker: there is one worker a core, and libraries read this when they are first imported."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
