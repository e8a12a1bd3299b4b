"""What an attached run measures, checked as far as it can be before the script runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.capture import ranks
from analysis.sites import SitePattern
from analysis.worlds import matrix_game

TOKENS = ("all", "valid", "both")
ENGINES = ("auto", "triton", "reference")
REGEX = "--sites"  # name of a pattern that the user gave


@dataclass(frozen=True)
class Options:
    """What to measure and where to leave it.

    out: folder of the tables. store: keep the inputs of so many calls on disk. kernel: run upstream's int8 path with
    this quantiser ('' for a script that is not Matrix-Game-3's, or not in int8). world: what the tables call it all, ''
    for the script's name.
    """

    out: Path
    pattern: SitePattern
    variants: tuple[str, ...] = ("shipped", "fixed")
    reference: str = "bf16"
    tokens: str = "all"
    engine: str = "auto"
    store: int = 0
    store_rows: int | None = None
    kernel: str = ""
    world: str = ""
    overwrite: bool = False
    command: str = ""
    wait_s: float = ranks.WAIT_S

    def __post_init__(self) -> None:
        for name, value, known in (("tokens", self.tokens, TOKENS), ("engine", self.engine, ENGINES)):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")
        if self.tokens != "all" and self.pattern.name not in matrix_game.PRESETS:
            raise ValueError(
                f"tokens={self.tokens!r} needs the lengths that a model gives its blocks ({matrix_game.LENGTHS!r}, "
                f"{matrix_game.GRID!r}); they are known for the presets {', '.join(matrix_game.PRESETS)}, not for "
                f"{self.pattern.name!r}; use --tokens all"
            )


def check_signatures(variants: Sequence[str]) -> None:
    """Imports torch. ValueError for a quantiser of the user's own that cannot be called with one tensor."""
    from analysis.kernels import registry

    for variant in filter(registry.is_foreign, variants):
        function = registry.load_foreign(variant)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # built in: there is none to look at
            continue
        try:
            signature.bind(None)
        except TypeError as error:
            raise ValueError(
                f"{variant}{signature} cannot be called with one tensor ({error}); a quantiser takes x [rows, K] and "
                "returns (codes int8 [rows, K], scales [rows])"
            ) from None
