"""Find the measured layers of whatever model runs, by PyTorch's global module hooks, and hand their calls to a sink.

    watcher = Watcher(preset("wan"), OnlineSink(...), report=print)
    watcher.install()
    ...                      # any code; models may be built late, twice, wrapped, altered or deleted
    watcher.remove()

The outermost module whose tree holds sites is a *root*; one forward pass of it is a call. A root is searched once, when
it first runs, and again when a module that it did not have then runs inside it. Modules get no attribute and (but for
the blocks whose arguments tell padding from tokens) no hook of their own, so that they copy, pickle and compile as
before. Under `torch.compile` the hooks vanish while tracing: compiled layers are not seen, nor do their outputs change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from analysis.capture.hooks import Event, layer_of, linear_input
from analysis.capture.modules import alive, is_linear, is_quantized, rms_norm_of
from analysis.capture.session import LabelledSink
from analysis.sites import Site, SitePattern, clean_name, parse_site
from analysis.worlds.matrix_game import Labels, Padding

RESCANS = 200  # of one root; a model that builds modules in every forward pass must not be searched every time


@dataclass(frozen=True)
class Watched:
    """A measured layer. The norm's weight is read when the layer runs: under FSDP it is whole only then."""

    site: Site
    norm: Callable[[], nn.Module | None]


@dataclass(frozen=True)
class Open:
    """The call that is running."""

    root: int
    thread: int


