"""A user's script: Matrix-Game-3.0's own network at full size, with random weights, in a loop like its generate.

It knows nothing of this project. It needs a checkout of the model's code (the folder that holds `wan/`), and prints one
line per forward pass. Weights are drawn on the device from the seed; FlashAttention and diffusers are replaced by SDPA
and two empty classes where they are missing.

    python matrix_game_full_size.py --repo Matrix-Game-3 --size 704x1280 --clips 2 --steps 3 --result out.json
    python matrix_game_full_size.py --repo Matrix-Game-3 --small          # toy size, on a CPU
    torchrun --nproc_per_node 2 matrix_game_full_size.py --repo Matrix-Game-3 --sequence-parallel --fsdp
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ACTION_BLOCKS = 15
SIZES = {"704x1280": (44, 80), "352x640": (22, 40), "small": (4, 6)}  # latent rows and columns
FIRST_CLIP, NEXT_CLIP, PAST_FRAMES, MEMORY = 57, 56, 16, 5


@dataclass(frozen=True)
class Shape:
    dim: int
    ffn: int
    heads: int
    blocks: int
    action_dim: int
    action_heads: int
    text_len: int
    text_dim: int


FULL = Shape(3072, 14336, 24, 30, 1024, 16, 512, 4096)
SMALL = Shape(96, 192, 4, 3, 64, 4, 16, 32)


def load_upstream(repo: Path):
    """Import `wan.modules.model` without the package's __init__, which pulls in the text encoder and the VAE."""
    for name in ("wan", "wan.modules", "wan.distributed"):
        package = types.ModuleType(name)
        package.__path__ = [str(repo / name.replace(".", "/"))]
        sys.modules[name] = package
    try:
        importlib.import_module("diffusers.models.modeling_utils")
    except ImportError:
        parts = [types.ModuleType(n) for n in ("diffusers", "diffusers.models")]
        for package in parts:
            package.__path__ = []
        config = types.ModuleType("diffusers.configuration_utils")
        config.ConfigMixin, config.register_to_config = type("ConfigMixin", (), {}), lambda function: function
        modeling = types.ModuleType("diffusers.models.modeling_utils")
        modeling.ModelMixin = type("ModelMixin", (nn.Module,), {})
        sys.modules |= {module.__name__: module for module in (*parts, config, modeling)}
    upstream = importlib.import_module("wan.modules.model")
    attention = importlib.import_module("wan.modules.attention")
    upstream.flash_attention = attention.attention = sdpa
    return upstream


def sdpa(q: Tensor, k: Tensor, v: Tensor, k_lens: Tensor | None = None, **_) -> Tensor:
    """What flash_attention computes, for a batch of one: bf16 attention over the valid keys. [B, L, heads, C]."""
    if k_lens is not None:
        k, v = k[:, : int(k_lens[0])], v[:, : int(k_lens[0])]
    q, k, v, out = *(t.transpose(1, 2).to(torch.bfloat16) for t in (q, k, v)), q.dtype
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).to(out)


def build(upstream, shape: Shape, device: str, seed: int) -> nn.Module:
    """WanModel in bf16 on `device`, every parameter drawn there from the seed (upstream's init leaves a zero head)."""
    head = shape.action_dim // shape.action_heads
    rope = [head // 8, head // 16 * 7, head // 16 * 7] if head % 16 == 0 and head > 16 else [4, 6, 6]
    action = {
        "blocks": list(range(min(ACTION_BLOCKS, shape.blocks - 1))),
        "img_hidden_size": shape.dim,
        "keyboard_hidden_dim": shape.action_dim,
        "mouse_hidden_dim": shape.action_dim,
        "heads_num": shape.action_heads,
        "rope_dim_list": rope,
        "mouse_qk_dim_list": rope,
    }
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = upstream.WanModel(
            model_type="ti2v",
            in_dim=48,
            out_dim=48,
            dim=shape.dim,
            ffn_dim=shape.ffn,
            num_heads=shape.heads,
            num_layers=shape.blocks,
            text_len=shape.text_len,
            text_dim=shape.text_dim,
            action_config=action,
            use_memory=True,
        )
    torch.set_default_dtype(torch.float32)
    model.to(torch.bfloat16).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            weight.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.02, generator=generator)
        else:
            weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
    return model


def make_parallel(model: nn.Module, fsdp: bool) -> nn.Module:
    """Upstream's sequence parallelism, and FSDP around blocks, switched on as its pipeline does."""
    parallel = importlib.import_module("wan.distributed.sequence_parallel")
    for block in model.blocks:
        block.self_attn.forward = types.MethodType(parallel.sp_attn_forward, block.self_attn)
    model.forward = types.MethodType(parallel.sp_dit_forward, model)
    if not fsdp:
        return model
    shard = importlib.import_module("wan.distributed.fsdp").shard_model
    # Every rank drew the same weights, so there is nothing to broadcast (and a CPU could not).
    return shard(model, device_id=torch.cuda.current_device(), sync_module_states=False)


