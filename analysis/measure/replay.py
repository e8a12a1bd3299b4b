"""(input, weight, bias, variants, reference) -> error sums: one layer's forward pass, replayed with int8 kernels.

    replay = Replay(["shipped", "fixed"], reference="bf16", device="cpu")
    sums = replay.measure(layer, x, output=None)      # fp64 [V, 2, 17], order stats.ALL_SUMS

The input that q, k and v share is quantised once per variant: `measure` recognises the tensor it saw last by identity
and in-place version counter. Under inference mode tensors have no counter, so nothing is shared there: a pass over the
input is small beside the products, and a write between q and k must be seen. (A write that goes around the counter,
through `.data` or a kernel of one's own, is not.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis import numerics
from analysis.measure import stats
from analysis.measure.engine import Engine, pick_engine
from analysis.measure.quantized import QuantizedInput
from analysis.sites import Site

REFERENCES = ("bf16", "as_run", "fp64")


@dataclass(frozen=True)
class Layer:
    """What a measurement needs to know of a linear layer: its site, weight [N, K], bias [N] and the norm behind it."""

    site: Site
    weight: Tensor
    bias: Tensor | None
    norm: stats.Norm | None = None
    stable: bool = True  # the weight is a parameter; False: a view that FSDP rebuilds, whose codes cannot be kept


def tensor_version(x: Tensor) -> int | None:
    """The in-place version counter; None for inference tensors, which have none and so are never taken as unchanged."""
    return None if x.is_inference() else x._version


def _stream(x: Tensor) -> int:
    """The CUDA stream in use: codes made on one are not ready on another."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


class Replay:
    """Replays layers with every variant and adds up errors against one reference.

    Args:
        variants: names of quantisers, in table order.
        reference: 'bf16', 'as_run' (needs the layer's own output) or 'fp64'.
        device: where the tensors will live; picks the engine unless `engine` forces one. A tensor on another kind of
            device gets that kind's engine.
        weight_cache_bytes: weight codes kept between calls on a CPU; on a GPU they are made anew, which costs less
            than a hundredth of the products and keeps the memory at one layer's.
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
        self._choice, self._engines = engine, {torch.device(device).type: self.engine}
        self._weights: dict[str, tuple[tuple[int, int | None], tuple[Tensor, Tensor]]] = {}
        self._weight_bytes, self._weight_limit = 0, weight_cache_bytes
        self._valid: Tensor | None = None
        self._last: tuple[Tensor, tuple[int | None, int], Tensor | None, QuantizedInput] | None = None

    def measure(
        self,
        layer: Layer,
        x: Tensor,
        output: Tensor | None = None,
        groups: Tensor | None = None,
        plain: bool = False,
    ) -> Tensor:
        """Error sums of one layer on one input.

        Args:
            layer: the layer.
            x: its input, floating [..., K].
            output: what the layer returned, [..., N]; needed by the reference `as_run` only.
            groups: uint8, one per row: 1 valid, 2 padding, 0 left out. None: all rows valid.
            plain: the output is what `F.linear` returned. In bf16 on a GPU it then is the bf16 reference itself, which
                need not be computed again.

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
            engine = self.engine_for(x.device.type)
            q = self._quantized(engine, x, groups)
            y = self._reference(layer, x, output, q, plain)
            output_sums = engine.error_sums(q, self._weight(engine, layer), y, layer.bias, layer.norm)
            return torch.cat([q.sums, output_sums], dim=2)

    @property
    def last_input(self) -> QuantizedInput | None:
        """The input that was measured last, quantised; None after `forget`."""
        return None if self._last is None else self._last[3]

    def forget(self) -> None:
        """Drop the tensors kept for sharing (call at the end of a forward pass)."""
        self._last = None

    def engine_for(self, kind: str) -> Engine:
        """The engine for tensors on 'cpu' or 'cuda'."""
        if kind not in self._engines:
            self._engines[kind] = pick_engine(self.variants, kind, self._choice)
        return self._engines[kind]

    def _quantized(self, engine: Engine, x: Tensor, groups: Tensor | None) -> QuantizedInput:
        state = (tensor_version(x), _stream(x))
        if self._last is not None:
            seen, seen_state, seen_groups, quantized = self._last
            if seen is x and state[0] is not None and seen_state == state and seen_groups is groups:
                return quantized
        flat = x.reshape(-1, x.shape[-1])  # [M, K]
        everything = self._ones(len(flat), x.device) if groups is None else groups
        quantized = engine.quantize(flat, everything.reshape(-1))
        self._last = (x, state, groups, quantized)
        return quantized

    def _ones(self, rows: int, device: torch.device) -> Tensor:
        """Groups that say 'all valid'; the last ones made are kept, since layers repeat their sizes."""
        if self._valid is None or len(self._valid) != rows or self._valid.device != device:
            self._valid = torch.ones(rows, dtype=torch.uint8, device=device)
        return self._valid

    def _reference(
        self, layer: Layer, x: Tensor, output: Tensor | None, q: QuantizedInput, plain: bool
    ) -> Tensor:  # fmt: skip
        if self.reference == "bf16":
            if plain and output is not None and output.is_cuda and output.dtype == torch.bfloat16:
                return output.reshape(-1, output.shape[-1])
            return numerics.bf16_linear(q.x_bf16, layer.weight, layer.bias)
        if self.reference == "fp64":
            flat = x.reshape(-1, x.shape[-1]).double()
            bias = None if layer.bias is None else layer.bias.double()
            return torch.nn.functional.linear(flat, layer.weight.double(), bias)
        if output is None or output.numel() == 0 < x.numel():
            raise ValueError(f"{layer.site.name}: reference 'as_run' needs the layer's output; it was not captured")
        return output.reshape(-1, output.shape[-1])

    def _weight(self, engine: Engine, layer: Layer) -> tuple[Tensor, Tensor]:
        weight, name = layer.weight, layer.site.name
        if weight.device.type != "cpu" or not layer.stable:
            return engine.quantize_weight(weight)
        key = (weight.data_ptr(), tensor_version(weight))
        if name in self._weights and self._weights[name][0] == key:
            return self._weights[name][1]
        codes = engine.quantize_weight(weight)
        self._weight_bytes += codes[0].numel() if name not in self._weights else 0
        if self._weight_bytes <= self._weight_limit:
            self._weights[name] = (key, codes)
        return codes
