"""Train TinyWorld on game frames: `python -m analysis.worlds.tiny.train --out runs/tiny --seconds 900`.

Two stages: the second (`--init FIRST --own-context 0.6`) starts from the first's checkpoint and lets the model predict
its own context for most clips, so that closed loops keep their walls and textures. Everything is seeded. With
`--seconds` the first steps are timed and the number of steps is then fixed, so that training ends in time; the number
is recorded, and `--steps` with it repeats the schedule. Needs `vizdoom`; one GPU is enough.

The network predicts the clean clip; the loss is the squared error of the velocity (x_t - x_0) / max(t, 0.05).

    card = train(TrainConfig(steps=30_000), Path("runs/tiny"))
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.worlds.tiny import data, evaluate
from analysis.worlds.tiny.checkpoint import load_checkpoint, read_card, save_checkpoint
from analysis.worlds.tiny.model import TinyConfig, TinyModel
from analysis.worlds.tiny.recipe import Batches, TrainConfig, learning_rate, velocity_loss
from analysis.worlds.tiny.scenes import HELD_OUT, save_scenes

STARTED = time.monotonic()
WARM_STEPS = 10  # before the update is captured as a CUDA graph
Say = Callable[[str], None]


class Trainer:
    """Model, average, optimiser and log of one run."""

    def __init__(self, config: TrainConfig, out: Path, say: Say, started: float) -> None:
        self.config, self.out, self.say, self.started = config, out, say, started
        self.device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self.model = TinyModel(config.model).to(self.device)
        if config.init:
            self.model.load_state_dict(load_checkpoint(Path(config.init))[0].state_dict())
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim == 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
        ]
        self.cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.graph: torch.cuda.CUDAGraph | None = None
        for group in groups:
            group["lr"] = torch.tensor(config.learning_rate, device=self.device) if self.cuda else config.learning_rate
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=self.cuda, capturable=self.cuda)
        self.parameters: list[Tensor] = list(parameters)
        self.averages: list[Tensor] = list(self.average.parameters())
        if config.compile:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        self.loss = torch.zeros((), device=self.device)  # summed since the last record
        self.records: list[dict[str, float]] = []
        self.stopped = False

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def update(self, frames: Tensor, times: Tensor, actions: Tensor, clean: Tensor, *first: Tensor) -> None:
        """Forward, backward and optimiser. Nothing here waits for the device, so that it can be captured."""
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self.cuda else nullcontext():
            if first:
                *earlier, use = first
                guess = self.model(*earlier).detach().clamp(-1, 1)
                kept = guess.shape[1]
                frames = torch.cat((torch.where(use, guess, frames[:, :kept]), frames[:, kept:]), dim=1)
            predicted = self.model(frames, times, actions)
        loss = velocity_loss(predicted, clean, times)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.loss += loss.detach()

    def capture(self, batch: tuple[Tensor, ...]) -> None:
        """Record `update` as a CUDA graph: launching its thousand kernels one by one takes longer than they run."""
        self.static = tuple(tensor.clone() for tensor in batch)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.update(*self.static)
        except RuntimeError as error:
            self.say(f"no CUDA graph: {error}")
            return
        self.graph = graph

    def step(self, batches: Batches, step: int, total: int) -> None:
        """One update of weights and average."""
        batch = batches.next()
        rate = learning_rate(step, total, self.config)
        for group in self.optimizer.param_groups:
            if self.cuda:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.graph is not None:
            for target, tensor in zip(self.static, batch, strict=True):
                target.copy_(tensor)
            self.graph.replay()
        elif self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.update(*batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            if step == WARM_STEPS - 1:
                self.capture(batch)
        else:
            self.update(*batch)
        decay = min(self.config.ema, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.parameters, 1 - decay)

    def run(self, batches: Batches, held: tuple[np.ndarray, np.ndarray]) -> int:
        """Train to the end (or SIGTERM); returns the number of steps made."""
        config = self.config
        total = config.steps or 10**9
        saved = recorded_at = self.elapsed()
        first = WARM_STEPS + 5 if config.seconds else 0  # steps that compile and capture
        timed, start, recorded, step = 0.0, 0.0, 0, 0
        while step < total and not self.stopped:
            self.step(batches, step, total)
            step += 1
            if step == 1 or step == first:
                self.synchronize()
                start = self.elapsed()
                self.say(f"step {step} after {start:.1f} s")
            if config.seconds and step == first + config.timed_steps:
                self.synchronize()
                timed = (self.elapsed() - start) / config.timed_steps
                left = config.seconds - self.elapsed()
                total = step + max(1, int(left / timed * 0.985))  # the rest is for evaluations and checkpoints
                self.say(f"{1000 * timed:.1f} ms a step: {total} steps in all")
            if step % config.eval_every == 0 or step == total:
                mean = float(self.loss) / (step - recorded)
                pace = (self.elapsed() - recorded_at) / (step - recorded)
                self.loss.zero_()
                recorded = step
                rate = learning_rate(step - 1, total, config)
                self.record(step, {"loss": mean, "learning_rate": rate, "ms_per_step": 1000 * pace}, held)
                recorded_at = self.elapsed()
            if self.elapsed() - saved > config.save_every_s and step > first:
                self.save({"steps": step, "finished": False})
                saved = self.elapsed()
        return step

    def record(self, step: int, values: dict[str, float], held: tuple[np.ndarray, np.ndarray]) -> None:
        """Append a line to `log.jsonl`: loss and held-out PSNR of the averaged weights."""
        frames, actions = held[0][:32], held[1][:32]
        steps, shift = self.config.sampler_steps, self.config.sampler_shift
        measured = evaluate.first_clip_psnr(self.average, frames, actions, steps=steps, shift=shift, device=self.device)
        line = {"step": step, "seconds": self.elapsed(), **values, "psnr_db": measured["psnr_db"]}
        self.records.append(line)
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        self.say(", ".join(f"{name} {value:.4g}" for name, value in line.items()))

    def save(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Checkpoint of the averaged weights with everything known so far."""
        training = {key: value for key, value in asdict(self.config).items() if key not in ("model", "init")}
        card = {
            "seconds": round(self.elapsed(), 1),
            "sampler": {"steps": self.config.sampler_steps, "shift": self.config.sampler_shift},
            **facts,
            "training": training,
            "log": self.records,
        }
        if self.config.init:
            card["first_stage"] = read_card(Path(self.config.init))
        return save_checkpoint(self.out, self.average, card)


