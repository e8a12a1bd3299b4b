"""Tables written under an older layout, read under the present one: one step a version, applied in order.

`STEPS[v]` turns a table of version v into one of version v + 1. It is called with the table's kind and its data and
returns the data: for 'per_layer' a frame whose cells are text (as in the CSV), for 'per_call' a typed frame, for 'run'
the dict of run.json. A step that has nothing to do for a kind returns its data unchanged.

    def from_1(kind, data):
        return data.rename(columns={"mse": "rel_mse"}) if kind == "per_layer" else data
    STEPS[1] = from_1

Whoever raises `schema.SCHEMA_VERSION` adds the step from the version before and a test that plants a file of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Step = Callable[[str, Any], Any]
STEPS: dict[int, Step] = {}


def upgrade(kind: str, data: Any, found: Any, present: int, what: str) -> Any:
    """`data` of version `found` as version `present`; the data itself where they are equal.

    Args:
        kind: 'per_layer', 'per_call' or 'run'.
        found: the version as the file states it: a number, its text, or None.
        what: the file, for messages.

    Raises:
        ValueError: the version is no number, is newer than this toolkit, or has no step to the present one.
    """
    version = _number(found)
    if version == present:
        return data
    refused = f"{what}: schema version {found}, this toolkit reads {present}"
    if version is None:
        raise ValueError(f"{refused}; is this a table of this toolkit?")
    if version > present:
        raise ValueError(f"{refused}; upgrade the toolkit, or measure or merge again with this one")
    for step in range(version, present):
        if step not in STEPS:
            raise ValueError(f"{refused} and cannot migrate {step} to {step + 1}; measure or merge again")
        data = STEPS[step](kind, data)
    return _stamp(kind, data, present)


def _stamp(kind: str, data: Any, present: int) -> Any:
    """The data with its version replaced: text in a per_layer frame, a number elsewhere."""
    if kind == "run":
        return data | {"schema_version": present}
    return data.assign(schema_version=str(present) if kind == "per_layer" else present)


def _number(found: Any) -> int | None:
    try:
        return int(str(found))
    except ValueError:
        return None
