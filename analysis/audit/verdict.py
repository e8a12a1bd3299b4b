"""What the decided rounding and scales mean for the user: findings on scales, range and rounding, with an example."""

from __future__ import annotations

from dataclasses import replace

import torch

from analysis.audit.classify import Decision, usable
from analysis.audit.findings import BIASED, DEFECT, NOTE
from analysis.audit.grid import INT8
from analysis.audit.rules import NEAREST, Batch
from analysis.audit.subject import Subject, short

DEMONSTRATION = (127.0, 0.4, 0.5, 0.6, 1.5, 2.5, 126.6, -0.6, -1.5, -2.5, -126.6)
SIMPLE = (0.6, -0.6, 0.75, -0.75, 0.25, -0.25, 1.75, -1.75, 1.25, -1.25, 10.75, -10.75, 50.75, -50.75, 100.0, -100.0)
# Relative: a few fp32 roundings, or half an ulp of a narrower returned scale.
SCALE_ULP = {torch.float32: 4e-6, torch.float64: 4e-6, torch.bfloat16: 2**-7.9, torch.float16: 2**-10.9}
HARMLESS_SCALE_ERROR = 1e-3
WHY_NOTE = {"floor_half": "ties always go up, -1.5 to -1", "stochastic": "unbiased, with twice the error energy"}


def name(decision: Decision, tie: str) -> str:
    """The verdict's word for a decision."""
    if decision.rule in NEAREST:
        return "double_rounded" if decision.double_rounded else tie
    return decision.rule


def scale_findings(subject: Subject, batch: Batch) -> None:
    """The returned scale against the one that was used, and its dtype."""
    if subject.layout.static is not None or subject.scale_dtype is None:
        return
    b = batch.where(batch.absmax > 0)
    ratio = b.returned / (b.absmax / subject.grid.limit)
    median = float(ratio.median())
    subject.scale_ratio = median, float((ratio / median - 1).abs().max())
    used = subject.hypothesis.step.of(b.absmax, b.returned)
    subject.scale_error = float((b.returned / used).median())
    off = (b.returned / used - 1).abs()
    worst = int(off.argmax())
    error = float(off[worst])
    given = f"a scale group with absmax {float(b.absmax[worst]):g}"
    got = f"returned {float(b.returned[worst]):.7g}, {error:.2g} off (relative)"
    expected = f"{float(used[worst]):.7g} ({subject.hypothesis.step.name}), which made the codes"
    if not error <= max(SCALE_ULP.get(subject.scale_dtype, 0.0), HARMLESS_SCALE_ERROR):
        subject.add("scale_used", DEFECT, given, got, expected)
    elif error > SCALE_ULP[torch.float32]:
        subject.add("scale_used", NOTE, given, got, expected)
    if subject.scale_dtype in (torch.bfloat16, torch.float16):
        subject.add("scale_dtype", NOTE, f"{subject.name} input", f"{short(subject.scale_dtype)} scales", "float32")


def range_findings(subject: Subject, batch: Batch) -> None:
    """The positive limit, the use of -128, and codes that wrapped around at the ends of the range."""
    grid, limit = subject.grid, subject.hypothesis.step.limit
    if limit is not None and abs(limit / grid.limit - 1) > 1e-3:
        subject.add("limits", NOTE, "the absmax of a group", f"scaled to {limit:.5g}", f"scaled to {grid.limit:g}")
    elif grid is INT8 and bool((batch.index == grid.lo).any()):
        subject.add("limits", NOTE, "the most negative values", "code -128", "codes in [-127, 127]")
    p = grid.position(subject.hypothesis.scaled(batch)).clamp(grid.lo, grid.hi)
    bad = ((batch.index - p).abs() > 2) & (p.abs() > grid.hi - 1) & (batch.absmax > 0)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        given = f"{float(batch.x[i]):g} in a group with absmax {float(batch.absmax[i]):g}"
        got = f"code {int(batch.index[i])}; {int(bad.sum())} such codes" if grid is INT8 else "NaN or a wrong code"
        subject.add("wrap", DEFECT, given, got, f"code {int(p[i].round())}")


