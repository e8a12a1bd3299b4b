"""`shrinkage validate`, `compare`, `merge` and `import` as a user calls them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis.results import folder, pool, provenance, schema
from analysis.results.sources import PER_RUN

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("report", "results")]
from made_up_runs import make_runs  # noqa: E402
from synthetic import make_calls  # noqa: E402

INFO = {"world": "synthetic", "scenes": ["corridor"], "seed": 0, "variants": {"shipped": "cd", "fixed": "ef"}}
INFO |= {"reference": "bf16", "tokens": "all", "complete": True, "layers_silent": []}
EVIL = '<img src=x onerror="alert(1)">|[bold]blocks.0.self_attn.q'


def write(out: Path, calls: pd.DataFrame, **changes) -> Path:
    info = INFO | changes
    folder.write_run_folder(out, calls.assign(run_id=provenance.run_id(info)).reset_index(drop=True), info)
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two runs in folders with spaces in their names; in the second the error of one layer is twice as large."""
    root = tmp_path_factory.mktemp("root of runs")
    calls = make_calls(8, 8)
    calls["layer"] = calls["layer"].where(calls["layer"] != "blocks.0.self_attn.q", EVIL)
    write(root / "run a", calls)
    other = calls.copy()
    other.loc[other["layer"] == EVIL, ["sum_ee", "sum_eff_ee"]] *= 4
    other.loc[other["layer"] == EVIL, ["sum_ey", "sum_ez"]] *= 2
    write(root / "run b", other, seed=1)
    return root


def test_validate_says_ok_and_exits_0(run, root, capsys):
    assert run("validate", root / "run a", root / "run b" / schema.PER_LAYER) == 0
    out = capsys.readouterr().out
    assert out.count(": ok (") == 4 and "per_layer.csv, 16 rows" in out


def test_validate_names_the_cell_and_exits_1(run, root, tmp_path, capsys):
    table = schema.read_per_layer(root / "run a" / schema.PER_LAYER)
    table.loc[3, "code_mismatch"] = 1.5
    schema.write_per_layer(table, tmp_path / "their table.csv")
    text = (tmp_path / "their table.csv").read_text().replace("\n", "\r\n")
    (tmp_path / "their table.csv").write_bytes(text.encode())
    assert run("validate", root / "run a", tmp_path / "their table.csv") == 1
    out = capsys.readouterr().out
    assert "their table.csv: line 5, column 'code_mismatch': found 1.5, expected between 0 and 1" in out
    assert "their table.csv: 2 problems (per_layer.csv, 16 rows)" in out  # out of range, and not what the sums give
    assert "their table.csv: note: CRLF line ends" in out
    assert run("validate", tmp_path / "none.csv", root / "run a") == 1
    out = capsys.readouterr().out
    assert "does not exist" in out and "run a/per_layer.csv: ok" in out  # goes on after a missing file


def test_compare_names_the_layer_and_writes_all_forms(run, root, tmp_path, capsys):
    files = [tmp_path / "new folder" / name for name in ("compared.md", "compared.csv", "compared.svg")]
    a, b = root / "run a", root / "run b"
    assert run("compare", a, b, "--markdown", files[0], "--csv", files[1], "--figure", files[2]) == 0
    out = capsys.readouterr().out
    assert "2 rows in 1 layer differ by more than their intervals allow" in " ".join(out.split())
    assert "[bold]" in out  # not markup
    assert all(str(path) in out for path in files)
    text = files[0].read_text()
    assert re.search(r"(?<!\\)<img", text) is None and "\\<img" in text and "\\|\\[bold\\]" in text
    assert text.count("**disagrees**") == 4  # once among those that disagree, once among all, each kernel
    table = pd.read_csv(files[1])
    assert len(table) == 16 and (table["judgement"] == "disagrees").sum() == 2
    assert table.loc[table["layer"] == EVIL, "ratio"].tolist() == pytest.approx([4, 4])
    svg = files[2].read_text()
    assert svg.startswith("<?xml") and "<img" not in svg
    assert run("compare", a, b, "--check") == 1
    assert run("compare", a, a, "--check") == 0
    assert "Every difference is exactly 0" in " ".join(capsys.readouterr().out.split())


def test_compare_of_three_draws_a_figure_each(run, root, tmp_path):
    a, b = root / "run a", root / "run b"
    assert run("compare", a, b, a, "--figure", tmp_path / "f.png", "--metric", "error_output_cosine") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f-1.png", "f-2.png"]
    assert (tmp_path / "f-1.png").read_bytes().startswith(b"\x89PNG")


