"""The page's heatmap holds the table's numbers, names the layer of each cell, and leaves out what was not measured."""

from __future__ import annotations

import io

import pandas as pd
import pytest
from PIL import Image
from synthetic import make_calls

from analysis.report import animation, heatmap, layout, markdown, plots, text
from analysis.report.blocks import Figure
from analysis.results import summary

FIGURE = Figure("heatmap", b"PNG", "<svg></svg>", "what is seen", "said")


def made(frame: pd.DataFrame, value: str = "ratio"):
    names = [row["layer"] for row in layout.in_order(frame)]
    return heatmap.heatmap(FIGURE, plots.heatmap_cells(frame, value), names), names


@pytest.fixture(scope="module")
def table():
    return summary.summarize(make_calls(24, 3), "w")


def test_cells_are_the_table(table):
    found, names = made(table)
    assert found.sites == tuple(f"{a} {p}" for a in ("self", "cross") for p in "qkvo")
    assert found.blocks == ("0", "1", "2")
    ratios = plots.ratios(table)["ratio"]
    for row in found.cells:
        for cell in row:
            assert cell.text == text.plain(ratios[names[cell.row]])
            assert names[cell.row] in cell.label and cell.text in cell.label
    ends = [text.plain(end) for end in (ratios.min(), ratios.max())]
    assert list(found.ends) == ends
    colours = {cell.text: cell.colour for row in found.cells for cell in row}
    assert colours[ends[0]] == found.scale[0] and colours[ends[1]] == found.scale[-1]


def test_text_on_a_cell_can_be_read(table):
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    found, _ = made(table, "error_output_cosine")
    for cell in (cell for row in found.cells for cell in row):
        dark, light = sorted((luminance(cell.colour), luminance(cell.ink)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, cell


def test_a_hole_and_two_layers_in_one_cell(table):
    holed = table[table["layer"] != "blocks.1.self_attn.k"].reset_index(drop=True)
    found, _ = made(holed)
    assert found.cells[1][1] is None
    both = holed.assign(layer=holed["layer"].where(holed["block"] != 2, holed["layer"] + "_b"))
    both = pd.concat([holed, both[both["block"] == 2]], ignore_index=True)
    found, _ = made(both)
    assert "mean of 2 layers" in found.cells[0][2].label


def test_the_twin_shows_the_figure(table):
    assert markdown.block(made(table)[0]) == "![what is seen](figures/heatmap.png)\n\nsaid"


def test_a_video_is_embedded_while_it_is_small_and_a_damaged_one_is_not(tmp_path, monkeypatch):
    def find():
        return animation.find(tmp_path, "closed_loop", "name", "alt", "said")

    assert find() is None
    (tmp_path / "closed_loop.mp4").write_bytes(b"video")
    assert find().mime == "video/mp4" and find().still == b""
    assert markdown.block(find()).startswith("[alt](figures/name.mp4)")
    (tmp_path / "closed_loop.webp").write_bytes(b"no picture")
    assert find().mime == "video/mp4"
    frames = [Image.new("RGB", (8, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "closed_loop.webp", save_all=True, append_images=frames[1:])
    assert find().mime == "image/webp" and find().ending == "webp"
    assert Image.open(io.BytesIO(find().still)).size == (8, 4)
    monkeypatch.setattr(animation, "LARGEST", 4)
    assert find() is None
