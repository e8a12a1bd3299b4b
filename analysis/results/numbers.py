"""Cells of text -> numbers, in the one style that the whole file is written in.

A file has a decimal point (1,234.5) or a decimal comma (1.234,5); thousands may be parted by the other sign, a space
or an apostrophe. Cells that read one way only decide the style of their file; cells that read both ways (1,234) follow
it. Where nothing decides, or a cell decides against the rest, it is named and nothing is guessed.

    values, problems = parse({"mse": ["0,5", "1.234,5"]}, {"mse": "float64"}, "f.csv", lines=[2, 3])
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from analysis.results.cells import Problem

Number = int | float | None
_DIGITS = 18  # that an Int64 holds in any case
_EMPTY = {"", "nan", "na", "n/a", "#n/a", "null", "none", "<na>"}
_INFINITE = {"inf": math.inf, "infinity": math.inf, "∞": math.inf}
_SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u2019": "'", "\u2212": "-"})
_GROUPED = r"(?P<whole>[1-9]\d{{0,2}}(?:(?P<mark>[{thousands} '])\d{{3}})(?:(?P=mark)\d{{3}})*|\d*)"
_TAIL = r"(?:{decimal}(?P<part>\d*))?(?P<power>[eE][+-]?\d+)?(?P<percent>\s?%)?"
_STYLES = {
    "point": re.compile(r"(?P<sign>[+-]?)" + (_GROUPED + _TAIL).format(thousands=",", decimal=r"\.")),
    "comma": re.compile(r"(?P<sign>[+-]?)" + (_GROUPED + _TAIL).format(thousands=".", decimal=",")),
}
_NAMES = {"point": "a decimal point", "comma": "a decimal comma"}


def parse(
    columns: Mapping[str, Sequence[str]],
    kinds: Mapping[str, str],
    file: str,
    lines: Sequence[int],
    separator: str = ",",
    notes: list[str] | None = None,
) -> tuple[dict[str, list[Number]], list[Problem]]:
    """Numbers of each column; None for an empty cell and for one in `problems`.

    Args:
        columns: text cells by column.
        kinds: 'Int64' or 'float64' by column.
        lines: line of each row, for problems.
        separator: of the file; points alone are decimal points where it is a comma.
        notes: takes what was found beyond plain numbers.
    """
    style, decided, problems = _style(columns, kinds, file, lines, separator)
    notes = [] if notes is None else notes
    if style == "comma":
        notes.append("decimal commas")
    out: dict[str, list[Number]] = {}
    grouped = percent = False
    for name, cells in columns.items():
        values: list[Number] = []
        for line, cell in zip(lines, cells, strict=True):
            value, mark = _read(cell, kinds[name], style)
            if value is None and cell.strip().lower() not in _EMPTY:
                problems.append(_bad(file, line, name, cell, kinds[name], style, decided))
            values.append(value)
            grouped |= "thousands" in mark
            percent |= "percent" in mark
        out[name] = values
    notes += ["thousands separators"] * grouped + ["percent signs, read as hundredths"] * percent
    return out, problems


_Place = tuple[int, str, str]  # line, column, cell


def _bad(file: str, line: int, column: str, cell: str, kind: str, style: str, decided: _Place | None) -> Problem:
    other = "comma" if style == "point" else "point"
    if decided is not None and _read(cell, kind, other)[0] is not None:
        seen = f"{_NAMES[style]}, as in line {decided[0]}, column {decided[1]!r}: {decided[2]!r}"
        return Problem(file, f"line {line}", column, f"{cell!r}, {_NAMES[other]}", seen)
    what = "a spreadsheet's own error" if cell.startswith("#") else "which is not a number"
    wanted = "a number or an empty cell" if kind == "float64" else "a whole number or an empty cell"
    return Problem(file, f"line {line}", column, f"{cell!r}, {what}", wanted)


def _style(
    columns: Mapping[str, Sequence[str]], kinds: Mapping[str, str], file: str, lines: Sequence[int], separator: str
) -> tuple[str, _Place | None, list[Problem]]:
    """The decimal sign of the file, a cell that decides it, and a problem where nothing does."""
    deciding: dict[str, list[_Place]] = {style: [] for style in _STYLES}
    unclear: list[_Place] = []
    for name, cells in columns.items():
        for line, cell in zip(lines, cells, strict=True):
            point, comma = (_read(cell, kinds[name], style)[0] for style in _STYLES)
            if point is not None and comma is None:
                deciding["point"].append((line, name, cell))
            elif comma is not None and point is None:
                deciding["comma"].append((line, name, cell))
            elif point != comma:
                unclear.append((line, name, cell))
    style = "comma" if len(deciding["comma"]) > len(deciding["point"]) else "point"
    if deciding[style]:
        return style, deciding[style][0], []
    if unclear and (separator != "," or any("," in cell for _, _, cell in unclear)):
        line, name, cell = unclear[0]
        meanings = " or ".join(repr(_read(cell, kinds[name], style)[0]) for style in _STYLES)
        wanted = "a number with one meaning; save the table without thousands separators"
        return style, None, [Problem(file, f"line {line}", name, f"{cell!r}, which may be {meanings}", wanted)]
    return style, None, []


def _read(cell: str, kind: str, style: str) -> tuple[Number, str]:
    """The number that a cell is in a style (None: none), and which marks it has."""
    text = cell.strip().translate(_SPACES)
    if text.lower().lstrip("+-") in _INFINITE and kind == "float64":
        return math.copysign(math.inf, -1 if text.startswith("-") else 1), ""
    match = _STYLES[style].fullmatch(text)
    if match is None or not (match["whole"] or match["part"]):
        return None, ""
    whole = re.sub(r"\D", "", match["whole"])
    digits = f"{match['sign']}{whole or '0'}.{match['part'] or '0'}{match['power'] or ''}"
    marks = ("thousands " if match["mark"] else "") + ("percent" if match["percent"] else "")
    if kind == "float64":
        return (float(Decimal(digits).scaleb(-2)) if match["percent"] else float(digits)), marks
    exact = Decimal(digits).scaleb(-2) if match["percent"] else Decimal(digits)
    whole_number = exact.adjusted() < _DIGITS and exact == exact.to_integral_value()
    return (int(exact), marks) if whole_number else (None, "")
