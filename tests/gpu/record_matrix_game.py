"""Matrix-Game-3.0's real code at full size, measured on one GPU: tables, overhead, memory, and a record of it all.

    python tests/gpu/record_matrix_game.py --repo Matrix-Game-3 --out OUT [--profile]
    python tests/gpu/record_matrix_game.py --repo Matrix-Game-3 --out OUT --small        # the same on a CPU, toy size

1. `shrinkage attach` on the driver script, both resolutions, both kernels, tokens=both: OUT/<size>/ holds the tables.
2. In this process, the same rollout without attach: are the latents the same to the last bit?
3. Whole forward passes plain and measured in turn (CUDA events): overhead, extra memory, equal outputs, no host syncs.
4. One layer beside its GEMMs; this project's codes and products beside upstream's own kernel file.
Prints a table and writes OUT/record.json.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import matrix_game_full_size as driver  # noqa: E402

from analysis.capture.hooks import Event  # noqa: E402
from analysis.capture.online import OnlineSink  # noqa: E402
from analysis.capture.watch import Watcher  # noqa: E402
from analysis.measure.bench import alternate, bench_layer  # noqa: E402
from analysis.measure.replay import Replay  # noqa: E402
from analysis.results import schema  # noqa: E402
from analysis.sites import preset  # noqa: E402
from analysis.worlds.matrix_game import Padding  # noqa: E402

DRIVER = "tests/gpu/matrix_game_full_size.py"
WORLD = "Matrix-Game-3.0, random weights"
TARGETS = {"704x1280": 1.06, "352x640": 1.12}
TABLES = Path("runs/matrix-game-3-random-weights")
REPEATS = {"704x1280": 5, "352x640": 15, "small": 3}
LATER_CALLS = {"704x1280": 2, "352x640": 8, "small": 8}


def start_attach(args, size: str) -> subprocess.Popen:
    """The command that run.json records: paths relative to the repository, none of this machine's."""
    words = [sys.executable, "-m", "analysis.cli", "attach", "--out", str(TABLES / size), "--overwrite"]
    words += ["--preset", "matrix-game-3", "--tokens", "both", "--world", WORLD, "--", DRIVER, "--repo", str(args.repo)]
    words += ["--result", str(TABLES / f"{size}.json"), *(["--small"] if args.small else ["--size", size])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    log = (args.out / f".{size}.log").open("w")
    return subprocess.Popen(words, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def end_attach(args, size: str, process: subprocess.Popen) -> dict:
    code = process.wait()
    if code != 0:
        sys.exit(f"attach at {size} exited {code}:\n{(args.out / f'.{size}.log').read_text()[-6000:]}")
    shutil.copytree(ROOT / TABLES / size, args.out / size, dirs_exist_ok=True)
    run, calls = schema.read_run(args.out / size / schema.RUN), schema.read_per_call(args.out / size / schema.PER_CALL)
    result = json.loads((ROOT / TABLES / f"{size}.json").read_text())
    (args.out / f".{size}.log").unlink()
    valid = (
        calls[calls["tokens"] == "valid"].groupby("call")["rows"].sum()
        / calls[calls["tokens"] == "all"].groupby("call")["rows"].sum()
    )
    return {
        "layers": run["layers_measured"],
        "silent": len(run["layers_silent"]),
        "calls": run["calls"],
        "engine": run["engine"],
        "device": run["device"],
        "valid_rows_of_all": [round(float(v), 4) for v in valid],
        "seconds_per_call": result["seconds"],
        "sha256": result["sha256"],
    }


class Measured:
    """One model's forward pass, plain and measured; `sink` is made anew for every size."""

    def __init__(self, model, arguments: dict, device: str) -> None:
        self.model, self.arguments = model, arguments
        self.sink = OnlineSink(Replay(["shipped", "fixed"], device=device), "both")
        self.watcher = Watcher(preset("matrix-game-3"), self.sink, print, Padding())

    @torch.no_grad()
    def plain(self):
        return self.model(**self.arguments)

    def measured(self):
        self.watcher.install()
        try:
            return self.plain()
        finally:
            self.watcher.pause()


def peak(function, device: str) -> tuple[float, torch.Tensor]:
    """Highest allocated memory of one call in GiB, and what it returned."""
    if device == "cpu":
        return 0.0, function()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30, result


def overhead(model, rollout, size: str, device: str, profile_to: Path | None) -> dict:
    """Times, memory and outputs of the first step of the second clip, whose input has memory frames."""
    arguments = rollout.clip(1)
    arguments |= {"x": rollout.start(1), "t": rollout.time(1000.0)}
    pair = Measured(model, arguments, device)
    for function in (pair.plain, pair.measured):
        function()  # compiles
    memory_plain, expected = peak(pair.plain, device)
    memory_measured, seen = peak(pair.measured, device)
    for _ in range(LATER_CALLS[size]):
        memory_later, _ = peak(pair.measured, device)
    times = alternate({"plain": pair.plain, "measured": pair.measured}, device, REPEATS[size], warmup=1)
    if pair.watcher.stopped:
        sys.exit(f"the measurement stopped: {pair.watcher.stopped}")
    if profile_to is not None:
        profile(pair.measured, profile_to)
    return {
        "plain": asdict(times["plain"]),
        "measured": asdict(times["measured"]),
        "ratio": times["measured"].median_s / times["plain"].median_s,
        "outputs_equal": torch.equal(expected, seen),
        "extra_memory_gib": memory_measured - memory_plain,
        "extra_memory_later_gib": memory_later - memory_plain,
        "plain_memory_gib": memory_plain,
        "layers": len(pair.sink.measured),
    }


def profile(function, path: Path) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    averages = seen.key_averages()
    tables = [averages.table(sort_by=key, row_limit=40) for key in ("self_cuda_time_total", "self_cpu_time_total")]
    path.write_text("\n".join(tables))


def no_host_sync(device: str) -> str:
    """Whether measuring layers and ending calls ever waits for the GPU: PyTorch raises if it does."""
    if device == "cpu":
        return "not on a CPU"
    from analysis.measure.bench import random_layer

    layer, x = random_layer(4400, 3072, 3072, device)
    sink = OnlineSink(Replay(["shipped", "fixed"], device=device), "both")

    def calls() -> None:
        for _ in range(3):
            sink.begin_call()
            sink.layer(Event(layer, x, x, None))
            sink.end_call()

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
        return "none"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def upstream_kernels(repo: Path, device: str) -> dict:
    """Codes of upstream's quantiser and products of its GEMM against this project's, bit for bit."""
    if device == "cpu":
        return {"checked": "not on a CPU"}
    from analysis import numerics
    from analysis.kernels import gemm, registry

    theirs = registry.quantizer(f"{repo / 'wan' / 'triton_kernels.py'}:int8_quantize_triton", device)
    ours = registry.quantizer("shipped", device)
    generator = torch.Generator(device).manual_seed(3)
    differing = elements = scales_differing = 0
    for rows, columns in ((1, 17), (17, 1000), (3, 3072), (129, 3073), (1000, 255), (7, 4097), (250, 48), (5, 1),
                          (333, 777), (64, 14336)):  # fmt: skip
        x = torch.randn(rows, columns, generator=generator, device=device) * torch.rand(
            rows, 1, generator=generator, device=device
        )
        for dtype in (torch.float32, torch.bfloat16):
            (a, a_scales), (b, b_scales) = ours(x.to(dtype)), theirs(x.to(dtype))
            differing += int((a != b).sum())
            scales_differing += int((a_scales != b_scales).sum())
            elements += a.numel()
    upstream = sys.modules[registry.load_foreign(f"{repo / 'wan' / 'triton_kernels.py'}:int8_gemm_triton").__module__]
    unequal = []
    for rows, inner, columns in ((256, 3072, 3072), (512, 1024, 256), (4352, 3072, 3072), (256, 128, 128)):
        x = torch.randn(rows, inner, generator=generator, device=device)
        w, w_scales = numerics.quantize_weight(torch.randn(columns, inner, generator=generator, device=device))
        a, a_scales = ours(x)
        expected = upstream.int8_gemm_triton(a, w, a_scales, w_scales, output_dtype=torch.bfloat16)
        if not torch.equal(gemm.int8_linear(a, a_scales, w, w_scales, None), expected):
            unequal.append([rows, inner, columns])
    return {"codes": elements, "codes_differing": differing, "scales_differing": scales_differing, "gemms": 4,
            "gemms_unequal": unequal}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sizes", nargs="+", default=["352x640", "704x1280"])
    parser.add_argument("--no-attach", action="store_true", help="only time")
    parser.add_argument("--profile", action="store_true", help="write OUT/profile-<size>.txt")
    args = parser.parse_args()
    began = time.monotonic()
    sizes = ["small"] if args.small else args.sizes
    device = "cpu" if args.small else "cuda"
    for folder in (args.out, ROOT / TABLES):
        folder.mkdir(parents=True, exist_ok=True)
    running = {} if args.no_attach else {size: start_attach(args, size) for size in sizes}
    record: dict = {
        "script": "tests/gpu/record_matrix_game.py",
        "device": "cpu" if args.small else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "python": platform.python_version(),
        "attach": {size: end_attach(args, size, process) for size, process in running.items()},
    }
    print(f"[{time.monotonic() - began:.0f} s] attach runs done", flush=True)
    driver.set_up(args.small, sequence_parallel=False)
    if not args.small:
        record["kernels"] = {"upstream": upstream_kernels(args.repo, device), "host_syncs": no_host_sync(device)}
        record["layer"] = {m: bench_layer(m, 3072, 3072, device) for m in (17600, 4400)}
        print(f"[{time.monotonic() - began:.0f} s] kernels and layers done", flush=True)
    shape = driver.SMALL if args.small else driver.FULL
    model = driver.build(driver.load_upstream(args.repo), shape, device, 0)
    record["parameters"] = sum(p.numel() for p in model.parameters())
    record["overhead"] = {}
    for size in sizes:
        rollout = driver.Rollout(shape, size, device, 0)
        latents = driver.generate(model, rollout, 2, 3)
        if size in record["attach"]:
            record["attach"][size]["bit_identical"] = driver.digest(latents) == record["attach"][size]["sha256"]
        profile_to = args.out / f"profile-{size}.txt" if args.profile else None
        record["overhead"][size] = overhead(model, rollout, size, device, profile_to)
        print(f"[{time.monotonic() - began:.0f} s] {size} timed", flush=True)
    record["wall_s"] = round(time.monotonic() - began, 1)
    (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    show(record)


def show(record: dict) -> None:
    print(f"\n{record['device']}, torch {record['torch']}, triton {record['triton']}, {record['wall_s']} s")
    for size, run in record["attach"].items():
        print(f"attach {size}: {run['layers']} layers, {run['silent']} silent, {run['calls']} calls, {run['engine']}, "
              f"latents bit-identical: {run.get('bit_identical')}, valid rows {run['valid_rows_of_all']}")  # fmt: skip
    for size, o in record["overhead"].items():
        target = TARGETS.get(size)
        verdict = "" if target is None else f" (target {target}: {'met' if o['ratio'] <= target else 'MISSED'})"
        extra = f"{o['extra_memory_gib']:.3f} GiB, after more calls {o['extra_memory_later_gib']:.3f}"
        print(
            f"forward {size}: {o['plain']['median_s']:.4f} -> {o['measured']['median_s']:.4f} s = {o['ratio']:.4f}x"
            f"{verdict}; extra memory {extra}; outputs equal: {o['outputs_equal']}; {o['layers']} layers"
        )
    for rows, layer in record.get("layer", {}).items():
        ratios = {name: round(value, 3) for name, value in layer["ratio_to_gemms"].items()}
        print(
            f"layer {rows}x3072x3072: GEMMs {1e6 * layer['times']['GEMMs alone']['median_s']:.0f} us; of them {ratios}"
        )
    if "kernels" in record:
        print(f"kernels: {record['kernels']}")


if __name__ == "__main__":
    main()
