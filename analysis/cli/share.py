"""`shrinkage validate`, `compare`, `merge` and `import`: tables that people exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from analysis.cli.measure import OVERWRITE, command_line, progress

if TYPE_CHECKING:
    from analysis.report.blocks import Table as TableBlock

console = Console(stderr=True)
PATHS = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Tables, runs' folders, or folders of runs.")]
RUNS = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders, or folders with runs below.")]
METRIC = Annotated[str, typer.Option(help="Metric column to compare.")]
_PROBLEMS = 1
_SHOWN = 30  # problems of a file, and rows of a table on the screen
_WIDTH = 140  # of tables that go into a file or a pipe


def register(app: typer.Typer) -> None:
    app.command()(validate)
    app.command()(compare)
    app.command()(merge)
    app.command("import")(import_)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """An output that cannot be written is the user's to mend."""
    try:
        yield
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise ValueError(
            f"{out} cannot be written ({error.strerror}: {error.filename}); choose another output"
        ) from None
    except OSError as error:
        if error.errno is None or error.filename is None:
            raise
        raise ValueError(f"{out} cannot be written ({error.strerror}); choose another output") from None


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar that advances by several."""
    with progress(what, total) as advance:

        def by(count: int) -> None:
            for _ in range(count):
                advance()

        yield by


def validate(paths: PATHS) -> None:
    """Check tables and runs: columns, keys, ranges, sums against what follows from them, files against each other.

    Exit code 0 where everything holds, 1 where there are problems. What a spreadsheet changed and can be read is told.

    Example: shrinkage validate runs/tiny theirs/per_layer.csv
    """
    from analysis.results.validate import validate as check

    total = 0
    for path in paths:
        for checked in check(path):
            for note in checked.notes:
                typer.echo(f"{checked.file}: note: {note}")
            for problem in checked.problems[:_SHOWN]:
                typer.echo(str(problem))
            if len(checked.problems) > _SHOWN:
                typer.echo(f"{checked.file}: {len(checked.problems) - _SHOWN} more problems")
            rows = "" if checked.frame is None else f", {len(checked.frame)} rows"
            count = len(checked.problems)
            found = "ok" if not count else f"{count} problem{'s' if count > 1 else ''}"
            typer.echo(f"{checked.file}: {found} ({checked.kind}{rows})")
            total += count
    if total:
        raise typer.Exit(_PROBLEMS)


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="A B...", help="The first is compared with each other one.")],
    metric: METRIC = "rel_mse",
    paired: Annotated[
        bool, typer.Option("--paired", help="Both measured the same calls: resample them together.")
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative difference beyond which a layer without intervals disagrees.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the comparison to this Markdown file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every row to this CSV file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it to this .svg or .png file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 where a layer disagrees.")] = False,
) -> None:
    """Put runs side by side: ratio and difference of every layer, rank correlation, layers that disagree.

    Takes runs' folders, per_layer.csv files (also as a spreadsheet saved them), imported tables, folders of runs.

    Example: shrinkage compare runs/mine theirs/per_layer.csv --markdown compared.md
    """
    from analysis.report import compare_blocks
    from analysis.report.blocks import Text
    from analysis.results import compare as comparing
    from analysis.results.compare_sources import open_source

    if figure is not None and figure.suffix not in (".svg", ".png"):
        raise ValueError(f"--figure {figure}: expected a name that ends in .svg or .png")
    with counting("reading runs", 0) as advance:
        sources = [open_source(path, on_runs=advance) for path in paths]
    found = comparing.compare(sources, metric, paired, tolerance)
    screen = Console()
    if not screen.is_terminal:
        screen.width = _WIDTH
    for pair in found.pairs:
        screen.print(f"\n[bold]{escape(pair.b)}[/] against [bold]{escape(pair.a)}[/]: {metric}", highlight=False)
        for block in compare_blocks.pair_blocks(pair, metric):
            if isinstance(block, Text):
                screen.print(escape(block.text), highlight=False)
            else:
                screen.print(_table(block))
    _save(found, markdown, csv, figure)
    if check and any(pair.count(comparing.DISAGREES) for pair in found.pairs):
        raise typer.Exit(_PROBLEMS)


def _table(block: Any) -> Table:
    """A block as the terminal shows it."""
    source: TableBlock = block
    table = Table(title=escape(source.caption), title_justify="left")
    for at, header in enumerate(source.headers):
        table.add_column(header, justify="right" if at in source.numeric else "left", overflow="fold")
    for row in source.rows[:_SHOWN]:
        table.add_row(*(escape(cell.text) for cell in row))
    if len(source.rows) > _SHOWN:
        table.caption = f"{len(source.rows) - _SHOWN} more rows: --csv or --markdown writes all"
    return table


def _save(found: Any, markdown: Path | None, csv: Path | None, figure: Path | None) -> None:
    """The files that were asked for."""
    from analysis.report import compare_blocks, compare_plot, style
    from analysis.results.schema import replacing

    if markdown is not None:
        with writing(markdown), replacing(markdown) as temporary:
            temporary.write_text(compare_blocks.markdown_page(found), encoding="utf-8")
    if csv is not None:
        with writing(csv), replacing(csv) as temporary:
            found.table().to_csv(temporary, index=False, lineterminator="\n")
    if figure is not None:
        for number, pair in enumerate(found.pairs, start=1):
            path = figure if len(found.pairs) == 1 else figure.with_stem(f"{figure.stem}-{number}")
            with style.context():
                drawn, ax = style.figure(wide=True)
                compare_plot.draw(pair, found.metric, ax)
            data = style.to_png(drawn) if path.suffix == ".png" else style.to_svg(drawn).encode()
            with writing(path), replacing(path) as temporary:
                temporary.write_bytes(data)
            typer.echo(str(path))
    for path in filter(None, (markdown, csv)):
        typer.echo(str(path))


def merge(
    runs: RUNS,
    out: Annotated[Path, typer.Option(help="Folder for the merged tables.")],
    as_: Annotated[
        str,
        typer.Option(
            "--as",
            help="auto: folders with one run id are parts of one run, others are different runs. parts: also runs that "
            "differ in their scenes only. ranks: parts that hold the same calls add up. runs: different runs.",
        ),
    ] = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Put the parts of a run together, or stack and add up different runs of the same thing.

    Parts of one run give the tables of the whole. Different runs give per_layer.csv over all of them, per_run.parquet
    with the rows of each, and runs.csv with their headlines.

    Example: shrinkage merge cluster/rollouts --out runs/pooled
    """
    from analysis.results import folder, sources
    from analysis.results.pool import RUNS as RUN_TABLE

    if as_ not in ("auto", "parts", "ranks", "runs"):
        raise ValueError(f"unknown --as {as_!r}; known: auto, parts, ranks, runs")
    folder.check_free(out, overwrite, (*folder.TABLES, sources.PER_RUN, RUN_TABLE))
    found = sources.find_runs(runs, out)
    one_run = len({run.run_id for run in found}) == 1
    if as_ in ("parts", "ranks") or (as_ == "auto" and one_run):
        _merge_parts(found, out, as_)
        return
    if one_run and len(found) > 1:
        raise ValueError(f"all {len(found)} folders hold run {found[0].run_id}: they are parts of one run: --as parts")
    from analysis.results import pool

    with counting(f"merging {len(found)} runs", len(found)) as advance, writing(out):
        merged = pool.merge_runs(found, out, command_line(), advance)
        _remove(out, "per_call.parquet")
    if as_ == "auto" and _differ_in_scenes_only(found):
        console.print("[bold]note:[/] these runs differ in their scenes only; --as parts makes one run of them")
    for note in merged.notes:
        console.print(f"[bold]note:[/] {escape(note)}", highlight=False)
    _headline(merged.per_layer)
    typer.echo(f"{merged.runs} runs, {merged.calls} calls")
    typer.echo(str(out / "per_layer.csv"))


