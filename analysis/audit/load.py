"""Find the callable that a TARGET names, with its adapter, and show a failure as the target's own short traceback.

TARGET is `path/file.py:function` or `package.module:function`. A file that lies in a package is imported as a member of
it, so relative imports work, and by itself where the package cannot be; its root is on the path either way. An adapter
is `file.py:function` too: a function `adapter(target, x) -> (codes, scales)` that calls a target of another signature,
or prepares its arguments.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRACEBACK_FRAMES = 4
_OWN = str(Path(__file__).parent)


def split_target(target: str) -> tuple[str, str]:
    """("path/file.py" or "package.module", "function"). ValueError when it is neither."""
    module, _, name = target.rpartition(":")
    if not module or not name.replace(".", "_").isidentifier():
        raise ValueError(f"cannot read target {target!r}: expected path/file.py:function or package.module:function")
    if module.endswith(".py") and not Path(module).is_file():
        raise ValueError(f"cannot read target {target!r}: no file {module}")
    return module, name


def load_target(target: str, adapter: str | None = None) -> Callable[[Any], Any]:
    """Import the target (and its adapter) and return a callable of one tensor.

    Raises whatever the import raises; ValueError when the name is missing or not callable.
    """
    function = _load(target)
    if adapter is None:
        return function
    return functools.partial(_load(adapter), function)


def _load(target: str) -> Callable[..., Any]:
    where, name = split_target(target)
    found: Any = _import_file(Path(where).resolve()) if where.endswith(".py") else _import_module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"{where} has no {name!r}; it defines {', '.join(_functions(found)[:12]) or 'no functions'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{target} is a {type(found).__name__}, not a function")
    return found


def _functions(module: Any) -> list[str]:
    """Names of the functions of a module, its own before the ones it imported."""
    names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = getattr(module, "__name__", None)
    return sorted(names, key=lambda key: getattr(vars(module)[key], "__module__", None) != own)


def _import_module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name = ".".join(parts)
    if len(parts) == 1 or _taken(parts[0], root):
        return _import_alone(path)
    try:
        return importlib.import_module(name)
    except ImportError:
        # The package's __init__ may want modules that are not here and that this file can do without.
        with contextlib.suppress(Exception):
            return _import_alone(path)
        raise


def _import_alone(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"audited_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and triton look the module up by name
    spec.loader.exec_module(module)
    return module


def _taken(package: str, root: Path) -> bool:
    """Whether another package of that name is already imported, as for a folder called triton."""
    places = getattr(sys.modules.get(package), "__path__", None)
    return places is not None and str(root / package) not in places


def short_traceback(error: BaseException) -> str:
    """The last frames of the target's own code and the message; frames of this package and of importlib left out."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN, "<frozen")) and "importlib" not in frame.filename
    ]
    lines = traceback.format_list(frames[-TRACEBACK_FRAMES:])
    message = traceback.format_exception_only(type(error), error)
    return "".join(lines + message).rstrip()
