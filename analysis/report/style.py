"""One look for every figure, and the only code that turns a figure into bytes.

Colours are Okabe and Ito's, told apart by colour-blind readers and in grey: a kernel keeps its colour in every figure.
Output is deterministic: no dates, no software names, a fixed salt for SVG ids. Figures are made without pyplot, so no
backend and no global state is involved; only `axes`, for notebooks, asks it for a figure.

    with style.context():
        figure, ax = style.figure(wide=True)
        plots.cosine(per_layer, ax)
        png, svg = style.render(figure)
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SHIPPED, FIXED = "#D55E00", "#0072B2"
_OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195")
# Ink and lines have colours of their own so that the page can swap them for its own in the dark.
INK, LINE, BAND = "#1c1d22", "#c9ccd3", "#f0f1f4"
HEAT = "cividis"  # reads the same to colour-blind eyes and in grey
MARKERS = {"shipped": "v", "fixed": "o"}
_OTHER_MARKERS = ("s", "D", "^", "P", "X")

# Any: matplotlib's stub types the keys as one Literal of every rcParam, which a plain dict cannot meet.
RC: Any = {
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same glyphs on every machine
    "font.size": 10.0,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.labelsize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.unicode_minus": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.1,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "svg.hashsalt": "int8-shrinkage",
    "svg.fonttype": "path",  # text looks the same whatever fonts the reader has
    "text.parse_math": False,  # names come from outside: a dollar sign in one must not start a formula
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
}


def context() -> AbstractContextManager[None]:
    """The style inside a `with` block; making and saving a figure both belong in it."""
    return mpl.rc_context(RC)


def use() -> None:
    """The style for the rest of a notebook."""
    mpl.rcParams.update(RC)


def figure(wide: bool = False, height: float = 4.2) -> tuple[Figure, Axes]:
    """A figure with one pair of axes: 10 inches wide, or 7. Height in inches."""
    made = Figure(figsize=(10.0 if wide else 7.0, height))
    return made, made.add_subplot()


def axes(ax: Axes | None = None, height: float = 4.2) -> Axes:
    """The axes given; or, for one line in a notebook, new ones that it shows, with the style in use from then on."""
    if ax is not None:
        return ax
    from matplotlib import pyplot  # here: the rest needs no backend and no global state

    use()
    return pyplot.subplots(figsize=(10.0, height))[1]


def colour(variant: str, variants: Iterable[str] = ()) -> str:
    """The colour of a kernel; kernels other than shipped and fixed get theirs by position among `variants`."""
    known = {"shipped": SHIPPED, "fixed": FIXED}
    return known[variant] if variant in known else _OTHERS[_position(variant, variants) % len(_OTHERS)]


def scale(low: float, high: float) -> mpl.colors.Normalize:
    """A heatmap's scale: logarithmic where positive values span more than a factor of ten."""
    kind = mpl.colors.LogNorm if 0 < 10 * low < high else mpl.colors.Normalize
    return kind(low, high)


def heat(share: float) -> tuple[str, str]:
    """(colour, that of text on it) at a share of the heatmaps' scale, 0 to 1: the ink with the higher contrast."""
    rgb = mpl.colormaps[HEAT](share)[:3]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    lighter = 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05  # contrast by WCAG 2
    return mpl.colors.to_hex(rgb), "#ffffff" if lighter else "#000000"


def marker(variant: str, variants: Iterable[str] = ()) -> str:
    """The marker of a kernel: a second cue beside the colour."""
    if variant in MARKERS:
        return MARKERS[variant]
    return _OTHER_MARKERS[_position(variant, variants) % len(_OTHER_MARKERS)]


def _position(variant: str, variants: Iterable[str]) -> int:
    others = sorted(set(variants) - {"shipped", "fixed"})
    return others.index(variant) if variant in others else 0


def render(made: Figure) -> tuple[bytes, str]:
    """(PNG, SVG) of one figure. The layout is found once and then kept, which is most of the work."""
    with context():
        made.draw_without_rendering()
        made.set_layout_engine("none")
        return to_png(made), to_svg(made)


def to_png(made: Figure) -> bytes:
    """PNG on white, without date or software name."""
    return _bytes(made, "png", facecolor="white", metadata={"Software": None})


def to_svg(made: Figure) -> str:
    """SVG on a transparent ground, without date or software name."""
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    return _bytes(made, "svg", facecolor="none", metadata=nothing).decode("utf-8")


def _bytes(made: Figure, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with context():
        made.savefig(buffer, format=kind, **options)
    return buffer.getvalue()
