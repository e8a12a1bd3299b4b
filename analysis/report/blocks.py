"""What a section of the report is made of; the HTML page and its Markdown twin are both written from these.

All text is plain text: neither HTML nor Markdown. Whoever renders a block escapes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


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
    """A table. `numeric`: columns that align right; `sortable`: a click on a header sorts, a field filters;
    `stack`: on a phone a row becomes a card, so that no column is out of sight.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: tuple[int, ...] = ()
    sortable: bool = False
    stack: bool = False
    short: int | None = None  # rows that the Markdown twin shows; None: all
    caption: str = ""
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
class Definitions:
    """Terms: (name, formula, meaning)."""

    items: tuple[tuple[str, str, str], ...]
    kind: ClassVar[str] = "definitions"


Block = Text | Code | Table | Figure | Image | Definitions


@dataclass(frozen=True)
class Section:
    """A titled part of the report. `id` is unique within a run's chapter."""

    id: str
    title: str
    blocks: tuple[Block, ...]
