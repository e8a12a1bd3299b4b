"""Moving pictures that a run holds, for the page: an animated WebP, else an MP4, and the still shown at rest.

A WebP plays in every browser and is smaller; an MP4 is taken where there is no WebP. Neither is embedded beyond
`LARGEST`, for the page is one file: it then stays where it lies in the run's folder.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image as Pictures

from analysis.report.blocks import Animation

LARGEST = 3_000_000  # bytes


def find(folder: Path, stem: str, name: str, alt: str, caption: str) -> Animation | None:
    """`stem`.webp or `stem`.mp4 of a folder; None where there is none that can be shown."""
    for ending, mime in (("webp", "image/webp"), ("mp4", "video/mp4")):
        path = folder / f"{stem}.{ending}"
        if not path.is_file() or path.stat().st_size > LARGEST:
            continue
        data = path.read_bytes()
        still = _first_frame(data) if ending == "webp" else b""
        if still is not None:
            return Animation(name, data, mime, still, alt, caption)
    return None


def _first_frame(data: bytes) -> bytes | None:
    """PNG of an animation's first frame; None where it is no picture."""
    try:
        with Pictures.open(io.BytesIO(data)) as animated:
            buffer = io.BytesIO()
            animated.convert("RGB").save(buffer, "PNG", optimize=True)
    except (OSError, ValueError):
        return None
    return buffer.getvalue()
