"""The parts of one run, put together as if it had been measured in one piece.

Parts that hold different calls are stacked; ranks of one launch hold the same calls and their sums add; with `scenes`,
runs that differ in nothing but their scenes become one run over all of them. Splitting a run by calls or by scenes and
joining the parts gives its per_layer.csv byte for byte.

    per_call, info = join([part_0, part_1])
    folder.write_run_folder("whole", per_call, info)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.results import merge, provenance, schema
from analysis.results.sources import RunFolder, check_parts

# What write_run_folder counts anew, and what holds for a part only.
_RECOUNTED = ("calls", "layers_measured", "rows", "nonfinite_rows", "rank", "timing", "schema_version")


def join(parts: Sequence[RunFolder], scenes: bool = False, ranks: bool = False) -> tuple[pd.DataFrame, dict[str, Any]]:
    """per_call and provenance of the run that the parts belong to.

    Args:
        scenes: parts with other run ids are allowed where only their scenes differ; calls are numbered on.
        ranks: calls that several parts hold are ranks of one launch, also where run.json does not say so.

    Raises:
        ValueError: the parts are of different runs, or hold the same rows; the message names the field.
    """
    check_parts(parts, but=("scenes",) if scenes else ())
    by_run: dict[str, list[RunFolder]] = {}
    for part in parts:
        by_run.setdefault(part.run_id, []).append(part)
    if len(by_run) > 1 and not scenes:
        first, other = (group[0] for group in list(by_run.values())[:2])
        raise ValueError(
            f"{other.path}: run_id is {other.run_id!r}, {first.path} has {first.run_id!r}; parts of one run share it"
        )
    frames = [_one_run(group, ranks) for group in by_run.values()]
    info = _provenance(parts, [group[0] for group in by_run.values()])
    if len(frames) > 1:
        frames = _number_on(frames, [group[0] for group in by_run.values()])
    per_call = pd.concat(frames, ignore_index=True).assign(run_id=str(info["run_id"]))
    per_call = schema.conform(per_call, schema.PER_CALL_COLUMNS, "merged parts")
    _check_layers(per_call, parts)
    silent = set(info.get("layers_silent") or ()) - set(per_call["layer"])
    kept = {name: value for name, value in info.items() if name not in _RECOUNTED}
    return per_call, kept | {"layers_silent": sorted(silent)}


def _one_run(parts: Sequence[RunFolder], ranks: bool) -> pd.DataFrame:
    """Rows of parts with one run id, in order of calls."""
    if len(parts) > 1:
        parts = sorted(parts, key=lambda part: part.info.get("rank", 0))
    frames = [schema.read_per_call(part.per_call) for part in parts]
    for part, frame in zip(parts, frames, strict=True):
        if set(frame["run_id"]) != {part.run_id}:
            raise ValueError(
                f"{part.per_call}: run_id is {frame['run_id'].iloc[0]!r}, its run.json has {part.run_id!r}"
            )
    numbers = [part.info.get("rank") for part in parts]
    if ranks or (None not in numbers and len(numbers) > 1):
        _check_ranks(parts, numbers)
        replicated = set().union(*(part.info.get("layers_replicated") or () for part in parts))
        frame = merge.add_runs(frames, replicated) if len(frames) > 1 else frames[0]
    else:
        frame = pd.concat(frames, ignore_index=True)
        _check_disjoint(parts, frames, frame)
    return frame.sort_values("call", kind="stable").reset_index(drop=True)


def _check_ranks(parts: Sequence[RunFolder], numbers: Sequence[Any]) -> None:
    for at, number in enumerate(numbers):
        if number is not None and number in numbers[:at]:
            other = parts[numbers.index(number)]
            raise ValueError(f"{parts[at].path}: rank is {number}, as in {other.path}; name each rank once")


def _check_disjoint(parts: Sequence[RunFolder], frames: Sequence[pd.DataFrame], stacked: pd.DataFrame) -> None:
    """Two parts that hold the same call and layer would count it twice."""
    double = stacked.duplicated(schema.PER_CALL_KEY).to_numpy()
    if not double.any():
        return
    at = int(double.argmax())
    ends = pd.Series([len(frame) for frame in frames]).cumsum()
    later = int((ends <= at).sum())
    row = stacked.iloc[at]
    same = (stacked[schema.PER_CALL_KEY] == row[schema.PER_CALL_KEY]).all(axis=1).to_numpy().argmax()
    earlier = int((ends <= same).sum())
    raise ValueError(
        f"{parts[later].path}: call {row['call']} of layer {row['layer']!r}, {row['variant']}, is also in "
        f"{parts[earlier].path}; if these are ranks of one launch, say --as ranks; if one run was repeated, keep one"
    )


def _number_on(frames: Sequence[pd.DataFrame], runs: Sequence[RunFolder]) -> list[pd.DataFrame]:
    """Calls of the second run after those of the first, and so on."""
    seen: dict[str, RunFolder] = {}
    for run in runs:
        for scene in run.info.get("scenes") or ():
            if scene in seen:
                raise ValueError(f"{run.path}: scenes: {scene!r} is also in {seen[scene].path}; name each scene once")
            seen[scene] = run
    numbered, offset = [], 0
    for frame in frames:
        numbered.append(frame.assign(call=frame["call"] + offset))
        offset += int(frame["call"].max()) + 1
    return numbered


def _provenance(parts: Sequence[RunFolder], runs: Sequence[RunFolder]) -> dict[str, Any]:
    """run.json of the whole: the first part's, with scenes joined and what each part was."""
    info = dict(parts[0].info)
    infos = [part.info for part in parts]
    if len(runs) > 1:
        info["scenes"] = [scene for run in runs for scene in run.info.get("scenes") or ()]
    info["complete"] = all(bool(i.get("complete", True)) for i in infos)
    info["layers_silent"] = sorted({name for i in infos for name in i.get("layers_silent") or ()})
    if isinstance(info.get("ranks"), int) and info.get("rank") is not None:
        info["ranks_missing"] = sorted(set(range(info["ranks"])) - {i.get("rank") for i in infos})
        info["complete"] = info["complete"] and not info["ranks_missing"]
    for name in ("layers_expected", "layers_found"):
        if any(name in i for i in infos):
            info[name] = max(int(i.get(name, 0)) for i in infos)
    shown = ("run_id", "scenes", "rank", "calls", "command")
    info["merged"] = {
        "as": "parts",
        "parts": [{"folder": p.name} | {k: p.info[k] for k in shown if k in p.info} for p in parts],
    }
    info["run_id"] = provenance.run_id(info) if len(runs) > 1 else parts[0].run_id
    return info


def _check_layers(per_call: pd.DataFrame, parts: Sequence[RunFolder]) -> None:
    """A layer has one shape and one place in every part."""
    labels = per_call.drop_duplicates(["layer", *schema.LABEL_NAMES])
    double = labels.duplicated("layer", keep=False)
    if double.any():
        layer = labels.loc[double, "layer"].iloc[0]
        for name in schema.LABEL_NAMES:
            found = labels.loc[labels["layer"] == layer, name].tolist()
            if len(set(found)) > 1:
                where = ", ".join(str(part.path) for part in parts)
                raise ValueError(
                    f"layer {layer!r}: {name} is {found[1]!r} in one of {where}, {found[0]!r} in the first"
                )
