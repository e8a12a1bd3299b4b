"""A run against itself is exactly equal; what was planted is named, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.results import checks, foreign, resample, schema, sources, summary
from analysis.results import compare as comparing
from analysis.results.compare import AGREES, DISAGREES, NOT_JUDGED, compare
from analysis.results.compare_sources import Source, open_source

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))
from synthetic import make_calls, make_run

THREE = {"blocks.0.self_attn.q", "blocks.1.cross_attn.o", "blocks.3.self_attn.v"}
LAYERS, CALLS = 32, 36


def write(folder: Path, calls: pd.DataFrame) -> Path:
    schema.write_per_call(calls, folder / schema.PER_CALL)
    schema.write_per_layer(summary.summarize(calls, "synthetic"), folder / schema.PER_LAYER)
    return folder


def planted(calls: pd.DataFrame, factor: float = 1.1) -> pd.DataFrame:
    """The error of three layers grown; error and output keep their angle."""
    calls = calls.copy()
    three = calls["layer"].isin(THREE)
    calls.loc[three, ["sum_ee", "sum_eff_ee"]] *= factor
    calls.loc[three, ["sum_ey", "sum_ez"]] *= factor**0.5
    return calls


def other_noise(calls: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The same layers measured on other calls: the same expectation, new noise of 6 % a call."""
    noise = np.exp(0.06 * np.random.default_rng(seed).standard_normal((2, len(calls))))
    size, error = (pd.Series(n, index=calls.index) for n in noise)
    calls = calls.copy()
    for name in ("sum_yy", "sum_zz", "sum_eff_yy"):
        calls[name] *= size
    for name in ("sum_ee", "sum_eff_ee"):
        calls[name] *= size * error
    for name in ("sum_ey", "sum_ez"):
        calls[name] *= size * error**0.5
    return calls


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    calls = make_calls(LAYERS, CALLS)
    return {
        "a": write(root / "a", calls),
        "planted": write(root / "planted", planted(calls)),
        "noisy": write(root / "noisy", other_noise(calls, 1)),
        "noisy and planted": write(root / "both", other_noise(planted(calls), 2)),
    }


def pair(*paths, **options):
    return compare([open_source(path) for path in paths], **options).pairs[0]


@pytest.mark.parametrize("metric", comparing.METRICS)
@pytest.mark.parametrize("with_calls", [True, False])
def test_a_run_against_itself(runs, metric, with_calls):
    path = runs["a"] if with_calls else runs["a"] / schema.PER_LAYER
    found = pair(path, path, metric=metric)
    assert len(found.table) == 2 * LAYERS
    assert (found.table["difference"] == 0).all()  # exactly
    assert (found.table["ratio"].dropna() == 1).all()
    assert found.count(DISAGREES) == 0 and len(found.disagreeing()) == 0
    assert found.only_a == found.only_b == []
    varied = found.table.groupby("variant")["a"].agg(lambda values: not checks.is_constant(values))
    assert (found.ranks.set_index("variant")["spearman"][varied] == 1).all()


PLANTED = [("planted", True), ("planted", False), ("noisy and planted", True), ("noisy and planted", False)]


@pytest.mark.parametrize(("which", "with_calls"), PLANTED)
def test_a_planted_change_is_named_and_only_that(runs, which, with_calls):
    paths = [runs["a"], runs[which]]
    found = pair(*(paths if with_calls else [path / schema.PER_LAYER for path in paths]))
    wrong = found.disagreeing()
    assert set(wrong["layer"]) == THREE and len(wrong) == 6  # both kernels of each
    assert found.intervals.startswith("calls of both" if with_calls else "the interval columns")
    if which == "planted":
        assert wrong["ratio"].to_numpy() == pytest.approx(1.1, rel=1e-12)
        assert wrong["difference"].to_numpy() == pytest.approx(0.1 * wrong["a"].to_numpy(), rel=1e-12)
    assert ((wrong["ratio_lo"] < wrong["ratio"]) & (wrong["ratio"] < wrong["ratio_hi"])).all()


def test_other_calls_of_the_same_layers_do_not_disagree(runs):
    """Negative control for the level: single intervals exclude 0 now and then, the decision does not."""
    found = pair(runs["a"], runs["noisy"])
    assert found.count(AGREES) == 2 * LAYERS
    single = sum(pair(runs["a"], path).excluding_zero() for path in (runs["noisy"],))
    assert single < 0.15 * 2 * LAYERS


