"""Attach to a model's sites and hand every input to a sink, as a context manager.

    sites = find_sites(model, preset("matrix-game-3"))
    with attached(model, sites, sink):
        model(x)            # sink.begin_call(), sink.layer(...) per site, sink.end_call()

Hooks are removed on exit, also after an exception. They never write to a tensor, draw a random number or change an
output. A forward pass that raises is discarded: only finished calls count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from analysis.measure.replay import Layer
from analysis.measure.stats import Norm
from analysis.sites import Site, clean_name


@dataclass(frozen=True)
class Event:
    """One layer of one forward pass."""

    layer: Layer
    x: Tensor  # [..., K]
    output: Tensor  # [..., N]
    groups: Tensor | None  # uint8, one per row of x; None: all rows valid
    plain: bool = False  # the output is what F.linear returned: no other forward, no hook before this one


class Sink(Protocol):
    """Takes the events of a forward pass. `begin_call` also discards a call that never ended."""

    def begin_call(self) -> None: ...

    def layer(self, event: Event) -> None: ...

    def end_call(self) -> None: ...


def norm_of(modules: Mapping[str, nn.Module], site: Site) -> Norm | None:
    """Weight and eps of the RMSNorm behind a site; None where there is none.

    Raises ValueError where the path names something that is not an RMSNorm over a [N] weight.
    """
    module = modules.get(site.norm) if site.norm else None
    if module is None or isinstance(module, nn.Identity):
        return None
    weight, eps = getattr(module, "weight", None), getattr(module, "eps", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        raise ValueError(f"{site.norm}: expected an RMSNorm with a weight [N] and an eps, got {type(module).__name__}")
    return weight, eps


def layer_of(site: Site, module: nn.Module, norm: Norm | None) -> Layer:
    """The layer's tensors as they are now (under FSDP they are whole only inside the forward pass)."""
    weight, bias = module.weight, getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        shown = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"{site.name}: expected a floating weight [out, in] inside the forward pass, got {shown}")
    stable = isinstance(weight, nn.Parameter)
    return Layer(site, weight.detach(), bias.detach() if isinstance(bias, Tensor) else None, norm, stable)


def linear_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a linear layer was called with, by position or by keyword."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a linear layer called with one tensor, got {type(x).__name__}")
    return x


@contextmanager
def attached(model: nn.Module, sites: Mapping[Site, nn.Module], sink: Sink) -> Iterator[None]:
    """Hook the model and its sites; a call is one forward of `model`."""
    modules = {clean_name(path): module for path, module in model.named_modules()}
    handles = []

    def site_hook(site: Site) -> Any:
        norm = norm_of(modules, site)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            sink.layer(Event(layer_of(site, module, norm), linear_input(args, kwargs), output, None))

        return hook

    try:
        handles.append(model.register_forward_pre_hook(lambda *_: sink.begin_call()))
        for site, module in sites.items():
            handles.append(module.register_forward_hook(site_hook(site), with_kwargs=True))
        handles.append(model.register_forward_hook(lambda *_: sink.end_call()))
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