def test_figures_draw_what_has_no_interval(run, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("layer,variant,rel_mse\nx,k,1\ny,k,2\nz,k,\n")
    (tmp_path / "b.csv").write_text("layer,variant,rel_mse\nx,k,1\ny,k,3\nz,k,1\n")
    paths = tmp_path / "a.csv", tmp_path / "b.csv"
    assert run("compare", *paths, "--figure", tmp_path / "f.png", "--tolerance", 0.1, "--check") == 1
    assert run("compare", *paths, "--figure", tmp_path / "f.svg", "--check") == 0
    capsys.readouterr()
    assert run("compare", paths[0], paths[0]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "No layer can be judged" in said and "Every difference is exactly 0" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metric", "mse"), "unknown metric 'mse'; known: rel_mse"),
        (("--figure", "f.jpg"), "--figure f.jpg: expected a name that ends in .svg or .png"),
        (("--tolerance", "0"), "tolerance 0.0 is not above 0"),
    ],
)
def test_bad_options_of_compare(run, root, capsys, arguments, message):
    assert run("compare", root / "run a", root / "run b", *arguments) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_merge_of_halves_is_the_whole(run, root, tmp_path, capsys):
    calls = schema.read_per_call(root / "run a" / schema.PER_CALL)
    for name, half in (("1", calls["call"] < 3), ("2", calls["call"] >= 3)):
        write(tmp_path / "parts" / name, calls[half])
    assert run("merge", tmp_path / "parts", "--out", tmp_path / "out") == 0
    assert "2 parts of one run, 8 calls" in capsys.readouterr().out
    whole = (root / "run a" / schema.PER_LAYER).read_bytes()
    assert (tmp_path / "out" / schema.PER_LAYER).read_bytes() == whole
    assert run("merge", tmp_path / "parts", "--out", tmp_path / "out") == 1
    err = capsys.readouterr().err.replace("\n", " ")
    assert "already holds" in err and "--overwrite" in err
    assert run("merge", tmp_path / "parts", "--out", tmp_path / "out", "--overwrite") == 0
    assert run("merge", tmp_path / "parts", "--out", tmp_path / "x", "--as", "runs") == 1
    assert "they are parts of one run: --as parts" in capsys.readouterr().err


def test_merge_of_a_folder_of_runs(run, tmp_path, capsys):
    make_runs(tmp_path / "runs", 5, layers=3, calls=3)
    assert run("merge", tmp_path / "runs", "--out", tmp_path / "pooled") == 0
    assert "5 runs, 15 calls" in capsys.readouterr().out
    made = {path.name for path in (tmp_path / "pooled").iterdir()}
    assert made == {schema.PER_LAYER, PER_RUN, pool.RUNS, schema.RUN}
    assert json.loads((tmp_path / "pooled" / schema.RUN).read_text())["command"].startswith("shrinkage merge ")
    assert run("validate", tmp_path / "pooled") == 0
    assert run("compare", tmp_path / "pooled", tmp_path / "runs" / "run-0") == 0


def test_overwriting_leaves_no_table_of_the_run_before(run, root, tmp_path, capsys):
    make_runs(tmp_path / "runs", 3, layers=2, calls=3)
    out = tmp_path / "runs" / "merged"  # below the runs: passed over when it is merged again
    (tmp_path / "theirs.csv").write_text("layer,variant,rel_mse\nx,k,1\n")
    single = ("merge", root / "run a", "--out", out, "--overwrite")
    many = ("merge", tmp_path / "runs", "--out", out, "--overwrite")
    foreign = ("import", tmp_path / "theirs.csv", "--out", out, "--overwrite")
    for arguments, tables in ((single, {schema.PER_CALL}), (many, {PER_RUN, pool.RUNS}), (single, {schema.PER_CALL})):
        assert run(*arguments) == 0
        assert {path.name for path in out.iterdir()} == {schema.PER_LAYER, schema.RUN} | tables
        assert run("validate", out) == 0
    assert run(*foreign) == 0
    assert {path.name for path in out.iterdir()} == {schema.PER_LAYER, schema.RUN}
    assert run("merge", root / "run a", "--out", root / "run a", "--overwrite") == 1
    assert "is both merged and written; choose another --out" in " ".join(capsys.readouterr().err.split())
    assert run("validate", root / "run a") == 0


