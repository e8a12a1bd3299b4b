"""Matrix-Game-3.0: all that the toolkit must know about upstream's code, in one file. Facts in shapes and names only.

`Padding` tells valid tokens from the zeros that the model appends, from the arguments of its blocks; `Labels` tells
clip and step; `KernelSwap` replaces the quantiser of upstream's int8 path; `check_repo` and `check_checkpoint` look
before a long run; `commands` builds the runs of `shrinkage matrix-game`. Wan 2.1 and 2.2 work too: their blocks have
the same arguments.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.sites import Site

if TYPE_CHECKING:
    from torch import Tensor

PRESETS = ("matrix-game-3", "wan")
LENGTHS = "seq_lens"  # argument of a block's forward: valid tokens of each sequence [B]
GRID = "grid_sizes"  # its fallback: frames, rows and columns of patches [B, 3]
PREDICTED = "predict_latent_idx"  # argument of the model's forward: first and last latent frame of the clip
MODEL_MODULE = "wan.modules.model"
KERNELS = ("shipped", "fixed")
VALID, PADDED = 1, 2


class Padding:
    """Groups (1 valid, 2 padding) for the rows of a layer's input, from what the model's blocks are called with.

    Self-attention's q, k, v, o and cross-attention's q, o see the video's tokens [B, L, C]; cross-attention's k and v
    see text tokens, all valid. Under sequence parallelism a rank holds a part of the sequence, fewer tokens than are
    valid: rank r has those from r * L on. A call's groups are built once per shape: q, k and v get the same tensor.
    """

    def __init__(self, required: bool = True) -> None:
        """`required`: valid tokens were asked for, so that a model without lengths is an error."""
        self.required = required
        self._split, self._text = False, set[str]()
        self.begin_call()

    @property
    def replicated(self) -> set[str]:
        """Layers whose rows every rank holds alike: those on text tokens, once a rank held a part of a sequence."""
        return self._text if self._split else set()

    def begin_call(self) -> None:
        self._lengths: Any = None
        self._built: dict[tuple[int, int, Any], Tensor] = {}

    @staticmethod
    def block_path(site: Site) -> str:
        """The block that a site is in: 'blocks.3.self_attn.q' -> 'blocks.3'."""
        return site.name.partition("#")[0].rsplit(".", 2)[0]

    def note(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what a block's forward is called with."""
        lengths = _argument(forward, args, kwargs, LENGTHS)
        if lengths is None:
            grid = _argument(forward, args, kwargs, GRID)
            lengths = None if grid is None else grid.prod(dim=1)
        if lengths is not None and lengths is not self._lengths:
            self._lengths, self._built = lengths, {}

    def groups(self, site: Site, x: Tensor) -> Tensor | None:
        """uint8 [B * L] for a layer's input x [B, L, C]; None where every row is valid.

        Raises ValueError when the model gave no lengths, or x is not [B, L, C] with their B.
        """
        if site.attention == "cross" and site.projection in ("k", "v"):
            self._text.add(site.name)
            return None
        if self._lengths is None:
            if not self.required:
                return None
            raise ValueError(
                f"valid tokens asked for, but the model gives no lengths: looked for {LENGTHS!r} and {GRID!r} among "
                f"the arguments of {self.block_path(site)}; use --tokens all"
            )
        if x.ndim != 3 or len(self._lengths) != x.shape[0]:
            raise ValueError(
                f"{site.name}: input {list(x.shape)} is not [batch, tokens, channels] with {len(self._lengths)} lengths"
            )
        key = (int(x.shape[0]), int(x.shape[1]), x.device)
        if key not in self._built:
            self._built[key] = self._build(*key)
        return self._built[key]

    def _build(self, batch: int, tokens: int, device: Any) -> Tensor:
        import torch

        lengths = torch.as_tensor(self._lengths).reshape(batch, 1)
        first = 0
        if _ranks() > 1 and tokens < int(lengths.max()):
            self._split, first = True, torch.distributed.get_rank() * tokens
        position = first + torch.arange(tokens, device=device)
        valid = position < lengths.to(device=device, non_blocking=True)
        return torch.where(valid, VALID, PADDED).to(torch.uint8).reshape(-1)


class Labels:
    """Clip and step of each call, from the latent frames that the model is asked to predict; empty where not told."""

    def __init__(self) -> None:
        self._asked: Any = None
        self._clip, self._step = -1, 0

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        """The label of a call that ended, given the model's arguments."""
        asked = _argument(forward, args, kwargs, PREDICTED)
        if asked is None:
            return {}
        asked = tuple(int(i) for i in asked)
        self._clip, self._step = (self._clip, self._step + 1) if asked == self._asked else (self._clip + 1, 0)
        self._asked = asked
        return {"clip": self._clip, "step": self._step}


def _ranks() -> int:
    from torch import distributed

    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


