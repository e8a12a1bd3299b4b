"""What an audit says: findings, the verdict of each dtype, and the report that is written as JSON.

A `defect` is a wrong result for legitimate input; a `note` is a choice, a refusal, or what happens to input that no
quantiser promises to handle. `clean` means no defect.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

DEFECT, NOTE = "defect", "note"
ROUNDINGS = ("truncate", "floor", "floor_half", "half_away", "half_even", "stochastic", "double_rounded", "other")
# Worst first: the verdict of a target is that of its worst dtype.
SEVERITY_ORDER = ("other", "truncate", "floor", "double_rounded", "stochastic", "floor_half", "half_away", "half_even")
BIASED = ("other", "truncate", "floor", "double_rounded")


@dataclass(frozen=True)
class Finding:
    """One observation: the input that shows it, what came, what should have come."""

    check: str
    severity: str
    input: str
    got: str
    expected: str
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({', '.join(self.dtypes)})" if self.dtypes else ""
        return f"{self.severity} {self.check}{where}: {self.input} -> {self.got}; expected {self.expected}"


def merged(findings: list[Finding]) -> list[Finding]:
    """One finding a (check, severity), with every dtype that shows it; the first example is kept. Defects first."""
    kept: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = finding.check, finding.severity
        if key in kept:
            dtypes = dict.fromkeys((*kept[key].dtypes, *finding.dtypes))
            kept[key] = replace(kept[key], dtypes=tuple(dtypes))
        else:
            kept[key] = finding
    return sorted(kept.values(), key=lambda finding: finding.severity != DEFECT)


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    `rounding` and `figures` are those of the worst dtype (`figures["dtype"]`); `by_dtype` has all of them.
    Figures in LSB are means over Gaussian rows, `*_interval` their 95 % intervals (see `figures.measure`).
    """

    target: str
    device: str
    dtypes: tuple[str, ...]
    rounding: str
    clean: bool
    layout: str
    figures: dict[str, Any]
    findings: tuple[Finding, ...]
    by_dtype: dict[str, dict[str, Any]]
    versions: dict[str, str]
    seed: int
    seconds: float
    source: dict[str, str] = field(default_factory=dict)

    @property
    def defects(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == DEFECT)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def write_json(self, path: Path) -> None:
        path.write_text(self.to_json())

    def __str__(self) -> str:
        lines = [f"{self.target}: rounding {self.rounding}, {'clean' if self.clean else 'not clean'}"]
        return "\n".join(lines + [f"  {finding}" for finding in self.findings])
