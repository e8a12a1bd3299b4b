"""Teacher-forced propagation: the bf16 trajectory's inputs through quantised models, compared block by block.

Every model sees the same inputs, so what differs is the error of one forward pass and nothing that feeds back.
`accumulated`: every site is quantised. `isolated`: one block is, the others stay in bf16; its error is seen behind
that block and at the model's output.

    calls = record(world, model, sites, scenes, clips=1, seed=0)
    sums = propagate(model, sites, calls, ("shipped", "fixed"))     # one row a (call, variant, quantised, seen_at)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from analysis.rollout.quantized import BF16, PLAIN, quantized
from analysis.sites import Site, clean_name
from analysis.worlds.world import Call, Scene, World

ALL, OUTPUT = "all", "output"


@dataclass(frozen=True)
class Recorded:
    """The inputs of one forward pass of the model, on its device."""

    label: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def record(
    world: World,
    model: nn.Module,
    sites: Mapping[Site, nn.Module],
    scenes: Sequence[Scene],
    *,
    clips: int,
    seed: int,
    on_clip: Callable[[], None] | None = None,
) -> list[Recorded]:
    """The inputs of every forward pass of the bf16 model's rollout, scene by scene."""
    labels: list[Call] = []
    calls: list[Recorded] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Recorded(labels[-1], _copied(args), {k: _copied(v) for k, v in kwargs.items()}))

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with quantized(sites, BF16):
            for scene in scenes:
                world.rollout(
                    model,
                    [scene],
                    clips=clips,
                    seed=seed,
                    on_call=labels.append,
                    on_clip=lambda _: on_clip() if on_clip else None,
                )
    finally:
        handle.remove()
    return calls


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(_copied(v) for v in value) if isinstance(value, tuple) else value


def blocks_of(model: nn.Module, sites: Mapping[Site, nn.Module]) -> dict[int, nn.Module]:
    """{block number: its module}: the shortest path that a block's sites share up to the number.

    Raises ValueError where sites have no block number.
    """
    modules = {clean_name(path): module for path, module in model.named_modules()}
    found: dict[int, nn.Module] = {}
    for site in sites:
        parts = site.name.split(".")
        if site.block >= 0 and str(site.block) in parts:
            found.setdefault(site.block, modules[".".join(parts[: parts.index(str(site.block)) + 1])])
    if not found:
        raise ValueError("the sites have no block numbers; propagation needs a pattern with the group `block`")
    return dict(sorted(found.items()))


@torch.no_grad()
def propagate(
    model: nn.Module,
    sites: Mapping[Site, nn.Module],
    calls: Sequence[Recorded],
    variants: Sequence[str],
    *,
    isolated: bool = True,
    engine: str = "auto",
    on_call: Callable[[], None] | None = None,
) -> pd.DataFrame:
    """Error sums of every variant at every block's output and at the model's, against the bf16 model.

    Returns:
        One row a (call, variant, quantised, seen_at): call, step, sum_yy, sum_ee, sum_ey. `fp32`, the model without
        bf16 linears, is among the variants as a floor.

    Raises:
        ValueError: an unknown variant, or sites without block numbers.
    """
    blocks = blocks_of(model, sites)
    points = {str(number): module for number, module in blocks.items()} | {OUTPUT: model}
    rows: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        with quantized(sites, BF16, engine):
            reference = _outputs(model, call, points)
        label = {"call": number, "step": call.label.step}
        for variant in (PLAIN, *variants):
            with quantized(sites, variant, engine):
                found = _outputs(model, call, points)
            rows += _compared(label | {"variant": variant, "quantised": ALL}, found, reference)
            for block in blocks if isolated and variant != PLAIN else ():
                only = {site: module for site, module in sites.items() if site.block == block}
                with quantized(sites, BF16, engine), quantized(only, variant, engine):
                    found = _outputs(model, call, {at: points[at] for at in (str(block), OUTPUT)})
                rows += _compared(label | {"variant": variant, "quantised": str(block)}, found, reference)
        if on_call is not None:
            on_call()
    return pd.DataFrame(rows)


def _outputs(model: nn.Module, call: Recorded, points: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What every point returns in one forward pass of the model."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        return lambda module, args, output: seen.update({name: output[0] if isinstance(output, tuple) else output})

    handles = [module.register_forward_hook(hook(name)) for name, module in points.items()]
    try:
        model(*call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _compared(
    label: dict[str, Any], found: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    return [label | {"seen_at": at} | sums(y, reference[at]) for at, y in found.items()]


def sums(quantised: Tensor, reference: Tensor) -> dict[str, float]:
    """sum_yy, sum_ee and sum_ey in float64."""
    y = reference.double()
    e = quantised.double() - y
    found = torch.stack([(y * y).sum(), (e * e).sum(), (e * y).sum()]).tolist()
    return dict(zip(("sum_yy", "sum_ee", "sum_ey"), found, strict=True))
