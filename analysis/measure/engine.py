"""The ways of doing a measurement: fused Triton passes on a GPU, blocked PyTorch on a CPU, the reference anywhere.

All take the same tensors and return the same sums; `pick_engine` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from analysis import numerics
from analysis.kernels import registry
from analysis.measure import stats
from analysis.measure.quantized import QuantizedInput
from analysis.measure.rowwise import RowwiseEngine

Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]  # [M, K] -> codes int8 [M, K], scales fp32 [M]


class Engine(Protocol):
    name: str

    def quantize(self, x: Tensor, groups: Tensor) -> QuantizedInput: ...

    def quantize_weight(self, w: Tensor) -> tuple[Tensor, Tensor]: ...

    def int8_linear(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None
    ) -> Tensor: ...  # fmt: skip

    def output_sums(
        self, yqs: Sequence[Tensor], y: Tensor, bias: Tensor | None, groups: Tensor, norm: stats.Norm | None
    ) -> Tensor: ...  # fmt: skip

    def error_sums(
        self, q: QuantizedInput, weight: tuple[Tensor, Tensor], y: Tensor, bias: Tensor | None, norm: stats.Norm | None
    ) -> Tensor:  # fmt: skip
        """Both steps: every variant's output for an input, and its sums. fp64 [V, 2, 8]."""
        ...


class ReferenceEngine:
    """Plain PyTorch, fp64 sums. Any device, any quantiser."""

    name = "reference"

    def __init__(self, quantizers: Sequence[Quantizer]) -> None:
        self.quantizers = list(quantizers)

    def quantize(self, x: Tensor, groups: Tensor) -> QuantizedInput:
        row_sums, groups = stats.row_sums(x, groups)
        s = numerics.scaled(x)
        pairs = [quantizer(x) for quantizer in self.quantizers]
        code_sums = torch.stack([stats.code_sums(x, s, codes, groups) for codes, _ in pairs])
        return QuantizedInput(
            x.to(torch.bfloat16), [c for c, _ in pairs], [s for _, s in pairs], groups, row_sums, code_sums
        )  # fmt: skip

    def quantize_weight(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return numerics.quantize_weight(w)

    def int8_linear(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None
    ) -> Tensor:  # fmt: skip
        return numerics.int8_linear(a, a_scales, b, b_scales, bias)

    def output_sums(
        self, yqs: Sequence[Tensor], y: Tensor, bias: Tensor | None, groups: Tensor, norm: stats.Norm | None
    ) -> Tensor:  # fmt: skip
        return stats.output_sums(yqs, y, bias, groups, norm)

    def error_sums(
        self, q: QuantizedInput, weight: tuple[Tensor, Tensor], y: Tensor, bias: Tensor | None, norm: stats.Norm | None
    ) -> Tensor:  # fmt: skip
        yqs = [self.int8_linear(a, s, *weight, bias) for a, s in zip(q.codes, q.scales, strict=True)]
        return self.output_sums(yqs, y, bias, q.groups, norm)


class TritonEngine:
    """Fused Triton passes: one over the input, one GEMM a variant, one over the outputs. No host synchronisation."""

    name = "triton"

    def __init__(self, variants: Sequence[str], quantizers: Sequence[Quantizer]) -> None:
        from analysis.kernels import error_sums, gemm, quantize, weight

        self._quantize, self._gemm, self._sums, self._weight = quantize, gemm, error_sums, weight
        self.quantizers = list(quantizers)
        known = tuple(r.value for r in (numerics.Rounding.SHIPPED, numerics.Rounding.FIXED))
        self.fused = tuple(numerics.Rounding(v) for v in variants) if set(variants) <= set(known) else None

    def quantize(self, x: Tensor, groups: Tensor) -> QuantizedInput:
        if self.fused is None:
            return ReferenceEngine(self.quantizers).quantize(x, groups)
        p = self._quantize.quantize_pass(x, self.fused, groups)
        return QuantizedInput(p.x_bf16, p.codes, p.scales, p.groups, p.row_sums, p.code_sums)

    def quantize_weight(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return self._weight.quantize_weight(w)

    def int8_linear(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None
    ) -> Tensor:  # fmt: skip
        return self._gemm.int8_linear(a, a_scales, b, b_scales, bias)

    def output_sums(
        self, yqs: Sequence[Tensor], y: Tensor, bias: Tensor | None, groups: Tensor, norm: stats.Norm | None
    ) -> Tensor:  # fmt: skip
        return self._sums.output_sums(list(yqs), y, bias, groups, norm)

    def error_sums(
        self, q: QuantizedInput, weight: tuple[Tensor, Tensor], y: Tensor, bias: Tensor | None, norm: stats.Norm | None
    ) -> Tensor:  # fmt: skip
        if isinstance(q.codes, Tensor) and isinstance(q.scales, Tensor):
            yqs = list(self._gemm.int8_linears(q.codes, q.scales, *weight, bias))
        else:
            yqs = [self.int8_linear(a, s, *weight, bias) for a, s in zip(q.codes, q.scales, strict=True)]
        return self.output_sums(yqs, y, bias, q.groups, norm)


def pick_engine(variants: Sequence[str], device: torch.device | str, engine: str = "auto") -> Engine:
    """The engine for `variants` (names of roundings, or FILE:FUNCTION) on a device.

    Raises:
        ValueError: an unknown engine or variant, or Triton asked for where it cannot run.
    """
    if not variants or len(set(variants)) != len(variants):
        raise ValueError(f"variants must be distinct and at least one, got {list(variants)}")
    quantizers = [registry.quantizer(v, device, engine) for v in variants]
    on_triton = engine == "triton" or (engine == "auto" and torch.device(device).type == "cuda" and registry.TRITON)
    if on_triton:
        return TritonEngine(variants, quantizers)
    if engine == "auto" and torch.device(device).type == "cpu":
        return RowwiseEngine(variants, quantizers)
    return ReferenceEngine(quantizers)
