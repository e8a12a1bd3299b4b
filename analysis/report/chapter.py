"""What the report says of one run before any figure: which rows it is about, the verdict, and what to beware of.

A run may hold several references and choices of tokens; the chapter is about one *slice* of it, by default bf16 and all
tokens, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis.report import claims, layout, study_claims, text
from analysis.report.claims import Evidence, Finding, Verdict
from analysis.results.load import Run

_PREFERRED_REFERENCE = ("bf16", "as_run", "fp64")
_PREFERRED_TOKENS = ("all", "valid")
_SHOWN_NAMES = 12


@dataclass(frozen=True, eq=False)
class Chapter:
    """One run in the report. `prefix` makes ids and figure names unique; '' where the report has one run."""

    run: Run
    prefix: str = ""

    @cached_property
    def slice(self) -> tuple[str, str, str]:
        """(run_id, reference, tokens) that the chapter is about."""
        keys = self.run.per_layer[["run_id", "reference", "tokens"]].drop_duplicates()
        found = sorted(keys.itertuples(index=False, name=None), key=lambda key: (*_rank(key), key))
        return found[0]

    @cached_property
    def per_layer(self) -> pd.DataFrame:
        """per_layer of the slice."""
        return self._of_slice(self.run.per_layer)

    @cached_property
    def per_call(self) -> pd.DataFrame | None:
        """per_call of the slice; None where the run has none."""
        return None if self.run.per_call is None else self._of_slice(self.run.per_call)

    @cached_property
    def evidence(self) -> Evidence:
        return claims.gather(self.per_layer, self.per_call)

    @cached_property
    def findings(self) -> list[Finding]:
        return study_claims.with_studies(claims.judge(self.evidence), self.evidence, self.run.path)

    @property
    def variants(self) -> list[str]:
        return layout.variants(self.per_layer)

    @property
    def subject(self) -> str | None:
        """The kernel that is set against fixed: shipped, or the first other one; None where there is no pair."""
        others = [v for v in self.variants if v != "fixed"]
        return others[0] if others and "fixed" in self.variants else None

    @property
    def unit(self) -> str:
        """What intervals are over: a call; or a run, where the chapter is about several that were pooled."""
        return self.run.unit

    @property
    def incomplete(self) -> bool:
        return self.run.info.get("complete") is False

    @property
    def layers(self) -> int:
        return int(self.per_layer["layer"].nunique())

    def _of_slice(self, table: pd.DataFrame) -> pd.DataFrame:
        run_id, reference, tokens = self.slice
        mine = (table["run_id"] == run_id) & (table["reference"] == reference) & (table["tokens"] == tokens)
        return table[mine].reset_index(drop=True)


def _rank(key: tuple[str, str, str]) -> tuple[int, int]:
    _, reference, tokens = key
    return (
        _PREFERRED_REFERENCE.index(reference) if reference in _PREFERRED_REFERENCE else len(_PREFERRED_REFERENCE),
        _PREFERRED_TOKENS.index(tokens) if tokens in _PREFERRED_TOKENS else len(_PREFERRED_TOKENS),
    )


def headline(chapter: Chapter) -> str:
    """The verdict in one sentence.

    Reproduced: C1 to C5 all are. Not reproduced: C3 fails, or the mean cosine over layers is not below the bound of C4,
    for without them there is no shrinkage to speak of. Not decided: C4 was not measured. Otherwise: in part.
    """
    verdicts = {f.claim.id: f.verdict for f in chapter.findings if f.claim.id in claims.CORE}
    groups: dict[str, list[str]] = {"reproduced": [], "not reproduced": [], "not measured": []}
    for claim, verdict in verdicts.items():
        groups["reproduced" if verdict in (Verdict.VALUE, Verdict.KIND) else str(verdict)].append(claim)
    if len(groups["reproduced"]) == len(verdicts):
        outcome, tail = "is reproduced", ""
    else:
        tail = " (" + "; ".join(f"{', '.join(ids)} {name}" for name, ids in groups.items() if ids) + ")"
        angle = chapter.evidence.mean("error_output_cosine", "shipped").value
        if verdicts["C3"] is Verdict.NOT or angle >= claims.CLEAR_COSINE:
            outcome = "is not reproduced"
        else:
            outcome = "is not decided" if verdicts["C4"] is Verdict.UNMEASURED else "is reproduced in part"
    start = "Interrupted run: the" if chapter.incomplete else "The"
    world = chapter.evidence.world
    return f"{start} magnitude shrinkage of the issue {outcome} on world “{world}”{tail}{_facts(chapter)}."


def _facts(chapter: Chapter) -> str:
    """': over 64 layers, truncation makes 4.87 [..] times the error of rounding, ...', as far as measured."""
    mean = chapter.evidence.mean
    ratio, shrunk = mean("rel_mse", "shipped/fixed"), mean("shrinkage", "shipped")
    angle = mean("error_output_cosine", "shipped")
    parts = []
    if text.is_number(ratio.value):
        shown = text.plain(ratio.value, ratio.low, ratio.high)
        parts.append(f"truncation makes {shown} times the mean squared error of rounding")
    if text.is_number(angle.value) and text.is_number(shrunk.value):
        change = "loses" if shrunk.value >= 0 else "gains"
        whose = "its error" if parts else "the error of truncation"
        parts.append(
            f"{whose} has cosine {text.cosine(angle.value)} with the output, "
            f"which {change} {text.percent(abs(shrunk.value))} of its magnitude"
        )
    layers = f"{chapter.layers} layer" + ("" if chapter.layers == 1 else "s")
    return f": over {layers}, {', '.join(parts)}" if parts else ""


def warnings(chapter: Chapter) -> list[str]:
    """What a reader must know before believing a number; empty where there is nothing."""
    info, table = chapter.run.info, chapter.per_layer
    out: list[str] = []
    if chapter.incomplete:
        out.append("The run was interrupted: the tables hold the calls that had finished.")
    if not info:
        out.append("The folder has no run.json: where these numbers come from is unknown.")
    if chapter.run.per_call is None:
        out.append("The folder has no per_call.parquet: means over layers have no intervals.")
    elif chapter.unit == "run":
        if (runs := int(chapter.run.per_call["call"].nunique())) < 3:
            out.append(f"Only {runs} run(s) were pooled: too few for intervals, which are over runs.")
    elif int(table["calls"].max()) < 3:
        out.append(f"Only {int(table['calls'].max())} call(s) were measured: too few for intervals.")
    if silent := info.get("layers_silent"):
        out.append(f"{len(silent)} matched layer(s) never ran and are not measured: {_names(silent)}.")
    expected, measured = info.get("layers_expected"), chapter.layers
    if isinstance(expected, int) and measured + len(silent or []) < expected:
        out.append(f"{measured} of {expected} expected layers are in the table.")
    if rows := int(table["nonfinite_rows"].max()):
        layers = table.loc[table["nonfinite_rows"] > 0, "layer"].unique().tolist()
        out.append(f"NaN or Inf in the input of {_names(layers)} (up to {rows} rows), left out of every sum.")
    odd = table.loc[~np.isfinite(table["rel_mse"].to_numpy(np.float64)), "layer"].unique().tolist()
    if odd:
        out.append(f"No finite relative error for {_names(odd)} (the reference output is all zero): left out of means.")
    if absent := [v for v in ("shipped", "fixed") if v not in chapter.variants]:
        out.append(f"The run has no kernel {' and no kernel '.join(absent)}: some claims cannot be judged.")
    if len(chapter.run.per_layer) > len(table):
        _, reference, tokens = chapter.slice
        out.append(f"The run holds several references or token choices; shown: reference {reference}, tokens {tokens}.")
    return out


def _names(names: list[str]) -> str:
    shown = ", ".join(map(str, names[:_SHOWN_NAMES]))
    return shown + (f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else "")
