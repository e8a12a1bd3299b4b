"""The rounding verdict of one dtype: run the probes, read the scales, decide.

subject = judge(runner, torch.bfloat16, Told(), seed=0)
subject.rounding, subject.figures, subject.findings
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor

from analysis.audit import figures, probes, verdict
from analysis.audit.call import FILLS, Call, Outcome
from analysis.audit.classify import decide, tie_rule
from analysis.audit.findings import DEFECT
from analysis.audit.grid import INT8, grid_of
from analysis.audit.layout import Told, find_layout
from analysis.audit.rules import NEAREST, absmax_step
from analysis.audit.runner import CannotAudit, Runner
from analysis.audit.subject import Subject, describe, short

SHAPES = ((16, 512), (128, 512), (256, 128), (128, 1024))
INTERPRETED = ((8, 512), *SHAPES)  # a program takes milliseconds there
FATAL = ("crashed", "hung")
Pair = tuple[Tensor, Outcome]


def judge(
    runner: Runner, dtype: torch.dtype, told: Told, seed: int, shape: tuple[int, int] | None = None
) -> Subject:  # fmt: skip
    """Verdict, figures and rounding findings for one dtype. CannotAudit when there is nothing to judge."""
    generator = torch.Generator().manual_seed(seed)
    subject, x, outcome = _first_contact(runner, dtype, generator, shape)
    _read_scales(subject, x, outcome, told)
    designed = _design(subject, subject.grid.limit)
    fine = _random(subject, probes.fine) + _random(subject, probes.fine)
    batch = subject.batch([(x, outcome), designed, *fine, *_random(subject, probes.coarse)])
    if subject.unwritten is not None:
        batch = batch.where(~subject.unwritten[batch.row, batch.col])
    subject.decision = decide(batch, subject.grid, subject.layout.static is not None)
    _name_the_limit(subject)
    rule, counts = _ties(subject, designed)
    subject.rounding = verdict.name(subject.decision, rule)
    measured = subject.batch(fine)
    if subject.unwritten is not None:
        measured = measured.where(~subject.unwritten[measured.row, measured.col])
    step = subject.hypothesis.step.of(measured.absmax, measured.returned)
    subject.figures = figures.measure(measured, step, subject.grid, subject.layout.independent_rows()) | {
        "exact_ties": counts["seen"],
        "exact_ties_not_half_even": counts["half_even"],
        "step": subject.hypothesis.step.name,
    }
    verdict.scale_findings(subject, batch)
    verdict.range_findings(subject, batch)
    verdict.rounding_findings(subject, batch, rule, counts)
    return subject


def _first_contact(
    runner: Runner, dtype: torch.dtype, generator: torch.Generator, shape: tuple[int, int] | None
) -> tuple[Subject, Tensor, Outcome]:
    """The first base shape that the target accepts."""
    failures = []
    for m, k in [shape] if shape is not None else INTERPRETED if runner.interpreted() else SHAPES:
        x = probes.spread(m, k, dtype, generator)
        outcome = runner.run(Call(x))
        if outcome.ok:
            assert outcome.codes is not None
            grid = grid_of(outcome.codes.dtype)
            assert grid is not None
            if shape is None and runner.interpreted() and (m, k) == SHAPES[0]:
                with contextlib.suppress(CannotAudit):  # known only now to be slow
                    return _first_contact(runner, dtype, generator, INTERPRETED[0])
            if grid is not INT8 and runner.device == "cpu":
                raise CannotAudit(
                    f"{runner.target} returns {grid.name}: fp8 is audited on CUDA only, because the Triton interpreter "
                    "converts to fp8 wrongly; use --device cuda"
                )
            return Subject(runner, dtype, (m, k), generator, grid), x, outcome
        failures.append(f"[{m}, {k}] {outcome.kind}: {outcome.detail}")
        if outcome.kind in ("malformed", "hung", "not run"):
            break
    text = f"{runner.target} gives no codes for {short(dtype)} input\n{failures[0]}"
    raise CannotAudit(text, fatal=outcome.kind in FATAL)


def _read_scales(subject: Subject, x: Tensor, outcome: Outcome, told: Told) -> None:
    """Layout and meaning of the scales; one that does not follow the input is a static scale."""
    assert outcome.codes is not None
    try:
        layout, _ = find_layout(x, subject.grid.index(outcome.codes), outcome.scales, subject.grid, told)
    except ValueError as error:
        raise CannotAudit(f"{subject.runner.target}: {error}") from None
    scales = outcome.scales
    if layout.static is None and scales is not None and scales.numel() == 1:
        other = subject.run(x * 0.5)
        if other.ok and other.scales is not None and torch.equal(other.scales, scales):
            layout = replace(layout, static=float(layout.steps(scales, *subject.shape, subject.grid.limit)[0]))
    subject.layout = layout
    subject.scale_dtype = None if scales is None else scales.dtype


def _design(subject: Subject, limit: float) -> Pair:
    """The designed probe, run twice on differently poisoned outputs."""
    layout, grid = subject.layout, subject.grid
    x = probes.design(*subject.shape, subject.dtype, subject.generator, layout, grid, limit)
    outcomes = [_require(subject.run(x, fill=fill)) for fill in range(len(FILLS))]
    if not (subject.has("two_runs") or subject.has("unwritten")):
        _compare_runs(subject, x, outcomes)
    return x, outcomes[0]


def _random(subject: Subject, make: probes.Maker) -> list[Pair]:
    x = make(*subject.shape, subject.dtype, subject.generator, subject.layout)
    return [(x, _require(subject.run(x)))]


def _require(outcome: Outcome) -> Outcome:
    if not outcome.ok:
        text = f"the target failed on an ordinary input: {outcome.kind}\n{outcome.detail}"
        raise CannotAudit(text, fatal=outcome.kind in FATAL)
    return outcome


def _compare_runs(subject: Subject, x: Tensor, outcomes: list[Outcome]) -> None:
    """Same input, differently poisoned outputs: what differs was never written, or is not deterministic."""
    given = f"the same {describe(x)} twice"
    for what in ("codes", "scales"):
        first, second = (getattr(outcome, what) for outcome in outcomes)
        if first is None:
            continue
        a, b = first.double().nan_to_num(nan=1e300), second.double().nan_to_num(nan=1e300)
        differ = a != b
        if not bool(differ.any()):
            continue
        fills = [{torch.int8: f[0], torch.float8_e4m3fn: f[2]}.get(first.dtype, f[1]) for f in FILLS]
        fills = [float(torch.tensor(fill).to(first.dtype)) for fill in fills]
        unwritten = differ & (a == fills[0]) & (b == fills[1])
        if int(unwritten.sum()) == int(differ.sum()):
            where = [tuple(int(i) for i in place) for place in unwritten.nonzero()[:3]]
            got = f"{int(unwritten.sum())} of {a.numel()} {what} never written, first at {where}"
            subject.add("unwritten", DEFECT, given, got, f"every element of the {what} is written")
            if what == "codes":
                subject.unwritten = unwritten
        else:
            got = f"{int(differ.sum())} of {a.numel()} {what} differ"
            subject.add("two_runs", DEFECT, given, got, "equal results")


def _name_the_limit(subject: Subject) -> None:
    """A returned scale that is absmax over a round number gets that name, and ties can then be designed for it."""
    hypothesis, decision = subject.hypothesis, subject.decision
    if hypothesis.step.name != "returned scale" or subject.layout.static is not None or decision is None:
        return
    x, outcome = _random(subject, probes.fine)[0]
    batch = subject.batch([(x, outcome)])
    limits = (batch.absmax / batch.returned)[batch.absmax > 0]
    limit = round(float(limits.median()) * 4) / 4
    if limit > 0 and bool(((limits / limit - 1).abs() < 1e-6).all()):
        subject.decision = replace(decision, hypothesis=replace(hypothesis, step=absmax_step(limit)))


def _ties(subject: Subject, designed: Pair) -> tuple[str, dict[str, int]]:
    """The tie rule; with another limit than the grid's, from a probe designed for that limit."""
    limit = subject.hypothesis.step.limit
    assert subject.decision is not None
    if limit is None and subject.layout.static is None:
        batch = subject.batch([designed])
        limit = round(float((batch.absmax / batch.returned).median()) * 4) / 4
    if limit and limit != subject.grid.limit and subject.decision.rule in NEAREST:
        designed = _design(subject, limit)
    return tie_rule(subject.batch([designed]), subject.grid, subject.hypothesis)
