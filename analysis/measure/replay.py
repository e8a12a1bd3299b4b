"""(input, weight, bias, variants, reference) -> error sums: one layer's forward pass, replayed with int8 kernels.

    replay = Replay(["shipped", "fixed"], reference="bf16", device="cpu")
    sums = replay.measure(layer, x, output=None)      # fp64 [V, 2, 17], order stats.ALL_SUMS

The input that q, k and v share is quantised once per variant: `measure` recognises the tensor it saw last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis import numerics
from analysis.measure import stats
from analysis.measure.engine import QuantizedInput, pick_engine
from analysis.sites import Site

REFERENCES = ("bf16", "as_run", "fp64")


@dataclass(frozen=True)
class Layer:
    """What a measurement needs to know of a linear layer: its site, weight [N, K], bias [N] and the norm behind it."""

    site: Site
    weight: Tensor
    bias: Tensor | None
    norm: stats.Norm | None = None


def tensor_version(x: Tensor) -> int | None:
    """The in-place version counter; None for inference tensors, which have none and so are never taken as unchanged."""
    return None if x.is_inference() else x._version


class Replay:
    """Replays layers with every variant and adds up errors against one reference.

    Args:
        variants: names of quantisers, in table order.
        reference: 'bf16', 'as_run' (needs the layer's own output) or 'fp64'.
        device: where the tensors will live; picks the engine unless `engine` forces one.
        weight_cache_bytes: weight codes kept between calls; 0 keeps one layer's only.
    """

    def __init__(
        self,
        variants: Sequence[str],
        reference: str = "bf16",
        device: torch.device | str = "cpu",
        engine: str = "auto",
        weight_cache_bytes: int = 64 * 2**20,
    ) -> None:
        if reference not in REFERENCES:
            raise ValueError(f"unknown reference {reference!r}; known: {', '.join(REFERENCES)}")
        self.variants, self.reference = list(variants), reference
        self.engine = pick_engine(self.variants, device, engine)
        self._weights: dict[str, tuple[tuple[int, int | None], tuple[Tensor, Tensor]]] = {}
        self._weight_bytes, self._weight_limit = 0, weight_cache_bytes
        self._last: tuple[Tensor, int | None, Tensor | None, QuantizedInput] | None = None

    def measure(
        self, layer: Layer, x: Tensor, output: Tensor | None = None, groups: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Error sums of one layer on one input.

        Args:
            layer: the layer.
            x: its input, floating [..., K].
            output: what the layer returned, [..., N]; needed by the reference `as_run` only.
            groups: uint8, one per row: 1 valid, 2 padding, 0 left out. None: all rows valid.

        Returns:
            fp64 [V, 2, 17] on x's device, in the order of stats.ALL_SUMS.

        Raises:
            ValueError: the input's width is not the weight's, or `as_run` without an output.
        """
        if x.shape[-1] != layer.weight.shape[1]:
            raise ValueError(
                f"{layer.site.name}: input is {list(x.shape)}, weight is {list(layer.weight.shape)}; widths differ"
            )
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            q = self._quantized(x, groups)
            y = self._reference(layer, x, output, q)
            codes, scales = self._weight(layer)
            bias = layer.bias
            yqs = [self.engine.int8_linear(a, s, codes, scales, bias) for a, s in zip(q.codes, q.scales, strict=True)]
            output_sums = self.engine.output_sums(yqs, y, bias, q.groups, layer.norm)
            rows = q.row_sums.expand(len(yqs), -1, -1)
            return torch.cat([rows, q.code_sums, output_sums], dim=2)

    def forget(self) -> None:
        """Drop the input kept for sharing (call at the end of a forward pass)."""
        self._last = None

    def _quantized(self, x: Tensor, groups: Tensor | None) -> QuantizedInput:
        if self._last is not None:
            seen, version, seen_groups, quantized = self._last
            if seen is x and version is not None and version == tensor_version(x) and seen_groups is groups:
                return quantized
        flat = x.reshape(-1, x.shape[-1])  # [M, K]
        everything = torch.ones(len(flat), dtype=torch.uint8, device=x.device) if groups is None else groups
        quantized = self.engine.quantize(flat, everything.reshape(-1))
        self._last = (x, tensor_version(x), groups, quantized)
        return quantized

    def _reference(self, layer: Layer, x: Tensor, output: Tensor | None, q: QuantizedInput) -> Tensor:
        if self.reference == "bf16":
            return numerics.bf16_linear(q.x_bf16, layer.weight, layer.bias)
        if self.reference == "fp64":
            flat = x.reshape(-1, x.shape[-1]).double()
            bias = None if layer.bias is None else layer.bias.double()
            return torch.nn.functional.linear(flat, layer.weight.double(), bias)
        if output is None or output.numel() == 0 < x.numel():
            raise ValueError(f"{layer.site.name}: reference 'as_run' needs the layer's output; it was not captured")
        return output.reshape(-1, output.shape[-1])

    def _weight(self, layer: Layer) -> tuple[Tensor, Tensor]:
        weight, name = layer.weight, layer.site.name
        key = (weight.data_ptr(), tensor_version(weight))
        if name in self._weights and self._weights[name][0] == key:
            return self._weights[name][1]
        codes = numerics.quantize_weight(weight)
        self._weight_bytes += codes[0].numel() if name not in self._weights else 0
        if self._weight_bytes <= self._weight_limit:
            self._weights[name] = (key, codes)
        return codes
