"""Error analysis of int8 attention projections: rounding bias, magnitude shrinkage, effect on a world model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.results.load import Run, load_run

    __version__: str

__all__ = ["Run", "__version__", "load_run"]


def __getattr__(name: str) -> Any:
    """Import on first use: reading runs needs pandas, which most commands, and their child processes, do not."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("int8-shrinkage")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0+unknown"
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from analysis.results import load

    return getattr(load, name)
