"""`audit` and `assert_rounds_to_nearest`: the whole audit of one target, as a library.

from analysis.audit import assert_rounds_to_nearest, audit

def test_my_quantiser_rounds():
    assert_rounds_to_nearest(my_quantise)           # x [rows, K] -> (int8 codes, scales)

report = audit("kernels.py:quantize", device="cuda")  # a TARGET runs in a child process
print(report.rounding, report.clean)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import analysis
from analysis.audit import edge_shapes, edge_values
from analysis.audit.findings import BIASED, DEFECT, NOTE, SEVERITY_ORDER, AuditReport, Finding, merged
from analysis.audit.judge import judge
from analysis.audit.layout import Told
from analysis.audit.load import split_target
from analysis.audit.process import Process
from analysis.audit.rules import NEAREST
from analysis.audit.runner import CannotAudit, ChildRunner, LocalRunner, Runner
from analysis.audit.subject import Subject, short

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CALL_LIMIT_S = 60.0
Progress = Callable[[str], None]


def audit(
    target: Callable[[Tensor], Any] | str | Process,
    *,
    adapter: str | None = None,
    device: str = "cpu",
    dtypes: Iterable[torch.dtype] = DTYPES,
    scales: str | None = None,
    returns: str | None = None,
    shape: tuple[int, int] | None = None,
    seed: int = 0,
    limit_s: float = CALL_LIMIT_S,
    edges: bool = True,
    source: dict[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> AuditReport:
    """Audit a quantiser of rows.

    Args:
        target: a function of one tensor [rows, K] on `device` that returns int8 (on CUDA also float8_e4m3fn) codes
            [rows, K] and scales, run in this process; or a TARGET string, run in a child process; or that process,
            already started (adapter and device are then its own).
        adapter: `file.py:function` called as adapter(target, x), for a TARGET of another signature.
        device: "cpu" (Triton kernels of a TARGET run in the interpreter), "cuda", or "auto": cuda where there is one.
        dtypes: input dtypes to try; one that the target refuses is noted.
        scales, returns: what is known about the scales: see `layout.Told.parse`. Found out when None.
        shape: a (rows, K) that the target accepts, if (16, 512) and its alternatives do not suit it.
        seed: of every random input.
        limit_s: time limit of one call, for a TARGET.
        edges: also run the edge checks.
        source: project, file, commit and so on: kept in the report.
        progress: called with a line of text before each step.

    Raises:
        CannotAudit: the target does not import, returns something else, or fails on ordinary input in every dtype.
        ValueError: a bad target, option or device.
    """
    told = Told.parse(scales, returns)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotAudit("device cuda: torch sees no CUDA device here; use device cpu")
    started = time.perf_counter()
    with _one_thread():
        if isinstance(target, str):
            split_target(target)
            target = Process(target, adapter, device)
        if isinstance(target, Process):
            progress(f"importing {target.target}")
            with ChildRunner(target, limit_s) as child:
                subjects, refused = _subjects(child, tuple(dtypes), told, seed, shape, edges, progress)
                return _report(child, subjects, refused, seed, time.perf_counter() - started, source)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        local = LocalRunner(target, device)
        subjects, refused = _subjects(local, tuple(dtypes), told, seed, shape, edges, progress)
        return _report(local, subjects, refused, seed, time.perf_counter() - started, source)


def assert_rounds_to_nearest(
    target: Callable[[Tensor], Any] | str,
    *,
    ties: str = "any",
    edges: bool = False,
    **options: Any,
) -> AuditReport:
    """Fail, readably, unless `target` rounds to the nearest code in every dtype and at every position.

    Args:
        target, options: as in `audit`.
        ties: "any", or the tie rule to insist on: "half_even", "half_away", "floor_half".
        edges: also fail on the defects that the edge checks find.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: with the rounding that was found and the smallest input that shows it.
    """
    if ties not in ("any", *NEAREST):
        raise ValueError(f"unknown tie rule {ties!r}; expected any, {', '.join(NEAREST)}")
    report = audit(target, edges=edges, **options)
    allowed = NEAREST if ties == "any" else (ties,)
    found = {name: entry["rounding"] for name, entry in report.by_dtype.items() if entry["rounding"] not in allowed}
    wrong = [f"{name} input: rounds by {rule}, expected {' or '.join(allowed)}" for name, rule in found.items()]
    if wrong or report.defects:
        lines = [f"{report.target} does not round to nearest" if wrong else f"{report.target} has defects"]
        raise AssertionError("\n  ".join([*lines, *wrong, *map(str, report.defects)]))
    return report


def _subjects(
    runner: Runner,
    dtypes: Sequence[torch.dtype],
    told: Told,
    seed: int,
    shape: tuple[int, int] | None,
    edges: bool,
    progress: Progress,
) -> tuple[list[Subject], list[Finding]]:
    """One judged subject a dtype, and a note for each dtype that the target refused. CannotAudit when all were."""
    subjects: list[Subject] = []
    refused: list[Finding] = []
    first: CannotAudit | None = None
    for dtype in dtypes:
        progress(f"{short(dtype)}: rounding")
        try:
            subject = judge(runner, dtype, told, seed, shape)
        except CannotAudit as error:
            first = first or error
            got = str(error).splitlines()
            severity = DEFECT if error.fatal else NOTE
            refused.append(Finding("dtype", severity, f"{short(dtype)} input", f"{got[0]} {got[-1]}", "codes", ()))
            continue
        subjects.append(subject)
        checks: tuple[Callable[[Subject], None], ...] = (*edge_values.CHECKS, *edge_shapes.CHECKS)
        if runner.interpreted() and len(subjects) > 1:
            checks = edge_values.CHECKS  # slow there, and without vectors whose width depends on the dtype
        for check in checks if edges else ():
            progress(f"{short(dtype)}: {check.__name__}")
            _guarded(subject, check)
    if not subjects:
        raise first or CannotAudit("no dtype to audit")
    return subjects, refused


def _guarded(subject: Subject, check: Callable[[Subject], None]) -> None:
    """Run a check; outputs that do not fit their own input are a defect of the target, not an error here."""
    try:
        check(subject)
    except ValueError as error:
        got, _, expected = str(error).partition(", expected ")
        subject.add(check.__name__, DEFECT, "see the check", got, expected or "codes and scales that fit the input")


def _report(
    runner: Runner,
    subjects: list[Subject],
    refused: list[Finding],
    seed: int,
    seconds: float,
    source: dict[str, str] | None,
) -> AuditReport:
    worst = min(subjects, key=lambda subject: SEVERITY_ORDER.index(subject.rounding))
    findings = merged([finding for subject in subjects for finding in subject.findings] + refused)
    return AuditReport(
        target=runner.target,
        device=runner.device,
        dtypes=tuple(subject.name for subject in subjects),
        rounding=worst.rounding,
        clean=not any(finding.severity == DEFECT for finding in findings) and worst.rounding not in BIASED,
        layout=worst.layout.describe(),
        figures={"dtype": worst.name, **worst.figures},
        findings=tuple(findings),
        by_dtype={s.name: {"rounding": s.rounding, "layout": s.layout.describe(), **s.figures} for s in subjects},
        versions={**runner.versions(), "shrinkage": analysis.__version__},
        seed=seed,
        seconds=round(seconds, 2),
        source=source or {},
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Probes are small: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
