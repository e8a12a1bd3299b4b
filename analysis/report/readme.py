"""README's result, written from a run's tables so that no number in it is typed by hand.

    update(Path("README.md"), Path("reports/tiny-world"))     # rewrites the text between the two markers

`python -m analysis.report.readme` does that for the committed run; a test compares README with `render`.
"""

from __future__ import annotations

from pathlib import Path

from analysis.report import markdown, sections
from analysis.report.chapter import Chapter, headline
from analysis.results.load import load_run
from analysis.results.schema import replacing

START, END = "<!-- result: written by analysis.report.readme -->", "<!-- end of result -->"
README, RUN = Path("README.md"), Path("reports/tiny-world")


def render(run: Path, shown_as: str) -> str:
    """The result of a run folder as Markdown; `shown_as` is the folder's path as README's links write it."""
    chapter = Chapter(load_run(run))
    table = next(b for b in sections.claims_table(chapter).blocks if b.kind == "table")
    figure = sections.main_figure(chapter)
    pictures = [b for b in (figure.blocks if figure else ()) if b.kind == "figure"]
    parts = [markdown.escape(headline(chapter))]
    parts += [f"![{markdown.escape(p.alt)}]({shown_as}/figures/{p.name}.png)" for p in pictures[:1]]  # type: ignore[union-attr]
    parts += [markdown.block(table), f"Full report: [`{shown_as}/report.md`]({shown_as}/report.md)."]
    return "\n\n".join(parts)


def update(readme: Path, run: Path) -> None:
    """Replace what stands between the markers. ValueError where README has lost them."""
    text = readme.read_text(encoding="utf-8")
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"{readme}: needs the markers {START!r} and {END!r} exactly once")
    before, after = text.split(START)[0], text.split(END)[1]
    with replacing(readme) as temporary:
        temporary.write_text(f"{before}{START}\n{render(run, RUN.as_posix())}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    update(README, RUN)
