"""Every number of README's result and of the committed report is recomputed from the committed table."""

import re
import shutil
from pathlib import Path

import pytest

from analysis.report import readme
from analysis.report.html import build_report
from analysis.results import schema

ROOT = Path(__file__).parents[1]
RUN = ROOT / readme.RUN


def result_block(text: str) -> str:
    return block(text, readme.RESULT)


def block(text: str, markers: tuple[str, str]) -> str:
    return text.split(markers[0])[1].split(markers[1])[0].strip()


def test_readme_says_what_the_committed_table_says():
    text = (ROOT / readme.README).read_text(encoding="utf-8")
    assert result_block(text) == readme.render(RUN, readme.RUN.as_posix())


def test_readme_says_what_the_gpu_record_says(tmp_path):
    text = (ROOT / readme.README).read_text(encoding="utf-8")
    said = readme.speed(ROOT / readme.GPU_RECORD)
    assert block(text, readme.SPEED) == said and "the same to the last bit" in said
    changed = tmp_path / "record.json"
    changed.write_text(
        (ROOT / readme.GPU_RECORD).read_text().replace('"bit_identical": true', '"bit_identical": false')
    )
    assert "outputs CHANGED" in readme.speed(changed)


def test_a_changed_table_would_be_noticed(tmp_path):
    copy = shutil.copytree(RUN, tmp_path / "run")
    per_call = schema.read_per_call(copy / schema.PER_CALL)
    per_call.loc[per_call["variant"] == "shipped", "sum_ee"] *= 1.05
    schema.write_per_call(per_call, copy / schema.PER_CALL)
    text = (ROOT / readme.README).read_text(encoding="utf-8")
    assert result_block(text) != readme.render(copy, readme.RUN.as_posix())


def test_the_committed_report_is_built_from_the_committed_table(tmp_path):
    copy = shutil.copytree(RUN, tmp_path / "run")
    build_report([copy], copy)
    assert (copy / "report.md").read_text(encoding="utf-8") == (RUN / "report.md").read_text(encoding="utf-8")


def test_readme_without_its_markers_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(ValueError, match="needs the markers"):
        readme.update(tmp_path / "README.md", RUN)


def test_readme_names_only_files_that_exist():
    text = (ROOT / readme.README).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link