def _merge_parts(found: list[Any], out: Path, as_: str) -> None:
    from analysis.results import folder, parts, pool, sources

    per_call, info = parts.join(found, scenes=as_ == "parts", ranks=as_ == "ranks")
    with writing(out):
        per_layer = folder.write_run_folder(out, per_call, info | {"command": command_line()})
        _remove(out, sources.PER_RUN, pool.RUNS)
    _headline(per_layer)
    typer.echo(f"{len(found)} parts of one run, {per_call['call'].nunique()} calls")
    typer.echo(str(out / "per_layer.csv"))


def _remove(out: Path, *names: str) -> None:
    """Tables of a run that stood here before: beside the new ones they would contradict them."""
    for name in names:
        (out / name).unlink(missing_ok=True)


def _differ_in_scenes_only(found: list[Any]) -> bool:
    from analysis.results import sources

    try:
        sources.check_parts(found, but=("scenes",))
    except ValueError:
        return False
    return True


def _headline(per_layer: Any) -> None:
    from analysis.cli.measure import print_headline

    print_headline(per_layer)


def import_(
    file: Annotated[Path, typer.Argument(help="Anybody's CSV with one row a layer.")],
    out: Annotated[Path, typer.Option(help="Folder for per_layer.csv and run.json.")],
    map_: Annotated[
        list[str], typer.Option("--map", help="OURS=THEIRS, comma-separated: layer='Layer name',rel_mse=MSE.")
    ] = [],  # noqa: B006
    set_: Annotated[
        list[str], typer.Option("--set", help="A column of one value: variant=shipped,reference=bf16.")
    ] = [],  # noqa: B006
    layer_regex: Annotated[str | None, typer.Option(help="Pattern of their layer names.")] = None,
    layer_name: Annotated[
        str | None, typer.Option(help=r"What a matching name becomes: 'blocks.\1.self_attn.\2'.")
    ] = None,
    separator: Annotated[str | None, typer.Option(help="Their separator, where it cannot be told.")] = None,
    overwrite: OVERWRITE = False,
) -> None:
    """Turn a foreign table of layers into this toolkit's schema as far as it goes, to compare it.

    Columns that their file does not have stay empty; metrics that follow from others are filled in.

    Example: shrinkage import theirs.csv --map layer=Name,rel_mse=MSE --set variant=shipped --out runs/theirs
    """
    from analysis.results import folder, foreign, pool, schema, sources

    folder.check_free(out, overwrite, (*folder.TABLES, sources.PER_RUN))
    if separator is not None and len(separator.replace("\\t", "\t")) != 1:
        raise ValueError(f"--separator {separator!r}: expected one character, or \\t")
    made = foreign.import_table(
        file,
        foreign.assignments(map_, "--map"),
        foreign.assignments(set_, "--set"),
        layer_regex,
        layer_name,
        separator and separator.replace("\\t", "\t"),
    )
    with writing(out):
        schema.write_per_layer(made.frame, out / schema.PER_LAYER)
        schema.write_run(made.info | {"command": command_line()}, out / schema.RUN)
        _remove(out, schema.PER_CALL, sources.PER_RUN, pool.RUNS)
    for note in made.notes:
        console.print(f"[bold]note:[/] {escape(note)}", highlight=False)
    filled = [name for name in foreign.MEASURED if made.frame[name].notna().any()]
    typer.echo(f"{len(made.frame)} layers with {', '.join(filled)}")
    typer.echo(str(out / schema.PER_LAYER))
