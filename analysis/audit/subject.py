"""A target with one input dtype and all that has been learned about it: scales, rounding, figures, findings.

`judge` fills it, the edge checks read it and add findings. It is the only way in which a check runs the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from analysis.audit.call import FILLS, Call, Outcome
from analysis.audit.classify import Decision
from analysis.audit.findings import DEFECT, Finding
from analysis.audit.grid import INT8, Grid
from analysis.audit.layout import PER_ROW, Layout
from analysis.audit.rules import Batch, Hypothesis
from analysis.audit.runner import Runner


@dataclass
class Subject:
    """See the module. `shape` is an input shape that the target accepts; `generator` seeds every random input."""

    runner: Runner
    dtype: torch.dtype
    shape: tuple[int, int]
    generator: torch.Generator
    grid: Grid = INT8
    layout: Layout = PER_ROW
    scale_dtype: torch.dtype | None = None
    decision: Decision | None = None
    rounding: str = "other"
    figures: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unwritten: Tensor | None = None  # bool [M, K] of the base shape: codes that hold whatever memory held
    scale_ratio: tuple[float, float] | None = None  # returned step over absmax / limit: median, largest deviation
    scale_error: float = 1.0  # median of the returned step over the one that was used

    @property
    def name(self) -> str:
        return short(self.dtype)

    @property
    def hypothesis(self) -> Hypothesis:
        assert self.decision is not None
        return self.decision.hypothesis

    def run(self, x: Tensor, **options: Any) -> Outcome:
        """Call the target on x [M, K] in this dtype; options as in `Call`. A modified input becomes a finding."""
        if self.unwritten is not None:
            options.setdefault("fill", 0)
        outcome = self.runner.run(Call(x.to(self.dtype), **options))
        if outcome.input_changed and not self.has("input_modified"):
            given = f"{describe(x.to(self.dtype))}, {options.get('view', 'plain')} layout"
            self.add("input_modified", DEFECT, given, "the input or memory beside it was written to", "input unchanged")
        return outcome

    def add(self, check: str, severity: str, given: str, got: str, expected: str) -> None:
        self.findings.append(Finding(check, severity, given, got, expected, (self.name,)))

    def has(self, check: str, severity: str | None = None) -> bool:
        return any(f.check == check and severity in (None, f.severity) for f in self.findings)

    def written(self, index: Tensor) -> Tensor:
        """bool: codes that the target may have written; all of them, unless it is known to leave some out."""
        if self.unwritten is None:
            return torch.ones_like(index, dtype=torch.bool)
        fill = FILLS[0][0 if self.grid is INT8 else 2]
        return index != self.grid.index(torch.tensor([fill]).to(self.grid.dtype))

    def batch(self, pairs: list[tuple[Tensor, Outcome]]) -> Batch:
        """Flatten (input, outcome) pairs. ValueError when the scales of one do not fit its input."""
        parts: dict[str, list[Tensor]] = {name: [] for name in Batch.__dataclass_fields__}
        offset = 0
        for i, (x, outcome) in enumerate(pairs):
            assert outcome.codes is not None
            m, k = x.shape
            ids = self.layout.group_ids(m, k).flatten()
            absmax = self.layout.absmax(x)
            step = self.layout.steps(outcome.scales, m, k, self.grid.limit)
            parts["x"].append(x.double().flatten())
            parts["absmax"].append(absmax[ids])
            parts["returned"].append(step[ids])
            parts["index"].append(self.grid.index(outcome.codes).flatten())
            parts["row"].append(torch.arange(m).repeat_interleave(k))
            parts["col"].append(torch.arange(k).repeat(m))
            parts["group"].append(ids + offset)
            parts["probe"].append(torch.full((m * k,), i))
            offset += len(absmax)
        return Batch(**{name: torch.cat(values) for name, values in parts.items()})


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(x: Tensor) -> str:
    return f"{short(x.dtype)} {list(x.shape)}"
