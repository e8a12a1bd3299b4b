"""The store sink: activations and weights on disk, to be replayed later with other kernels, references or factors.

A store is a folder of safetensors files with a manifest that names each one's SHA-256:

    manifest.json      world, calls, layers, sampling; rewritten after every call, `complete` set at the end
    layers/0.safetensors    weight, bias and norm weight of one layer
    calls/0.safetensors     the distinct inputs of one forward pass (q, k and v share one), optionally the outputs

Tensors keep the dtype that the model had. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from analysis.capture.hooks import Event
from analysis.capture.online import OnlineSink
from analysis.measure.replay import Layer, tensor_version
from analysis.results.schema import replacing
from analysis.sites import Site

MANIFEST = "manifest.json"
STORE_VERSION = 1


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class StoreSink:
    """Writes every call's inputs to `folder`.

    Args:
        folder: created when missing; must not hold a store.
        info: provenance for the manifest (world, scenes, seed, ...).
        rows: keep this many rows of each input, drawn without replacement; None keeps all.
        seed: of the row sampling; the draw depends on (seed, call, layer) only.
        outputs: also keep what each layer returned, for the reference `as_run`.
    """

    def __init__(
        self, folder: str | Path, info: dict[str, Any], rows: int | None = None, seed: int = 0, outputs: bool = False
    ) -> None:  # fmt: skip
        if rows is not None and rows < 1:
            raise ValueError(f"rows per input must be at least 1, got {rows}; leave it out to keep all")
        self.folder, self.rows, self.seed, self.outputs = Path(folder), rows, seed, outputs
        sampling = None if rows is None else {"rows": rows, "seed": seed}
        self.manifest: dict[str, Any] = {
            "store_version": STORE_VERSION,
            "complete": False,
            "sampling": sampling,
            "info": info,
            "layers": {},
            "calls": [],
        }
        self.label: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._inputs: dict[str, str] = {}
        self._last: tuple[Tensor, int | None, str, Tensor | None] | None = None

    def begin_call(self) -> None:
        self._reset()

    def layer(self, event: Event) -> None:
        name = event.layer.site.name
        if name not in self.manifest["layers"]:
            self._write_layer(event.layer)
        version = tensor_version(event.x)
        if self._last is not None and self._last[0] is event.x and version is not None and self._last[1] == version:
            _, _, key, picked = self._last
        else:
            key, picked = f"x{len(set(self._inputs.values()))}", self._pick(event)
            self._keep(key, event.x, picked)
            if event.groups is not None:
                self._keep(f"{key}.groups", event.groups.reshape(-1, 1), picked)
            self._last = (event.x, version, key, picked)
        self._inputs[name] = key
        if self.outputs:
            self._keep(f"{name}.output", event.output, picked)

    def _keep(self, key: str, tensor: Tensor, picked: Tensor | None) -> None:
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        self._tensors[key] = (
            (flat if picked is None else flat[picked.to(flat.device)]).to("cpu", copy=True).contiguous()
        )

    def _pick(self, event: Event) -> Tensor | None:
        rows = event.x.numel() // event.x.shape[-1]
        if self.rows is None or rows <= self.rows:
            return None
        key = f"{self.seed}/{len(self.manifest['calls'])}/{event.layer.site.name}"
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
        return torch.from_numpy(np.sort(rng.choice(rows, self.rows, replace=False)))

    def _write_layer(self, layer: Layer) -> None:
        site = layer.site
        tensors = {"weight": layer.weight}
        if layer.bias is not None:
            tensors["bias"] = layer.bias
        if layer.norm is not None:
            tensors["norm"] = layer.norm[0].detach()
        file = f"layers/{len(self.manifest['layers'])}.safetensors"
        entry = {"block": site.block, "attention": site.attention, "projection": site.projection, "norm": site.norm}
        entry |= {"eps": None if layer.norm is None else layer.norm[1], "file": file}
        self.manifest["layers"][site.name] = entry | {"sha256": self._write(file, tensors)}

    def _write(self, file: str, tensors: dict[str, Tensor]) -> str:
        with replacing(self.folder / file) as temporary:
            save_file({k: v.to("cpu", copy=True).contiguous() for k, v in tensors.items()}, temporary)
            return file_sha256(temporary)

    def end_call(self) -> None:
        if self._inputs:
            index = len(self.manifest["calls"])
            file = f"calls/{index}.safetensors"
            sha256 = self._write(file, self._tensors)
            entry = {"call": index} | self.label | {"file": file, "sha256": sha256, "inputs": self._inputs}
            self.manifest["calls"].append(entry)
            self._write_manifest()
        self._reset()

    def _write_manifest(self) -> None:
        with replacing(self.folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps(self.manifest, indent=1) + "\n", encoding="utf-8")

    def close(self, complete: bool) -> None:
        """Write the manifest a last time, saying whether the rollout ran to its end."""
        self.manifest["complete"] = complete
        self._write_manifest()


class Store:
    """A store on disk, read lazily.

    Raises:
        FileNotFoundError: no manifest, or a file that it names is missing.
        ValueError: another store version, or (on reading) a file whose SHA-256 differs.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; make a store with `shrinkage capture --out {folder}`")
        try:
            self.manifest = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if self.manifest.get("store_version") != STORE_VERSION:
            raise ValueError(f"{path}: store version {self.manifest.get('store_version')}, expected {STORE_VERSION}")
        if not self.manifest["calls"]:
            raise ValueError(f"{path}: no finished call; capture again")
        self.info: dict[str, Any] = self.manifest["info"]
        self._verified: set[str] = set()

    def __len__(self) -> int:
        return len(self.manifest["calls"])

    @property
    def layers(self) -> list[str]:
        return list(self.manifest["layers"])

    def _read(self, entry: dict[str, Any], *keys: str) -> dict[str, Tensor]:
        path = self.folder / entry["file"]
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; the store's manifest names it. Capture again or restore it.")
        if entry["file"] not in self._verified:
            found = file_sha256(path)
            if found != entry["sha256"]:
                raise ValueError(
                    f"{path}: SHA-256 {found[:12]}... is not the manifest's {entry['sha256'][:12]}...; "
                    "the file was truncated or altered. Capture again or restore it."
                )
            self._verified.add(entry["file"])
        try:
            with safe_open(path, framework="pt") as file:
                return {k: file.get_tensor(k) for k in file.keys() if not keys or k in keys}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path}: not a readable safetensors file: {error}") from None

    def layer(self, name: str) -> Layer:
        """One layer's tensors, read from disk."""
        entry = self.manifest["layers"][name]
        tensors = self._read(entry)
        site = Site(name, entry["block"], entry["attention"], entry["projection"], entry["norm"])
        norm = (tensors["norm"], float(entry["eps"])) if "norm" in tensors else None
        return Layer(site, tensors["weight"], tensors.get("bias"), norm)

    def shared_inputs(self) -> list[list[str]]:
        """Layers in firing order, grouped where they read the same tensor: [[q, k, v], [o], ...]."""
        inputs: dict[str, str] = self.manifest["calls"][0]["inputs"]
        known = [[name for name, _ in group] for _, group in groupby(inputs.items(), key=lambda pair: pair[1])]
        return known + [[name] for name in self.layers if name not in inputs]

    def events(
        self, names: list[str], device: torch.device | str = "cpu"
    ) -> Iterator[tuple[dict[str, Any], list[Event]]]:
        """(call label, events of these layers) call by call; holds these layers' weights and one input at a time."""
        layers = {name: _to(self.layer(name), device) for name in names}
        for entry in self.manifest["calls"]:
            label = {k: entry.get(k) for k in ("call", "scene", "clip", "step")}
            loaded: dict[str, Tensor] = {}
            events = []
            for name in names:
                if name not in entry["inputs"]:
                    continue
                key = entry["inputs"][name]
                if key not in loaded:
                    found = self._read(entry, key, f"{key}.groups")
                    loaded |= {k: v.to(device) for k, v in found.items()}
                output = self._read(entry, f"{name}.output").get(f"{name}.output", torch.empty(0))
                groups = loaded.get(f"{key}.groups")
                events.append(Event(layers[name], loaded[key], output.to(device), groups))
            yield label, events


def _to(layer: Layer, device: torch.device | str) -> Layer:
    norm = None if layer.norm is None else (layer.norm[0].to(device), layer.norm[1])
    return Layer(layer.site, layer.weight.to(device), None if layer.bias is None else layer.bias.to(device), norm)


def replay_store(store: Store, sink: OnlineSink, device: torch.device | str = "cpu") -> Iterator[str]:
    """Feed a store to an online sink, group by group; yields each layer's name when it is done."""
    for names in store.shared_inputs():
        for label, events in store.events(names, device):
            sink.label = label
            sink.begin_call()
            for event in events:
                sink.layer(event)
            sink.end_call()
        yield from names
