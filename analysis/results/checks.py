"""What must hold within the rows of a table: presence, ranges, inequalities between sums, metrics against sums.

Each check names the cell, its value and the expected one. Rows of a per_layer or a per_call table, in any order.

    check_rows(frame, "run/per_layer.csv", places=["line 2", "line 3"])      # [] where everything holds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.results import schema, summary
from analysis.results.cells import Problem

SHOWN = 10  # cells named for each kind of complaint; the rest is counted
RELATIVE = 1e-9  # derived columns against the sums beside them
SUM_ACCURACY = 1e-6  # to which the contract promises sums: inequalities between sums hold to it
_RUN_ID = r"[0-9a-f]{12}"
_LEAST = dict.fromkeys(("rows", "nonfinite_rows", "zero_rows", "mismatched", "zeroed", "saturated"), 0)
_LEAST |= dict.fromkeys(("sum_yy", "sum_ee", "sum_zz", "sum_eff_yy", "sum_eff_ee", "sum_square_error"), 0)
_LEAST |= dict.fromkeys(("sum_crest", "max_abs_e", "rel_mse", "residual_rel_mse", "rel_mse_nobias"), 0)
_LEAST |= {"effective_rel_mse": 0, "rmse_lsb": 0, "crest": 1, "block": -1, "in_features": 1, "out_features": 1}
_LEAST |= {"call": 0, "clip": 0, "step": 0, "calls": 1}
_WITHIN = {"error_output_cosine": (-1, 1), "error_output_cosine_nobias": (-1, 1)}
_WITHIN |= dict.fromkeys(("code_mismatch", "zeroed_fraction", "saturated_fraction"), (0, 1))
_ANSWERS = {"reference": ("bf16", "as_run", "fp64"), "tokens": ("all", "valid")}


class Complaints:
    """Collects problems of one table; at most `SHOWN` of a kind are named."""

    def __init__(self, frame: pd.DataFrame, file: str, places: Sequence[str]) -> None:
        self.frame, self.file, self.places = frame, file, places
        self.problems: list[Problem] = []

    def add(self, bad: Any, column: str, expected: str | Callable[[int], str], found: Any = None) -> None:
        """Name the rows where `bad`; `expected` is a text, or a function of the row's position."""
        where = np.flatnonzero(np.asarray(pd.array(bad).astype("boolean").fillna(False), dtype=bool))
        values = self.frame[column] if found is None else found
        for at in where[:SHOWN]:
            wanted = expected if isinstance(expected, str) else expected(int(at))
            shown = _show(values.iloc[at] if isinstance(values, pd.Series) else values[at])
            self.problems.append(Problem(self.file, self.places[at], column, shown, wanted))
        if len(where) > SHOWN:
            wanted = expected if isinstance(expected, str) else "the like"
            rest = f"{len(where) - SHOWN} more such cells"
            self.problems.append(Problem(self.file, "", column, rest, wanted))


def _show(value: Any) -> str:
    if pd.isna(value) or value == "":
        return "an empty cell"
    return repr(plain(value))


def check_rows(frame: pd.DataFrame, file: str, places: Sequence[str]) -> list[Problem]:
    """Problems of a per_layer or per_call frame (all columns of the schema, typed), in the order of the checks."""
    told = Complaints(frame, file, places)
    measured = frame[schema.SUM_NAMES].notna()
    some = measured.any(axis=1)
    with np.errstate(invalid="ignore"):  # roots of what the ranges complain about
        _keys(told)
        _ranges(told)
        for name in schema.SUM_NAMES:
            told.add(some & ~measured[name], name, "a number: the row has other sums")
        _inequalities(told)
        if "rel_mse" in frame:
            _metrics(told, measured.all(axis=1) & frame["in_features"].notna())
            _intervals(told)
    return told.problems


def _keys(told: Complaints) -> None:
    frame = told.frame
    for name in ("layer", "variant"):
        told.add(frame[name].isna() | (frame[name] == ""), name, "a name: it is part of the row's key")
    wrong = ~frame["run_id"].fillna("").str.fullmatch(_RUN_ID)
    told.add(wrong, "run_id", "12 hex digits (a spreadsheet may have turned them into a number)")
    for name, answers in _ANSWERS.items():
        told.add(~frame[name].isin(answers), name, f"one of {', '.join(answers)}")
    key = schema.PER_CALL_KEY if "call" in frame else schema.PER_LAYER_KEY
    double = frame.duplicated(key)
    if double.any():
        positions = pd.Series(range(len(frame)), index=frame.index)
        first = positions.groupby([frame[k] for k in key], sort=False, dropna=False).transform("min")
        told.add(double, "layer", lambda at: f"one row a key; {told.places[int(first.iloc[at])]} has the same")


