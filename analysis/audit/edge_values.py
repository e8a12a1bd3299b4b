"""Edge checks on values: zero rows, NaN and Inf, tiny and huge rows, saturation under a static scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.audit import probes
from analysis.audit.call import Outcome
from analysis.audit.compare import disagreement
from analysis.audit.findings import DEFECT, NOTE
from analysis.audit.grid import INT8
from analysis.audit.subject import Subject, describe

LEGITIMATE = (2.0**-10, 65504.0)  # absmax that activations do have; outside it a wrong row is a note
NEGLIGIBLE = 1e-30  # a row below this may count as zero, or be inexact, but not become NaN
HARMLESS = 1e-20  # a zero row may dequantise to this much
ROW = 3  # the row that is made special
STATIC_POINTS = (126.4, 127.0, 127.4, 127.6, 128.0, 128.6, 130.0, 200.0, 255.6, 300.0, 1000.0)
_TOLERANCE_LSB = 2.01


def zero_row(subject: Subject) -> None:
    """A zero row (a zero tensor where scales span rows) must give 0, finite, and leave the other rows alone."""
    x = _base(subject)
    own = subject.layout.independent_rows()
    special = torch.zeros(len(x), dtype=torch.bool)
    special[[ROW, len(x) - 1] if own else slice(None)] = True
    x[special] = 0
    if own and subject.layout.cols is not None:
        x[ROW + 2, : subject.layout.cols] = 0  # one zero group in a row that is not
    given = f"{describe(x)} with rows {special.nonzero().flatten().tolist() if own else 'all'} zero"
    outcome = subject.run(x)
    if not outcome.ok:
        subject.add("zero_row", DEFECT, given, outcome.error, "codes 0")
        return
    index, step = _rows(subject, x, outcome)
    index = torch.where(subject.written(index), index, 0)
    back = torch.where(special[:, None], subject.grid.decode(index) * step, 0.0)
    if not bool(torch.isfinite(back).all()):
        shown = f"code {int(index[special][0, 0])} with a scale worth {float(step[special][0, 0]):g}"
        subject.add("zero_row", DEFECT, given, f"{shown}: the row dequantises to NaN", "exactly 0")
    elif float(back.abs().max()) > HARMLESS:
        code = int(index[special][back[special].abs() > HARMLESS][0])
        subject.add("zero_row", DEFECT, given, f"code {code} with scale {float(step[special][0, 0]):g}", "exactly 0")
    elif bool((index[special] != 0).any()):
        code = int(index[special][index[special] != 0][0])
        got = f"code {code}, made harmless by a scale of {float(step[special][0, 0]):g}"
        subject.add("zero_row", NOTE, given, got, "codes 0")
    if own and (wrong := disagreement(subject, x, outcome, rows=~special)):
        subject.add("row_independence", DEFECT, given, f"other rows changed: {wrong[0]}", wrong[1])


def non_finite(subject: Subject) -> None:
    """A NaN or an Inf must not reach other rows; whether its own row shows it is noted."""
    for check, value in (("nan", math.nan), ("inf", math.inf)):
        x = _base(subject)
        x[ROW, 5] = value
        given = f"{describe(x)} with {value} at ({ROW}, 5)"
        outcome = subject.run(x)
        if not outcome.ok:
            severity = NOTE if outcome.kind == "raised" else DEFECT
            subject.add(check, severity, given, outcome.error, "a loud row, other rows untouched")
            continue
        index, step = _rows(subject, x, outcome)
        back = subject.grid.decode(index[ROW]) * step[ROW]
        if bool(torch.isfinite(back[5])):
            code = int(index[ROW, 5])
            how = "turned into the largest code" if abs(code) >= subject.grid.hi else "swallowed"
            got = f"{how}: code {code} with a finite scale {float(step[ROW, 5]):.4g}"
            subject.add(check, NOTE, given, got, "a scale of NaN or Inf, so that the loss is seen")
        others = torch.arange(len(x)) != ROW
        if subject.layout.independent_rows() and (wrong := disagreement(subject, x, outcome, rows=others)):
            subject.add(check, DEFECT, given, f"other rows changed: {wrong[0]}", wrong[1])


def tiny_and_huge(subject: Subject) -> None:
    """Rows of absmax from the smallest to the largest number of the dtype come back within two LSB."""
    if subject.layout.static is not None:
        return
    info = torch.finfo(subject.dtype)
    lowest, highest = math.log2(info.smallest_normal * info.eps) + 1, math.log2(info.max) - 0.01
    ordinary = tuple(math.log2(limit) for limit in LEGITIMATE)
    rows = subject.shape[0]
    for check, ends in (("tiny_absmax", (-2.0, ordinary[0], lowest)), ("huge_absmax", (8.0, ordinary[1], highest))):
        near = torch.linspace(*ends[:2], rows // 2, dtype=torch.float64)
        exponents = torch.cat([near, torch.linspace(*ends[1:], rows - rows // 2, dtype=torch.float64)])
        if subject.layout.independent_rows():
            _sweep(subject, check, [exponents])
        else:
            some = exponents[:: max(1, len(exponents) // 4)]
            _sweep(subject, check, [e.expand(subject.shape[0]) for e in some])


def _sweep(subject: Subject, check: str, sweeps: list[Tensor]) -> None:
    """One call a sweep; `exponents` fp64 [M] sets the absmax of each row to 2^e."""
    bad: list[tuple[float, str, bool]] = []  # absmax, what came, whether it is NaN or Inf
    for exponents in sweeps:
        shape = torch.randn(subject.shape, generator=subject.generator, dtype=torch.float64)
        shape = shape / shape.abs().amax(dim=1, keepdim=True)
        x = (shape * torch.exp2(exponents)[:, None]).to(subject.dtype)
        outcome = subject.run(x)
        if not outcome.ok:
            subject.add(check, DEFECT, describe(x), outcome.error, "codes")
            return
        index, step = _rows(subject, x, outcome)
        m, k = x.shape
        lsb = (subject.layout.absmax(x) / subject.grid.limit)[subject.layout.group_ids(m, k)]
        back = subject.grid.decode(index) * step / subject.scale_error
        error = (back - x.double()).abs() / lsb
        error = torch.where(subject.written(index), error, 0.0)
        if subject.has("wrap"):
            error = torch.where(x.double().abs() < 0.98 * subject.grid.limit * lsb, error, 0.0)
        if subject.grid is not INT8:
            error = error / 32  # the widest fp8 gap, in units of absmax / 448
        for row in range(m):
            largest = float(x[row].double().abs().max())
            if largest == 0:
                continue
            if not bool(torch.isfinite(back[row]).all()):
                bad.append((largest, "NaN or Inf", True))
            elif float(error[row].max()) > _TOLERANCE_LSB and largest > NEGLIGIBLE:
                zeroed = bool((back[row] == 0).all())
                what = "all zero" if zeroed else f"off by {float(error[row].max()):.3g} LSB"
                bad.append((largest, what, False))
    _report_sweep(subject, check, bad)


def _report_sweep(subject: Subject, check: str, bad: list[tuple[float, str, bool]]) -> None:
    """A note with the threshold, or a defect when it lies among ordinary activations or tiny rows become NaN."""
    if not bad:
        return
    tiny = check == "tiny_absmax"
    worst = max(bad) if tiny else min(bad)
    loud = [entry for entry in bad if entry[2]]
    ordinary = worst[0] > LEGITIMATE[0] if tiny else worst[0] < LEGITIMATE[1]
    severity = DEFECT if ordinary or (loud and tiny) else NOTE
    if severity == DEFECT and not ordinary:
        worst = max(loud)
    side = "from there down" if tiny else "from there up"
    subject.add(check, severity, f"a row with absmax {worst[0]:.3g}", f"{worst[1]}, {side}", "within one LSB of it")


def static_saturation(subject: Subject) -> None:
    """Beyond the range of a static scale codes stay at the end of it."""
    step = subject.layout.static
    if step is None or subject.grid is not INT8:
        return
    x = torch.zeros(subject.shape, dtype=torch.float64)
    points = torch.tensor(STATIC_POINTS, dtype=torch.float64)
    points = torch.cat([points, -points])[: subject.shape[1]]
    x[:, : len(points)] = points * step
    x = x.to(subject.dtype)
    outcome = subject.run(x)
    if not outcome.ok:
        subject.add("saturation", DEFECT, describe(x), outcome.error, "codes")
        return
    s = x[0, : len(points)].double() / step
    got = subject.grid.index(outcome.codes)[0, : len(points)] if outcome.codes is not None else s
    target = s.clamp(-128, 127)
    wrong = (got - target).abs() > 1.01
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        given = f"{float(x[0, i]):g} under a static scale of {step:g} (s = {float(s[i]):g})"
        subject.add("saturation", DEFECT, given, f"code {int(got[i])}", f"code {int(target[i].round())}")


def _base(subject: Subject) -> Tensor:
    return probes.fine(*subject.shape, subject.dtype, subject.generator, subject.layout)


def _rows(subject: Subject, x: Tensor, outcome: Outcome) -> tuple[Tensor, Tensor]:
    """(index int64, step fp64), both [M, K]."""
    assert outcome.codes is not None
    m, k = x.shape
    step = subject.layout.steps(outcome.scales, m, k, subject.grid.limit)
    return subject.grid.index(outcome.codes), step[subject.layout.group_ids(m, k)]


CHECKS = (zero_row, non_finite, tiny_and_huge, static_saturation)
