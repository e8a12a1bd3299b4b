"""`shrinkage bench --kernels` as a user calls it."""

import json

import pytest

SMALL = ("bench", "--kernels", "--device", "cpu", "--features", "64", "--repeats", "4")


def test_record_of_the_quantisers(run, tmp_path, capsys):
    out = tmp_path / "quantizers.json"
    assert run(*SMALL, "--rows", "8,16", "--out", out) == 0
    record = json.loads(out.read_text())
    assert record["device"] == "cpu" and record["versions"]["torch"] and record["rounds"] == 4
    assert [shape["rows"] for shape in record["shapes"]] == [8, 8, 16, 16]
    printed = capsys.readouterr()
    assert str(out) in printed.out and "PyTorch reference, not the Triton kernels" in printed.err
    assert run(*SMALL, "--rows", "8", "--out", out) == 1
    assert "already holds quantizers.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "--theirs", "mine.py:f"), "--theirs needs --kernels"),
        (("bench", "--rows", "8,16"), "several need --kernels"),
        ((*SMALL, "--rows", "8,many"), "expected positive numbers"),
        ((*SMALL, "--rows", "-8"), "expected positive numbers"),
        ((*SMALL, "--rows", "8", "--theirs", "nowhere.py:f"), "no file nowhere.py"),
    ],
)
def test_bad_input(run, capsys, arguments, said):
    assert run(*arguments) == 1
    assert said in capsys.readouterr().err