def test_the_level_holds_over_all_layers():
    """Of 400 comparisons of 20 equal layers, about 5 % name any; without widening, most would."""
    rng = np.random.default_rng(5)
    named = single = 0
    for _ in range(400):
        values = rng.standard_normal((2, 20, 12))  # 12 calls
        mean, half = values.mean(axis=2), 1.96 * values.std(axis=2, ddof=0) / 12**0.5
        d, spread = mean[1] - mean[0], np.hypot(*half)
        k = comparing.widening(20, np.full(20, 12.0))
        named += bool((np.abs(d) > k * spread).any())
        single += bool((np.abs(d) > spread).any())
    assert named / 400 < 0.09
    assert single / 400 > 0.5


def test_widening_by_hand():
    assert comparing.widening(1, np.array([np.inf]))[0] == pytest.approx(1.0, rel=1e-8)
    want = stats.t.ppf(1 - 0.025 / 480, 35) * np.sqrt(36 / 35) / stats.norm.ppf(0.975)
    assert comparing.widening(480, np.array([36.0]))[0] == pytest.approx(want, rel=1e-9)
    many, few = comparing.widening(480, np.array([1000.0, 3.0]))
    assert 1.9 < many < 2.0 and few > 20  # three calls can tell next to nothing about 480 layers


def test_paired_calls_see_what_independent_calls_cannot(runs, tmp_path):
    small = write(tmp_path / "small", planted(make_calls(LAYERS, CALLS), 1.01))
    assert pair(runs["a"], small).count(DISAGREES) == 0
    found = pair(runs["a"], small, paired=True)
    assert set(found.disagreeing()["layer"]) == THREE
    assert found.intervals == "calls of both resampled together"


def test_paired_needs_the_same_calls(runs, tmp_path):
    other = make_calls(4, CALLS)
    write(tmp_path / "b", other.assign(scene="hall"))
    with pytest.raises(ValueError, match=r"list different calls .*leave --paired out"):
        pair(runs["a"], tmp_path / "b", paired=True)
    with pytest.raises(ValueError, match=r"per_layer.csv has no per_call.parquet; calls cannot be paired"):
        pair(runs["a"], runs["a"] / schema.PER_LAYER, paired=True)


def test_differences_below_the_accuracy_of_sums_agree(runs, tmp_path):
    """A relative change of 1e-8 in every call is certain and means nothing; 1e-4, paired, is named."""
    for factor, wrong in ((1 + 1e-8, 0), (1 + 1e-4, 6)):
        path = write(tmp_path / str(factor), planted(make_calls(LAYERS, CALLS), factor))
        assert pair(runs["a"], path, paired=True).count(DISAGREES) == wrong


def test_intervals_from_columns_and_from_calls_agree(runs):
    by_calls = pair(runs["a"], runs["noisy"]).table
    by_columns = pair(runs["a"] / schema.PER_LAYER, runs["noisy"] / schema.PER_LAYER).table
    for value in ("ratio", "difference"):
        widths = [(t[f"{value}_hi"] - t[f"{value}_lo"]).to_numpy() for t in (by_calls, by_columns)]
        np.testing.assert_allclose(widths[0], widths[1], rtol=0.1)


def test_mover_by_hand(tmp_path):
    for name, values in {"a": (4.0, 3.0, 6.0), "b": (10.0, 6.0, 12.0)}.items():
        rows = ",".join(map(str, values))
        (tmp_path / f"{name}.csv").write_text(f"layer,variant,rel_mse,rel_mse_lo,rel_mse_hi,calls\nx,k,{rows},36\n")
    row = pair(tmp_path / "a.csv", tmp_path / "b.csv").table.iloc[0]
    assert row["difference_lo"] == pytest.approx(6 - np.hypot(10 - 6, 6 - 4))
    assert row["difference_hi"] == pytest.approx(6 + np.hypot(12 - 10, 4 - 3))
    log = np.log
    assert row["ratio_lo"] == pytest.approx(np.exp(log(2.5) - np.hypot(log(10 / 6), log(6 / 4))))
    assert row["ratio_hi"] == pytest.approx(np.exp(log(2.5) + np.hypot(log(12 / 10), log(4 / 3))))


def test_without_intervals_nothing_is_judged_but_by_a_tolerance(tmp_path):
    for name, values in {"a": (1.0, 1.0, 2.0), "b": (1.0, 1.2, 2.0)}.items():
        rows = "".join(f"layer{at},k,{value}\n" for at, value in enumerate(values))
        (tmp_path / f"{name}.csv").write_text("layer,variant,rel_mse\n" + rows)
    paths = tmp_path / "a.csv", tmp_path / "b.csv"
    assert pair(*paths).table["judgement"].tolist() == [NOT_JUDGED] * 3
    assert pair(*paths, tolerance=0.1).table["judgement"].tolist() == [AGREES, DISAGREES, AGREES]
    assert pair(*paths, tolerance=0.3).count(DISAGREES) == 0
    with pytest.raises(ValueError, match="tolerance -1 is not above 0"):
        pair(*paths, tolerance=-1)


