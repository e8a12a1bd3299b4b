"""The project's own records, the same for every report: measured once, committed, and packaged beside this file.

`reports/gpu/quantizers.json`: times of the row quantisers (`shrinkage bench --kernels`). `data/closed-loop`: the large
run of `shrinkage rollout`, of which its verdicts and provenance travel.

    record = quantizers()                          # None where the file is missing; ValueError where it is another
    loops = closed_loops("tiny", "runs/tiny")      # this run's own closed loop, and the record where that says more
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.results import studies, tables

QUANTIZERS, QUANTIZERS_PLACE = "quantizers.json", "reports/gpu"
CLOSED_LOOP, CLOSED_LOOP_PLACE = "closed_loop", "data/closed-loop"
_PACKAGED = Path(__file__).resolve().parent
_REPOSITORY = _PACKAGED.parents[1]
_KEYS = ("device", "what", "copy_gb_per_s", "rounds", "shapes")
_SHAPE_KEYS = ("rows", "features", "dtype", "sites", "times", "gb_per_s", "of_copy", "ratio_to_shipped")
_TIMED = ("shipped", "fixed")


@dataclass(frozen=True)
class ClosedLoop:
    """closed_loop.csv with its provenance; `place` is the record's folder, '' for a run's own."""

    table: pd.DataFrame
    info: dict[str, Any]
    place: str = ""

    @property
    def pairs(self) -> int:
        return int(self.table["pairs"].max())

    @property
    def described(self) -> str:
        """'64 scene-seed pairs × 16 clips on an NVIDIA H200 (data/closed-loop)'."""
        clips, device = self.info.get("clips"), self.info.get("device")
        said = f"{self.pairs} scene-seed pairs" + (f" × {clips} clips" if clips else "")
        said += f" on {_article(device)}" if device else ""
        return said + (f" ({self.place})" if self.place else "")


def _article(device: str) -> str:
    return "a CPU" if device == "cpu" else f"an {device}" if device[0] in "AEIOUN" else f"a {device}"


def find(name: str, place: str) -> Path | None:
    """The packaged file, else the repository's, else None."""
    return next((path for path in (_PACKAGED / name, _REPOSITORY / place / name) if path.is_file()), None)


def quantizers() -> dict[str, Any] | None:
    """The record of the quantisers' times. Raises ValueError where the file is no such record."""
    path = find(QUANTIZERS, QUANTIZERS_PLACE)
    return None if path is None else read_quantizers(path)


def read_quantizers(path: Path) -> dict[str, Any]:
    """A record of `shrinkage bench --kernels`. Raises ValueError naming what it lacks."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    lacks = [key for key in _KEYS if not isinstance(record, dict) or key not in record]
    shapes = [] if lacks else record["shapes"]
    for shape in shapes:
        lacks += [f"shapes: {key}" for key in _SHAPE_KEYS if key not in shape]
        lacks += [f"shapes: times of {name}" for name in _TIMED if name not in shape.get("times", {})]
    if lacks or not shapes:
        raise ValueError(
            f"{path} lacks {', '.join(dict.fromkeys(lacks)) or 'shapes'}: not a record of `shrinkage bench --kernels`"
        )
    found: dict[str, Any] = record
    return found


def closed_loops(world: str, folder: Path) -> tuple[ClosedLoop | None, ClosedLoop | None]:
    """(the run's own closed loop, the record where it is of the same world and of more scene-seed pairs)."""
    own = read_closed_loop(folder) if (folder / studies.CLOSED_LOOP.file).is_file() else None
    record = closed_loop_record()
    if record is None or record.info.get("world") != world or (own is not None and own.pairs >= record.pairs):
        return own, None
    return own, record


def closed_loop_record() -> ClosedLoop | None:
    """The large closed-loop run that is committed; None where it is missing."""
    path = find(studies.CLOSED_LOOP.file, CLOSED_LOOP_PLACE)
    return None if path is None else read_closed_loop(path.parent, CLOSED_LOOP_PLACE)


def read_closed_loop(folder: Path, place: str = "") -> ClosedLoop:
    """closed_loop.csv and closed_loop.json of a folder. Raises as `tables.read`."""
    return ClosedLoop(tables.read(studies.CLOSED_LOOP, folder), tables.read_info(CLOSED_LOOP, folder), place)
