"""Matrix-Game-3.0's real code on two GPUs: sequence parallelism, with and without FSDP, merged and compared with one.

    python tests/gpu/two_gpus.py --repo Matrix-Game-3 --out OUT            # two GPUs
    python tests/gpu/two_gpus.py --repo Matrix-Game-3 --out OUT --small    # two CPU processes, toy size

Both sides run upstream's sequence-parallel forwards, one of them in one process: these cast q's, k's and v's input to
bf16, and FSDP casts the modulation, which the plain forwards do not, so that comparing with those would compare models.
Each run is `shrinkage attach` on the driver under torchrun. Then plain and measured forwards in turn, and a rank that
raises. Writes OUT/record.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import matrix_game_full_size as driver  # noqa: E402

from analysis.results import schema  # noqa: E402

DRIVER = "tests/gpu/matrix_game_full_size.py"
RUNS = Path("runs/two-gpus")
KEY = ["call", "layer", "variant", "tokens"]
TOLERANCE, OVERHEAD = 1e-4, 1.10
LIMIT_S = 240


def torchrun(processes: int, words: list[str], limit_s: float = LIMIT_S) -> subprocess.CompletedProcess:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([*launch, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)


def attach(args, name: str, processes: int, extra: list[str]) -> dict:
    """One attached run -> how it ended, and its run.json where it left one."""
    words = ["-m", "analysis.cli", "attach", "--out", str(RUNS / name), "--overwrite", "--tokens", "both", "--"]
    words += [DRIVER, "--repo", str(args.repo), "--sequence-parallel", "--clips", "1", "--steps", "2"]
    words += ["--small"] if args.small else ["--size", "704x1280"]
    started = time.monotonic()
    done = torchrun(processes, [*words, *extra])
    result = {"exit_code": done.returncode, "wall_s": round(time.monotonic() - started, 1)}
    path = ROOT / RUNS / name / schema.RUN
    if path.exists():
        run = schema.read_run(path)
        result |= {k: run.get(k) for k in ("complete", "layers_measured", "layers_silent", "calls", "calls_per_rank")}
    elif done.returncode == 0 or not extra or "--raise-on-rank" not in extra:
        result["output"] = (done.stdout + done.stderr)[-4000:]
    return result


def compare(one: str, two: str) -> dict:
    """Rows and sums of the merged table beside the single process's, and where they begin to part."""
    tables = [schema.read_per_call(ROOT / RUNS / n / schema.PER_CALL).set_index(KEY).sort_index() for n in (one, two)]
    a, b = tables
    worst = {}
    parts = {}
    for name in ("sum_yy", "sum_ee", "sum_zz", "sum_eff_yy", "sum_square_error"):
        difference = ((a[name] - b[name]).abs() / a[name].abs().clip(lower=1e-300)).astype(float)
        worst[name] = float(difference.max())
        before = difference[(a["block"] == 0) & (a["attention"] == "self") & a["projection"].isin(["q", "k", "v"])]
        parts[name] = float(before.xs(0, level="call").max())
    return {
        "same_keys": a.index.equals(b.index),
        "rows_equal": bool((a["rows"] == b["rows"]).all()),
        "worst_relative_difference": worst,
        "before_the_first_attention": parts,  # nothing is summed in another order there
    }


def timing_worker(args) -> None:
    """Plain and measured forwards in turn on every rank; the slowest rank counts. Prints one JSON line on rank 0."""
    from analysis.capture.online import OnlineSink
    from analysis.capture.watch import Watcher
    from analysis.measure.replay import Replay
    from analysis.sites import preset
    from analysis.worlds.matrix_game import Padding

    device = driver.set_up(args.small, sequence_parallel=True)
    shape, size = (driver.SMALL, "small") if args.small else (driver.FULL, "704x1280")
    model = driver.make_parallel(driver.build(driver.load_upstream(args.repo), shape, device, 0), args.fsdp)
    rollout = driver.Rollout(shape, size, device, 0)
    arguments = rollout.clip(0)
    arguments |= {"x": rollout.start(0), "t": rollout.time(1000.0)}
    sink = OnlineSink(Replay(["shipped", "fixed"], device=device), "both")
    watcher = Watcher(preset("matrix-game-3"), sink, print, Padding())
    seconds = {False: [], True: []}
    for turn in range(2 * (3 + args.repeats)):
        measured = turn % 2 == 1
        if measured:
            watcher.install()
        dist.barrier()
        if device != "cpu":
            torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.no_grad():
            model(**arguments)
        if device != "cpu":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - started, device=device)
        watcher.pause()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if turn >= 6:
            seconds[measured].append(slowest.item())
    if dist.get_rank() == 0:
        plain, seen = (statistics.median(seconds[m]) for m in (False, True))
        result = {"plain_s": plain, "measured_s": seen, "ratio": seen / plain, "repeats": args.repeats}
        print("TIMES " + json.dumps(result | {"stopped": watcher.stopped}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def times(args, fsdp: bool) -> dict:
    words = [str(Path(__file__).resolve()), "--worker", "--repo", str(args.repo), "--repeats", str(args.repeats)]
    done = torchrun(2, [*words, *(["--small"] if args.small else []), *(["--fsdp"] if fsdp else [])])
    lines = [line for line in done.stdout.splitlines() if line.startswith("TIMES ")]
    return json.loads(lines[0][6:]) if lines else {"output": (done.stdout + done.stderr)[-4000:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help="internal: one rank of the timing")
    parser.add_argument("--fsdp", action="store_true", help="internal, with --worker")
    args = parser.parse_args()
    if args.worker:
        return timing_worker(args)
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "two CPU processes" if args.small else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    record: dict = {"script": "tests/gpu/two_gpus.py", "device": device, "torch": torch.__version__}
    for kind, extra in (("plain", []), ("fsdp", ["--fsdp"])):
        found = {n: attach(args, f"{kind}-{n}", n, extra) for n in (1, 2)}
        record[kind] = {"one": found[1], "two": found[2]}
        if all(run["exit_code"] == 0 for run in found.values()):
            record[kind]["compared"] = compare(f"{kind}-1", f"{kind}-2")
            shutil.copytree(ROOT / RUNS / f"{kind}-2", args.out / kind, ignore=shutil.ignore_patterns("rank-*"))
        record[kind]["times"] = times(args, fsdp=kind == "fsdp")
        print(f"[{time.monotonic() - began:.0f} s] {kind}: {json.dumps(record[kind])}", flush=True)
    broken = attach(args, "broken", 2, ["--raise-on-rank", "1"])
    left = ROOT / RUNS / "broken" / "rank-1" / schema.RUN
    broken["rank_1"] = {k: schema.read_run(left)[k] for k in ("ended", "calls", "complete")} if left.exists() else None
    record["a_rank_raises"] = broken
    record["wall_s"] = round(time.monotonic() - began, 1)
    (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return None


if __name__ == "__main__":
    main()