def train(config: TrainConfig, out: Path, say: Say = lambda text: None, started: float | None = None) -> dict[str, Any]:
    """Play the game, train, save to `out` (checkpoint, scenes, log, contact sheet), evaluate. Returns the card.

    `say` receives progress lines; `started` is the `time.monotonic()` from which `seconds` count (now, if not given).
    """
    begun = time.monotonic() if started is None else started
    out.mkdir(parents=True, exist_ok=True)
    clip = config.model.clip_frames
    length = config.model.context_frames + clip * config.clips

    def progress(done: int, of: int) -> None:
        if done % max(1, of // 10) == 0:
            say(f"{done} of {of} episodes, {time.monotonic() - begun:.1f} s")

    held_out = range(HELD_OUT, HELD_OUT + config.eval_scenes)
    held = data.generate(held_out, length, config.seed, config.workers)
    save_scenes(out / "scenes", *(part[: config.scenes] for part in held), seed=config.seed, first=HELD_OUT)
    frames, actions = data.generate(config.episodes, config.frames_per_episode, config.seed, config.workers, progress)
    facts: dict[str, Any] = {
        "game": data.GAME,
        "map": data.MAP,
        "frames": int(np.prod(frames.shape[:2])),
        "data_sha256": data.sha256(frames, actions),
        "held_out_episodes": [HELD_OUT, HELD_OUT + config.eval_scenes],
        "held_out_sha256": data.sha256(*held),
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if config.device.startswith("cuda") else "CPU",
    }
    say(f"data {facts['data_sha256'][:16]}, {facts['frames']} frames, {time.monotonic() - begun:.1f} s")
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(config, out, say, begun)

    def stop(signum: int, frame: FrameType | None) -> None:
        trainer.stopped = True

    before = signal.signal(signal.SIGTERM, stop)
    try:
        steps = trainer.run(Batches(frames, actions, config), held)
    finally:
        signal.signal(signal.SIGTERM, before)
    facts |= {"steps": steps, "finished": not trainer.stopped}
    card = trainer.save(facts)
    say(f"saved after {steps} steps, {trainer.elapsed():.1f} s")
    if not trainer.stopped:
        torch.set_float32_matmul_precision("highest")
        try:
            facts |= evaluate.final(trainer.average, held, out, config.sampler_steps, config.sampler_shift, say)
        except Exception:  # the checkpoint is safe; say what went wrong and keep it
            say(traceback.format_exc())
        card = trainer.save(facts)
    return card


def parse() -> tuple[TrainConfig, Path]:
    """Command line -> configuration and output folder. `--model.dim 64` and so on change the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for prefix, kind in (("", TrainConfig), ("model.", TinyConfig)):
        for part in fields(kind):
            if part.name == "model":
                continue
            option = f"--{prefix}{part.name.replace('_', '-')}"
            if isinstance(part.default, bool):
                parser.add_argument(option, action=argparse.BooleanOptionalAction, default=part.default)
            else:
                parser.add_argument(option, type=type(part.default), default=part.default)
    given = {name.replace("-", "_"): value for name, value in vars(parser.parse_args()).items()}
    out = given.pop("out")
    sizes = {name.removeprefix("model."): given.pop(name) for name in list(given) if name.startswith("model.")}
    return replace(TrainConfig(**given), model=TinyConfig(**sizes)), out


def main() -> None:
    config, out = parse()
    train(config, out, say=lambda text: print(text, flush=True), started=STARTED)  # noqa: T201


if __name__ == "__main__":
    main()
