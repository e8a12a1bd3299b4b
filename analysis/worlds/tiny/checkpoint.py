"""The checkpoint: bfloat16 weights in `model.safetensors` and everything known about them in `card.json`.

save_checkpoint(folder, model, {"steps": 30000})
model, card = load_checkpoint(folder)         # float32 weights that hold bfloat16 values
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from analysis.worlds.tiny.model import TinyConfig, TinyModel
from analysis.worlds.tiny.scenes import check, file_sha256

WEIGHTS = "model.safetensors"
CARD = "card.json"


def save_checkpoint(folder: Path, model: TinyModel, card: dict[str, Any]) -> dict[str, Any]:
    """Write weights, then card, each to a temporary name first: a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    temporary = folder / f".{WEIGHTS}"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    temporary.chmod(0o644)
    temporary.replace(folder / WEIGHTS)
    written = {
        **card,
        "model": asdict(model.config),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "weights_sha256": file_sha256(folder / WEIGHTS),
    }
    write_json(folder / CARD, written)
    return written


def write_json(path: Path, content: Any) -> None:
    """Write JSON through a temporary file."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def fill(model: TinyModel, tensors: dict[str, Tensor]) -> None:
    """Copy weights into a model. ValueError names a tensor that is missing, unknown or of another shape."""
    expected = model.state_dict()
    for name in sorted(expected.keys() ^ tensors.keys()):
        problem = "lacks" if name in expected else "has an unknown"
        raise ValueError(f"the checkpoint {problem} tensor {name!r}; it was trained for another model")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            found, wanted = list(tensor.shape), list(expected[name].shape)
            raise ValueError(f"tensor {name!r} has shape {found}, expected {wanted}; check `model` in {CARD}")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def load_checkpoint(folder: Path) -> tuple[TinyModel, dict[str, Any]]:
    """Model (eval mode, frozen, float32, CPU) and card. Raises FileNotFoundError or ValueError as `check`, `fill`."""
    card = read_card(folder)
    check(folder / WEIGHTS, card["weights_sha256"])
    model = TinyModel(TinyConfig(**card["model"]))
    fill(model, load_file(folder / WEIGHTS))
    return model.eval().requires_grad_(False), card


def read_card(folder: Path) -> dict[str, Any]:
    """`card.json` of a checkpoint's folder; FileNotFoundError when it is missing."""
    path = folder / CARD
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; restore it from the repository")
    content: dict[str, Any] = json.loads(path.read_text())
    return content
