"""Figures draw for every shape of table that a run can leave, and show what the table holds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from synthetic import make_calls

from analysis.report import layout, plots, style
from analysis.results import summary

PER_LAYER = (plots.rel_mse, plots.cosine, plots.shrinkage, plots.cosine_by_site)


def table(layers: int = 16, calls: int = 3, **options) -> pd.DataFrame:
    return summary.summarize(make_calls(layers, calls, **options), "w")


@pytest.fixture
def ax():
    with style.context():
        yield style.figure(wide=True)[1]


SHAPES = {
    "64 layers": table(64),
    "240 layers": table(240, 1),
    "one kernel": table(variants=("shipped",)),
    "another kernel": table(variants=("fixed", "half_even", "a $name$ <b>")),
    "no intervals": table(calls=1),
    "no labels": table(labelled=False),
    "one layer": table(1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draw", PER_LAYER, ids=lambda draw: draw.__name__)
def test_draws_and_returns_the_axes(ax, draw, shape):
    assert draw(SHAPES[shape], ax) is ax
    assert ax.get_title(loc="left")
    assert ax.get_xlabel()
    assert "(" in ax.get_ylabel()  # a unit, or that there is none
    style.to_png(ax.figure)


@pytest.mark.parametrize("shape", ["64 layers", "240 layers", "one layer"])
def test_heatmap_and_histogram_draw(shape):
    with style.context():
        for draw in (plots.heatmap, plots.ratio_histogram):
            figure, ax = style.figure()
            assert draw(SHAPES[shape], ax) is ax
            style.to_png(figure)
        figure, ax = style.figure()
        plots.heatmap(SHAPES[shape], ax, value="error_output_cosine")
        assert "cosine(error, output), shipped" in ax.get_title(loc="left").lower()


def test_points_are_the_table(ax):
    frame = table()
    plots.rel_mse(frame, ax)
    drawn = np.concatenate([line.get_ydata() for line in ax.lines if line.get_label() == "shipped"])
    assert sorted(drawn) == sorted(frame.loc[frame["variant"] == "shipped", "rel_mse"])
    assert ax.get_yscale() == "log"


def test_layers_stand_by_site_and_block():
    placed = layout.arrange(table(24))
    assert [name for name, _, _ in placed.groups] == [f"{a} {p}" for a in ("self", "cross") for p in "qkvo"]
    assert placed.blocks == (0, 2)
    x = [placed.x[f"blocks.{block}.self_attn.k"] for block in (0, 1, 2)]
    assert x == sorted(x)
    assert len(set(placed.x.values())) == 24


def test_unlabelled_layers_stand_in_natural_order():
    placed = layout.arrange(table(96, 1, labelled=False))
    assert placed.blocks is None
    assert [name for name, _, _ in placed.groups] == [layout.UNLABELLED]
    assert placed.x["blocks.2.self_attn.q"] < placed.x["blocks.10.self_attn.q"]


def test_an_infinite_or_empty_layer_is_left_out(ax):
    frame = table()
    frame.loc[0, ["rel_mse", "rel_mse_lo", "rel_mse_hi"]] = np.inf
    frame.loc[2, ["rel_mse", "rel_mse_lo", "rel_mse_hi"]] = np.nan
    plots.rel_mse(frame, ax)
    style.to_png(ax.figure)
    assert np.isfinite(ax.get_ylim()).all()


def test_an_interval_beside_its_point_gives_no_negative_bar(ax):
    frame = table()
    frame["rel_mse_lo"] = frame["rel_mse"] * 1.1
    plots.rel_mse(frame, ax)


def test_ratios_by_hand():
    frame = table(2, 1)
    frame["rel_mse"] = np.where(frame["variant"] == "shipped", 6.0, 2.0)
    assert plots.ratios(frame)["ratio"].tolist() == [3.0, 3.0]


def test_errors_say_what_is_missing(ax):
    with pytest.raises(ValueError, match="no variant 'fixed'; the table has shipped"):
        plots.ratio_histogram(SHAPES["one kernel"], ax)
    with pytest.raises(ValueError, match="a heatmap of blocks and sites needs labelled layers"):
        plots.heatmap(SHAPES["no labels"], ax)


def test_few_ticks_for_many_layers(ax):
    plots.cosine(SHAPES["240 layers"], ax)
    assert len(ax.get_xticks()) == 8


def test_bytes_are_the_same_twice():
    made = []
    for _ in range(2):
        with style.context():
            figure, ax = style.figure()
            plots.cosine(SHAPES["64 layers"], ax)
            made.append((style.to_png(figure), style.to_svg(figure)))
    assert made[0] == made[1]
    assert "<dc:date>" not in made[0][1]
    assert b"matplotlib" not in made[0][0].lower()


def test_kernels_keep_their_colours():
    assert style.colour("shipped", ["fixed", "shipped"]) == "#D55E00"
    assert style.colour("fixed") == "#0072B2"
    others = ["fixed", "floor", "half_even"]
    assert len({style.colour(v, others) for v in others}) == 3


@pytest.mark.parametrize("draw", [*PER_LAYER, plots.heatmap, plots.ratio_histogram], ids=lambda draw: draw.__name__)
def test_one_line_makes_its_own_axes(draw):
    from matplotlib import pyplot

    with style.context():  # which a notebook's line leaves in use
        ax = draw(SHAPES["64 layers"])
    assert ax.get_title(loc="left") and ax.figure in map(pyplot.figure, pyplot.get_fignums())
    pyplot.close(ax.figure)
