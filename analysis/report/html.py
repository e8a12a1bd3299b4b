"""Run folders -> one self-contained index.html, its Markdown twin report.md, and figures/*.png and *.svg.

The page asks nothing of the network and holds its figures inside. The same tables give the same bytes.

    built = build_report(["reports/tiny-world"], "reports/tiny-world")
    built.index       # .../index.html
    built.headlines   # the verdict of each run, one sentence each
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from analysis.report import markdown, style, text
from analysis.report.blocks import Cell, Figure, Image, Section, Table
from analysis.report.chapter import Chapter, headline, warnings
from analysis.report.claims import ISSUE
from analysis.report.sections import SECTIONS
from analysis.results.load import load_run
from analysis.results.schema import replacing

TITLE = "Magnitude shrinkage in int8 attention projections"
INDEX, TWIN, FIGURES = "index.html", "report.md", "figures"
_PAGE_COLOURS = {
    style.INK: "--ink",
    style.LINE: "--line",
    style.BAND: "--band",
    style.SHIPPED: "--shipped",
    style.FIXED: "--fixed",
}
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

    Raises:
        ValueError: no run is given, one is given twice, or a folder holds no run.
        FileExistsError: `out_dir` holds the report of other runs, or a page of another origin, without overwrite.
    """
    chapters = _chapters(run_dirs)
    out = Path(out_dir)
    runs = [chapter.slice[0] for chapter in chapters]
    own_folder = any(out.resolve() == chapter.run.path.resolve() for chapter in chapters)
    if not overwrite:
        _check_free(out, runs, own_folder)
    rendered = [_render(chapter) for chapter in chapters]
    pictures = [b for c in rendered for s in c.sections for b in s.blocks if isinstance(b, Figure | Image)]
    for picture in pictures:
        _write(out / FIGURES / f"{picture.name}.png", picture.png)
        if isinstance(picture, Figure):
            _write(out / FIGURES / f"{picture.name}.svg", picture.svg.encode())
    marker = f"{_MARKER} {' '.join(runs)}"
    overview = _overview(chapters, rendered)
    _write(out / TWIN, _markdown(rendered, overview, marker).encode())
    _write(out / INDEX, _html(rendered, overview, marker).encode())
    return Report(out / INDEX, out / TWIN, tuple(c.headline for c in rendered))


def _chapters(run_dirs: Sequence[str | Path]) -> list[Chapter]:
    paths = [Path(path) for path in run_dirs]
    if not paths:
        raise ValueError("no run given; name at least one folder that `shrinkage measure` wrote")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"a run is given twice: {', '.join(map(str, paths))}")
    if len(paths) == 1:
        return [Chapter(load_run(paths[0]))]
    return [Chapter(load_run(path), f"run{number}-") for number, path in enumerate(paths, start=1)]


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


def _overview(chapters: Iterable[Chapter], rendered: Iterable[_Rendered]) -> Table:
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
    return Table(headers, tuple(rows), numeric=(2, 3, 4, 5, 6))


def _value(estimate: Any) -> float:
    return float(estimate.value)


def _html(rendered: list[_Rendered], overview: Table, marker: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["inline_svg"] = inline_svg
    environment.filters["glue"] = glue
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    page = environment.get_template("report.html.j2")
    return page.render(title=TITLE, chapters=rendered, overview=overview, marker=marker, issue_url=ISSUE.url)


def glue(words: str) -> str:
    """No line break inside '3.68 × 10⁻³', '−0.85 … −0.62' or '4.4 %'."""
    return words.replace(" … ", "\u00a0…\u00a0").replace(" × 10", "\u00a0×\u00a010").replace(" %", "\u00a0%")


def inline_svg(figure: Figure) -> Markup:
    """The figure's SVG to stand inside a page: ids unique in the page, ink and lines in the page's own colours."""
    body = figure.svg[figure.svg.index("<svg") :]
    prefix = re.sub(r"[^A-Za-z0-9]+", "-", figure.name)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(xlink:href|href)="#', rf'\1="#{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-")
    for colour, name in _PAGE_COLOURS.items():
        body = body.replace(colour.lower(), f"var({name})")
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    opening = re.search(r'viewBox="[^"]+"', body[: body.index(">")])
    assert opening is not None
    head = f'<svg {opening[0]} role="img" aria-label="{escape(figure.alt)}" xmlns="http://www.w3.org/2000/svg"'
    head += ' xmlns:xlink="http://www.w3.org/1999/xlink">'
    return Markup(head + body[body.index(">") + 1 :])


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
