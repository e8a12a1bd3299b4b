"""A report as text for a terminal (rich) and as Markdown to paste into an issue."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from analysis.audit.findings import BIASED, DEFECT, AuditReport

MEANING = {
    "truncate": "codes are truncated toward zero: every magnitude loses half a step on average",
    "floor": "codes are rounded down: every value loses half a step on average",
    "floor_half": "round to nearest, ties up: floor(x + 0.5)",
    "half_away": "round to nearest, ties away from zero",
    "half_even": "round to nearest, ties to even",
    "stochastic": "stochastic rounding: unbiased, with twice the error energy of rounding to nearest",
    "double_rounded": "the quotient is rounded to a narrow dtype before it is rounded to a code",
    "other": "no known rounding explains the codes",
}
FIGURES = (
    "rounding",
    "codes that are not half even",
    "magnitude bias, LSB",
    "mean error, LSB",
    "RMS error, LSB",
    "row gain",
    "exact ties not to even",
)


def figures(report: AuditReport) -> dict[str, list[str]]:
    """dtype -> its FIGURES, as strings."""
    return {
        dtype: [
            entry["rounding"],
            f"{entry['code_mismatch']:.2%}",
            _with_interval(entry, "magnitude_bias_lsb", "+.3f"),
            _with_interval(entry, "mean_error_lsb", "+.3f"),
            f"{entry['rmse_lsb']:.3f}",
            _with_interval(entry, "row_gain", ".4f"),
            f"{entry['exact_ties_not_half_even']} of {entry['exact_ties']}",
        ]
        for dtype, entry in report.by_dtype.items()
    }


def _with_interval(entry: dict[str, Any], name: str, spec: str) -> str:
    interval = entry[f"{name}_interval"]
    half = (interval[1] - interval[0]) / 2 if interval else 0.0
    return f"{entry[name]:{spec}} ± {half:{spec.lstrip('+')}}" if interval else f"{entry[name]:{spec}}"


def headline(report: AuditReport) -> str:
    return f"{report.rounding}: {MEANING[report.rounding]}"


def _verdict(report: AuditReport) -> str:
    if report.clean:
        return "clean"
    n = len(report.defects)
    return f"{n} defect{'' if n == 1 else 's'}"


def text(report: AuditReport) -> Group:
    """For `rich.print`."""
    style = "bold red" if report.rounding in BIASED or not report.clean else "bold green"
    lines = Text.assemble((headline(report), style), "\n", (_verdict(report), style))
    lines.append(f"\nscales {report.layout}")
    lines.append(f"\n{_provenance(report)}", style="dim")
    columns = figures(report)
    table = Table("", *columns, box=None, header_style="bold")
    for name, *values in zip(FIGURES, *columns.values(), strict=True):
        table.add_row(name, *values)
    parts: list[Any] = [Panel(lines, title=Text(report.target), title_align="left"), table]
    for finding in report.findings:
        color = "red" if finding.severity == DEFECT else "yellow"
        title = Text.assemble("\n", (finding.severity, f"bold {color}"), " ", (finding.check, "bold"))
        title.append(f" {', '.join(finding.dtypes)}", style="dim")
        parts.append(title)
        fields = Table.grid(padding=(0, 2))
        for name in ("input", "got", "expected"):
            fields.add_row(Text(f"  {name}", style="dim"), Text(getattr(finding, name)))
        parts.append(fields)
    return Group(*parts)


def markdown(report: AuditReport) -> str:
    """For an issue."""
    out = [f"### `{report.target}`: {report.rounding}, {_verdict(report)}", "", headline(report) + ".", ""]
    example = report.figures.get("smallest_input")
    if example:
        out += [
            f"Smallest input that shows it: {example['input']} gives {example['got']}, not {example['expected']}.",
            "",
        ]
    columns = figures(report)
    out += _table(["", *columns], [list(row) for row in zip(FIGURES, *columns.values(), strict=True)])
    if report.findings:
        header = ["", "check", "input", "got", "expected"]
        cells = [
            [f.severity, f"{f.check} ({', '.join(f.dtypes)})" if f.dtypes else f.check, f.input, f.got, f.expected]
            for f in report.findings
        ]
        out += ["", *_table(header, cells)]
    shown = report.figures["demonstration"]
    out += [
        "",
        f"One row with step 1, {shown['input']}, is coded {shown['got']}; half even gives {shown['half_even']}.",
    ]
    out += ["", f"Scales: {report.layout}. {_provenance(report)}."]
    out += [
        "Codes are compared with the input rounded in fp64; LSB figures are means over Gaussian rows, 95 % intervals."
    ]
    return "\n".join(out) + "\n"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]


def _provenance(report: AuditReport) -> str:
    source = [f"{key} {value}" for key, value in report.source.items()]
    ran = [f"{name} {version}" for name, version in report.versions.items()]
    return ", ".join([*source, f"device {report.device}", *ran, f"seed {report.seed}"])
