"""What attention sees of the projections' error: the tensor that enters `o`, per head, on the bf16 model's inputs.

Only q and k are quantised (`qk`), or only v; the rest of the attention stays in bf16. The norms behind q and k divide
by the size of what they get, so that a common loss of magnitude cancels. `rel_mse_norm_frozen` is what would be seen if
they did not: the norms then divide by the size that the bf16 projection had.

    sums = attention_errors(model, sites, calls, ("shipped", "fixed"))
    # one row a (call, layer, quantised, variant, head)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from analysis.capture.hooks import norm_of
from analysis.rollout.propagation import Recorded, sums
from analysis.rollout.quantized import BF16, Forward, quantized, replaced
from analysis.sites import Site, clean_name

QK, V = ("q", "k"), ("v",)


@dataclass(frozen=True)
class _Attention:
    """One attention with its four sites and the norms behind q and k."""

    name: str
    module: nn.Module
    sites: dict[str, tuple[Site, nn.Module]]  # by projection
    norms: dict[str, tuple[nn.Module, Tensor, float]]  # by projection: module, weight, eps

    @property
    def heads(self) -> int:
        found = getattr(self.module, "heads", getattr(self.module, "num_heads", 1))
        return int(found)


def find_attentions(model: nn.Module, sites: Mapping[Site, nn.Module]) -> list[_Attention]:
    """Every module whose q, k, v and o are all sites. Raises ValueError where there is none."""
    modules = {clean_name(path): module for path, module in model.named_modules()}
    grouped: dict[str, dict[str, tuple[Site, nn.Module]]] = {}
    for site, module in sites.items():
        grouped.setdefault(site.name.rpartition(".")[0], {})[site.projection] = (site, module)
    found = []
    for name, members in grouped.items():
        if not {"q", "k", "v", "o"} <= set(members):
            continue
        norms = {}
        for projection in QK:
            site = members[projection][0]
            norm = norm_of(modules, site)
            if norm is not None:
                norms[projection] = (modules[site.norm], *norm)
        found.append(_Attention(name, modules[name], members, norms))
    if not found:
        raise ValueError("no module has q, k, v and o among the sites; what attention sees cannot be measured")
    return found


@torch.no_grad()
def attention_errors(
    model: nn.Module,
    sites: Mapping[Site, nn.Module],
    calls: Sequence[Recorded],
    variants: Sequence[str],
    *,
    engine: str = "auto",
    on_call: Callable[[], None] | None = None,
) -> pd.DataFrame:
    """Sums of the error of what enters `o`, and of the same with frozen norms (columns `frozen_ee`).

    The attention is run again on the inputs that it had in the bf16 model, so errors of other layers do not mix in.
    """
    attentions = find_attentions(model, sites)
    rows: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        inputs: dict[str, tuple[Any, Any]] = {}
        with ExitStack() as stack:
            stack.enter_context(quantized(sites, BF16, engine))
            for a in attentions:
                handle = a.module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=a.name, to=inputs: to.__setitem__(name, (args, kwargs)),
                    with_kwargs=True,
                )
                stack.callback(handle.remove)
            model(*call.args, **call.kwargs)
            for a in attentions:
                if a.name in inputs:
                    rows += [{"call": number} | row for row in _of_one(a, *inputs[a.name], variants, engine)]
        if on_call is not None:
            on_call()
    return pd.DataFrame(rows)


def _of_one(a: _Attention, args: Any, kwargs: Any, variants: Sequence[str], engine: str) -> list[dict[str, Any]]:
    """Rows of one attention on one input; its sites are in bf16 when this is called."""
    outputs: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for projection in QK:
            module = a.sites[projection][1]
            handle = module.register_forward_hook(lambda _, __, y, p=projection: outputs.__setitem__(p, y))
            stack.callback(handle.remove)
        reference = _entering_o(a, args, kwargs)
    frozen = {module: _frozen(outputs[p], weight, eps) for p, (module, weight, eps) in a.norms.items()}
    rows = []
    for variant in variants:
        for what in (QK, V):
            chosen = dict(a.sites[p] for p in what)
            with quantized(chosen, variant, engine):
                seen = _entering_o(a, args, kwargs)
                held = None
                if what is QK and frozen:
                    with replaced(frozen):
                        held = _entering_o(a, args, kwargs)
            site = a.sites[what[0]][0]
            label = {"layer": a.name, "block": site.block, "attention": site.attention}
            label |= {"quantised": "".join(what), "variant": variant}
            rows += [label | row for row in _by_head(a.heads, reference, seen, held)]
    return rows


def _by_head(heads: int, reference: Tensor, seen: Tensor, held: Tensor | None) -> list[dict[str, Any]]:
    rows = []
    split = [None if t is None else t.unflatten(-1, (heads, -1)) for t in (reference, seen, held)]
    for head in range(heads):
        y, q, f = (None if t is None else t[..., head, :] for t in split)
        assert y is not None
        assert q is not None
        row: dict[str, Any] = {"head": str(head)} | sums(q, y)
        rows.append(row | {"frozen_ee": None if f is None else sums(f, y)["sum_ee"]})
    return rows


def _frozen(bf16_output: Tensor, weight: Tensor, eps: float) -> Forward:
    """The RMSNorm with the divisor that it has on `bf16_output`, whatever it is given."""
    scale = torch.rsqrt(bf16_output.float().square().mean(-1, keepdim=True) + eps) * weight
    return lambda y: (y.float() * scale).to(y.dtype)


def _entering_o(a: _Attention, args: Any, kwargs: Any) -> Tensor:
    """Run the attention and return the input of its o."""
    seen: list[Tensor] = []
    handle = a.sites["o"][1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    try:
        a.module(*args, **kwargs)
    finally:
        handle.remove()
    return seen[-1]