def _argument(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a forward by name, however it was passed; None where there is none."""
    if name in kwargs:
        return kwargs[name]
    try:
        return inspect.signature(forward).bind_partial(*args, **kwargs).arguments.get(name)
    except (TypeError, ValueError):
        return None


class KernelSwap:
    """The quantiser of upstream's int8 path, replaced by this project's kernel of one rounding; counts its use.

    Upstream loads its kernel file when the first int8 layer runs and looks the quantiser up by name each time.
    """

    def __init__(self, kernel: str) -> None:
        """Raises ValueError for a kernel that is neither 'shipped' nor 'fixed'."""
        if kernel not in KERNELS:
            raise ValueError(f"unknown kernel {kernel!r}; known: {', '.join(KERNELS)}")
        self.kernel, self.calls = kernel, 0

    def install(self) -> None:
        """Replace the loader of upstream's module, which must be imported."""
        upstream = sys.modules[MODEL_MODULE]
        load: Callable[[], Any] | None = getattr(upstream, "_get_triton_kernels", None)
        if load is None:
            raise ValueError(f"{MODEL_MODULE} has no _get_triton_kernels: this revision has no int8 path to replace")

        def load_and_replace() -> Any:
            kernels = load()
            if kernels is not None:
                kernels.int8_quantize_triton = self.quantize
            return kernels

        upstream._get_triton_kernels = load_and_replace  # type: ignore[attr-defined]

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Upstream's signature: x [..., K] -> codes int8 [..., K], scales fp32 [...]."""
        from analysis.kernels import registry

        self.calls += 1
        quantizer = registry.quantizer(self.kernel, x.device, "auto")
        codes, scales = quantizer(x.reshape(-1, x.shape[-1]))
        return codes.view(x.shape), scales.view(x.shape[:-1])


def check_repo(repo: Path) -> None:
    """Raise ValueError unless `repo` is Matrix-Game-3's folder, the one with generate.py, naming what lacks."""
    needed = ("generate.py", "wan/modules/model.py", "wan/triton_kernels.py", "pipeline/inference_pipeline.py")
    missing = [name for name in needed if not (repo / name).is_file()]
    if missing:
        hint = ""
        if (repo / "Matrix-Game-3" / "generate.py").is_file():
            hint = f"; did you mean {repo / 'Matrix-Game-3'}?"
        raise ValueError(f"{repo} is not a Matrix-Game-3 folder: no {', '.join(missing)}{hint}")


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """The model's config.json of a Matrix-Game-3 checkpoint folder.

    Raises ValueError naming what lacks, or a config that is not Matrix-Game-3's.
    """
    model = folder / "base_distilled_model"
    config_file = model / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{folder}: no base_distilled_model/config.json; download the checkpoint as upstream says")
    try:
        config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{config_file} is not JSON: {error}") from None
    if missing := [key for key in ("dim", "num_heads", "num_layers") if not isinstance(config.get(key), int)]:
        raise ValueError(f"{config_file}: no {', '.join(missing)}; is this a WanModel's config?")
    if not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
        raise ValueError(f"{model}: no weights (*.safetensors); the download is not complete")
    lacking = [n for n in ("models_t5_umt5-xxl-enc-bf16.pth", "google/umt5-xxl") if not (folder / n).exists()]
    if lacking:
        raise ValueError(f"{folder}: no {', '.join(lacking)}; the text encoder is part of the checkpoint")
    return config


@dataclass(frozen=True)
class Job:
    """One command of `shrinkage matrix-game`: its name, what it is for, and its words (run in the repo's folder)."""

    name: str
    purpose: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands(
    out: Path,
    generate_args: Sequence[str],
    *,
    seed: int,
    tokens: str = "both",
    processes: int = 1,
    measure: bool = True,
    closed_loop: bool = True,
    overwrite: bool = False,
) -> list[Job]:
    """The runs of one user: measure in bf16, then roll out in bf16, int8 shipped and int8 fixed with the same seed.

    `generate_args` are generate.py's own, without seed, output and int8 switches. `out` must be absolute, since the
    commands run in the repo's folder. The measured run is the bf16 rollout: it changes no output.
    """
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    base = [*generate_args, "--seed", str(seed), "--output_dir", str(out / "videos")]
    attach = ["-m", "analysis.cli", "attach", "--preset", "matrix-game-3", *(["--overwrite"] if overwrite else [])]

    def attached(name: str, purpose: str, options: Sequence[str], extra: Sequence[str]) -> Job:
        own = [*attach, "--out", str(out / name), *options, "--"]
        return Job(name, purpose, (*launch, *own, "generate.py", *base, "--save_name", name, *extra))

    jobs = []
    if measure:
        jobs.append(attached("bf16", "bf16 rollout, both kernels measured on every layer", ["--tokens", tokens], []))
    elif closed_loop:
        jobs.append(Job("bf16", "bf16 rollout", (*launch, "generate.py", *base, "--save_name", "bf16")))
    if closed_loop:
        for kernel in KERNELS:
            purpose = f"int8 rollout with the {kernel} quantiser"
            jobs.append(attached(f"int8-{kernel}", purpose, ["--kernel", kernel], ["--use_int8"]))
    return jobs