class Watcher:
    """Global hooks that measure `pattern`'s layers.

    Args:
        pattern: which layers.
        sink: takes the calls.
        report: called with a text when the measurement stops because a hook failed.
        padding: tells valid tokens from padding; None where every row is valid.
        labels: clip and step of a call from the model's arguments; None where calls have no labels.
    """

    def __init__(
        self,
        pattern: SitePattern,
        sink: LabelledSink,
        report: Callable[[str], None],
        padding: Padding | None = None,
        labels: Labels | None = None,
    ) -> None:
        self.pattern, self.sink, self.report, self.padding, self.labels = pattern, sink, report, padding, labels
        self.found: dict[str, Site] = {}
        self.quantized: dict[str, str] = {}  # matched, but its weight is not a floating one: name -> type
        self.linears: list[str] = []  # of roots without a site, for the message when nothing was found
        self.notes: dict[str, int] = {}  # what was not measured and how often
        self.stopped = ""
        self._known: dict[int, weakref.ref[nn.Module]] = {}
        self._roots: dict[int, int] = {}  # id -> rescans
        self._sites: dict[int, Watched] = {}
        self._owners: dict[str, weakref.ref[nn.Module]] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._open: Open | None = None
        self._hooks: list[Any] = []
        self._block_hooks: list[Any] = []
        self._blocks: set[int] = set()

    def install(self) -> None:
        """Start to watch, or go on after `pause`. Does nothing once the measurement stopped."""
        if not self._hooks and not self.stopped:
            self._hooks = [
                module_hooks.register_module_forward_pre_hook(self._before),
                module_hooks.register_module_forward_hook(self._after, with_kwargs=True),
            ]

    def pause(self) -> None:
        """Take the global hooks away: forward passes run as if nobody watched. What was found is kept."""
        for handle in self._hooks:
            handle.remove()
            # PyTorch leaves this mark of a global hook behind, and module calls stay slow because of it.
            getattr(module_hooks, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
        self._hooks, self._open = [], None

    def remove(self) -> None:
        """Take every hook away."""
        self.pause()
        for handle in self._block_hooks:
            handle.remove()
        self._block_hooks = []
        for held in (self._known, self._roots, self._blocks):
            held.clear()

    # -- hooks: nothing may escape from them into the script

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        key = id(module)
        if key in self._known and key not in self._roots:
            return
        try:
            if key not in self._known:
                self._look_at(module)
            if key in self._roots:
                self._begin(key)
        except Exception as error:
            self._stop(error, f"looking at {type(module).__name__}")

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or self._open is None:
            return
        key = id(module)
        watched = self._sites.get(key)
        if watched is None and key not in self._roots:
            return
        try:
            if watched is not None and self._open.thread == threading.get_ident():
                self._measure(watched, module, args, kwargs, output)
            if self._open is not None and self._open == Open(key, threading.get_ident()):
                self._open = None
                if self.labels is not None:
                    self.sink.label = self.labels(module.forward, args, kwargs)
                self.sink.end_call()
        except Exception as error:
            self._stop(error, watched.site.name if watched else "the end of a call")

    def _told(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-hook of the blocks, whose arguments carry lengths."""
        if torch.compiler.is_compiling() or self.padding is None or self._open is None:
            return
        try:
            self.padding.note(module.forward, args, kwargs)
        except Exception as error:
            self._stop(error, f"the arguments of {type(module).__name__}")

    def _stop(self, error: Exception, where: str) -> None:
        """End the measurement and let the script go on. Frees what the hook held before anything else."""
        error.__traceback__ = None
        first = (str(error).splitlines() or [""])[0]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        self.stopped = f"{where}: {kind}{first}"
        self.remove()
        drop = getattr(self.sink, "drop", self.sink.begin_call)
        drop()
        self.report(f"measurement stopped, the script goes on: {self.stopped}")

    # -- calls

    def _begin(self, root: int) -> None:
        if self._open is not None:
            if self._open.thread != threading.get_ident() and alive(self._open.thread):
                self._note("calls in a second thread while one ran")
                return
            if self._open.thread == threading.get_ident() and self._runs(self._open.root):
                return  # a root inside a root belongs to the outer one's call
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._note("calls captured in a CUDA graph")
            self._open = None
            return
        self._open = Open(root, threading.get_ident())
        self.sink.begin_call()
        if self.padding is not None:
            self.padding.begin_call()

    def _runs(self, root: int) -> bool:
        """Whether that module's forward pass is on this thread's stack; one that raised is not."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__ and id(frame.f_locals.get("self")) == root:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _measure(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:  # fmt: skip
        x = linear_input(args, kwargs)
        if type(x) not in (Tensor, nn.Parameter) or x.is_meta:
            self._note(f"inputs of type {type(x).__name__}")
            return
        layer = layer_of(watched.site, module, rms_norm_of(watched.norm(), int(module.out_features)))  # type: ignore[arg-type]
        groups = None if self.padding is None else self.padding.groups(watched.site, x)
        plain = type(module) is nn.Linear and "forward" not in vars(module)
        self.sink.layer(Event(layer, x, output, groups, plain))

    def _note(self, what: str) -> None:
        self.notes[what] = self.notes.get(what, 0) + 1

    # -- finding

    def _look_at(self, module: nn.Module) -> None:
        """A module that was never seen: part of the root that runs, or a root of its own."""
        if self._open is not None and self._open.root in self._roots:
            if not module._parameters and not module._modules:
                self._remember(module)
                return
            root = self._known[self._open.root]()
            if root is not None and self._roots[self._open.root] < RESCANS:
                self._roots[self._open.root] += 1
                self._scan(root)
        if id(module) not in self._known:
            self._scan(module)

    def _remember(self, module: nn.Module) -> None:
        key = id(module)
        if key not in self._known:
            # Bound to the dicts alone: a module may outlive the watcher.
            known, roots, sites, blocks = self._known, self._roots, self._sites, self._blocks

            def forget(_: Any) -> None:
                for held in (known, roots, sites):
                    held.pop(key, None)
                blocks.discard(key)

            known[key] = weakref.ref(module, forget)

    def _scan(self, root: nn.Module) -> None:
        modules: dict[str, nn.Module] = {}
        for path, module in root.named_modules():
            modules[clean_name(path)] = module  # of a wrapper and what it wraps the latter
            self._remember(module)
        matched = [(site, modules[name]) for name in modules if (site := parse_site(name, self.pattern)) is not None]
        for site, module in matched:
            self._add(site, module, modules)
        if any(id(module) in self._sites for _, module in matched):
            self._roots.setdefault(id(root), 0)
            self._listen([site for site, _ in matched], modules)
        elif not matched and len(self.linears) < 6:
            self.linears += [name for name, m in modules.items() if name and is_linear(m)][: 6 - len(self.linears)]

    def _add(self, site: Site, module: nn.Module, modules: dict[str, nn.Module]) -> None:
        if id(module) in self._sites:
            return
        if not is_linear(module):
            if not is_quantized(module):
                raise ValueError(
                    f"{self.pattern.name} ({self.pattern.regex}) matches {site.name!r}, of type "
                    f"{type(module).__name__}, not a linear layer; narrow it to layers with a [out, in] weight"
                )
            self.quantized[site.name] = type(module).__name__
            return
        shape = (int(module.in_features), int(module.out_features))  # type: ignore[arg-type]
        norm = modules.get(site.norm) if site.norm else None
        site = dataclasses.replace(site, name=self._free_name(site.name, module, shape))
        self._owners[site.name], self._shapes[site.name] = weakref.ref(module), shape
        self._sites[id(module)] = Watched(site, weakref.ref(norm) if norm is not None else _no_norm)
        self.found.setdefault(site.name, site)

    def _free_name(self, name: str, module: nn.Module, shape: tuple[int, int]) -> str:
        """The name, with '#2' and so on where another living model's layer has it; a deleted one's is free again."""
        candidate, number = name, 1
        while candidate in self._owners:
            owner = self._owners[candidate]
            if owner() is not None and owner() is not module:
                gc.collect()  # models often sit in cycles: whether one still lives must not depend on luck
            if owner() in (None, module) and self._shapes[candidate] == shape:
                break
            number += 1
            candidate = f"{name}#{number}"
        return candidate

    def _listen(self, sites: list[Site], modules: dict[str, nn.Module]) -> None:
        """Hook the blocks whose arguments tell padding from tokens."""
        for path in {self.padding.block_path(site): None for site in sites} if self.padding is not None else ():
            block = modules.get(path)
            if block is not None and id(block) not in self._blocks:
                self._blocks.add(id(block))
                self._block_hooks.append(block.register_forward_pre_hook(_Told(self, block), with_kwargs=True))


class _Told:
    """A module's own pre-hook. A copy or a pickle of the module keeps a harmless nothing in its place."""

    def __init__(self, watcher: Watcher, module: nn.Module) -> None:
        self.watcher, self.module = watcher, weakref.ref(module)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and self.module() is module:
            self.watcher._told(module, args, kwargs)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, returns None, needs no analysis


def _no_norm() -> None:
    return None
