"""Claims C6 and C7 against a run's studies: (value here, verdict, note), as `claims.Claim.judge` returns them.

judge_factors(tables.find(studies.ABLATION, run.path))
judge_closed_loop(tables.find(studies.CLOSED_LOOP, run.path))
with_studies(claims.judge(evidence), run.path)      # the claims table with both in their places
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.report import text
from analysis.report.claims import Finding, Verdict
from analysis.results import studies, tables
from analysis.results.ablation import REJECTED, SUPPORTED
from analysis.results.closed_loop import DEGRADED, EQUIVALENT

Judged = tuple[str, Verdict, str]
FACTORS_RULE = (
    "In kind: for the shipped kernel every change that the issue names (fp32 accumulation, bf16 weight scales, one "
    "scale per tensor for activations or weights) moves the mean relative MSE by less than 2 %, interval included."
)
CLOSED_LOOP_RULE = (
    "In kind: the shipped kernel's rollouts are equivalent to bf16's in PSNR against the game's frames, and no further "
    "from bf16's frames than another noise seed (tests at 5 % with the stated margin, paired by scene)."
)
NAMES = {
    ("accumulation", "fp32"): "codes summed in fp32",
    ("accumulation", "dequantised fp32"): "operands scaled first, summed in fp32",
    ("weight_scale", "bf16"): "weight scales in bf16",
    ("weight_scale", "fp16"): "weight scales in fp16",
    ("activation_scale", "bf16"): "activation scales in bf16",
    ("activation_granularity", "tensor"): "activations: one scale per tensor",
    ("activation_granularity", "group128"): "activations: one scale per 128 features",
    ("weight_granularity", "tensor"): "weights: one scale per tensor",
    ("only", "activation"): "only activations quantised",
    ("only", "weight"): "only weights quantised",
    ("only", "bf16 output"): "nothing quantised, output rounded twice",
    ("output", "fp32"): "output in fp32",
}
IN_ISSUE = (  # what the issue names, as changes: int32 accumulation, bf16 weight scales, granularity
    ("accumulation", "fp32"),
    ("weight_scale", "bf16"),
    ("activation_granularity", "tensor"),
    ("weight_granularity", "tensor"),
)


def name_of(factor: str, level: str) -> str:
    """A change in words."""
    return f"rounding: {level}" if factor == "rounding" else NAMES.get((factor, level), f"{factor}: {level}")


def overall(ablation: pd.DataFrame, rounding: str) -> pd.DataFrame:
    """The changes of one rounding over all sites, without the control, the rounding itself and interactions."""
    kept = (ablation["site"] == "all") & (ablation["rounding"] == rounding)
    return ablation[kept & ~ablation["factor"].isin(["none", "rounding"])].reset_index(drop=True)


def judge_factors(ablation: pd.DataFrame | None) -> Judged:
    """C6, by FACTORS_RULE."""
    if ablation is None:
        return text.EMPTY, Verdict.UNMEASURED, "the run has no ablation: shrinkage ablate"
    rows = overall(ablation, "shipped").set_index(["factor", "level"])
    named = [rows.loc[key] for key in IN_ISSUE if key in rows.index]
    value = "; ".join(f"{name_of(*row.name)} {change_percent(row['change'])}" for row in named)
    verdicts = [row["verdict"] for row in named]
    note = "shipped kernel, against per-token and per-channel scales in fp32 and int32 accumulation"
    if REJECTED in verdicts:
        held = [name_of(*row.name) for row in named if row["verdict"] == SUPPORTED]
        note += f"; below 2 %: {', '.join(held) or 'none'}"
        return value, Verdict.NOT, note
    if not named or set(verdicts) != {SUPPORTED}:
        return value or text.EMPTY, Verdict.UNMEASURED, "undecided: intervals reach across 2 %, or too few calls"
    return value, Verdict.KIND, note


def change_percent(change: float, lo: float = np.nan, hi: float = np.nan) -> str:
    """'+2.4 %', with its interval where there is one."""
    ends = "" if np.isnan(lo) else f" [{text.signed(f'{100 * lo:+.1f}')}, {text.signed(f'{100 * hi:+.1f}')}]"
    return f"{text.signed(f'{100 * change:+.1f}')}{ends} %"


def question(
    table: pd.DataFrame, variant: str, against: str, baseline: str, metric: str = "psnr_db"
) -> pd.Series | None:
    """The row of closed_loop.csv over all clips that answers a question; None where it was not asked."""
    asked = (table["against"] == against) & (table["baseline"] == baseline) & (table["metric"] == metric)
    rows = table[asked & (table["variant"] == variant) & (table["window"] == "all")]
    return None if rows.empty else rows.iloc[0]


def decibels(row: pd.Series) -> str:
    """'−0.08 [−0.34, 0.17] dB'."""
    shown = text.signed(f"{row['difference']:+.2f}")
    if not np.isnan(row["difference_lo"]):
        shown += f" [{', '.join(text.signed(f'{row[end]:.2f}') for end in ('difference_lo', 'difference_hi'))}]"
    return f"{shown} dB"


def judge_closed_loop(closed_loop: pd.DataFrame | None) -> Judged:
    """C7, by CLOSED_LOOP_RULE."""
    if closed_loop is None:
        return text.EMPTY, Verdict.UNMEASURED, "the run has no closed loop: shrinkage rollout"
    game = question(closed_loop, "shipped", "true", "bf16")
    seed = question(closed_loop, "shipped", "bf16", "other_seed")
    if game is None or seed is None:
        return text.EMPTY, Verdict.UNMEASURED, "needs the shipped kernel, the game's frames and another seed"
    value = f"against the game {decibels(game)} from bf16's PSNR: {game['verdict']}"
    note = f"{int(game['scenes'])} scenes, {int(game['pairs'])} scene-seed pairs, margin {game['margin']:g} dB; "
    note += (
        f"to bf16's frames {decibels(seed)} nearer than another seed"
        if seed["difference"] > 0
        else (f"to bf16's frames {decibels(seed)} compared with another seed")
    )
    rounding = question(closed_loop, "shipped", "bf16", "fp32")
    if rounding is not None:
        note += f", and {decibels(rounding)} compared with bf16's own rounding: {_measurable(rounding)}"
    verdicts = {game["verdict"], seed["verdict"]}
    if DEGRADED in verdicts:
        return value, Verdict.NOT, note
    return value, Verdict.KIND if verdicts == {EQUIVALENT} else Verdict.UNMEASURED, note


def _measurable(row: pd.Series) -> str:
    return "the error is measurable in the frames" if row["verdict"] == DEGRADED else "not distinguishable from it"


def with_studies(findings: list[Finding], folder: Path) -> list[Finding]:
    """The findings with C6 and C7 judged by the studies that the folder holds; the others as they are."""
    judged = {
        "C6": (FACTORS_RULE, judge_factors(tables.find(studies.ABLATION, folder))),
        "C7": (CLOSED_LOOP_RULE, judge_closed_loop(tables.find(studies.CLOSED_LOOP, folder))),
    }
    out = []
    for finding in findings:
        rule, found = judged.get(finding.claim.id, ("", None))
        made = None if found is None else Finding(replace(finding.claim, rule=rule), *found)
        out.append(made or finding)
    return out
