"""The report's section on closed loops: verdicts with intervals, drift, what the frames look like by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.report import animation, records, style, text
from analysis.report.blocks import Block, Cell, Figure, Image, Section, Table, Text
from analysis.report.chapter import Chapter
from analysis.report.study_claims import decibels, question
from analysis.results import closed_loop as results
from analysis.results import studies, tables

PICTURE = "closed_loop.png"
PSNR_CEILING_DB = 60.0  # as in rollout.frames, which the report cannot import
NAMES = {"other_seed": "bf16, another seed", "true": "game"}
_COLOURS = {"bf16": "#8a8d94", "fp32": "#56B4E9", "other_seed": "#009E73", "true": "#1c1d22"}
_AGAINST = {"true": "the game's frames", "bf16": "bf16's frames", "nothing": "by itself"}
_UNITS = {"psnr_db": "PSNR (dB)", "ssim": "SSIM", "flip": "FLIP"}
_TONES = {"equivalent": "good", "degraded": "bad", "undecided": "open"}
_STATISTICS = {"luminance": "mean luma", "contrast": "contrast", "high_frequency": "high frequencies"}


def _colour(variant: str) -> str:
    return _COLOURS.get(variant) or style.colour(variant)


def drift(frames: pd.DataFrame, ax: Axes, against: str = "bf16", metric: str = "psnr_db") -> Axes:
    """A metric against another video's frames, clip by clip, mean over scenes with 95 % bands."""
    _curves(results.drift(frames, metric, against), ax)
    ax.set_ylabel(f"{_UNITS[metric]} against {_AGAINST[against]}")
    if metric == "psnr_db":
        ax.set_ylim(top=min(ax.get_ylim()[1], PSNR_CEILING_DB + 2))  # a t band may reach beyond what PSNR can be
    ax.set_title(f"Drift: how near do rollouts stay to {_AGAINST[against]}?")
    return _legend(ax)


def difference(frames: pd.DataFrame, ax: Axes, margin: float = results.MARGINS["psnr_db"]) -> Axes:
    """PSNR against the game minus bf16's, clip by clip, paired by scene; the equivalence margin is shaded."""
    curves = results.drift(frames, "psnr_db", "true", baseline="bf16")
    ax.axhspan(-margin, margin, color=style.BAND, lw=0, zorder=0.5, label=f"margin ± {margin:g} dB")
    ax.axhline(0, color=_COLOURS["bf16"], lw=1.2, zorder=1, label="bf16")
    _curves(curves, ax)
    ax.set_ylabel("PSNR against the game, minus bf16's (dB)")
    worst = curves.loc[curves["mean"].abs().idxmax()]
    amount, name = text.signed(f"{worst['mean']:+.2f}"), NAMES.get(worst["variant"], worst["variant"])
    ax.set_title(f"Against the game's frames: {amount} dB at most ({name}, clip {int(worst['clip']) + 1})")
    return _legend(ax)


