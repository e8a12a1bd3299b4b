"""Run any Python script with a sink attached, nothing in it edited, and leave its tables.

    session = Session(Options(out=Path("run"), pattern=preset("wan")), target, say=print)
    code = session.run()        # the script's exit code, or 1 where the script ended well and the measurement did not

Results are kept however the script ends: `exit()`, an exception, Ctrl-C, `os._exit`, SIGTERM. Calls that were finished
count; `complete` in run.json says whether the script ran to its end. SIGKILL leaves nothing.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.capture import launch, ranks
from analysis.capture.launch import Ending, StopScript, Target
from analysis.capture.options import REGEX, Options, check_signatures
from analysis.capture.sudden import kept_on_sudden_end
from analysis.results import codes, merge, provenance, schema
from analysis.results import folder as run_folder
from analysis.worlds import matrix_game

if TYPE_CHECKING:
    import pandas as pd

    from analysis.capture.online import OnlineSink
    from analysis.capture.store import StoreSink
    from analysis.capture.watch import Watcher

_EMPTY = {"schema_version": schema.SCHEMA_VERSION, "calls": 0}


class Session:
    """One attached run of one process.

    Args:
        options: what to measure.
        target: what to run.
        say: prints one line for the user.

    Raises ValueError or FileExistsError for what can be known before the script runs.
    """

    def __init__(self, options: Options, target: Target, say: Callable[[str], None]) -> None:
        self.options, self.target, self.say = options, target, say
        self.rank = ranks.this_rank()
        self.folder = options.out if self.rank is None else self.rank.folder(options.out)
        self.started = time.time()
        self.watcher: Watcher | None = None
        self.sink: OnlineSink | None = None
        self.store: StoreSink | None = None
        # Lengths also tell which layers every rank holds alike, so that ranks can be merged.
        required = options.tokens != "all"
        wanted = required or (self.rank is not None and options.pattern.name in matrix_game.PRESETS)
        self.padding = matrix_game.Padding(required) if wanted else None
        self.swap = matrix_game.KernelSwap(options.kernel) if options.kernel else None
        self.per_layer: pd.DataFrame | None = None
        self.tables = self.folder  # where they are in the end
        self.problem = ""
        self.ending = Ending(0)
        self._saved = False
        for folder in dict.fromkeys((options.out, self.folder)):
            run_folder.check_free(folder, options.overwrite)
        ranks.clear(self.folder / "store" if self.rank is None else self.folder)

    def run(self) -> int:
        """Run the target to its end and write the tables.

        Returns the script's exit code, or 1 where the script ended well and `problem` says why there is no (whole)
        measurement. Raises ValueError when the options turn out wrong before the script gets anywhere.
        """
        with kept_on_sudden_end(self._sudden):
            try:
                launch.after_import("torch", self._start)
                if self.swap is not None:
                    launch.after_import(matrix_game.MODEL_MODULE, self._replace_kernel)
                ending = launch.run(self.target)
            except StopScript as stop:
                raise ValueError(str(stop)) from stop.__cause__
            finally:
                if self.watcher is not None:
                    self.watcher.remove()
            return self.finish(ending)

    def _start(self) -> None:
        """torch is there: build the sinks and install the hooks. What is wrong with the options ends the script."""
        from analysis.capture.online import OnlineSink
        from analysis.capture.store import StoreSink
        from analysis.capture.tee import Tee
        from analysis.capture.watch import Watcher
        from analysis.measure.replay import Replay

        options = self.options
        try:
            check_signatures(options.variants)
            # Touches no device before the script chooses one; tensors elsewhere get the engine of where they are.
            device = "cuda" if options.engine == "triton" else "cpu"
            self.sink = OnlineSink(Replay(options.variants, options.reference, device, options.engine), options.tokens)
            if options.store:
                info = {"expected": [], "world": self.target.name}
                self.store = StoreSink(
                    self.folder / "store", info, options.store_rows, outputs=options.reference == "as_run"
                )
        except (ValueError, FileNotFoundError, FileExistsError) as error:
            raise StopScript(str(error)) from error
        labels = matrix_game.Labels() if options.pattern.name in matrix_game.PRESETS else None
        sink = Tee(self.sink, self.store, options.store)
        self.watcher = Watcher(options.pattern, sink, self.say, self.padding, labels)
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self.watcher.install()

    def _replace_kernel(self) -> None:
        assert self.swap is not None
        try:
            self.swap.install()
        except ValueError as error:
            raise StopScript(str(error)) from error

    # -- the end

    def finish(self, ending: Ending, wait_s: float | None = None) -> int:
        """Write the tables once, and add up the ranks where this is the first; returns the exit code."""
        if self._saved:
            return ending.code
        self._saved, self.ending = True, ending
        info = self._info(ending)
        per_call = None if self.sink is None else self.sink.table(provenance.run_id(info))
        if self.store is not None and self.watcher is not None:
            self.store.manifest["info"] |= {"expected": list(self.watcher.found), "sites": info["sites"]}
            self.store.close(complete=bool(info["complete"]))
        self.problem = self._problem(ending, per_call)
        if per_call is not None and not per_call.empty:
            assert self.sink is not None  # its codes come first: ranks wait for each other's run.json
            codes.write(self.sink.code_table(), self.folder, provenance.run_id(info))
            self.per_layer = run_folder.write_run_folder(self.folder, per_call, info)
        elif not self.problem or self.rank is not None:
            schema.write_run(_EMPTY | info, self.folder / schema.RUN)
        if self.rank is not None and self.rank.index == 0:
            self.problem = self._merge(self.options.wait_s if wait_s is None else wait_s) or self.problem
        return ending.code or (1 if self.problem else 0)

    def _problem(self, ending: Ending, per_call: pd.DataFrame | None) -> str:
        """Why a run whose script ended well is not a measurement; '' where it is one."""
        if self.watcher is not None and self.watcher.stopped:
            return f"the measurement stopped before the script's end: {self.watcher.stopped}"
        if self.swap is not None:
            unused = self.swap.calls == 0 and not ending.why
            return (
                "the int8 path never ran: --kernel changed nothing; is upstream's --use_int8 given?" if unused else ""
            )
        return "" if per_call is not None and not per_call.empty else self.nothing_measured()

    def nothing_measured(self) -> str:
        """The message for a run in which no layer fired."""
        pattern = f"{self.options.pattern.name!r} ({self.options.pattern.regex})"
        if self.watcher is None:
            return f"nothing was measured: {self.target.name} never imported torch"
        if self.watcher.found and self.ending.why:
            return "nothing was measured: the script ended before a forward pass of its model did"
        if self.watcher.found:
            names = ", ".join(list(self.watcher.found)[:4])
            return (
                f"nothing was measured: {len(self.watcher.found)} layer(s) matched ({names}, ...) but none ran as a "
                "module inside its model's forward pass (compiled, or called through F.linear?)"
            )
        if self.watcher.quantized:
            return f"nothing was measured: {len(self.watcher.quantized)} matched layer(s) hold int8 weights already"
        shown = ", ".join(self.watcher.linears) or "none"
        return f"nothing was measured: no layer matches {pattern}; linear layers of the models that ran: {shown}"

    def silent(self) -> list[str]:
        """Layers that matched but never fired in a finished call."""
        if self.watcher is None or self.sink is None:
            return []
        return [name for name in self.watcher.found if name not in self.sink.measured]

    def _info(self, ending: Ending) -> dict[str, Any]:
        options, watcher = self.options, self.watcher
        stopped = "" if watcher is None else watcher.stopped
        info: dict[str, Any] = {
            "world": options.world or self.target.name,
            "script": self.target.name,
            "script_sha256": None if self.target.path is None else _sha256(self.target.path),
            "sites": options.pattern.regex if options.pattern.name == REGEX else options.pattern.name,
            "variants": dict.fromkeys(options.variants, ""),
            "reference": options.reference,
            "tokens": options.tokens,
            "versions": provenance.versions(),
            "git_commit": provenance.git_commit(),
            "command": options.command,
            "complete": not ending.why and not stopped,
            "exit_code": ending.code,
            "ended": ending.why or "normally",
            "layers_expected": 0 if watcher is None else len(watcher.found),
            "layers_silent": self.silent(),
            "timing": {
                "started": datetime.fromtimestamp(self.started, UTC).isoformat(timespec="seconds"),
                "wall_s": round(time.time() - self.started, 1),
            },
        }
        if self.sink is not None:
            from analysis.kernels import registry

            info["variants"] = {v: registry.source_sha256(v) for v in options.variants}
            info |= self.sink.provenance()
        if watcher is not None:
            info |= {"stopped": stopped, "not_measured": watcher.notes, "layers_int8": len(watcher.quantized)}
        if self.swap is not None:
            info |= {"kernel": self.swap.kernel, "kernel_calls": self.swap.calls}
        if self.rank is not None:
            replicated = sorted(self.padding.replicated) if self.padding else []
            info |= {"rank": self.rank.index, "ranks": self.rank.world, "launch": self.rank.launch}
            info |= {"layers_replicated": replicated}
        return info

    def _merge(self, wait_s: float) -> str:
        """Add up the ranks into the run's own folder; returns what is wrong, '' if nothing is."""
        assert self.rank is not None
        found = ranks.wait_for_ranks(self.options.out, self.rank, wait_s)
        infos = {i: schema.read_run(path / schema.RUN) for i, path in sorted(found.items())}
        tables = {i: found[i] / schema.PER_CALL for i in infos if (found[i] / schema.PER_CALL).exists()}
        missing = sorted(set(range(self.rank.world)) - set(tables))
        info = next(infos[i] for i in (*tables, *infos)) | {
            "complete": not missing and all(run["complete"] for run in infos.values()),
            "ranks_missing": missing,
            "calls_per_rank": [infos[i]["calls"] if i in infos else 0 for i in range(self.rank.world)],
            "layers_silent": sorted(set().union(*(run["layers_silent"] for run in infos.values()))),
        }
        info = {k: v for k, v in info.items() if k not in ("rank", "run_id", "calls", "rows", "nonfinite_rows")}
        if not tables:
            if self.swap is not None and not self.problem:
                schema.write_run(_EMPTY | info, self.options.out / schema.RUN)
            return ""
        try:
            merged = merge.add_runs([schema.read_per_call(p) for p in tables.values()], info["layers_replicated"])
        except ValueError as error:
            return f"the ranks' tables stay in {self.options.out}/rank-*, not merged: {error}"
        self.per_layer = run_folder.write_run_folder(self.options.out, merged, info)
        held = [found[i] for i in tables]
        codes.add_folders(held, info["layers_replicated"], self.options.out, str(merged["run_id"].iloc[0]))
        self.tables = self.options.out
        if not missing:
            return ""
        return (
            f"rank(s) {', '.join(map(str, missing))} left no tables within {wait_s:g} s; the merged tables are "
            f"incomplete. `shrinkage merge` adds the folders {self.options.out}/rank-* later"
        )

    def _sudden(self, ending: Ending) -> None:
        """The process ends without unwinding (os._exit, SIGTERM): write what there is, without waiting long."""
        self.finish(ending, wait_s=5.0)
        if self.problem:
            self.say(self.problem)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
