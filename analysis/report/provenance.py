"""The report's last two sections: where a run's numbers come from, and the commands that make them again."""

from __future__ import annotations

import json
from typing import Any

from analysis.report.blocks import Cell, Code, Section, Table, Text
from analysis.report.chapter import Chapter


def section(chapter: Chapter) -> Section:
    """What run.json says, then what the tables themselves hold."""
    info = {key: value for key, value in chapter.run.info.items() if value is not None}
    held = {
        "kernels in the table": ", ".join(chapter.variants),
        "layers in the table": chapter.layers,
        "calls in the table": int(chapter.per_layer["calls"].max()),
        "rows per layer (most)": int(chapter.per_layer["rows"].max()),
    }
    rows = tuple((Cell(key.replace("_", " ")), Cell(_words(value))) for key, value in (info | held).items())
    return Section("provenance", "Provenance", (Table(("", ""), rows, stack=True),))


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{key} {_words(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def reproduce(chapter: Chapter) -> Section:
    """The commands that make this run and this page."""
    info = chapter.run.info
    command = info.get("command") or "shrinkage measure --world tiny --out RUN"
    commit = info.get("git_commit")
    lines = [f"git checkout {commit.rstrip('+')}"] if isinstance(commit, str) and commit else []
    lines += [str(command), "shrinkage report RUN --out RUN    # RUN: the folder that the line above wrote"]
    said = "The same seed, checkpoint and device give the same tables; another device may differ in the last digits."
    return Section("reproduce", "How to reproduce", (Code("\n".join(lines)), Text(said)))
