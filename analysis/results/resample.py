"""Cluster bootstrap of many layers at once: sums by (cluster, layer) -> draws of any metric.

A cluster is what is drawn as a whole: a call within a run, a run within a pool of runs. Draws are seeded, and made in
pieces, so that memory does not grow with the number of clusters.

    clusters = by_cluster(per_call, "call")
    draws = draw(clusters, ["rel_mse"])["rel_mse"]       # [draws, layers]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.results import schema, summary

KEY = ["layer", "variant", "reference", "tokens"]
FEWEST = 3  # clusters, below which there is no interval
_PIECE = 2_000_000  # numbers held at once: weights, or drawn sums


@dataclass(frozen=True)
class Clusters:
    """`keys`: one row a layer; `sums`: [clusters, layers, sums]; `present`: which cluster has which layer."""

    keys: pd.DataFrame
    sums: np.ndarray
    present: np.ndarray
    in_features: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Clusters of each layer."""
        return self.present.sum(axis=0)


def by_cluster(frame: pd.DataFrame, cluster: str) -> Clusters:
    """Sums of a frame whose rows each belong to a cluster (a column) and, by KEY, to a layer. Rows of one cell add."""
    at, _ = pd.factorize(frame[cluster], sort=True)
    group = frame.groupby(KEY, sort=True, dropna=False)
    layer = group.ngroup().to_numpy()
    keys = frame.iloc[np.unique(layer, return_index=True)[1]]
    shape = (int(at.max()) + 1, len(keys))
    cells = at * shape[1] + layer
    sums = np.zeros((shape[0] * shape[1], len(schema.SUM_NAMES)))
    for number, name in enumerate(schema.SUM_NAMES):
        values = frame[name].to_numpy(np.float64)
        if name == "max_abs_e":
            np.maximum.at(sums[:, number], cells, values)
        else:
            sums[:, number] = np.bincount(cells, weights=values, minlength=len(sums))
    present = np.bincount(cells, minlength=len(sums)).reshape(shape) > 0
    features = keys["in_features"].to_numpy(np.float64)
    return Clusters(keys[KEY].reset_index(drop=True), sums.reshape(*shape, -1), present, features)


def draw(clusters: Clusters, names: Sequence[str], seed: int = summary.BOOTSTRAP_SEED) -> dict[str, np.ndarray]:
    """Draws of metrics, [BOOTSTRAP_DRAWS, layers]; empty (NaN) for a layer with fewer than FEWEST clusters.

    A layer is drawn over the clusters that have it; layers with the same clusters are drawn together.
    """
    layers = len(clusters.keys)
    out = {name: np.full((summary.BOOTSTRAP_DRAWS, layers), np.nan) for name in names}
    patterns: dict[bytes, list[int]] = {}
    for layer in range(layers):
        patterns.setdefault(clusters.present[:, layer].tobytes(), []).append(layer)
    for columns in patterns.values():
        rows = np.flatnonzero(clusters.present[:, columns[0]])
        if len(rows) < FEWEST:
            continue
        sums = clusters.sums[rows][:, columns].reshape(len(rows), -1)
        random = np.random.default_rng(seed)
        piece = max(1, _PIECE // max(sums.shape))
        for start in range(0, summary.BOOTSTRAP_DRAWS, piece):
            size = min(piece, summary.BOOTSTRAP_DRAWS - start)
            weights = random.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=size).astype(np.float64)
            drawn = (weights @ sums).reshape(size, len(columns), -1)
            found = summary.metrics(
                {name: drawn[:, :, number] for number, name in enumerate(schema.SUM_NAMES)}
                | {"in_features": np.broadcast_to(clusters.in_features[columns], drawn.shape[:2])}
            )
            for name in names:
                out[name][start : start + size, columns] = found[name]
    return out
