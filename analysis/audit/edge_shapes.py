"""Edge checks on shapes and memory: tails, row counts, layouts, poisoned surroundings, undefined lanes.

A refusal (the target raises) is a note: it cannot be wrong silently. A wrong code or scale is a defect.
"""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.audit.call import Outcome
from analysis.audit.classify import rules_by, spans
from analysis.audit.compare import disagreement, wrong_codes
from analysis.audit.findings import DEFECT, NOTE
from analysis.audit.rules import RULES
from analysis.audit.subject import Subject, describe

GUARD = 60000.0  # larger than any probe element, and finite in fp16
TAILS = (1, 17, 130, 513, 1000)
ROW_COUNTS = (0, 1, 17, 67)
VIEWS = ("row_padded", "col_strided", "transposed")


def tails(subject: Subject) -> None:
    """Row lengths that are no power of two or no multiple of a block, amid poisoned memory."""
    group = subject.layout.cols
    lengths = TAILS if group is None else (3 * group, 3 * group + max(1, group // 4))
    results = []
    for k in lengths:
        x = growing_rows(subject, subject.shape[0], k)
        results.append((f"K = {k}", x, subject.run(x, view="guarded", guard=GUARD)))
    _report(subject, "tails", results, "the codes of K elements, whatever lies beyond them")


def rows(subject: Subject) -> None:
    """0, 1 and odd numbers of rows."""
    k = subject.shape[1]
    results = []
    for m in ROW_COUNTS:
        x = growing_rows(subject, m, k)
        results.append((f"{m} rows", x, subject.run(x, view="guarded", guard=GUARD)))
    _report(subject, "rows", results, "codes of that many rows")


def views(subject: Subject) -> None:
    """Padded, strided and transposed inputs give the codes of the same values, or are refused."""
    x = growing_rows(subject, *subject.shape)
    for view in VIEWS:
        results = [(f"{view} input", x, subject.run(x, view=view, guard=GUARD))]
        _report(subject, "noncontiguous", results, "the codes of the contiguous input, or an error")


def undefined_lanes(subject: Subject) -> None:
    """In the interpreter: what a masked load without `other` leaves undefined must not reach the result."""
    if not subject.runner.interpreted():
        return
    group = subject.layout.cols
    m = 5 if subject.layout.independent_rows() else subject.shape[0] + 5
    for k in (500 if group is None else 3 * group, subject.shape[1]):
        x = growing_rows(subject, m, k)
        plain, outcome = subject.run(x), subject.run(x, lanes=GUARD)
        if not (plain.ok and outcome.ok) or _same(plain, outcome):
            continue
        if (wrong := disagreement(subject, x, outcome)) is not None:
            given = f"{describe(x)}, masked-off lanes of loads without `other` set to {GUARD:g}"
            subject.add("undefined_lanes", DEFECT, given, f"{wrong[0]}: they reach the result", wrong[1])
            return


def _same(a: Outcome, b: Outcome) -> bool:
    pairs = ((a.codes, b.codes), (a.scales, b.scales))
    return all(x is None or y is None or torch.equal(x, y) for x, y in pairs)


def growing_rows(subject: Subject, m: int, k: int) -> Tensor:
    """Gaussian rows whose neighbours are 4 and 1/256 times as large, so that a look across a boundary shows. [M, K]"""
    x = torch.randn(m, k, generator=subject.generator, dtype=torch.float64).clamp(-6, 6)
    if subject.layout.static is not None:
        return (x * 10 * subject.layout.static).to(subject.dtype)
    sizes = torch.exp2(2.0 * (torch.arange(m) % 5).double() - 4)
    x = x * (sizes[:, None] if subject.layout.independent_rows() else 1.0)
    largest = 1.5 * x.abs().amax(dim=1).clamp(min=2.0**-4)
    ends = torch.where(torch.arange(m) % 2 == 0, k - 1, 0)  # in the tail, or at the start
    x[torch.arange(m), ends] = torch.where(x[:, 0] < 0, -largest, largest)
    return x.to(subject.dtype)


def _report(subject: Subject, check: str, results: list[tuple[str, Tensor, Outcome]], expected: str) -> None:
    """One defect for the first wrong result (all of them named), one note for what was refused."""
    refused = [(label, outcome) for label, _, outcome in results if outcome.kind == "raised"]
    if refused:
        given = ", ".join(label for label, _ in refused)
        subject.add(check, NOTE, given, f"refused: {refused[0][1].error.removeprefix('raised: ')}", expected)
    wrong: list[tuple[str, str, str]] = []
    for label, x, outcome in results:
        if outcome.ok:
            found = disagreement(subject, x, outcome)
            if found and not _positions(subject, label, x, outcome):
                wrong.append((label, *found))
        elif outcome.kind == "not run":
            subject.add(check, NOTE, label, outcome.detail, expected)
        elif outcome.kind != "raised":
            wrong.append((label, outcome.error, expected))
    if wrong:
        others = f" (also wrong: {', '.join(label for label, _, _ in wrong[1:])})" if wrong[1:] else ""
        subject.add(check, DEFECT, wrong[0][0], f"{wrong[0][1]}{others}", wrong[0][2])


def _positions(subject: Subject, label: str, x: Tensor, outcome: Outcome) -> bool:
    """Whether the wrong codes are columns that follow another rounding (a scalar tail, say); then it is a finding."""
    batch = subject.batch([(x, outcome)])
    if len(batch.x) == 0 or subject.rounding not in RULES:
        return False
    wrong, _ = wrong_codes(subject, batch)
    columns = sorted(set(batch.col[wrong].tolist()))
    if not columns or len(columns) > x.shape[1] // 2 or x.shape[0] < 8:
        return False
    keep = torch.isin(batch.col, torch.tensor(columns))
    odd = batch.where(keep)
    found = rules_by(odd, subject.grid, subject.hypothesis.step, torch.zeros_like(odd.col))[0]
    if not found:
        return False
    if not subject.has("positions"):
        got = f"columns {spans(columns)} round by {found[0]}, the others by {subject.rounding}"
        subject.add("positions", DEFECT, f"{describe(x)}, {label}", got, "the same rounding at every position")
    return True


CHECKS = (tails, rows, views, undefined_lanes)
