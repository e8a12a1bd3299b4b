"""Several processes of one run: each writes its own folder, the first adds them up. Imports no torch.

    rank = this_rank()                        # None in a single process
    rank.folder(out)                          # out/rank-1
    wait_for_ranks(out, rank, timeout_s=60)   # {1: out/rank-1, ...}, those that ended in time

Ranks meet on the file system, not in a collective: one that raised or was killed cannot make the others hang.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.results import schema

WAIT_S = 60.0


@dataclass(frozen=True)
class Rank:
    """One process of a launch. `launch` tells this launch from an earlier one into the same folder."""

    index: int
    world: int
    launch: str

    def folder(self, out: Path) -> Path:
        return out / f"rank-{self.index}"


def this_rank(environment: Mapping[str, str] | None = None) -> Rank | None:
    """This process's rank, from the variables that torchrun sets; None unless there are several.

    Raises ValueError when they contradict each other.
    """
    env = os.environ if environment is None else environment
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    try:
        index, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    except ValueError:
        raise ValueError(f"RANK={env['RANK']!r}, WORLD_SIZE={env['WORLD_SIZE']!r}: expected two integers") from None
    if not 0 <= index < world:
        raise ValueError(f"RANK={index} is not in 0..{world - 1} (WORLD_SIZE={world}); launch with torchrun")
    if world == 1:
        return None
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return Rank(index, world, "/".join(env.get(name, "") for name in names))


def clear(folder: Path) -> None:
    """Remove what an earlier launch left in a rank's folder."""
    shutil.rmtree(folder, ignore_errors=True)


def _ended(folder: Path, rank: Rank) -> bool:
    try:
        info: dict[str, Any] = json.loads((folder / schema.RUN).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return bool(info.get("launch") == rank.launch)


def wait_for_ranks(out: Path, rank: Rank, timeout_s: float = WAIT_S, poll_s: float = 0.1) -> dict[int, Path]:
    """Folders of the ranks that left their tables, by rank, waiting at most `timeout_s` for the last of them."""
    deadline = time.monotonic() + timeout_s
    while True:
        folders = {i: Rank(i, rank.world, rank.launch).folder(out) for i in range(rank.world)}
        found = {i: folder for i, folder in folders.items() if _ended(folder, rank)}
        if len(found) == rank.world or time.monotonic() >= deadline:
            return found
        time.sleep(poll_s)