def _ranges(told: Complaints) -> None:
    frame = told.frame
    for name, least in _LEAST.items():
        if name in frame:
            told.add(frame[name] < least, name, f"at least {least}")
    for name, (low, high) in _WITHIN.items():
        if name in frame:
            outside = (frame[name] < low - RELATIVE) | (frame[name] > high + RELATIVE)
            told.add(outside, name, f"between {low} and {high}")
    for name in schema.SUM_NAMES:
        if frame[name].dtype == "float64":
            told.add(np.isinf(frame[name]), name, "a finite sum")
    codes = frame["rows"] * frame["in_features"]
    for name in ("mismatched", "zeroed", "saturated"):
        told.add(frame[name] > codes, name, f_at("at most {:.0f} = rows * in_features", codes))
    told.add(frame["zero_rows"] > frame["rows"], "zero_rows", f_at("at most {} = rows", frame["rows"]))


def _inequalities(told: Complaints) -> None:
    """Cauchy-Schwarz between sums, and what bounds a maximum or a mean by them."""
    frame = told.frame
    codes = (frame["rows"] * frame["in_features"]).astype("float64")
    for name, left, right in (
        ("sum_ey", "sum_ee", "sum_yy"),
        ("sum_ez", "sum_ee", "sum_zz"),
    ):
        bound = np.sqrt(frame[left]) * np.sqrt(frame[right])
        wanted = "a size of at most {!r} = sqrt(" + f"{left} * {right})"
        told.add(frame[name].abs() > bound * (1 + RELATIVE), name, f_at(wanted, bound))
    bound = np.sqrt(codes) * np.sqrt(frame["sum_square_error"])
    wanted = "a size of at most {!r} = sqrt(rows * in_features * sum_square_error)"
    name = "sum_magnitude_error"
    told.add(frame[name].abs() > bound * (1 + SUM_ACCURACY), name, f_at(wanted, bound))
    bound = np.sqrt(frame["sum_ee"])
    above = frame["max_abs_e"] > bound * (1 + SUM_ACCURACY)
    told.add(above, "max_abs_e", f_at("at most {!r} = sqrt(sum_ee)", bound))
    bound = (frame["rows"] - frame["zero_rows"]).astype("float64")
    below = frame["sum_crest"] < bound * (1 - SUM_ACCURACY)
    told.add(below, "sum_crest", f_at("at least {:.0f}, the rows that are not zero", bound))


def f_at(template: str, values: pd.Series) -> Callable[[int], str]:
    """The template filled with the value of a row."""
    return lambda at: template.format(plain(values.iloc[at]))


def plain(value: Any) -> Any:
    """A numpy scalar as a Python number, so that it prints as one."""
    return value.item() if hasattr(value, "item") else value


def _metrics(told: Complaints, complete: pd.Series) -> None:
    """Derived columns against what the sums of their row give."""
    frame = told.frame
    sums = frame[[*schema.SUM_NAMES, "in_features"]].astype("float64")
    for name, values in summary.metrics(sums).items():
        slack = np.zeros(len(frame))
        if name == "residual_rel_mse":  # a difference of nearly equal numbers where the cosine is near 1
            slack = RELATIVE * frame["rel_mse"].abs().fillna(0).to_numpy()
        if name == "sqnr_db":  # crosses 0
            slack += RELATIVE
        differs = ~close(frame[name].to_numpy(np.float64), values, RELATIVE, slack)
        meaning = next(c.meaning for c in schema.METRICS if c.name == name)
        told.add(
            complete & differs, name, f_at("{!r} from the sums (" + meaning.split(";")[0] + ")", pd.Series(values))
        )


def close(a: np.ndarray, b: np.ndarray, relative: float, absolute: Any = 0.0) -> np.ndarray:
    """Equal within a tolerance; empty equals empty, inf equals inf."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return same | (np.abs(a - b) <= relative * np.maximum(np.abs(a), np.abs(b)) + absolute) & np.isfinite(a - b)


def is_constant(values: pd.Series) -> bool:
    """Whether no value differs from the first; also where there is none."""
    return bool((values == values.iloc[0]).all()) if len(values) else True


def _intervals(told: Complaints) -> None:
    frame = told.frame
    for metric in schema.INTERVAL_OF:
        low, high = frame[f"{metric}_lo"], frame[f"{metric}_hi"]
        told.add(low > high, f"{metric}_lo", f_at("at most {!r}, the upper end", high))
        told.add(low.isna() & high.notna(), f"{metric}_lo", "a number: the upper end has one")
        told.add(high.isna() & low.notna(), f"{metric}_hi", "a number: the lower end has one")
        if metric in _WITHIN:
            told.add((low < -1 - RELATIVE) | (low > 1 + RELATIVE), f"{metric}_lo", "between -1 and 1")
            told.add((high < -1 - RELATIVE) | (high > 1 + RELATIVE), f"{metric}_hi", "between -1 and 1")
