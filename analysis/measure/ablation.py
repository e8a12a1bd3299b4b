"""One named change to one stage of the int8 layer at a time, against one baseline, for both roundings.

The baseline is the contract's layer: activations per token with fp32 scales, weights per output channel with fp32
scales, int32 accumulation, bf16 output. FACTORS is the frozen table of changes. Everything a setting does not change
goes through `numerics`, so that a setting without a change gives the contract's output bit for bit and a change of 0.

    ablation = Ablation(rows=128)
    sums = ablation.measure(layer, x, call=0)      # fp64 [settings, 2]: sum_ee, sum_yy against the bf16 layer

`results.ablation` turns the sums of many calls into the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from analysis import numerics
from analysis.measure.replay import Layer
from analysis.numerics import Rounding

GROUP = 128  # input features that share a scale
ROUNDINGS = (Rounding.SHIPPED, Rounding.FIXED)
_SCALE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """Every stage of the layer. None leaves an operand unquantised, in bf16."""

    rounding: Rounding | None = None
    activation: str = "token"  # token, tensor or group128
    activation_scale: str = "fp32"  # of the product; the codes are made with the fp32 scale
    weight: str | None = "channel"  # channel, tensor or None
    weight_scale: str = "fp32"  # as activation_scale: what casting the scales with the model does
    accumulation: str = "int32"  # int32, fp32 (sums of codes) or dequantised (sums of scaled operands, in fp32)
    output: str = "bf16"


@dataclass(frozen=True)
class Change:
    """A factor at a level: which fields of the baseline's Setting it replaces."""

    factor: str
    level: str
    stage: str
    fields: tuple[tuple[str, Any], ...]

    def applied(self, setting: Setting) -> Setting:
        return replace(setting, **dict(self.fields))


def _change(factor: str, level: str, stage: str, **fields: Any) -> Change:
    return Change(factor, level, stage, tuple(fields.items()))


FACTORS: tuple[Change, ...] = (
    _change("none", "baseline", "none"),
    _change("accumulation", "fp32", "product", accumulation="fp32"),
    _change("accumulation", "dequantised fp32", "product", accumulation="dequantised"),
    _change("weight_scale", "bf16", "weight scales", weight_scale="bf16"),
    _change("weight_scale", "fp16", "weight scales", weight_scale="fp16"),
    _change("activation_scale", "bf16", "activation scales", activation_scale="bf16"),
    _change("activation_granularity", "tensor", "activation scales", activation="tensor"),
    _change("activation_granularity", "group128", "activation scales", activation="group128"),
    _change("weight_granularity", "tensor", "weight scales", weight="tensor"),
    *(_change("rounding", r.value, "activation codes", rounding=r) for r in Rounding),
    _change("only", "activation", "operands", weight=None),
    _change("only", "weight", "operands", rounding=None),
    _change("only", "bf16 output", "operands", rounding=None, weight=None),
    _change("output", "fp32", "output", output="fp32"),
)
KNOWN = tuple(dict.fromkeys(change.factor for change in FACTORS))


def pick_factors(names: Sequence[str] | None) -> tuple[Change, ...]:
    """The changes of the named factors, all for None; the control `none` is always among them."""
    if names is None:
        return FACTORS
    if unknown := [name for name in names if name not in KNOWN]:
        raise ValueError(f"unknown factor {', '.join(map(repr, unknown))}; known: {', '.join(KNOWN)}")
    return tuple(change for change in FACTORS if change.factor in (*names, "none"))


@dataclass
class Ablation:
    """Measures every setting that the chosen factors need, each once.

    Args:
        factors: names of KNOWN, None for all.
        rows: rows of each input that are measured, drawn without replacement; None: all. Scales per tensor are
            those of the whole input that is given.
        seed: of the draw and of stochastic rounding; both depend on (seed, layer, call) only.
    """

    factors: Sequence[str] | None = None
    rows: int | None = 128
    seed: int = 0
    changes: tuple[Change, ...] = field(init=False)
    settings: list[Setting] = field(init=False)

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}; leave it out to measure all")
        self.changes = pick_factors(self.factors)
        wanted = [change.applied(Setting(rounding)) for rounding in ROUNDINGS for change in self.changes]
        self.settings = list(dict.fromkeys(wanted))

    def index(self, change: Change, rounding: Rounding) -> int:
        """Place of a change's setting among `settings`, and so in what `measure` returns."""
        return self.settings.index(change.applied(Setting(rounding)))

    @torch.no_grad()
    def measure(self, layer: Layer, x: Tensor, groups: Tensor | None = None, call: int = 0) -> Tensor:
        """(sum_ee, sum_yy) of every setting on one input, fp64 [settings, 2] on x's device.

        Args:
            layer: the layer.
            x: its input, floating [..., K]; rows with NaN or Inf are left out.
            groups: uint8, one per row; rows of group 0 are left out.
            call: label of the forward pass.
        """
        with torch.autocast(x.device.type, enabled=False):
            picked, absmax = sample(x, groups, self.rows, f"{self.seed}/{layer.site.name}/{call}")
            y = numerics.bf16_linear(picked, layer.weight, layer.bias).double()
            stages = _Stages(layer, picked, absmax, f"{self.seed}/{layer.site.name}/{call}/stochastic")
            energies = [((stages.output(s).double() - y) ** 2).sum() for s in self.settings]
            return torch.stack([torch.stack(energies), (y * y).sum().expand(len(energies))], dim=1)


