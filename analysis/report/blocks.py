"""What a section of the report is made of; the HTML page and its Markdown twin are both written from these.

All text is plain text: neither HTML nor Markdown. Whoever renders a block escapes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Code:
    """Commands to copy."""

    text: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Cell:
    """What a cell shows, what it sorts by (None: by what it shows), and a style word: '', 'good', 'bad' or 'open'."""

    text: str
    sort: float | str | None = None
    tone: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table. `numeric`: columns that align right; `sortable`: a click on a header sorts, fields filter and search;
    `stack`: on a phone a row becomes a card, so that no column is out of sight; `details`: what the page shows of a
    row that is chosen, as plain JSON (see `details.build`).
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: tuple[int, ...] = ()
    sortable: bool = False
    stack: bool = False
    short: int | None = None  # rows that the Markdown twin shows; None: all
    caption: str = ""
    details: Mapping[str, Any] | None = None
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A figure as PNG and SVG. `name` is its file name without ending, unique within a report."""

    name: str
    png: bytes
    svg: str
    alt: str
    caption: str
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Image:
    """A picture that the run holds."""

    name: str
    png: bytes
    alt: str
    caption: str
    kind: ClassVar[str] = "image"


@dataclass(frozen=True)
class Animation:
    """Moving pictures that the run holds: `data` is an animated WebP or an MP4, `still` the PNG shown at rest."""

    name: str
    data: bytes
    mime: str  # image/webp or video/mp4
    still: bytes
    alt: str
    caption: str
    kind: ClassVar[str] = "animation"

    @property
    def ending(self) -> str:
        return self.mime.rpartition("/")[2]


@dataclass(frozen=True)
class HeatCell:
    """One cell: what it says in full, its colour and that of text on it, and the row of the table of layers (or -1)."""

    text: str
    label: str
    colour: str
    ink: str
    row: int


@dataclass(frozen=True)
class Heatmap:
    """A figure whose cells the page can point at: sites x blocks, None where there is no layer.

    `figure` stands for it in files and in the Markdown twin. `scale`: colours from the lowest value to the highest.
    """

    figure: Figure
    sites: tuple[str, ...]
    blocks: tuple[str, ...]
    cells: tuple[tuple[HeatCell | None, ...], ...]
    scale: tuple[str, ...]
    ends: tuple[str, str]
    kind: ClassVar[str] = "heatmap"


@dataclass(frozen=True)
class Definitions:
    """Terms: (name, formula, meaning)."""

    items: tuple[tuple[str, str, str], ...]
    kind: ClassVar[str] = "definitions"


Block = Text | Code | Table | Figure | Image | Animation | Heatmap | Definitions


@dataclass(frozen=True)
class Section:
    """A titled part of the report. `id` is unique within a run's chapter."""

    id: str
    title: str
    blocks: tuple[Block, ...]
