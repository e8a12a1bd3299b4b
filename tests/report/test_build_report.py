"""The report as a reader gets it: complete, self-contained, escaped, honest about what is missing, the same twice."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import typer
from synthetic import make_calls, make_run
from typer.testing import CliRunner

from analysis.cli import report as command
from analysis.report import html, style
from analysis.report.html import build_report
from analysis.results import schema, summary

EVIL = '<script>alert("x")</script>&|$\\frac{'
VOID = {"meta", "link", "img", "input", "br", "hr"}


class Page(HTMLParser):
    """Tags with attributes, ids, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    @property
    def ids(self) -> list[str]:
        return [str(attrs["id"]) for _, attrs in self.tags if "id" in attrs]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def no_pictures(monkeypatch):
    """Figures are drawn but not rendered: for tests that look at words only."""
    monkeypatch.setattr(style, "render", lambda made: (b"PNG", '<svg viewBox="0 0 1 1"></svg>'))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(run, its report) for 64 layers, written beside the run."""
    run = make_run(tmp_path_factory.mktemp("built") / "tiny-world", 64, 4)
    (run / "contact_sheet.png").write_bytes(b"\x89PNG\r\n\x1a\n not much of a picture")
    return run, build_report([run], run)


@pytest.fixture(scope="module")
def page(built):
    return built[1].index.read_text(encoding="utf-8")


def test_page_is_well_formed_and_self_contained(page):
    parsed = Page(page)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    for tag, attrs in parsed.tags:
        assert tag not in {"iframe", "object", "embed"}
        for name in ("src", "href", "xlink:href"):
            if target := attrs.get(name):
                assert target.startswith(("#", "data:")) or (tag, name) == ("a", "href"), (tag, target)
    targets = re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', page)
    assert targets
    assert set(targets) <= set(parsed.ids)
    assert "@import" not in page


def test_first_screen_then_the_rest_in_order(built, page):
    order = ["reproduced on world", 'id="claims"', 'id="shrinkage"', 'id="headline"', 'id="error"', 'id="sites"']
    order += ['id="rollout"', 'id="layers"', 'id="definitions"', 'id="provenance"', 'id="reproduce"']
    places = [page.index(word) for word in order]
    assert places == sorted(places)
    assert "shrinkage measure --world synthetic --out run" in page
    assert "data:image/png;base64," in page
    assert 'class="warnings"' not in page
    assert built[1].headlines[0] in page.replace("\u00a0", " ")


def test_every_layer_is_in_the_page(built, page):
    for layer in schema.read_per_layer(built[0] / schema.PER_LAYER)["layer"].unique():
        assert page.count(f">{layer}</td>") == 1


def test_twin_says_the_same_and_its_figures_exist(built, page):
    twin = built[1].twin.read_text(encoding="utf-8")
    pictures = re.findall(r"\]\((figures/[^)]+\.png)\)", twin)
    assert len(pictures) == page.count("<figure>")
    assert all((built[0] / name).is_file() for name in pictures)
    assert "| C1 |" in twin
    headers = [line.count("|") for line in twin.splitlines() if line.startswith("| ")]
    assert min(headers) >= 3


def test_same_tables_same_bytes(built, tmp_path):
    first = files(built[0])
    again = build_report([built[0]], built[0])  # its own report may be replaced
    assert files(built[0]) == first
    elsewhere = build_report([built[0]], tmp_path)
    assert elsewhere.index.read_bytes() == again.index.read_bytes()
    assert elsewhere.twin.read_bytes() == again.twin.read_bytes()


def test_240_layers(tmp_path):
    run = make_run(tmp_path / "run", 240, 3)
    report = build_report([run], tmp_path / "out")
    assert "All 240 layers" in report.index.read_text(encoding="utf-8")
    assert report.index.stat().st_size < 4e6


def test_names_from_outside_are_escaped(tmp_path):
    run = make_run(
        tmp_path / "<i>run</i>",
        9,
        3,
        world=EVIL,
        prefix=EVIL,
        variants=("shipped", "fixed", EVIL),
        info={"command": EVIL + "```", "scenes": [EVIL], "layers_silent": [EVIL], "odd": {"<b>": ["</code>"]}},
    )
    report = build_report([run, make_run(tmp_path / "other", 1, 1)], tmp_path / "out")
    page = report.index.read_text(encoding="utf-8")
    assert Page(page).open == []
    own = Path(html.__file__).parent / "assets"
    assert page.count("<script>") == len(list(own.rglob("*.js")))  # the page's own
    assert page.count("<script") - page.count("<script>") == 2  # the layers' details of either run
    assert "&lt;script&gt;alert" in page
    assert not re.search(r"<(i|b)>", page)
    twin = report.twin.read_text(encoding="utf-8")
    outside_code = re.sub(r"^(`{3,}).*?^\1$", "", twin, flags=re.MULTILINE | re.DOTALL)
    assert "<script>" not in outside_code.replace("\\<", "").replace("\\>", "")
    assert not re.search(r"(?<!\\)<(?!!--|https:)", outside_code)


@pytest.mark.usefixtures("no_pictures")
def test_warnings_are_at_the_top(tmp_path):
    info = {"complete": False, "layers_silent": ["blocks.9.q"], "layers_expected": 12}
    run = make_run(tmp_path / "run", 8, 2, info=info)
    table = schema.read_per_layer(run / schema.PER_LAYER)
    table.loc[0, "nonfinite_rows"] = 3
    table.loc[5, "rel_mse"] = float("inf")
    schema.write_per_layer(table, run / schema.PER_LAYER)
    report = build_report([run], run)
    page = report.index.read_text(encoding="utf-8")
    box = page[page.index('class="warnings"') : page.index('id="claims"')]
    for words in (
        "interrupted",
        "never ran",
        "blocks.9.q",
        "8 of 12",
        "NaN or Inf",
        "too few for intervals",
        "all zero",
    ):
        assert words in box, words
    assert report.headlines[0].startswith("Interrupted run: ")
    assert "blocks.9.q" in report.twin.read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_pictures")
def test_only_the_shared_file(tmp_path):
    run = make_run(tmp_path / "run", 8, 3)
    (run / schema.PER_CALL).unlink()
    (run / schema.RUN).unlink()
    page = build_report([run], tmp_path / "out").index.read_text(encoding="utf-8")
    assert "no run.json" in page
    assert "no per_call.parquet" in page
    assert 'id="rollout"' not in page


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("info", [{}, {"versions": None, "layers_silent": None, "git_commit": None, "command": None}])
def test_every_key_of_run_json_is_optional(tmp_path, info):
    run = make_run(tmp_path / "run", 8, 3)
    schema.write_run({"schema_version": schema.SCHEMA_VERSION} | info, run / schema.RUN)
    assert "How to reproduce" in build_report([run], run).index.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options",
    [{"variants": ("shipped",)}, {"variants": ("fixed",)}, {"variants": ("fixed", "floor")}, {"labelled": False}],
    ids=str,
)
def test_builds_for_other_shapes(tmp_path, options):
    report = build_report([make_run(tmp_path / "run", 9, 3, **options)], tmp_path / "out")
    assert Page(report.index.read_text(encoding="utf-8")).open == []


@pytest.mark.usefixtures("no_pictures")
def test_no_defect_no_reproduction(tmp_path):
    run = make_run(tmp_path / "run", 16, 4, ratio=1.0, cosine=0.0)
    assert "is not reproduced" in build_report([run], run).headlines[0]


@pytest.mark.usefixtures("no_pictures")
def test_what_is_not_measured_is_not_claimed(tmp_path):
    (only_fixed,) = build_report([make_run(tmp_path / "a", 9, 3, variants=("fixed",))], tmp_path / "oa").headlines
    assert "is not decided" in only_fixed
    (short,) = build_report([make_run(tmp_path / "b", 9, 2)], tmp_path / "ob").headlines
    assert "reproduced in part" in short
    assert "C1, C3 not measured" in short


@pytest.mark.usefixtures("no_pictures")
def test_a_run_with_two_token_choices_shows_one_and_says_so(tmp_path):
    run = make_run(tmp_path / "run", 8, 3)
    calls = make_calls(8, 3)
    both = pd.concat([calls, calls.assign(tokens="valid")], ignore_index=True)
    schema.write_per_call(both, run / schema.PER_CALL)
    schema.write_per_layer(summary.summarize(both, "w"), run / schema.PER_LAYER)
    page = build_report([run], run).index.read_text(encoding="utf-8")
    assert "shown: reference bf16, tokens all" in page
    assert "<td>valid</td>" in page


@pytest.mark.usefixtures("no_pictures")
def test_another_report_is_not_overwritten_silently(tmp_path):
    a, b = make_run(tmp_path / "a", 1, 1), make_run(tmp_path / "b", 1, 1, run_id="ba9876543210")
    out = tmp_path / "out"
    build_report([a], out)
    with pytest.raises(FileExistsError, match="is the report of run 0123456789ab, not of ba9876543210; choose another"):
        build_report([b], out)
    build_report([b], out, overwrite=True)
    (out / "index.html").write_text("my own page")
    with pytest.raises(FileExistsError, match="was not written by a report"):
        build_report([b], out)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_measured_again_gets_its_report_again(tmp_path):
    folder = tmp_path / "run"
    build_report([make_run(folder, 1, 1)], folder)
    build_report([make_run(folder, 1, 1, run_id="ba9876543210")], folder)


def test_several_runs_on_one_page(tmp_path):
    runs = [make_run(tmp_path / "one", 8, 3), make_run(tmp_path / "two", 8, 3, run_id="ba9876543210", seed=1)]
    report = build_report(runs, tmp_path / "out")
    parsed = Page(report.index.read_text(encoding="utf-8"))
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert len(report.headlines) == 2
    assert (tmp_path / "out" / "figures" / "run2-cosine.svg").is_file()
    with pytest.raises(ValueError, match="a run is given twice"):
        build_report([runs[0], runs[0]], tmp_path / "out")


def test_no_run_at_all(tmp_path):
    with pytest.raises(ValueError, match="no run given"):
        build_report([], tmp_path)
    with pytest.raises(ValueError, match=r"no per_layer\.csv in this folder; make a run with: shrinkage measure"):
        build_report([tmp_path], tmp_path)


@pytest.mark.usefixtures("no_pictures")
def test_command(tmp_path):
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    run = make_run(tmp_path / "run", 8, 3)
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(run)])
    assert done.exit_code == 0, done.output
    first, second = done.output.strip().splitlines()
    assert first == str(run / "index.html")
    assert "is reproduced on world “synthetic”" in second
    assert "Example: shrinkage report" in CliRunner().invoke(app, ["report", "--help"]).output
    assert CliRunner().invoke(app, ["report", "--out", str(run)]).exit_code == 2
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "none"), "--out", str(run)])
    assert isinstance(missing.exception, ValueError)
