"""Imports only go down. The floors are the ones that README draws."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    {"numerics", "sites", "results"},
    {"kernels", "worlds"},
    {"measure", "audit"},
    {"capture", "rollout", "report"},
    {"cli"},
]
TORCH_FREE = {"results", "report"}


def floor_of(part: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if part in floor)


def imports(source: str) -> set[str]:
    """Parts of `analysis` that a source imports, at any depth of the code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("analysis"):
            names = [node.module] if node.module != "analysis" else [f"analysis.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith("analysis")]
        else:
            continue
        found |= {name.split(".")[1] for name in names if "." in name}
    return found - {"__version__", "load_run"}


def edges_up(part: str, source: str) -> list[str]:
    return [other for other in imports(source) if other != part and floor_of(other) > floor_of(part)]


def sources() -> list[tuple[str, Path]]:
    files = sorted((ROOT / "analysis").rglob("*.py"))
    return [(path.relative_to(ROOT / "analysis").parts[0].removesuffix(".py"), path) for path in files]


def test_no_import_runs_up():
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for part, path in sources()
        if part != "__init__"
        for other in edges_up(part, path.read_text())
    ]
    assert not wrong


def test_every_part_has_a_floor():
    parts = {part for part, _ in sources()} - {"__init__"}
    assert parts == set().union(*FLOORS)


@pytest.mark.parametrize(
    ("part", "planted"),
    [("measure", "from analysis.capture import hooks"), ("results", "def f():\n    from analysis.kernels import gemm")],
)
def test_a_planted_edge_up_is_found(part, planted):
    assert edges_up(part, planted)


def test_results_and_report_import_neither_torch_nor_triton():
    for part, path in sources():
        if part in TORCH_FREE:
            names = {n.split(".")[0] for node in ast.walk(ast.parse(path.read_text())) for n in _imported(node)}
            assert not names & {"torch", "triton"}, path


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
