"""Run studies of single layers (ablation, theory) over a rollout or a store, and collect what they measure.

collector = Collector([Ablation(), Theory()])
rollout_into(collector, world, model, sites, scenes, clips=2, seed=0)       # online
for _ in read_store(collector, Store("runs/store")): ...                    # or from disk
collector.found[0]["blocks.0.self_attn.q"][call]                            # what the first study returned
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from analysis.capture.hooks import Event
from analysis.capture.store import Store
from analysis.measure.replay import Layer
from analysis.sites import Site


class Study(Protocol):
    """Something that measures one layer on one input."""

    def measure(self, layer: Layer, x: Tensor, groups: Tensor | None = None, call: int = 0) -> Tensor: ...


class Collector:
    """A sink (see `capture.hooks`) that hands the events of every n-th call to each study; only finished calls count.

    Args:
        studies: what measures.
        every: 1 measures every forward pass, 3 the first, fourth, seventh, ...
    """

    def __init__(self, studies: Sequence[Study], every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.studies, self.every = list(studies), every
        self.label: dict[str, Any] = {}
        self.passed = 0  # forward passes seen
        self.calls = 0  # and measured
        self.sites: dict[str, Site] = {}
        self.found: list[dict[str, dict[int, Tensor]]] = [{} for _ in self.studies]
        self._open: list[tuple[int, str, Tensor]] = []

    def begin_call(self) -> None:
        self._open = []

    def layer(self, event: Event) -> None:
        if self.passed % self.every:
            return
        name = event.layer.site.name
        self.sites.setdefault(name, event.layer.site)
        for place, study in enumerate(self.studies):
            found = study.measure(event.layer, event.x, event.groups, self.calls)
            self._open.append((place, name, found.cpu()))

    def end_call(self) -> None:
        for place, name, found in self._open:
            calls = self.found[place].setdefault(name, {})
            calls[self.calls] = calls[self.calls] + found if self.calls in calls else found
        self.calls += 0 if self.passed % self.every else 1
        self.passed += 1
        self._open = []

    def stacked(self, place: int) -> tuple[list[Site], Tensor]:
        """(sites in order of first firing, [calls, layers, ...]) of one study; a layer that a call missed holds 0."""
        results = self.found[place]
        if not results:
            raise ValueError("no forward pass was finished: nothing was measured")
        shape = next(iter(next(iter(results.values())).values())).shape
        nothing = torch.zeros(shape, dtype=torch.float64)
        rows = [torch.stack([calls.get(c, nothing) for c in range(self.calls)]) for calls in results.values()]
        return [self.sites[name] for name in results], torch.stack(rows, dim=1)


def read_store(collector: Collector, store: Store, device: torch.device | str = "cpu") -> Iterator[str]:
    """Feed a store to a collector, group of layers by group; yields each layer's name when it is done.

    Raises:
        ValueError: the store holds no weight of a layer.
    """
    check_weights(store)
    for names in store.shared_inputs():
        for label, events in store.events(names, device):
            collector.label, collector.passed = label, int(label["call"])
            collector.calls = -(-collector.passed // collector.every)
            collector.begin_call()
            for event in events:
                collector.layer(event)
            collector.end_call()
        yield from names


def check_weights(store: Store) -> None:
    """Raise ValueError where a layer's weight is not in the store: its inputs alone cannot be multiplied."""
    without = []
    for name in store.layers:
        try:
            store.layer(name)
        except (KeyError, FileNotFoundError):
            without.append(name)
    if without or not store.layers:
        shown = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        raise ValueError(
            f"{store.folder} holds no weight of {shown or 'any layer'}; this study needs inputs and weights: "
            "capture again with `shrinkage capture`"
        )
