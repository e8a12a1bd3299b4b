"""How numbers print: three digits, one power of ten, an interval with as many decimals, an empty cell as a dash."""

from __future__ import annotations

import math

import pytest

from analysis.report import text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.scientific(3.68e-3), "3.68 × 10⁻³"),
        (text.scientific(3.684e-3, 3.5e-3, 3.9e-3), "3.68 [3.50, 3.90] × 10⁻³"),
        (text.scientific(9.996e-4, 9.9e-4, 1.01e-3), "1.00 [0.99, 1.01] × 10⁻³"),
        (text.scientific(5.7), "5.70"),
        (text.scientific(0.0), "0.00"),
        (text.scientific(-1.2e12), "−1.20 × 10¹²"),
        (text.scientific(math.nan, 1, 2), "–"),
        (text.scientific(None), "–"),
        (text.scientific(math.inf), "∞"),
        (text.scientific(1.0, math.nan, 2.0), "1.00"),
        (text.plain(5.714, 5.62, 5.81), "5.71 [5.62, 5.81]"),
        (text.plain(1.0, 0.5, math.inf), "1.00 [0.50, ∞]"),
        (text.plain(123.4), "123"),
        (text.plain(0.0123), "0.0123"),
        (text.plain(-1e-9), "0.0000"),
        (text.cosine(-0.7189, -0.72, -0.71), "−0.719 [−0.720, −0.710]"),
        (text.cosine(0.00004), "0.000"),
        (text.cosine(0.02), "+0.020"),
        (text.percent(0.0312), "3.12 %"),
        (text.percent(1.0), "100 %"),
        (text.percent(math.nan), "–"),
    ],
)
def test_numbers(shown, expected):
    assert shown == expected
