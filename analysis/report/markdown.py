"""The report's Markdown twin: the same blocks, figures by file name, long tables cut to their first rows.

Text from outside (names of layers, scenes, kernels) is escaped: it can start no table, link, emphasis or HTML.
"""

from __future__ import annotations

import re

from analysis.report.blocks import (
    Animation,
    Block,
    Cell,
    Code,
    Definitions,
    Figure,
    Heatmap,
    Image,
    Section,
    Table,
    Text,
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def escape(words: str) -> str:
    """Plain text as Markdown that prints it unchanged, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(words.split()))


def section(part: Section, level: int = 2) -> str:
    """A section under a heading of this level."""
    return "\n\n".join([f"{'#' * level} {escape(part.title)}", *map(block, part.blocks)])


def block(part: Block) -> str:
    """One block."""
    match part:
        case Text():
            return escape(part.text)
        case Code():
            longest = max((len(run) for run in re.findall(r"`+", part.text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{fence}sh\n{part.text}\n{fence}"
        case Figure() | Image():
            return f"![{escape(part.alt)}](figures/{part.name}.png)\n\n{escape(part.caption)}"
        case Animation() if part.mime.startswith("video/"):
            return f"[{escape(part.alt)}](figures/{part.name}.{part.ending})\n\n{escape(part.caption)}"
        case Animation():
            return f"![{escape(part.alt)}](figures/{part.name}.{part.ending})\n\n{escape(part.caption)}"
        case Heatmap():
            return block(part.figure)
        case Definitions():
            rows = tuple(tuple(map(Cell, item)) for item in part.items)
            return _table(Table(("term", "formula", "meaning"), rows))
        case Table():
            return _table(part)


def _table(part: Table) -> str:
    rows = part.rows if part.short is None else part.rows[: part.short]
    rule = ["---:" if column in part.numeric else "---" for column in range(len(part.headers))]
    lines = [_line([escape(header) for header in part.headers]), _line(rule)]
    lines += [_line([_cell(cell) for cell in row]) for row in rows]
    words = [part.caption] if part.caption and not part.sortable else []
    if len(rows) < len(part.rows):
        words.append(f"The first {len(rows)} of {len(part.rows)} rows; all of them: index.html and per_layer.csv.")
    return "\n".join(lines) + "".join(f"\n\n{escape(said)}" for said in words)


def _cell(cell: Cell) -> str:
    shown = f"**{escape(cell.text)}**" if cell.tone else escape(cell.text)
    return f"{shown} ({escape(cell.note)})" if cell.note else shown


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
