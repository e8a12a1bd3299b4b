"""A contact sheet: labelled rows of frames, for looking at a rollout beside the game."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_LABEL_WIDTH, _GAP = 150, 2


def contact_sheet(rows: Mapping[str, np.ndarray], columns: int = 9) -> Image.Image:
    """One row of evenly spaced frames per entry, first and last included.

    rows: label -> uint8 [T, H, W, 3], all of one frame size.
    """
    if not rows:
        raise ValueError("a contact sheet needs at least one row of frames")
    height, width = next(iter(rows.values())).shape[1:3]
    sheet = Image.new(
        "RGB", (_LABEL_WIDTH + columns * (width + _GAP), len(rows) * (height + _GAP) + 14), color=(255, 255, 255)
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    longest = max(len(frames) for frames in rows.values())
    picked = np.unique(np.linspace(0, longest - 1, columns).round().astype(int))
    for column, index in enumerate(picked):
        draw.text((_LABEL_WIDTH + column * (width + _GAP) + 2, 0), f"frame {index + 1}", fill=(90, 90, 90), font=font)
    for row, (label, frames) in enumerate(rows.items()):
        top = 14 + row * (height + _GAP)
        draw.text((4, top + height // 2 - 7), label, fill=(0, 0, 0), font=font)
        for column, index in enumerate(picked[picked < len(frames)]):
            sheet.paste(Image.fromarray(frames[index]), (_LABEL_WIDTH + column * (width + _GAP), top))
    return sheet
