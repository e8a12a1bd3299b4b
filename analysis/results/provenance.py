"""Where a run came from: versions, device, hashes, command. Torch-free; the caller names the device.

`run_id` is a hash of what determines the numbers (not of times, paths or the git commit), so that repeating a run
gives the same tables byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_IDENTITY = (
    *("world", "checkpoint_sha256", "scenes", "clips", "seed", "script", "sites", "sampling"),
    *("variants", "reference", "tokens", "engine", "device", "versions"),
)


def versions() -> dict[str, str | None]:
    """Versions of what computes: python and the packages, None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("int8-shrinkage", "torch", "triton", "numpy", "pandas"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit() -> str | None:
    """Commit of this source tree, with '+' where it has uncommitted changes; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--", "."], cwd=here.parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def run_id(info: dict[str, Any]) -> str:
    """First 12 hex digits of the SHA-256 of what determines a run's numbers."""
    identity = {key: info[key] for key in _IDENTITY if key in info}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