def sample(x: Tensor, groups: Tensor | None, rows: int | None, key: str) -> tuple[Tensor, Tensor]:
    """(finite rows of x drawn by `key`, [M, K]; absmax of all of its finite rows, a scalar)."""
    flat = x.reshape(-1, x.shape[-1])
    kept = ~numerics.nonfinite_rows(flat)
    if groups is not None:
        kept &= groups.reshape(-1).to(flat.device) != 0
    flat = flat[kept]
    absmax = flat.abs().amax().float() if len(flat) else torch.zeros((), device=flat.device)
    if rows is not None and len(flat) > rows:
        chosen = torch.randperm(len(flat), generator=keyed_generator(key))[:rows].sort().values
        flat = flat[chosen.to(flat.device)]
    return flat, absmax


def keyed_generator(key: str) -> torch.Generator:
    """A CPU generator fixed by a text."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class _Stages:
    """The layer's outputs on one input for any setting; codes that settings share are made once."""

    def __init__(self, layer: Layer, x: Tensor, absmax: Tensor, key: str) -> None:
        self.layer, self.x, self.absmax, self.key = layer, x, absmax, key
        self._activations: dict[tuple[Rounding, str], tuple[Tensor, Tensor]] = {}
        self._weights: dict[str, tuple[Tensor, Tensor]] = {}

    def output(self, s: Setting) -> Tensor:
        """y [M, N] in the setting's output dtype."""
        out = torch.float32 if s.output == "fp32" else torch.bfloat16
        bias = self.layer.bias
        if s.rounding is None or s.weight is None:
            y = self._unquantised(s)
        else:
            a, a_scales = self._activation(s.rounding, s.activation)
            b, b_scales = self._weight(s.weight)
            a_scales, b_scales = _cast(a_scales, s.activation_scale), _cast(b_scales, s.weight_scale)
            if s.activation == "token" and s.accumulation == "int32":
                return numerics.int8_linear(a, a_scales[:, 0], b, b_scales, bias, out)
            y = _product(a, a_scales, b, b_scales, s.accumulation)
        return y.to(out) if bias is None else y.to(out) + bias.to(out)

    def _unquantised(self, s: Setting) -> Tensor:
        """At least one operand in bf16: fp32 products of what each operand stands for, [M, N] fp32."""
        x, w = self.x.to(torch.bfloat16).float(), self.layer.weight.to(torch.bfloat16).float()
        if s.rounding is not None:
            a, a_scales = self._activation(s.rounding, "token")
            return (a.float() @ w.t()) * a_scales
        if s.weight is not None:
            b, b_scales = self._weight(s.weight)
            return (x @ b.float().t()) * b_scales
        return x @ w.t()

    def _activation(self, rounding: Rounding, granularity: str) -> tuple[Tensor, Tensor]:
        """Codes int8 [M, K] and scales fp32 [M, 1], or [M, groups]."""
        key = (rounding, granularity)
        if key not in self._activations:
            self._activations[key] = self._quantize(rounding, granularity)
        return self._activations[key]

    def _quantize(self, rounding: Rounding, granularity: str) -> tuple[Tensor, Tensor]:
        rows, features = self.x.shape
        draw = keyed_generator(self.key) if rounding is Rounding.STOCHASTIC else None
        if granularity == "token":
            codes, scales = numerics.quantize_rows(self.x, rounding, draw)
            return codes, scales[:, None]
        if granularity == "tensor":
            # One long row. The whole tensor's absmax comes along as one more value, so that it sets the scale.
            long = torch.cat([self.x.float().flatten(), self.absmax[None]])[None]
            codes, scales = numerics.quantize_rows(long, rounding, draw)
            return codes[0, :-1].reshape(rows, features), scales.expand(rows)[:, None]
        padded = torch.nn.functional.pad(self.x, (0, -features % GROUP))
        codes, scales = numerics.quantize_rows(padded.reshape(-1, GROUP), rounding, draw)
        return codes.reshape(rows, -1)[:, :features], scales.reshape(rows, -1)

    def _weight(self, granularity: str) -> tuple[Tensor, Tensor]:
        """Codes int8 [N, K] and scales fp32 [N]."""
        if granularity not in self._weights:
            w = self.layer.weight
            if granularity == "channel":
                self._weights[granularity] = numerics.quantize_weight(w)
            else:
                codes, scales = numerics.quantize_weight(w.reshape(1, -1))
                self._weights[granularity] = codes.reshape(w.shape), scales.expand(len(w))
        return self._weights[granularity]


def _cast(scales: Tensor, name: str) -> Tensor:
    return scales.to(_SCALE_TYPES[name]).float()


def _product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, accumulation: str) -> Tensor:
    """fp32 [M, N] of codes a [M, K], b [N, K] with scales [M, 1 or groups] and [N]."""
    if accumulation == "fp32":
        return (a.float() @ b.float().t()) * a_scales * b_scales
    if accumulation == "dequantised":
        return (a.float() * a_scales) @ (b.float() * b_scales[:, None]).t()
    total = torch.zeros(len(a), len(b), device=a.device)
    step = GROUP if a_scales.shape[1] > 1 else a.shape[1]
    for g, k in enumerate(range(0, a.shape[1], step)):
        acc = numerics.int8_matmul(a[:, k : k + step].contiguous(), b[:, k : k + step].contiguous())
        total += acc.float() * a_scales[:, g : g + 1]
    return total * b_scales
