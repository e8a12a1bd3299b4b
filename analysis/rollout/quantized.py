"""Swap a model's measured linears for bf16 or int8 ones, site by site, and back.

Inside the block a site computes what the public model's own Int8Linear computes: rows quantised, int8 product, bf16
output, bias added in bf16, result cast to the input's dtype. The module stays where it is and only its `forward` is
replaced, so hooks keep firing and swapping back leaves nothing behind: the model's outputs are bit-identical after.

    with quantized(sites, "shipped"):
        frames = world.rollout(model, scenes, clips=4, seed=0)

Modes: `fp32` (the model as it is), `bf16` (the bf16 linear that int8 is compared with), or a quantiser's name. On CUDA
`shipped` and `fixed` run on the Triton kernels, elsewhere on the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from analysis import numerics
from analysis.kernels import registry
from analysis.measure.engine import pick_engine
from analysis.sites import Site

PLAIN, BF16 = "fp32", "bf16"
Forward = Callable[[Tensor], Tensor]


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Each module calls the given function instead of its own forward inside the block, and its own again after.

    Blocks may be nested; an exception restores too.
    """
    kept: dict[nn.Module, Any] = {}
    try:
        for module, forward in forwards.items():
            kept[module] = module.__dict__.get("forward")
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in kept.items():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


@contextmanager
def quantized(sites: Mapping[Site, nn.Module], mode: str, engine: str = "auto") -> Iterator[None]:
    """Every site of `sites` computes in `mode` inside the block; choose sites by passing fewer.

    Args:
        sites: what `find_sites` returned, or a part of it.
        mode: 'fp32', 'bf16', or a quantiser: a rounding of the contract or FILE:FUNCTION.
        engine: 'auto', 'triton' or 'reference', as `pick_engine`.

    Raises:
        ValueError: an unknown mode.
    """
    forwards = {} if mode == PLAIN else {module: forward_of(module, mode, engine) for module in sites.values()}
    with replaced(forwards):
        yield


def forward_of(module: nn.Module, mode: str, engine: str = "auto") -> Forward:
    """The forward function of one linear layer in a mode; weights are quantised now, once."""
    assert isinstance(module.weight, Tensor)
    weight = module.weight.detach()
    bias = module.bias.detach() if isinstance(module.bias, Tensor) else None
    if mode == BF16:
        half = weight.to(torch.bfloat16)
        return _on_rows(lambda x: numerics.bf16_linear(x, half, bias))
    chosen, quantize = pick_engine([mode], weight.device, engine), registry.quantizer(mode, weight.device, engine)
    codes, scales = numerics.quantize_weight(weight)

    def int8(x: Tensor) -> Tensor:
        a, a_scales = quantize(x)
        return chosen.int8_linear(a, a_scales, codes, scales, bias)

    return _on_rows(int8)


def _on_rows(linear: Forward) -> Forward:
    """A function of rows [M, K] as the forward of a layer: [..., K] -> [..., N] in the input's dtype."""

    def forward(input: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
            y = linear(input.reshape(-1, input.shape[-1]))
            return y.reshape(*input.shape[:-1], -1).to(input.dtype)

    return forward