class Rollout:
    """The generate loop: conditions of each clip, and what the model is called with."""

    def __init__(self, shape: Shape, size: str, device: str, seed: int):
        self.shape, self.device = shape, device
        self.rows, self.columns = SIZES[size]
        self.tokens = self.rows * self.columns // 4  # of a latent frame
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        self.context = [self.randn(shape.text_len // 4, shape.text_dim)]
        self.history = None

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def clip(self, index: int) -> dict:
        """Arguments of the model for one clip, without `x` and `t`."""
        first = index == 0
        frames = FIRST_CLIP if first else NEXT_CLIP
        end = FIRST_CLIP + index * (NEXT_CLIP - PAST_FRAMES)
        start = 0 if first else end - NEXT_CLIP
        latents = ((start - 1) // 4 + 1, (end - 1) // 4 + 1)
        self.frames = latents[1] - latents[0]
        memory = 0 if first else MEMORY
        return {
            "context": self.context,
            "seq_len": self.tokens * ((FIRST_CLIP - 1) // 4 + 1 + MEMORY),
            "mouse_cond": self.randn(1, frames, 2),
            "keyboard_cond": self.randn(1, frames, 6),
            "plucker_emb": self.randn(1, 6 * 256, memory + self.frames, self.rows, self.columns),
            "x_memory": None if first else self.history[:, :, [0, 2, 5, 7, 9]],
            "timestep_memory": None if first else torch.zeros(1, MEMORY * self.tokens, device=self.device),
            "mouse_cond_memory": None if first else torch.ones(1, MEMORY, 2, device=self.device, dtype=torch.bfloat16),
            "keyboard_cond_memory": None
            if first
            else -torch.ones(1, MEMORY, 6, device=self.device, dtype=torch.bfloat16),
            "memory_latent_idx": None if first else [0, 2, 5, 7, 9],
            "predict_latent_idx": latents,
        }

    def start(self, index: int) -> Tensor:
        """Noise with the clip's first latents given. bf16 [1, 48, frames, rows, columns]."""
        given = self.randn(1, 48, 1, self.rows, self.columns) if index == 0 else self.history[:, :, -4:]
        self.given = given
        noise = self.randn(1, 48, self.frames - given.shape[2], self.rows, self.columns)
        return torch.cat([given, noise], dim=2)

    def time(self, t: float) -> Tensor:
        steps = torch.full((self.frames, self.tokens), t, device=self.device)
        steps[: self.given.shape[2]] = 0
        return steps.flatten().unsqueeze(0)


@torch.no_grad()
def generate(model: nn.Module, rollout: Rollout, clips: int, steps: int, on_call=None) -> Tensor:
    """Clip after clip, each fed the latents of the one before -> latents of the last clip."""
    for clip in range(clips):
        arguments = rollout.clip(clip)
        latents = rollout.start(clip)
        for step in range(steps):
            now, after = 1000 * (1 - step / steps), 1000 * (1 - (step + 1) / steps)
            started = time.perf_counter()
            velocity = model(x=latents, t=rollout.time(now), **arguments)
            latents = (latents.float() + velocity.float() * ((after - now) / 1000)).to(torch.bfloat16)
            latents = torch.cat([rollout.given, latents[:, :, rollout.given.shape[2] :]], dim=2)
            if on_call is not None:
                on_call(clip, step, started)
        rollout.history = latents
    return latents


def digest(latents: Tensor) -> str:
    return hashlib.sha256(latents.contiguous().view(torch.int16).cpu().numpy().tobytes()).hexdigest()


def cast_to_weight(linear):
    """F.linear for a CPU, which has no autocast to float32: the input is cast to the weight's type and back."""
    return lambda x, w, bias=None: linear(x.to(w.dtype), w, bias).to(x.dtype)


def set_up(small: bool, sequence_parallel: bool) -> str:
    """The device of this process, ready; the process group, if one is needed."""
    device = "cpu" if small else f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if small:
        F.linear, torch.cuda.current_device = cast_to_weight(F.linear), lambda: torch.device("cpu")
    else:
        torch.cuda.set_device(device)
    if sequence_parallel:
        dist.init_process_group("gloo" if small else "nccl")
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True)
    parser.add_argument("--size", choices=list(SIZES), default="704x1280")
    parser.add_argument("--clips", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="toy size on a CPU")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--fsdp", action="store_true", help="with --sequence-parallel")
    parser.add_argument("--raise-on-rank", type=int, default=-1, help="raise after the first call on this rank")
    parser.add_argument("--result", type=Path, help="write times and the hash of the last latents here")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    device = set_up(args.small, args.sequence_parallel)
    shape, size = (SMALL, "small") if args.small else (FULL, args.size)
    model = build(load_upstream(args.repo), shape, device, args.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"rank {rank}: {parameters / 1e9:.2f}B parameters on {device}, {size}", flush=True)
    if args.sequence_parallel:
        model = make_parallel(model, args.fsdp)

    seconds = []

    def on_call(clip: int, step: int, started: float) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        print(f"rank {rank}: clip {clip} step {step}: {seconds[-1]:.2f} s", flush=True)
        if rank == args.raise_on_rank:
            raise RuntimeError(f"rank {rank} was told to fail")

    latents = generate(model, Rollout(shape, size, device, args.seed), args.clips, args.steps, on_call)
    result = {"seconds": seconds, "sha256": digest(latents), "mean": latents.float().mean().item()}
    print(json.dumps(result), flush=True)
    if args.result and rank == 0:
        args.result.write_text(json.dumps(result) + "\n")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.exit()  # as upstream's pipeline ends


if __name__ == "__main__":
    main()
