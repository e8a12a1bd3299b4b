"""The online sink: replay every layer inside the forward pass and keep sums only.

Memory beyond the model is one layer's tensors; sums stay on the device until a later call has begun, so that nothing
waits for the GPU. `table()` is the per_call frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from analysis.capture.hooks import Event
from analysis.measure import stats
from analysis.measure.replay import Replay
from analysis.results import schema
from analysis.sites import Site

TOKENS = ("all", "valid", "both")
_INTEGERS = {c.name for c in schema.SUMS if c.dtype == "Int64"}


class OnlineSink:
    """Measures every event with `replay`.

    Args:
        replay: what to measure.
        tokens: 'all', 'valid' (padding left out) or 'both' (two rows each).
    """

    def __init__(self, replay: Replay, tokens: str = "all") -> None:
        if tokens not in TOKENS:
            raise ValueError(f"unknown tokens {tokens!r}; known: {', '.join(TOKENS)}")
        self.replay, self.tokens = replay, tokens
        self.label: dict[str, Any] = {}  # scene, clip, step of the next call
        self.sites: dict[str, tuple[Site, int, int]] = {}
        self.measured: set[str] = set()
        self._open: list[tuple[str, torch.Tensor]] = []
        self._pending: list[tuple[dict[str, Any], list[str], torch.Tensor]] = []
        self._rows: list[tuple[dict[str, Any], list[str], np.ndarray]] = []
        self.calls = 0

    def begin_call(self) -> None:
        self._open = []

    def layer(self, event: Event) -> None:
        site, weight = event.layer.site, event.layer.weight
        self.sites.setdefault(site.name, (site, weight.shape[1], weight.shape[0]))
        self._open.append((site.name, self.replay.measure(event.layer, event.x, event.output, event.groups)))

    def end_call(self) -> None:
        self.replay.forget()
        if self._open:
            names = [name for name, _ in self._open]
            label = {"call": self.calls} | self.label
            self._pending.append((label, names, torch.stack([s for _, s in self._open])))
            self.measured.update(names)
        self.calls += 1
        self._open = []
        while len(self._pending) > 4:
            self._fetch()

    def _fetch(self) -> None:
        label, names, sums = self._pending.pop(0)
        self._rows.append((label, names, sums.cpu().numpy()))

    def table(self, run_id: str) -> pd.DataFrame:
        """The per_call frame of every finished call; empty (with its columns) where there is none."""
        while self._pending:
            self._fetch()
        records = []
        for label, names, sums in sorted(self._rows, key=lambda row: row[0]["call"]):
            for (name, variants), variant_index in (
                (p, v) for p in _by_layer(names, sums) for v in range(sums.shape[1])
            ):
                for tokens in ("all", "valid") if self.tokens == "both" else (self.tokens,):
                    values = _over_groups(variants[variant_index], tokens)
                    records.append(self._record(run_id, label, name, variant_index, tokens, values))
        columns = [c.name for c in schema.PER_CALL_COLUMNS]
        return schema.conform(pd.DataFrame(records, columns=columns), schema.PER_CALL_COLUMNS, "measurement")

    def _record(
        self, run_id: str, label: dict[str, Any], name: str, variant: int, tokens: str, values: np.ndarray
    ) -> dict[str, Any]:  # fmt: skip
        site, in_features, out_features = self.sites[name]
        return {
            "schema_version": schema.SCHEMA_VERSION,
            "run_id": run_id,
            "layer": name,
            "variant": self.replay.variants[variant],
            "reference": self.replay.reference,
            "tokens": tokens,
            "call": label["call"],
            "scene": label.get("scene", ""),
            "clip": label.get("clip"),
            "step": label.get("step"),
            "block": site.block,
            "attention": site.attention,
            "projection": site.projection,
            "in_features": in_features,
            "out_features": out_features,
        } | {k: int(v) if k in _INTEGERS else float(v) for k, v in zip(stats.ALL_SUMS, values, strict=True)}


def _by_layer(names: list[str], sums: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Sums [layers fired, V, 2, S] -> one entry per layer; a layer that fired twice in a call adds up."""
    merged: dict[str, np.ndarray] = {}
    for name, values in zip(names, sums, strict=True):
        merged[name] = values if name not in merged else _add(merged[name], values)
    return list(merged.items())


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = a + b
    peak = stats.ALL_SUMS.index("max_abs_e")
    total[..., peak] = np.maximum(a[..., peak], b[..., peak])
    return total


def _over_groups(values: np.ndarray, tokens: str) -> np.ndarray:
    """[2, S] -> [S]: group 1 for valid tokens, both for all."""
    return values[0] if tokens == "valid" else _add(values[0], values[1])