def test_merge_says_when_runs_could_be_parts(run, tmp_path, capsys):
    for scene in ("corridor", "hall"):
        write(tmp_path / scene, make_calls(2, 3).assign(scene=scene), scenes=[scene])
    assert run("merge", tmp_path / "corridor", tmp_path / "hall", "--out", tmp_path / "runs") == 0
    said = capsys.readouterr()
    assert "differ in their scenes only; --as parts makes one run of them" in " ".join(said.err.split())
    assert run("merge", tmp_path / "corridor", tmp_path / "hall", "--out", tmp_path / "one", "--as", "parts") == 0
    assert "2 parts of one run, 6 calls" in capsys.readouterr().out


def test_merge_refuses_what_does_not_fit(run, root, tmp_path, capsys):
    write(tmp_path / "other", make_calls(2, 3), world="elsewhere")
    assert run("merge", root / "run a", tmp_path / "other", "--out", tmp_path / "out") == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "world is 'elsewhere'" in err and "has 'synthetic'" in err
    assert run("merge", root / "run a", "--out", tmp_path / "out", "--as", "pairs") == 1
    assert "unknown --as 'pairs'; known: auto, parts, ranks, runs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


THEIRS = "Layer;MSE\nblocks.0.self_attn.k;0,004\nblocks.0.self_attn.v;0,003\n"


def test_import_then_compare(run, root, tmp_path, capsys):
    (tmp_path / "their sheet.csv").write_bytes(("\ufeff" + THEIRS.replace("\n", "\r\n")).encode())
    out = tmp_path / "theirs"
    given = ("--map", "layer=Layer,rel_mse=MSE", "--set", "variant=shipped", "--out", out)
    assert run("import", tmp_path / "their sheet.csv", *given) == 0
    said = capsys.readouterr()
    assert "2 layers with rel_mse, sqnr_db" in said.out and "decimal commas" in said.err
    info = json.loads((out / schema.RUN).read_text())
    assert info["imported"]["file"] == "their sheet.csv" and info["command"].startswith("shrinkage import ")
    assert run("validate", out) == 0
    assert run("compare", root / "run a", out) == 0
    assert "Only in" in capsys.readouterr().out
    assert run("import", tmp_path / "their sheet.csv", *given) == 1
    assert "already holds per_layer.csv" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--map", "layer=Name", "--set", "variant=x"),
            "no column 'Name' to take layer from (there are 'Layer', 'MSE')",
        ),
        (("--map", "layer", "--set", "variant=x"), "--map 'layer': expected COLUMN=VALUE"),
        (("--map", "layer=Layer,rel_mse=MSE"), "which kernel was measured? --set variant=shipped"),
        (("--separator", "ab"), "--separator 'ab': expected one character"),
    ],
)
def test_bad_imports_write_nothing(run, tmp_path, capsys, arguments, message):
    (tmp_path / "theirs.csv").write_text(THEIRS)
    assert run("import", tmp_path / "theirs.csv", "--out", tmp_path / "out", *arguments) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["merge", "merge runs", "import", "compare"])
def test_output_that_cannot_be_written(run, root, tmp_path, capsys, monkeypatch, what):
    (tmp_path / "theirs.csv").write_text(THEIRS)
    out = tmp_path / "read only" / "out"

    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    commands = {
        "merge": ("merge", root / "run a", "--out", out),
        "merge runs": ("merge", root, "--out", out),
        "import": (
            "import",
            tmp_path / "theirs.csv",
            "--map",
            "layer=Layer,rel_mse=MSE",
            "--set",
            "variant=x",
            "--out",
            out,
        ),
        "compare": ("compare", root / "run a", root / "run b", "--csv", out),
    }
    assert run(*commands[what]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "cannot be written (Permission denied" in err and "choose another output" in err


def test_output_below_a_file(run, root, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run("merge", root / "run a", "--out", tmp_path / "file" / "out") == 1
    assert "cannot be written" in capsys.readouterr().err


def test_sharing_needs_no_torch(root, tmp_path):
    """Whoever receives tables can check and compare them where torch is not installed."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Refuse())
import typer
from analysis.cli import share
app = typer.Typer()
share.register(app)
app()
"""
    for arguments in (
        ("validate", root / "run a"),
        ("compare", *sorted(root.iterdir())),
        ("merge", root, "--out", tmp_path),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