def test_an_imported_table_compares_with_a_run(runs, tmp_path):
    table = schema.read_per_layer(runs["a"] / schema.PER_LAYER)
    shipped = table[table["variant"] == "shipped"]
    lines = [
        f"{layer};{mse!r}".replace(".", ",") for layer, mse in zip(shipped["layer"], shipped["rel_mse"], strict=True)
    ]
    (tmp_path / "theirs.csv").write_text("Name;Fehler\n" + "\n".join(lines) + "\n")
    made = foreign.import_table(
        tmp_path / "theirs.csv",
        {"layer": "Name", "rel_mse": "Fehler"},
        {"variant": "shipped"},
        r"blocks,(\d+),(\w+),(.)",
        r"blocks.\1.\2.\3",
    )
    schema.write_per_layer(made.frame, tmp_path / "theirs" / schema.PER_LAYER)
    found = pair(runs["a"], tmp_path / "theirs")
    assert len(found.table) == LAYERS and (found.table["difference"] == 0).all()
    assert found.ranks["spearman"].tolist() == [1.0]
    assert len(found.only_a) == LAYERS and found.only_a[0].endswith("(fixed, bf16, all)")
    assert found.count(NOT_JUDGED) == LAYERS


def test_layers_on_one_side_are_listed(runs, tmp_path):
    calls = make_calls(LAYERS, CALLS)
    write(tmp_path / "b", calls[calls["layer"] != "blocks.2.cross_attn.k"])
    found = pair(runs["a"], tmp_path / "b")
    assert found.only_a == ["blocks.2.cross_attn.k (fixed, bf16, all)", "blocks.2.cross_attn.k (shipped, bf16, all)"]
    assert found.only_b == [] and found.count(DISAGREES) == 0
    assert pair(tmp_path / "b", runs["a"]).only_b == found.only_a


def test_ranks_against_scipy(runs):
    found = pair(runs["a"], runs["noisy"])
    for row in found.ranks.to_dict("records"):
        rows = found.table[found.table["variant"] == row["variant"]]
        assert row["spearman"] == pytest.approx(stats.spearmanr(rows["a"], rows["b"]).statistic, rel=1e-12)
        assert row["layers"] == LAYERS


def test_several_runs_are_compared_with_the_first(runs):
    found = compare([open_source(runs[name], name) for name in ("a", "noisy", "planted")])
    assert [(p.a, p.b) for p in found.pairs] == [("a", "noisy"), ("a", "planted")]
    table = found.table()
    assert len(table) == 4 * LAYERS and set(table["metric"]) == {"rel_mse"}


def test_zero_and_infinite_metrics(tmp_path):
    (tmp_path / "a.csv").write_text("layer,variant,rel_mse\nzero,k,0\ninf,k,inf\nempty,k,\none,k,1\n")
    (tmp_path / "b.csv").write_text("layer,variant,rel_mse\nzero,k,0\ninf,k,inf\nempty,k,1\none,k,0\n")
    table = pair(tmp_path / "a.csv", tmp_path / "b.csv").table.set_index("layer")
    assert table["difference"].tolist()[:2] == [0, 0] and np.isnan(table.loc["empty", "difference"])
    assert np.isnan(table.loc["zero", "ratio"]) and table.loc["inf", "ratio"] == 1 and table.loc["one", "ratio"] == 0


ROWS = {
    "layer": ("other,k,bf16,all,1\n", "no layer in common: .*has x; .*has other; rename layers with `shrinkage import"),
    "variant": ("x,int8,bf16,all,1\n", "no variant in common: .*has k; .*has int8; name the kernel alike"),
    "reference": ("x,k,fp64,all,1\n", "no reference in common"),
    "tokens": ("x,k,bf16,valid,1\n", "no tokens in common"),
}


@pytest.mark.parametrize("part", ROWS)
def test_nothing_in_common_says_why(tmp_path, part):
    header = "layer,variant,reference,tokens,rel_mse\n"
    (tmp_path / "a.csv").write_text(header + "x,k,bf16,all,1\n")
    (tmp_path / "b.csv").write_text(header + ROWS[part][0])
    with pytest.raises(ValueError, match=ROWS[part][1]):
        pair(tmp_path / "a.csv", tmp_path / "b.csv")


