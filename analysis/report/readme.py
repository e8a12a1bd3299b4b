"""README's result, written from a run's tables so that no number in it is typed by hand.

    update(Path("README.md"), Path("reports/tiny-world"))     # rewrites the text between the markers

`python -m analysis.report.readme` does that for the committed run; a test compares README with `render`.
"""

from __future__ import annotations

import json
from pathlib import Path

from analysis.report import closed_loop, markdown, records, sections
from analysis.report.chapter import Chapter, headline
from analysis.results.load import load_run
from analysis.results.schema import replacing

RESULT = "<!-- result: written by analysis.report.readme -->", "<!-- end of result -->"
SPEED = "<!-- speed: written by analysis.report.readme -->", "<!-- end of speed -->"
GPU_RECORD = Path("reports/gpu/matrix-game-3.json")
GPU_TABLES = Path("data/matrix-game-3-random-weights")
README, RUN = Path("README.md"), Path("reports/tiny-world")


def render(run: Path, shown_as: str) -> str:
    """The result of a run folder as Markdown; `shown_as` is the folder's path as README's links write it."""
    chapter = Chapter(load_run(run))
    table = next(b for b in sections.claims_table(chapter).blocks if b.kind == "table")
    figure = sections.main_figure(chapter)
    pictures = [b for b in (figure.blocks if figure else ()) if b.kind == "figure"]
    parts = [markdown.escape(headline(chapter))]
    parts += [f"![{markdown.escape(p.alt)}]({shown_as}/figures/{p.name}.png)" for p in pictures[:1]]  # type: ignore[union-attr]
    parts += [markdown.block(table), _closed_loop(), f"Full report: [`{shown_as}/report.md`]({shown_as}/report.md)."]
    return "\n\n".join(part for part in parts if part)


def _closed_loop() -> str:
    """The two sentences on the committed closed loops; '' without them."""
    record = records.closed_loop_record()
    if record is None:
        return ""
    said = markdown.escape(" ".join(closed_loop.sentences(record.table)))
    where = markdown.escape(record.described.removesuffix(f" ({record.place})"))
    return f"Closed loop, {where} ([tables and pictures]({record.place})). {said}"


def speed(record: Path) -> str:
    """What attaching to Matrix-Game-3.0 cost in the committed record, as Markdown."""
    found = json.loads(record.read_text(encoding="utf-8"))
    times = found["overhead"]
    runs = [found["attach"][size] for size in times]
    layers, silent = {run["layers"] for run in runs}, sum(run["silent"] for run in runs)
    same = all(run["bit_identical"] for run in runs) and all(one["outputs_equal"] for one in times.values())
    said = f"On one {found['device']}, with upstream's own code at full size and random weights "
    said += f"([tables]({GPU_TABLES.as_posix()}), [record]({GPU_RECORD.as_posix()})): "
    said += f"{' or '.join(map(str, sorted(layers)))} layers measured, {silent} silent, outputs "
    said += f"{'the same to the last bit' if same else 'CHANGED'}. Both kernels on every token of every layer, bf16 "
    said += "reference included, cost "
    said += " and ".join(f"{one['ratio']:.3f} times the plain forward pass at {size}" for size, one in times.items())
    said += "; memory grows by " + " and ".join(f"{one['extra_memory_gib']:.2f}" for one in times.values()) + " GiB."
    return said


def replaced(text: str, markers: tuple[str, str], by: str, name: str) -> str:
    """`text` with what stands between the markers replaced. ValueError where it has lost them."""
    start, end = markers
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"{name}: needs the markers {start!r} and {end!r} exactly once")
    return f"{text.split(start)[0]}{start}\n{by}\n{end}{text.split(end)[1]}"


def update(readme: Path, run: Path) -> None:
    """Replace what stands between both pairs of markers. ValueError where README has lost them."""
    text = readme.read_text(encoding="utf-8")
    text = replaced(text, RESULT, render(run, RUN.as_posix()), str(readme))
    text = replaced(text, SPEED, speed(readme.parent / GPU_RECORD), str(readme))
    with replacing(readme) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    update(README, RUN)
