"""Run folders -> one self-contained index.html, its Markdown twin report.md, and figures/*.png and *.svg.

The page asks nothing of the network and holds its figures inside. The same tables give the same bytes.

    built = build_report(["reports/tiny-world"], "reports/tiny-world")
    built.index       # .../index.html
    built.headlines   # the verdict of each run, one sentence each
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import escape

from analysis.report import markdown, page, pooled, text
from analysis.report.blocks import Animation, Block, Cell, Figure, Heatmap, Image, Section, Table
from analysis.report.chapter import Chapter, headline, warnings
from analysis.report.claims import ISSUE
from analysis.report.sections import SECTIONS
from analysis.results.schema import replacing

TITLE = "Magnitude shrinkage in int8 attention projections"
INDEX, TWIN, FIGURES = "index.html", "report.md", "figures"
_MARKER = "int8-shrinkage report of"


@dataclass(frozen=True)
class Report:
    """What was written: the page, its twin, and the sentence that each run's chapter begins with."""

    index: Path
    twin: Path
    headlines: tuple[str, ...]


@dataclass(frozen=True)
class _Rendered:
    """A chapter, ready to print."""

    name: str
    prefix: str
    headline: str
    warnings: list[str]
    sections: list[Section]


def build_report(run_dirs: Sequence[str | Path], out_dir: str | Path, overwrite: bool = False) -> Report:
    """Write the report of one or several runs into `out_dir`, which may be a run's own folder.

    A folder of many runs is pooled into one chapter (see `pooled`).

    Raises:
        ValueError: no run is given, one is given twice, or a folder holds no run.
        FileExistsError: `out_dir` holds the report of other runs, or a page of another origin, without overwrite.
    """
    paths, out = [Path(path) for path in run_dirs], Path(out_dir)
    if not paths:
        raise ValueError("no run given; name at least one folder that `shrinkage measure` wrote")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"a run is given twice: {', '.join(map(str, paths))}")
    with pooled.opened(paths) as found:
        return _build(_chapters(found), found.note, out, overwrite)


def _build(chapters: list[Chapter], note: str, out: Path, overwrite: bool) -> Report:
    runs = [chapter.slice[0] for chapter in chapters]
    own_folder = any(out.resolve() == chapter.run.path.resolve() for chapter in chapters)
    if not overwrite:
        _check_free(out, runs, own_folder)
    rendered = [_render(chapter) for chapter in chapters]
    for part in (b for c in rendered for s in c.sections for b in s.blocks):
        for name, data in _files(part):
            _write(out / FIGURES / name, data)
    marker = f"{_MARKER} {' '.join(runs)}"
    overview = _overview(chapters, rendered, note)
    _write(out / TWIN, _markdown(rendered, overview, marker).encode())
    shown = page.render(title=TITLE, chapters=rendered, overview=overview, marker=marker, issue_url=ISSUE.url)
    _write(out / INDEX, shown.encode())
    return Report(out / INDEX, out / TWIN, tuple(c.headline for c in rendered))


def _chapters(found: pooled.Opened) -> list[Chapter]:
    if len(found.runs) == 1:
        return [Chapter(found.runs[0])]
    return [Chapter(run, f"run{number}-") for number, run in enumerate(found.runs, start=1)]


def _files(part: Block) -> list[tuple[str, bytes]]:
    """The files that stand for a block beside the page: (name, content)."""
    match part:
        case Heatmap():
            return _files(part.figure)
        case Figure():
            return [(f"{part.name}.png", part.png), (f"{part.name}.svg", part.svg.encode())]
        case Image():
            return [(f"{part.name}.png", part.png)]
        case Animation():
            return [(f"{part.name}.{part.ending}", part.data)]
    return []


def _check_free(out: Path, runs: list[str], own_folder: bool) -> None:
    for name in (INDEX, TWIN):
        path = out / name
        if not path.exists():
            continue
        found = re.search(rf"{_MARKER} ([^\"<>]*?)(?:\"| -->)", path.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            raise FileExistsError(f"{path} was not written by a report; choose another --out or pass --overwrite")
        if not own_folder and found[1] != str(escape(" ".join(runs))):
            raise FileExistsError(
                f"{path} is the report of run {found[1]}, not of {' '.join(runs)}; "
                "choose another --out or pass --overwrite"
            )


def _render(chapter: Chapter) -> _Rendered:
    sections = [made for make in SECTIONS if (made := make(chapter)) is not None]
    return _Rendered(chapter.run.name, chapter.prefix, headline(chapter), warnings(chapter), sections)


def _overview(chapters: Iterable[Chapter], rendered: Iterable[_Rendered], note: str) -> Table:
    """One row a run, for a report of several."""
    rows = []
    for chapter, done in zip(chapters, rendered, strict=True):
        mean = chapter.evidence.mean
        ratio, angle = mean("rel_mse", "shipped/fixed"), mean("error_output_cosine", "shipped")
        rows.append(
            (
                *(Cell(done.name), Cell(chapter.evidence.world), Cell(str(chapter.layers))),
                *(Cell(text.scientific(_value(mean("rel_mse", v)))) for v in ("shipped", "fixed")),
                Cell(text.plain(ratio.value, ratio.low, ratio.high)),
                Cell(text.cosine(angle.value, angle.low, angle.high)),
            )
        )
    headers = (
        "run",
        "world",
        "layers",
        "mean relative MSE, shipped",
        "fixed",
        "ratio of means",
        "mean cosine, shipped",
    )
    return Table(headers, tuple(rows), numeric=(2, 3, 4, 5, 6), caption=note)


def _value(estimate: Any) -> float:
    return float(estimate.value)


def _markdown(rendered: list[_Rendered], overview: Table, marker: str) -> str:
    parts = [f"<!-- {escape(marker)} -->\n# {TITLE}", f"Issue: <{ISSUE.url}>"]
    several = len(rendered) > 1
    if several:
        parts.append(markdown.block(overview))
    for chapter in rendered:
        if several:
            parts.append(f"## {markdown.escape(chapter.name)}")
        parts.append(f"**{markdown.escape(chapter.headline)}**")
        parts += ["\n".join(f"> - {markdown.escape(line)}" for line in chapter.warnings)] if chapter.warnings else []
        parts += [markdown.section(section, 3 if several else 2) for section in chapter.sections]
    return "\n\n".join(parts) + "\n"


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)