def _curves(curves: pd.DataFrame, ax: Axes) -> None:
    order = ["fp32", "fixed", "shipped", "other_seed"]
    names = sorted(curves["variant"].unique(), key=lambda v: (order.index(v) if v in order else 1.5, v))
    for variant in names:
        rows = curves[curves["variant"] == variant].sort_values("clip")
        x, look = rows["clip"].to_numpy(np.float64) + 1, _colour(variant)
        ax.plot(
            x, rows["mean"], color=look, marker=style.marker(variant), ms=4, mew=0, label=NAMES.get(variant, variant)
        )
        if rows["lo"].notna().any():
            ax.fill_between(x, rows["lo"], rows["hi"], color=look, alpha=0.15, lw=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("clip of the rollout; line: mean over scenes, band: 95 %")


def _legend(ax: Axes) -> Axes:
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def sentences(closed_loop: pd.DataFrame) -> tuple[str, ...]:
    """The verdict in two sentences, with intervals; one or none where a question was not asked."""
    said = []
    game = _each(closed_loop, "true", "bf16")
    if game:
        first = game[0][1]
        said.append(
            f"Against the game's own frames: {_grouped(game, 'equivalent to', 'bf16')}, in PSNR with a margin of "
            f"{first['margin']:g} dB, over {int(first['scenes'])} scenes and {int(first['pairs'])} scene-seed pairs."
        )
    asked = (("other_seed", "another noise seed"), ("fp32", "bf16's own rounding"))
    near = [(_each(closed_loop, "bf16", baseline), name) for baseline, name in asked]
    near = [(rows, name) for rows, name in near if rows]
    if near:
        kept = ", ".join(f"{variant} {text.plain(row['value'])} dB" for variant, row in near[0][0])
        parts = ", ".join(_grouped(rows, "no further than", name) for rows, name in near)
        said.append(f"Against bf16's frames (PSNR {kept}): {parts}.")
    return tuple(said)


def _grouped(rows: list[tuple[str, pd.Series]], equivalent: str, name: str) -> str:
    """One phrase for all kernels of one verdict: 'nearer than another seed (shipped +14.5 [13.0, 16.0] dB)'."""
    groups: dict[str, list[str]] = {}
    for variant, row in rows:
        words = equivalent if row["verdict"] == "equivalent" else f"{row['verdict']} compared with"
        if words == "no further than" and row["difference_lo"] > 0:
            words = "nearer than"
        groups.setdefault(words, []).append(f"{variant} {decibels(row)}")
    return ", ".join(f"{words} {name} ({', '.join(shown)})" for words, shown in groups.items())


def _each(closed_loop: pd.DataFrame, against: str, baseline: str) -> list[tuple[str, pd.Series]]:
    kernels = [v for v in dict.fromkeys(closed_loop["variant"]) if v != "fp32"]
    ordered = sorted(kernels, key=lambda v: (v != "shipped", v))
    asked = [(v, question(closed_loop, v, against, baseline)) for v in ordered]
    return [(v, row) for v, row in asked if row is not None]


def section(chapter: Chapter) -> Section | None:
    """The record where it says more, then the run's own closed loop; None where there is neither."""
    own, record = records.closed_loops(chapter.evidence.world, chapter.run.path)
    if own is None and record is None:
        return None
    blocks: list[Block] = []
    if record is not None:
        blocks += [*map(Text, _introduced(record, "Record")), _verdicts(record.table)]
    if own is not None:
        blocks += [*map(Text, _introduced(own, "This run" if record else "")), *_own(chapter, own.table)]
    return Section("closed-loop", "Closed loop: do the frames get worse?", tuple(blocks))


def _introduced(loop: records.ClosedLoop, name: str) -> list[str]:
    """The two sentences, the first of them behind where they come from if it is named."""
    said = list(sentences(loop.table)) or [""]
    if name:
        said[0] = f"{name}, {loop.described}. {said[0]}".strip()
    return [s for s in said if s]


def _own(chapter: Chapter, closed_loop: pd.DataFrame) -> list[Block]:
    """What a run's own folder holds: drift, pictures, verdicts, looks."""
    blocks: list[Block] = []
    if closed_loop["difference_lo"].isna().all():
        blocks.append(Text("Fewer than 3 scenes: no interval, no test, no verdict."))
    frames = tables.find(studies.CLOSED_LOOP_FRAMES, chapter.run.path)
    if frames is not None:
        blocks += _figures(chapter, frames, float(closed_loop["margin"].dropna().iloc[0]))
    path = chapter.run.path / PICTURE
    said = (
        "The first scene in motion: bf16 and each kernel on the same noise, then their difference to bf16, amplified."
    )
    name = f"{chapter.prefix}closed_loop_video"
    moving = animation.find(chapter.run.path, path.stem, name, "video of the closed loops side by side", said)
    if moving is not None:
        blocks.append(moving)
    if path.is_file():
        caption = "The first scene: the game, then the model in bf16 and with each kernel on the same noise."
        picture = Image(f"{chapter.prefix}closed_loop", path.read_bytes(), "frames of the closed loops", caption)
        blocks.append(picture)
    return [*blocks, _verdicts(closed_loop), _looks(closed_loop)]


def _figures(chapter: Chapter, frames: pd.DataFrame, margin: float) -> list[Block]:
    pairs = set(zip(frames["variant"], frames["against"], strict=True))
    made: list[Block] = []
    if ("bf16", "true") in pairs:
        draw = partial(difference, margin=margin)
        caption = "Same scene, actions and noise for every kernel. Bands: t intervals over scenes, clip by clip."
        made.append(_figure(chapter, "closed_loop_game", frames, draw, caption))
    if any(against == "bf16" for _, against in pairs):
        caption = "60 dB: equal frames. Another seed is how far apart two samples of the same bf16 model are; fp32 is "
        caption += "what bf16's own rounding does."
        made.append(_figure(chapter, "closed_loop_drift", frames, drift, caption))
    return made


def _figure(chapter: Chapter, name: str, frames: pd.DataFrame, draw: object, caption: str) -> Figure:
    assert callable(draw)
    with style.context():
        made, ax = style.figure(wide=True)
        draw(frames, ax)
        alt = ax.get_title(loc="left")
        return Figure(f"{chapter.prefix}{name}", *style.render(made), alt, caption)


def _number(metric: str, value: float, ends: Sequence[float] = ()) -> str:
    digits = 2 if metric == "psnr_db" else 4
    if np.isnan(value):
        return text.EMPTY
    shown = text.signed(f"{value:+.{digits}f}") if ends else f"{value:.{digits}f}"
    known = [text.signed(f"{end:.{digits}f}") for end in ends if not np.isnan(end)]
    return shown + (f" [{', '.join(known)}]" if len(known) == 2 else "")


def _verdicts(closed_loop: pd.DataFrame) -> Table:
    rows = []
    questions = [question[:2] for question in results.QUESTIONS]
    records = closed_loop[closed_loop["against"] != "nothing"].to_dict("records")
    records.sort(
        key=lambda r: (
            list(_UNITS).index(r["metric"]),
            r["window"],
            questions.index((r["against"], r["baseline"])),
            r["variant"] == "fp32",
            r["variant"] != "shipped",
        )
    )
    for r in records:
        ends = (r["difference_lo"], r["difference_hi"])
        rows.append(
            (
                *(Cell(str(r["variant"])), Cell(_UNITS[r["metric"]]), Cell(_AGAINST[r["against"]])),
                Cell(NAMES.get(r["baseline"], r["baseline"])),
                Cell(str(r["window"]).replace("_", " ")),
                Cell(_number(r["metric"], r["value"]), float(r["value"])),
                Cell(_number(r["metric"], r["difference"], ends), float(r["difference"])),
                Cell(text.EMPTY if np.isnan(r["p_value"]) else f"{r['p_value']:.2g}", float(r["p_value"])),
                Cell(f"{r['margin']:g}"),
                Cell(str(r["verdict"]), tone=_TONES.get(r["verdict"], "")),
            )
        )
    headers = ("kernel", "metric", "against", "minus that of", "clips", "value", "difference [95 %]", "p", "margin")
    said = "Paired by scene, seeds averaged. Equivalent: the difference is shown to be smaller than the margin (for "
    said += "bf16's frames: no further away than the comparison). Degraded: a loss that is not. p: paired t test of no "
    said += "difference; a difference can be significant and still smaller than the margin."
    return Table((*headers, "verdict"), tuple(rows), numeric=(5, 6, 7, 8), sortable=True, short=12, caption=said)


def _looks(closed_loop: pd.DataFrame) -> Table:
    rows = []
    chosen = closed_loop[(closed_loop["against"] == "nothing") & (closed_loop["window"] == "all")]
    for r in chosen.to_dict("records"):
        ends = (r["difference_lo"], r["difference_hi"])
        p_value = text.EMPTY if np.isnan(r["p_value"]) else f"{r['p_value']:.2g}"
        values = (_number("", r["baseline_value"]), _number("", r["difference"], ends), p_value)
        rows.append((Cell(str(r["variant"])), Cell(_STATISTICS[r["metric"]]), *map(Cell, values)))
    headers = ("kernel", "statistic", "bf16", "difference [95 %]", "p")
    said = "Statistics that need no reference: would shrinkage darken, flatten or blur the frames? Luma from 0 to 1; "
    said += "high frequencies: share of the luma's variance above a quarter cycle a pixel."
    return Table(headers, tuple(rows), numeric=(2, 3, 4), caption=said)
