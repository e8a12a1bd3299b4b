"""The online sink: replay every layer inside the forward pass and keep sums only.

Memory beyond the model is one layer's tensors; sums stay on the device until a later call has begun, so that nothing
waits for the GPU. `table()` is the per_call frame, `code_table()` the histograms of codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from analysis.capture.hooks import Event
from analysis.measure import stats
from analysis.measure.replay import Replay
from analysis.results import codes, schema
from analysis.sites import Site

TOKENS = ("all", "valid", "both")
PENDING_CALLS = 4  # whose sums are not read yet, so that reading them never waits for a forward pass
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
        self._open_counts: list[tuple[str, torch.Tensor]] = []
        self._counts: dict[tuple[str, torch.device], torch.Tensor] = {}  # int64 [V, 2, 256]
        self._pending: list[tuple[dict[str, Any], list[str], list[_Copy]]] = []
        self._rows: list[tuple[dict[str, Any], list[str], np.ndarray]] = []
        self.calls = 0
        self._devices: dict[torch.device, str] = {}

    def begin_call(self) -> None:
        self._open, self._open_counts = [], []

    def layer(self, event: Event) -> None:
        site, weight = event.layer.site, event.layer.weight
        self.sites.setdefault(site.name, (site, weight.shape[1], weight.shape[0]))
        sums = self.replay.measure(event.layer, event.x, event.output, event.groups, event.plain)
        self._devices.setdefault(event.x.device, "")
        self._open.append((site.name, sums))
        quantized = self.replay.last_input
        if quantized is not None and codes.counted(self.label.get("call", self.calls)):
            self._open_counts.append((site.name, quantized.code_counts))

    def end_call(self) -> None:
        self.replay.forget()
        if self._open:
            label = {"call": self.calls} | self.label
            by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
            for name, sums in self._open:
                by_device.setdefault(sums.device, []).append((name, sums))
            names = [name for group in by_device.values() for name, _ in group]
            copies = [_Copy(torch.stack([sums for _, sums in group])) for group in by_device.values()]
            self._pending.append((label, names, copies))
            self.measured.update(names)
        for name, counts in self._open_counts:
            key = (name, counts.device)
            self._counts[key] = self._counts[key] + counts if key in self._counts else counts
        self.calls += 1
        self._open, self._open_counts = [], []
        while len(self._pending) > PENDING_CALLS:
            self._fetch()

    def provenance(self) -> dict[str, Any]:
        """Device and engine of what was measured, for run.json."""
        names = [torch.cuda.get_device_name(d) if d.type == "cuda" else d.type for d in self._devices]
        engines = [self.replay.engine_for(d.type).name for d in self._devices]
        return {"device": " + ".join(dict.fromkeys(names)), "engine": " + ".join(dict.fromkeys(engines))}

    def drop(self) -> None:
        """Forget the call that is open and every tensor kept for it; finished calls stay."""
        self._open, self._open_counts = [], []
        self.replay.forget()

    def _fetch(self) -> None:
        label, names, copies = self._pending.pop(0)
        self._rows.append((label, names, np.concatenate([copy.wait() for copy in copies])))

    def table(self, run_id: str) -> pd.DataFrame:
        """The per_call frame of every finished call; empty (with its columns) where there is none."""
        while self._pending:
            self._fetch()
        parts = [
            self._part(run_id, label, *_by_layer(names, sums), tokens)
            for label, names, sums in sorted(self._rows, key=lambda row: row[0]["call"])
            for tokens in (("all", "valid") if self.tokens == "both" else (self.tokens,))
        ]
        names = [c.name for c in schema.PER_CALL_COLUMNS]
        frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=names)
        order = {tokens: i for i, tokens in enumerate(TOKENS)}
        layers = {name: i for i, name in enumerate(self.sites)}
        variants = {name: i for i, name in enumerate(self.replay.variants)}
        keys = [frame["call"], frame["layer"].map(layers), frame["variant"].map(variants), frame["tokens"].map(order)]
        frame = frame.iloc[np.lexsort([np.asarray(k, dtype=np.int64) for k in reversed(keys)])]
        return schema.conform(frame[names].reset_index(drop=True), schema.PER_CALL_COLUMNS, "measurement")

    def code_table(self) -> pd.DataFrame:
        """The rows of studies.CODES of every finished call, layers in the order in which they first ran."""
        held: dict[str, np.ndarray] = {}
        for (name, _), counts in self._counts.items():
            held[name] = held.get(name, 0) + counts.cpu().numpy()
        ordered = {name: held[name] for name in self.sites if name in held}
        return codes.frame(ordered, self.replay.variants, ("all", "valid") if self.tokens == "both" else (self.tokens,))

    def _part(
        self, run_id: str, label: dict[str, Any], names: list[str], sums: np.ndarray, tokens: str
    ) -> pd.DataFrame:  # fmt: skip
        """Rows of one call and one choice of tokens: sums [L, V, 2, S] -> L * V rows."""
        values = sums[:, :, 0] if tokens == "valid" else _add(sums[:, :, 0], sums[:, :, 1])  # group 1 is valid
        count, variants, _ = values.shape
        sites = [self.sites[name] for name in names]
        columns: dict[str, Any] = {
            "schema_version": schema.SCHEMA_VERSION,
            "run_id": run_id,
            "layer": np.repeat(np.array(names, dtype=object), variants),
            "variant": np.tile(np.array(self.replay.variants, dtype=object), count),
            "reference": self.replay.reference,
            "tokens": tokens,
            "call": label["call"],
            "scene": label.get("scene", ""),
            "clip": label.get("clip"),
            "step": label.get("step"),
            "block": np.repeat([site.block for site, _, _ in sites], variants),
            "attention": np.repeat(np.array([site.attention for site, _, _ in sites], dtype=object), variants),
            "projection": np.repeat(np.array([site.projection for site, _, _ in sites], dtype=object), variants),
            "in_features": np.repeat([k for _, k, _ in sites], variants),
            "out_features": np.repeat([n for _, _, n in sites], variants),
        }
        flat = values.reshape(count * variants, -1)
        columns |= {
            name: flat[:, i].astype(np.int64) if name in _INTEGERS else flat[:, i]
            for i, name in enumerate(stats.ALL_SUMS)
        }
        frame = pd.DataFrame(columns)
        for name in ("clip", "step"):
            frame[name] = frame[name].astype("Int64")
        return frame


class _Copy:
    """Sums on their way to the host. On a GPU the copy is queued behind the work that makes them; nobody waits yet."""

    def __init__(self, sums: torch.Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        self.host = sums
        if sums.is_cuda:
            self.host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self.host.copy_(sums, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(sums.device))

    def wait(self) -> np.ndarray:
        if self.event is not None:
            self.event.synchronize()
        return self.host.numpy().copy()


def _by_layer(names: list[str], sums: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Sums [layers fired, V, 2, S], one entry per layer; a layer that fired twice in a call adds up."""
    merged: dict[str, np.ndarray] = {}
    for name, values in zip(names, sums, strict=True):
        merged[name] = values if name not in merged else _add(merged[name], values)
    return list(merged), np.stack(list(merged.values()))


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = a + b
    peak = stats.ALL_SUMS.index("max_abs_e")
    total[..., peak] = np.maximum(a[..., peak], b[..., peak])
    return total
