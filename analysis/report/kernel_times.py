"""The report's section on what the fix costs: times of the row quantisers, from the project's record.

The record is the project's own (see `records`), the same in every report; a report of several runs leaves it out.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from analysis.report import records, style, text
from analysis.report.blocks import Cell, Figure, Section, Table, Text
from analysis.report.chapter import Chapter
from analysis.report.claims import Verdict
from analysis.report.study_claims import FREE, cost_of, layer_ratio, shape_name, times_range, times_ratio

AGAIN = "shipped, again"  # as in measure.kernel_bench, which the report cannot import
_WORDS = {Verdict.KIND: "free", Verdict.NOT: "slower", Verdict.UNDECIDED: "undecided"}
_TONES = {Verdict.KIND: "good", Verdict.NOT: "bad", Verdict.UNDECIDED: "open"}


def kernels(record: dict[str, Any]) -> list[str]:
    """What was timed: shipped, others' quantisers, fixed; without the control."""
    names = [name for name in record["shapes"][0]["times"] if name not in ("shipped", "fixed", AGAIN)]
    return ["shipped", *names, "fixed"]


def speeds(record: dict[str, Any], ax: Axes) -> Axes:
    """GB/s of the quantisers in percent of the device's copy, shape by shape; whiskers: quartiles."""
    shapes, names = record["shapes"], kernels(record)
    x, width = np.arange(len(shapes)), 0.8 / len(names)
    for place, kernel in enumerate(names):
        at = x + (place - (len(names) - 1) / 2) * width
        reached = 100 * np.array([shape["of_copy"][kernel] for shape in shapes])
        times = np.array([[shape["times"][kernel][k] for k in ("median_s", "low_s", "high_s")] for shape in shapes])
        median, low, high = times.T
        spread = np.stack([reached * (1 - median / high), reached * (median / low - 1)])
        ax.bar(at, reached, width=0.95 * width, color=style.colour(kernel, names), label=_short(kernel))
        ax.errorbar(at, reached, yerr=spread, fmt="none", ecolor=style.INK, elinewidth=1.0, capsize=2)
    ax.axhline(100, color=style.INK, lw=0.9, zorder=1)
    ax.set_xticks(x, [f"{shape['rows']} × {shape['features']}\n{shape['dtype']}" for shape in shapes])
    ax.set_ylim(0, max(105.0, ax.get_ylim()[1]))
    ax.set_ylabel("GB/s in % of the device's copy")
    ax.set_title(f"Speed of the row quantisers; fixed takes {times_range(record)} times the time of shipped")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _short(kernel: str) -> str:
    """FILE:FUNCTION without the file."""
    return kernel.rpartition(":")[2]


def _long(kernel: str, record: dict[str, Any]) -> str:
    """A quantiser with the folders that the record's command names."""
    found = re.search(rf"\S*{re.escape(kernel)}", str(record.get("command", "")))
    return found[0] if found else kernel


def words(record: dict[str, Any]) -> str:
    """What was timed, on what, and what the method cannot tell from 1."""
    threads = f" ({record['threads']} threads)" if record.get("threads") else ""
    said = f"{record['what']} on {record['device']}{threads}, whose copy reads and writes "
    said += (
        f"{record['copy_gb_per_s']:.0f} GB/s; the shapes of Matrix-Game-3.0's projections, {record['rounds']} rounds, "
    )
    said += "each kernel in turn. "
    if all(AGAIN in shape["ratio_to_shipped"] for shape in record["shapes"]):
        said += f"The shipped kernel timed against itself gives {times_range(record, AGAIN)}. "
    verdicts = [cost_of(shape) for shape in record["shapes"]]
    counts = [f"{_WORDS[v]} at {verdicts.count(v)}" for v in _WORDS if v in verdicts]
    said += f"The fix is {', '.join(counts)} of {len(verdicts)} shapes."
    for other in kernels(record)[1:-1]:
        ratios = [shape["times"]["fixed"]["median_s"] / shape["times"][other]["median_s"] for shape in record["shapes"]]
        said += f" Fixed takes {min(ratios):.3f} … {max(ratios):.3f} times the time of {_long(other, record)}."
    return said


def section(chapter: Chapter) -> Section | None:
    """Words, bars and a table; None in a report of several runs or without the record."""
    record = None if chapter.prefix else records.quantizers()
    if record is None:
        return None
    with style.context():
        made, ax = style.figure(wide=True)
        speeds(record, ax)
        alt = ax.get_title(loc="left")
        caption = "Bytes of the input, the codes and the scales over the median time. Whiskers: quartiles over rounds. "
        caption += "100 %: what the device copies from memory to memory."
        figure = Figure("kernel_times", *style.render(made), alt, caption)
    return Section("cost", "The fix's cost", (Text(words(record)), figure, _table(record)))


def _table(record: dict[str, Any]) -> Table:
    rows = [_row(shape, kernel) for shape in record["shapes"] for kernel in kernels(record)]
    headers = (
        "rows × width",
        "quantiser",
        "µs",
        "GB/s",
        "of copy",
        "time / shipped [95 %]",
        "int8 layer / shipped [95 %]",
    )
    said = "Medians over rounds; intervals: bootstrap over rounds. Int8 layer: quantiser and int8 product together. "
    said += f"Free: its interval ends at or below {FREE:g}; slower: it lies above. Record: "
    said += f"{records.QUANTIZERS_PLACE}/{records.QUANTIZERS}, made by shrinkage bench --kernels."
    return Table((*headers, "the fix is"), tuple(rows), numeric=(2, 3, 4, 5, 6), stack=True, caption=said)


def _row(shape: dict[str, Any], kernel: str) -> tuple[Cell, ...]:
    ratio = shape["ratio_to_shipped"].get(kernel)
    verdict = cost_of(shape)
    return (
        Cell(shape_name(shape), note=shape["sites"] if kernel == "shipped" else ""),
        Cell(_short(kernel)),
        Cell(text.plain(1e6 * shape["times"][kernel]["median_s"])),
        Cell(f"{shape['gb_per_s'][kernel]:.0f}"),
        Cell(f"{100 * shape['of_copy'][kernel]:.0f} %"),
        Cell(text.EMPTY if ratio is None else times_ratio(ratio)),
        Cell(text.EMPTY if ratio is None else times_ratio(layer_ratio(shape, kernel))),
        Cell(_WORDS[verdict], tone=_TONES[verdict]) if kernel == "fixed" else Cell(""),
    )