def rounding_findings(subject: Subject, batch: Batch, tie: str, counts: dict[str, int]) -> None:
    """The verdict itself as a finding, what it rests on, and where it does not hold."""
    decision = subject.decision
    assert decision is not None
    subject.figures["demonstration"] = shown = _demonstrate(subject)
    if subject.rounding == "stochastic":
        subject.findings = [finding for finding in subject.findings if finding.check != "two_runs"]
    if decision.positions:
        subject.add("positions", DEFECT, "all probes", decision.positions, "the same rounding at every position")
    elif decision.rule in NEAREST and not decision.double_rounded:
        _tie_findings(subject, tie, counts)
    if subject.rounding in BIASED:
        given, got, expected = _example(subject, batch) or (shown["input"], shown["got"], shown["half_even"])
        subject.figures["smallest_input"] = {"input": given, "got": got, "expected": expected}
        bias, gain = subject.figures["magnitude_bias_lsb"], subject.figures["row_gain"]
        got = f"{got} ({subject.rounding}; magnitude bias {bias:+.3f} LSB, row gain {gain:.4f})"
        if subject.rounding == "other":
            got = f"{got}; {decision.evidence}"
        subject.add("rounding", DEFECT, given, got, expected)
    elif subject.rounding in WHY_NOTE:
        got = f"{subject.rounding}: {WHY_NOTE[subject.rounding]}"
        subject.add("rounding", NOTE, shown["input"], got, "half_even or half_away")
    if decision.evidence and subject.rounding != "other":
        subject.add("arithmetic", NOTE, "all probes", decision.evidence, "an fp32 quotient x / (absmax / 127)")


def _tie_findings(subject: Subject, tie: str, counts: dict[str, int]) -> None:
    if counts["seen"] == 0:
        text = "no exact tie could be produced under this scale"
        subject.add("ties", NOTE, "designed rows", text, "a tie rule; half_even is only assumed")
    elif counts[tie] > 0:
        text = f"{counts[tie]} of {counts['seen']} exact ties follow no rule; closest is {tie}"
        subject.add("ties", NOTE, "designed rows with a power-of-two step", text, "one tie rule")


def _demonstrate(subject: Subject) -> dict[str, str]:
    """One row with step 1, rounded by the target and by half even; zeros fill the row."""
    step = subject.layout.static or 1.0
    row = torch.tensor(DEMONSTRATION, dtype=torch.float64) * step
    row[0] = subject.grid.limit * step
    x = torch.zeros(subject.shape, dtype=torch.float64)
    n = min(subject.shape[1], len(row))
    x[:, :n] = row[:n]
    x = x.to(subject.dtype)
    outcome = subject.run(x)
    nearest = torch.round(subject.grid.position(x[0, :n].double() / step)).long()
    got = outcome.error if outcome.codes is None else str(subject.grid.index(outcome.codes)[0, :n].tolist())
    shown = "[" + ", ".join(f"{v:g}" for v in x[0, :n].tolist()) + ", 0, ...]"
    return {"input": shown, "got": got, "half_even": str(nearest.tolist())}


def _example(subject: Subject, batch: Batch) -> tuple[str, str, str] | None:
    """(input, got, expected) of the smallest input that shows the rounding: a simple row, else one from the probes."""
    return _simple_example(subject) or _found_example(subject, batch)


def _simple_example(subject: Subject) -> tuple[str, str, str] | None:
    """A row [limit, value, 0, ...] with step 1, for the first simple value that is not rounded to nearest."""
    m, k = subject.shape
    step = subject.layout.static or 1.0
    x = torch.zeros(m, k, dtype=torch.float64)
    x[:, 0] = subject.grid.limit * step
    simple = torch.tensor(SIMPLE[:m], dtype=torch.float64) * step
    x[: len(simple), 1] = simple
    x = x.to(subject.dtype)
    outcome = subject.run(x)
    if outcome.codes is None:
        return None
    got = subject.grid.index(outcome.codes)[: len(simple), 1]
    s = x[: len(simple), 1].double() / step
    nearest = torch.round(subject.grid.position(s)).long()
    for i in (got != nearest).nonzero().flatten().tolist():
        row = f"a row [{float(x[0, 0]):g}, {float(x[i, 1]):g}, 0, ...]"
        return row, f"code {int(got[i])}", f"code {int(nearest[i])}"
    return None


def _found_example(subject: Subject, batch: Batch) -> tuple[str, str, str] | None:
    """The element of smallest |s| that is not rounded to nearest, alone in a row with its absmax if that shows it."""
    grid = subject.grid
    nearest = replace(subject.hypothesis, quotient=None, rule="half_even")
    wrong = nearest.mismatch(batch, grid)[0] & usable(batch, grid, nearest)
    if not bool(wrong.any()):
        return None
    bad = batch.where(wrong)
    s = nearest.scaled(bad)
    i = int(s.abs().argmin())
    absmax, value, code = float(bad.absmax[i]), float(bad.x[i]), int(bad.index[i])
    expected = f"code {int(grid.position(s[i]).round())} (s = {float(s[i]):.6g})"
    if subject.layout.static is None:
        x = torch.zeros(subject.shape, dtype=torch.float64)
        x[:, 0], x[:, 1] = absmax, value
        outcome = subject.run(x)
        if outcome.codes is not None and int(grid.index(outcome.codes)[0, 1]) == code:
            return f"a row [{absmax:g}, {value:.9g}, 0, ...]", f"code {code}", expected
    return f"{value:.9g} in a group with absmax {absmax:g}", f"code {code}", expected
