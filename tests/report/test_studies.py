"""Sections of the studies: there where their tables are, silent where they are not; C6 and C7 judged by rule."""

import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.report import closed_loop, factors, propagation, study_claims, theory
from analysis.report.blocks import Figure, Table, Text
from analysis.report.chapter import Chapter
from analysis.report.claims import Verdict
from analysis.report.html import build_report
from analysis.report.records import ClosedLoop
from analysis.results import closed_loop as results
from analysis.results import studies, tables
from analysis.results.load import load_run

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import make_run
from synthetic_studies import ablation_table, add_studies, closed_loop_tables

SECTIONS = {"factors": factors, "theory": theory, "propagation": propagation, "closed-loop": closed_loop}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return add_studies(make_run(tmp_path_factory.mktemp("studies") / "run", layers=16, calls=4))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_text_figures_and_tables(run, name):
    made = SECTIONS[name].section(Chapter(load_run(run)))
    assert made is not None and made.id == name
    kinds = {type(block) for block in made.blocks}
    assert {Figure, Table} <= kinds
    for block in made.blocks:
        if isinstance(block, Table):
            assert block.rows and all(len(row) == len(block.headers) for row in block.rows)
            assert not any("nan" in cell.text for row in block.rows for cell in row)
        if isinstance(block, Text):
            assert "nan" not in block.text.split()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_without_its_table_is_nothing(tmp_path, name):
    assert SECTIONS[name].section(Chapter(load_run(make_run(tmp_path / "run", layers=8, calls=3)))) is None


def test_the_page_holds_all_of_them_and_is_the_same_each_time(run, tmp_path):
    first, second = (build_report([run], tmp_path / n).index.read_bytes() for n in "ab")
    assert first == second
    page = first.decode()
    for title in (
        "Which factors change the error",
        "Theory: predicted",
        "Behind the layer",
        "Closed loop: do the frames",
    ):
        assert title in page


def test_claims_of_a_run_with_and_without_studies(run, tmp_path):
    by_id = {f.claim.id: f for f in Chapter(load_run(run)).findings}
    assert by_id["C6"].verdict is Verdict.NOT and "one scale per tensor +170" in by_id["C6"].value
    assert by_id["C7"].verdict is Verdict.KIND and "equivalent" in by_id["C7"].value
    assert by_id["C7"].note.startswith("4 scene-seed pairs") and "record" not in by_id["C7"].note
    assert "2 %" in by_id["C6"].claim.rule and "another noise seed" in by_id["C7"].claim.rule
    bare = {f.claim.id: f for f in Chapter(load_run(make_run(tmp_path / "run", layers=8, calls=3))).findings}
    assert bare["C6"].verdict is bare["C7"].verdict is Verdict.UNMEASURED
    assert "shrinkage ablate" in bare["C6"].note and "shrinkage rollout" in bare["C7"].note


def test_factors_below_2_percent_are_reproduced_and_few_calls_decide_nothing():
    calm = ablation_table()
    calm.loc[calm["factor"] != "none", "verdict"] = "supported"
    assert study_claims.judge_factors(calm)[1] is Verdict.KIND
    value, verdict, note = study_claims.judge_factors(ablation_table(calls=2))
    assert verdict is Verdict.UNDECIDED and "too few calls" in note and "codes summed in fp32" in value


def judged(scenes=4, **options):
    frames, looks = closed_loop_tables(scenes, **options)
    return study_claims.judge_closed_loop(ClosedLoop(results.summarize(frames, looks), {}))


def test_closed_loop_verdicts():
    assert judged(loss=3.0)[1] is Verdict.NOT
    value, verdict, note = judged(loss=0.05)
    assert verdict is Verdict.KIND and "4 scenes" in note and "bf16's own rounding" in note
    assert value.startswith("against the game −0.0")
    assert judged(scenes=2)[1] is Verdict.UNDECIDED
    assert study_claims.judge_closed_loop(None)[1] is Verdict.UNMEASURED


def test_the_two_sentences(run):
    said = closed_loop.sentences(tables.read(studies.CLOSED_LOOP, run))
    assert len(said) == 2
    assert "equivalent to bf16 (shipped −0.0" in said[0] and "4 scene-seed pairs" in said[0]
    assert "nearer than another noise seed (shipped +1" in said[1] and "[" in said[1]
    assert "degraded compared with bf16's own rounding (shipped −19.99 [" in said[1]


def test_the_sentences_keep_different_verdicts_apart():
    frames, looks = closed_loop_tables(loss=3.0)
    said = closed_loop.sentences(results.summarize(frames, looks))[0]
    assert "degraded compared with bf16 (shipped −3" in said and "equivalent to bf16 (fixed" in said
    frames, looks = closed_loop_tables(scenes=2)
    assert "undecided compared with bf16 (shipped" in closed_loop.sentences(results.summarize(frames, looks))[0]


def test_a_closed_loop_of_two_scenes_says_so(run, tmp_path):
    folder = make_run(tmp_path / "run", layers=8, calls=3)
    frames, looks = closed_loop_tables(scenes=2)
    tables.write(studies.CLOSED_LOOP, results.summarize(frames, looks), folder, "r")
    tables.write(studies.CLOSED_LOOP_FRAMES, frames, folder, "r")
    made = closed_loop.section(Chapter(load_run(folder)))
    assert any(isinstance(b, Text) and b.text.startswith("Fewer than 3 scenes") for b in made.blocks)


def test_shares_add_up_with_their_cross_terms(run):
    means = theory.site_shares(tables.read(studies.THEORY, run))
    assert np.allclose(means[["bias", "noise", "weight", "output", "cross"]].sum(axis=1), 1)
    assert means["site"].iloc[0] == "self q" and means["rounding"].tolist()[:2] == ["shipped", "fixed"]
