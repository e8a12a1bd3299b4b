"""Symbols and formulas as the report prints them, in the order in which a reader needs them."""

from __future__ import annotations

_ALWAYS: tuple[tuple[str, str, str], ...] = (
    ("code", "s = x · 127 / max|x|, per token", "the activation in steps (LSB) of its int8 code, before rounding"),
    (
        "shipped",
        "trunc(s + int8(½ sign s)) = trunc(s)",
        "the issue's kernel: the offset casts to 0, codes truncate",
    ),
    ("fixed", "trunc(s + ½ sign s)", "the offset is added in float: round half away from zero"),
    ("y, e", "e = y(int8) − y(reference)", "output of the layer and its error; y is the reference output"),
    ("relative MSE", "Σe² / Σy²", "energy of the error in units of the output's energy"),
    ("cosine(error, output)", "Σey / √(Σe² Σy²)", "−1: pure loss of magnitude; 0: error unrelated to the output"),
    ("shrinkage", "−Σey / Σy²", "fraction of its magnitude that the output loses"),
    (
        "effective MSE",
        "relative MSE after the norm",
        "the norm behind q and k undoes a common gain; v, o: as is",
    ),
    ("mean", "plain mean over layers", "as in the issue; pooled = Σ over layers of e² / Σ over layers of y²"),
)
_DRAWN = {
    "call": "calls (one forward pass each) are drawn with replacement, seeded",
    "run": "whole runs are drawn with replacement, seeded",
}
# By what intervals are over: see Chapter.unit.
DEFINITIONS = {unit: (*_ALWAYS, ("interval", "95 %, percentile bootstrap", drawn)) for unit, drawn in _DRAWN.items()}
