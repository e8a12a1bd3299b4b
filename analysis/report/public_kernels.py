"""The report's section on public quantisers: what `shrinkage audit` found when it ran them.

The table is the project's own (`data/kernel-audits.csv`, packaged beside this file), the same in every report; a report
of several runs leaves it out.
"""

from __future__ import annotations

from pathlib import Path

from analysis.report import audits, text
from analysis.report.blocks import Cell, Section, Table, Text
from analysis.report.chapter import Chapter

NAME = "kernel-audits.csv"
_HERE = Path(__file__).resolve()
_TONES = {"truncate": "bad", "floor": "bad", "double_rounded": "bad", "other": "open"}
_WORDS = {
    "truncate": "truncation toward zero",
    "double_rounded": "double rounding",
    "half_even": "nearest, ties to even",
}
_WORDS |= {"half_away": "nearest, ties away", "floor": "floor", "stochastic": "stochastic", "other": "other"}


def find_table() -> Path | None:
    """The packaged table, else the repository's, else None."""
    places = (_HERE.parent / NAME, _HERE.parents[2] / "data" / NAME)
    return next((place for place in places if place.is_file()), None)


def section(chapter: Chapter) -> Section | None:
    """Verdicts of public kernels, worst first; None in a report of several runs or without the table."""
    path = find_table()
    if chapter.prefix or path is None:
        return None
    found = audits.build(audits.read(path))
    counts = "; ".join(
        f"{n} {_WORDS.get(rule, rule)}" for rule, n in sorted(found.summary.items(), key=lambda p: -p[1])
    )
    same = "No verdict differs between devices." if not found.disagreements else "Devices disagree on some verdicts."
    intro = (
        f"{found.kernels} quantisers of {found.projects} public projects, run by shrinkage audit on the CPU and, where "
        f"marked, on a GPU: {counts}. {same} Each verdict is decided on codes recomputed in fp64 from the input."
    )
    rows = tuple(
        (
            Cell(row.kernel),
            Cell(row.commit),
            Cell(row.device),
            Cell(_WORDS.get(row.verdict, row.verdict), row.verdict, _TONES.get(row.verdict, "good")),
            Cell(text.percent(row.code_mismatch), row.code_mismatch),
            Cell(text.plain(row.magnitude_bias_lsb), row.magnitude_bias_lsb),
            Cell(str(len(row.defects)), len(row.defects)),
        )
        for row in found.rows
    )
    headers = ("kernel", "commit", "device", "rounding", "codes off", "magnitude bias (LSB)", "defects found")
    table = Table(headers, rows, numeric=(4, 5, 6), sortable=True, caption="Figures of the worst input dtype.")
    return Section("public-kernels", "Public kernels, audited", (Text(intro), table))
