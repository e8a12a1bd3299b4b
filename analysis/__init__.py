"""Error analysis of int8 attention projections: rounding bias, magnitude shrinkage, effect on a world model."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("int8-shrinkage")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

from analysis.results.load import Run, load_run

__all__ = ["Run", "__version__", "load_run"]