def test_bad_sources_and_options(runs, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; name a run's folder"):
        open_source(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no run in this folder or below it"):
        open_source(tmp_path / "empty")
    table = schema.read_per_layer(runs["a"] / schema.PER_LAYER)
    stacked = pd.concat([table, table.assign(run_id="f" * 12)])
    schema.write_per_layer(stacked, tmp_path / "stacked.csv")
    with pytest.raises(ValueError, match=r"holds 2 runs \(0123456789ab, ffffffffffff\); .*`shrinkage merge`"):
        open_source(tmp_path / "stacked.csv")
    schema.write_per_layer(pd.concat([table, table.iloc[[4]]]), tmp_path / "double.csv")
    with pytest.raises(ValueError, match=r"line 66 repeats the key layer="):
        open_source(tmp_path / "double.csv")
    (tmp_path / "bad.csv").write_text("layer,variant,rel_mse\na,k,x\n")
    with pytest.raises(ValueError, match=r"line 2, column 'rel_mse': found 'x'.*`shrinkage validate"):
        open_source(tmp_path / "bad.csv")
    (tmp_path / "foreign.csv").write_text("layer,rel_mse\na,1\n")
    with pytest.raises(ValueError, match=r"no column variant; make a table of it with: shrinkage import"):
        open_source(tmp_path / "foreign.csv")
    one = open_source(runs["a"])
    with pytest.raises(ValueError, match="1 run given; comparing takes at least two"):
        compare([one])
    with pytest.raises(ValueError, match="unknown metric 'mse'; known: rel_mse"):
        compare([one, one], "mse")
    (tmp_path / "few.csv").write_text("layer,variant,rel_mse\na,k,1\n")
    with pytest.raises(ValueError, match=r"few.csv has no crest; it has rel_mse: --metric"):
        compare([open_source(tmp_path / "few.csv")] * 2, "crest")


def test_a_folder_of_runs_is_pooled(tmp_path):
    for number in range(4):
        calls = other_noise(make_calls(8, 6), number)
        make_run(tmp_path / "ours" / f"run {number}", 8, 6, run_id=f"{number:012x}", info={"seed": number})
        write(tmp_path / "ours" / f"run {number}", calls.assign(run_id=f"{number:012x}"))
    source = open_source(tmp_path / "ours")
    assert source.unit == "runs" and source.table["clusters"].tolist() == [4.0] * 16
    found = compare([source, source]).pairs[0]
    assert (found.table["difference"] == 0).all() and found.intervals == "runs of both resampled independently"
    found = compare([source, open_source(tmp_path / "ours" / "run 2")]).pairs[0]
    assert found.count(NOT_JUDGED) == 0 and found.count(DISAGREES) == 0


def test_draws_are_those_of_the_summary_whatever_the_pieces(monkeypatch):
    calls = make_calls(4, 5)
    calls = calls[(calls["layer"] != "blocks.0.self_attn.v") | (calls["call"] < 4)]
    clusters = resample.by_cluster(calls, "call")
    assert sorted(set(clusters.counts)) == [4, 5]
    whole = resample.draw(clusters, ["rel_mse", "shrinkage"])
    monkeypatch.setattr(resample, "_PIECE", 70)
    pieces = resample.draw(clusters, ["rel_mse", "shrinkage"])
    table = summary.summarize(calls, "w").set_index(resample.KEY).loc[pd.MultiIndex.from_frame(clusters.keys)]
    for name, draws in whole.items():
        np.testing.assert_allclose(pieces[name], draws, rtol=1e-12)
        low, high = summary.percentile_interval(draws)
        np.testing.assert_allclose(low, table[f"{name}_lo"], rtol=1e-12)
        np.testing.assert_allclose(high, table[f"{name}_hi"], rtol=1e-12)
    few = resample.by_cluster(calls[calls["call"] < 2], "call")
    assert np.isnan(resample.draw(few, ["rel_mse"])["rel_mse"]).all()


def test_merged_folder_is_resampled_over_runs(tmp_path):
    from analysis.results import pool

    for number in range(3):
        make_run(tmp_path / "runs" / str(number), 4, 4, run_id=f"{number:012x}", seed=number, info={"seed": number})
    pool.merge_runs(sources.find_runs([tmp_path / "runs"]), tmp_path / "merged")
    source = open_source(tmp_path / "merged")
    assert isinstance(source, Source) and source.unit == "runs"
    assert source.clusters is not None and (source.clusters.counts == 3).all()
    assert pair(tmp_path / "merged", tmp_path / "runs").table["difference"].abs().max() == 0
