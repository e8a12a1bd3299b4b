"""Numbers as the report prints them: three significant digits, intervals in brackets, powers of ten typographically.

    scientific(3.68e-3)                        '3.68 × 10⁻³'
    scientific(3.68e-3, 3.5e-3, 3.9e-3)        '3.68 [3.50, 3.90] × 10⁻³'
    plain(5.7144, 5.62, 5.81)                  '5.71 [5.62, 5.81]'
    percent(0.0312)                            '3.12 %'

An empty cell (NaN or None) prints as an en dash, never as 0. An interval with an empty end is left out.
"""

from __future__ import annotations

import math

EMPTY = "–"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_BRACKETS = " [{}, {}]"


def power(exponent: int) -> str:
    """10 to an integer exponent: '10⁻³'."""
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def is_number(value: float | None) -> bool:
    """Neither None nor NaN; infinity is a number."""
    return value is not None and not math.isnan(value)


def scientific(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A number of any size with one power of ten, which its interval shares."""
    if special := _special(value):
        return special
    assert value is not None
    exponent = 0 if value == 0 else math.floor(math.log10(abs(float(f"{value:.2e}"))))
    scale = 10.0**exponent
    mantissa = signed(f"{value / scale:.2f}") + _interval(low, high, lambda end: signed(f"{end / scale:.2f}"))
    return mantissa if exponent == 0 else f"{mantissa} × {power(exponent)}"


def plain(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A number of ordinary size: three significant digits, as many decimals at both ends of its interval."""
    if special := _special(value):
        return special
    assert value is not None
    size = 0 if value == 0 else math.floor(math.log10(abs(float(f"{value:.2e}"))))
    decimals = min(max(2 - size, 0), 4)
    return signed(f"{value:.{decimals}f}") + _interval(low, high, lambda end: signed(f"{end:.{decimals}f}"))


def cosine(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A cosine: three decimals, always signed."""
    if special := _special(value):
        return special
    return signed(f"{value:+.3f}") + _interval(low, high, lambda end: signed(f"{end:+.3f}"))


def percent(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A fraction in percent: '3.12 %'."""
    if special := _special(value):
        return special
    scaled = [None if end is None else end * 100 for end in (value, low, high)]
    return f"{plain(*scaled)} %"


def signed(digits: str) -> str:
    """A true minus sign, and no minus before a zero."""
    return digits.lstrip("+-") if float(digits) == 0 else digits.replace("-", "−")


def _special(value: float | None) -> str:
    if not is_number(value):
        return EMPTY
    assert value is not None
    return "" if math.isfinite(value) else ("∞" if value > 0 else "−∞")


def _interval(low: float | None, high: float | None, show: object) -> str:
    assert callable(show)
    if not (is_number(low) and is_number(high)):
        return ""
    assert low is not None
    assert high is not None
    return _BRACKETS.format(*(show(end) if math.isfinite(end) else _special(end) for end in (low, high)))
