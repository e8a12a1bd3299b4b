"""What measuring costs a whole forward pass, beside plain PyTorch hooks and the measurement's GEMMs alone.

    run = first_call(model, lambda: world.rollout(model, scenes, clips=1, seed=0))
    report = bench_forward(run, pattern, device="cpu", repeats=5)

The four are timed in turn. Refused where hooks change an output or the sums are not the reference's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from analysis import numerics
from analysis.capture.online import OnlineSink
from analysis.capture.watch import Watcher
from analysis.measure import stats
from analysis.measure.bench import PlainReplay, alternate, check_sums
from analysis.measure.replay import Layer, Replay
from analysis.sites import SitePattern


class _Seen(Exception):
    """Ends the rollout whose first call was wanted."""


def first_call(model: nn.Module, play: Callable[[], Any]) -> Callable[[], Any]:
    """What runs `model` as `play` runs it first: the same arguments each time.

    Raises ValueError when `play` never calls the model.
    """
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def grab(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))
        raise _Seen

    handle = model.register_forward_pre_hook(grab, with_kwargs=True)
    try:
        with contextlib.suppress(_Seen):
            play()
    finally:
        handle.remove()
    if not seen:
        raise ValueError("nothing to time: the model was never called")
    (args, kwargs), *_ = seen

    def run() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    return run


class GemmReplay(Replay):
    """Only the products that a measurement needs: one bf16, one int8 a variant, on codes that are never made."""

    def measure(
        self,
        layer: Layer,
        x: Tensor,
        output: Tensor | None = None,
        groups: Tensor | None = None,
        plain: bool = False,
    ) -> Tensor:
        """Zeros [V, 2, 17]."""
        engine = self.engine_for(x.device.type)
        rows, (out, columns) = x.numel() // x.shape[-1], layer.weight.shape
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(rows, columns)
            numerics.bf16_linear(flat, layer.weight, layer.bias)
            codes = torch.ones(rows, columns, dtype=torch.int8, device=x.device)
            weight = torch.ones(out, columns, dtype=torch.int8, device=x.device)
            scales = torch.ones(max(rows, out), device=x.device)
            for _ in self.variants:
                engine.int8_linear(codes, scales[:rows], weight, scales[:out], layer.bias)
        return torch.zeros(len(self.variants), 2, len(stats.ALL_SUMS), dtype=torch.float64, device=x.device)


def bench_forward(
    run: Callable[[], Tensor],
    pattern: SitePattern,
    device: str,
    repeats: int,
    variants: Sequence[str] = ("shipped", "fixed"),
) -> dict[str, Any]:
    """Times of `run` plain, measured, measured by plain PyTorch, and with the measurement's GEMMs alone.

    Args:
        run: runs the model, the same each time, and returns its output.
        pattern: the measured layers.
        device: where the model is.
        repeats: rounds; each takes one run of each kind.
        variants: quantisers; plain PyTorch is left out where it knows them not.

    Raises ValueError when nothing was measured, an output changed, or the sums are wrong.
    """
    replays = {"measured": Replay(variants, device=device), "GEMMs alone": GemmReplay(variants, device=device)}
    if set(variants) <= {"shipped", "fixed"}:
        replays["plain PyTorch"] = PlainReplay(variants, device=device)
    sinks = {name: OnlineSink(replay) for name, replay in replays.items()}
    stopped: list[str] = []
    watchers = {name: Watcher(pattern, sink, stopped.append) for name, sink in sinks.items()}

    def watched(watcher: Watcher) -> Tensor:
        watcher.install()
        try:
            return run()
        finally:
            watcher.pause()

    worst = _check(run, watched, pattern, variants, device)
    functions = {"plain": run} | {name: _bound(watched, watcher) for name, watcher in watchers.items()}
    times = alternate(functions, device, repeats, warmup=1)
    for watcher in watchers.values():
        watcher.remove()
    if stopped:
        raise ValueError(f"refusing to report times: {stopped[0]}")
    base = times["plain"].median_s
    return {
        "layers": len(sinks["measured"].measured),
        "engine": replays["measured"].engine.name,
        "largest_difference": worst,
        "times": {name: asdict(timing) for name, timing in times.items()},
        "ratio_to_plain": {name: timing.median_s / base for name, timing in times.items()},
    }


def _bound(function: Callable[[Watcher], Any], watcher: Watcher) -> Callable[[], Any]:
    return lambda: function(watcher)


def _check(
    run: Callable[[], Tensor],
    watched: Callable[[Watcher], Tensor],
    pattern: SitePattern,
    variants: Sequence[str],
    device: str,
) -> float:
    """Largest relative difference of any layer's sums to the reference engine's on the same calls."""
    expected = run()
    sums: list[dict[str, Tensor]] = []
    for engine in ("auto", "reference"):
        sink = OnlineSink(Replay(variants, device=device, engine=engine))
        watcher = Watcher(pattern, sink, lambda text: None)
        output = watched(watcher)
        watcher.remove()
        if watcher.stopped or not sink.measured:
            raise ValueError(f"refusing to report times: {watcher.stopped or 'no layer was measured'}")
        if not torch.equal(output, expected):
            raise ValueError("refusing to report times: the model's output changed while it was measured")
        table = sink.table("bench").groupby(["layer", "variant"], sort=False)[list(stats.ALL_SUMS)].sum()
        sums.append({name: _sums(table, name, variants) for name in sink.sites})
    return max(check_sums(sums[0][name], sums[1][name], variants, name) for name in sums[1])


def _sums(table: Any, layer: str, variants: Sequence[str]) -> Tensor:
    """Sums of a layer as [V, 1, 17]."""
    return torch.tensor(table.loc[[(layer, v) for v in variants]].to_numpy(np.float64))[:, None]
