"""`shrinkage measure`, `capture`, `replay` and `world` as a user calls them."""

import json
import subprocess
import sys

import pandas as pd
import pytest

from analysis.capture import session
from analysis.cli import build
from analysis.results import codes, schema, studies

SMALL = ("--world", "tiny", "--scenes", 1, "--clips", 1, "--device", "cpu")


def test_measure_twice_gives_the_same_bytes(run, tmp_path, capsys):
    for name in ("a", "b"):
        assert run("measure", *SMALL, "--out", tmp_path / name) == 0
    for table in (schema.PER_LAYER, schema.PER_CALL, studies.CODES.file, "contact_sheet.png"):
        assert (tmp_path / "a" / table).read_bytes() == (tmp_path / "b" / table).read_bytes(), table
    per_layer = schema.read_per_layer(tmp_path / "a" / schema.PER_LAYER)
    assert len(per_layer) == 64 * 2 and per_layer["layer"].nunique() == 64
    info = schema.read_run(tmp_path / "a" / schema.RUN)
    assert info["complete"] and info["layers_silent"] == [] and info["layers_measured"] == 64
    assert str(tmp_path / "a" / schema.PER_LAYER) in capsys.readouterr().out


def test_another_seed_gives_other_numbers(run, tmp_path):
    for seed in (0, 1):
        run("measure", *SMALL, "--seed", seed, "--out", tmp_path / str(seed))
    first, second = (schema.read_per_layer(tmp_path / s / schema.PER_LAYER) for s in "01")
    assert not first["rel_mse"].equals(second["rel_mse"]) and first["run_id"][0] != second["run_id"][0]


def test_capture_and_replay_give_the_tables_of_measure(run, tmp_path):
    assert run("measure", *SMALL, "--out", tmp_path / "online") == 0
    assert run("capture", *SMALL, "--out", tmp_path / "store") == 0
    assert run("replay", tmp_path / "store", "--out", tmp_path / "replayed", "--device", "cpu") == 0
    tables = [schema.read_per_call(tmp_path / name / schema.PER_CALL) for name in ("online", "replayed")]
    key = ["call", "layer", "variant"]
    one, two = (t.sort_values(key).reset_index(drop=True).drop(columns="run_id") for t in tables)
    pd.testing.assert_frame_equal(one, two, rtol=1e-6)
    held = [codes.find(tmp_path / name) for name in ("online", "replayed")]
    one, two = (t.sort_values(codes.KEY).reset_index(drop=True).drop(columns="run_id") for t in held)
    pd.testing.assert_frame_equal(one, two)


def test_a_folder_with_a_run_is_not_overwritten(run, tmp_path, capsys):
    (tmp_path / schema.RUN).write_text("{}")
    assert run("measure", *SMALL, "--out", tmp_path) == 1
    assert "already holds run.json; choose another --out or pass --overwrite" in capsys.readouterr().err
    assert run("measure", *SMALL, "--out", tmp_path, "--overwrite") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world", "big"), "unknown world 'big'; known: 'tiny'"),
        (("--scenes", 99), "has 16 scenes, asked for 99"),
        (("--clips", 99), "scenes allow 1..16 clips, asked for 99"),
        (("--variants", "shipped,nearest"), "nearest"),
        (("--reference", "fp8"), "unknown reference 'fp8'"),
        (("--tokens", "some"), "unknown tokens 'some'"),
        (("--engine", "cublas"), "cublas"),
        (("--device", "tpu9"), "unknown device 'tpu9'"),
    ],
)
def test_bad_options_are_named_and_nothing_is_written(run, tmp_path, capsys, arguments, message):
    assert run("measure", "--out", tmp_path / "out", "--device", "cpu", *arguments) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_ctrl_c_keeps_the_finished_calls_marked_incomplete(run, tmp_path, monkeypatch, capsys):
    rollout_into, calls = session.rollout_into, []

    def interrupted(sink, *arguments, **options):
        end_call = sink.end_call

        def after():
            end_call()
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt

        sink.end_call = after
        return rollout_into(sink, *arguments, **options)

    monkeypatch.setattr(session, "rollout_into", interrupted)
    assert run("measure", *SMALL, "--out", tmp_path) == 130
    assert schema.read_per_call(tmp_path / schema.PER_CALL)["call"].nunique() == 2
    assert schema.read_run(tmp_path / schema.RUN)["complete"] is False
    assert "marked incomplete" in capsys.readouterr().err


def test_version_and_every_command_has_an_example(run, capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("shrinkage ")
    import typer.main

    group = typer.main.get_command(build())
    commands = dict(group.commands)
    commands |= {f"world {name}": command for name, command in commands.pop("world").commands.items()}
    assert {"measure", "capture", "replay", "report", "world train"} <= set(commands)
    for name, command in commands.items():
        assert f"Example: shrinkage {name}" in command.help, name


def test_the_installed_command_works_without_a_terminal(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "from analysis.cli import main; main()", "replay", str(tmp_path), "--out", "x"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1 and "manifest.json does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_capture_of_an_altered_store_is_refused_and_leaves_no_run(run, tmp_path, capsys):
    assert run("capture", *SMALL, "--rows", 4, "--out", tmp_path / "store") == 0
    shard = tmp_path / "store" / "calls" / "0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    assert run("replay", tmp_path / "store", "--out", tmp_path / "out", "--device", "cpu") == 1
    assert "truncated or altered" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["sampling"] == {"rows": 4, "seed": 0} and manifest["complete"]
