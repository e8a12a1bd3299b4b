"""Run a user's script or module as `__main__`, as plain python would, and say how it ended. Imports no torch.

    target = script_target(["train.py", "--steps", "3"])
    ending = run(target)            # sys.argv, sys.path[0] and __main__ are the script's from here on
    sys.exit(ending.code)

torch is left to the script to import, so that what it sets before (`OMP_NUM_THREADS`, `CUDA_VISIBLE_DEVICES`) counts:
`after_import` calls back as soon as it has.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.util
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

USAGE = "shrinkage attach --out DIR -- SCRIPT.py ARGS..."
INTERRUPTED = 130


@dataclass(frozen=True)
class Target:
    """What to run: a script's path, or a module's name (`python -m`), and its arguments."""

    args: tuple[str, ...]
    path: Path | None = None
    module: str = ""

    @property
    def name(self) -> str:
        """What tables call it: the script's file name or the module's name."""
        return self.module or (self.path.name if self.path else "")


@dataclass(frozen=True)
class Ending:
    """The exit code that plain python would give, and why it is not 0 ('' for a normal end)."""

    code: int
    why: str = ""


class StopScript(BaseException):
    """Raised out of an import in the script when it must not go on; the message is for the user."""


def script_target(words: Sequence[str]) -> Target:
    """The target that `SCRIPT.py ARGS...` or `-m MODULE ARGS...` names, checked.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: nothing to run, a folder, a file that is not Python, or no such module.
    """
    if not words or (words[0] == "-m" and len(words) < 2):
        raise ValueError(f"nothing to run; usage: {USAGE}, or -- -m MODULE ARGS...")
    if words[0] == "-m":
        name = words[1]
        try:
            found = importlib.util.find_spec(name.partition(".")[0])
        except (ImportError, ValueError):
            found = None
        if found is None and not Path(name.partition(".")[0]).is_dir() and not Path(f"{name}.py").is_file():
            raise ValueError(f"no module named {name!r}; give a script's path, or -m with a module python can import")
        return Target(tuple(words[2:]), module=name)
    path = Path(words[0])
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; usage: {USAGE}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the script inside it: {USAGE}")
    _compiled(path)
    return Target(tuple(words[1:]), path=path)


def _compiled(path: Path) -> types.CodeType:
    try:
        return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python: line {error.lineno or 1}: {error.msg}; usage: {USAGE}") from None
    except ValueError as error:  # a null byte, before Python 3.12
        raise ValueError(f"{path} is not Python: {error}; usage: {USAGE}") from None


def run(target: Target) -> Ending:
    """Run it to its end. Nothing is restored afterwards: what the script left for the interpreter's exit still works.

    An exception is shown as plain python shows it, without the frames of this file. Ctrl-C gives 130.
    """
    try:
        if target.module:
            _set_path(str(Path.cwd()))
            sys.argv[:] = [target.module, *target.args]
            runpy.run_module(target.module, run_name="__main__", alter_sys=True)
        else:
            assert target.path is not None
            _run_path(target.path, target.args)
    except SystemExit as stop:
        return _exited(stop.code)
    except StopScript:
        raise
    except KeyboardInterrupt:
        return Ending(INTERRUPTED, "interrupted")
    except BaseException as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            shown = shown.tb_next
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        return Ending(1, f"{type(error).__name__}: {error}".splitlines()[0])
    return Ending(0)


def _set_path(first: str) -> None:
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = first


def _run_path(path: Path, args: tuple[str, ...]) -> None:
    code = _compiled(path)
    main = types.ModuleType("__main__")
    file = str(path.absolute())
    main.__dict__.update(
        __file__=file,
        __cached__=None,
        __package__=None,
        __spec__=None,
        __loader__=SourceFileLoader("__main__", file),
        __builtins__=builtins,
        __annotations__={},
    )
    sys.modules["__main__"] = main
    sys.argv[:] = [str(path), *args]
    _set_path(str(path.resolve().parent))
    exec(code, main.__dict__)


def _exited(code: Any) -> Ending:
    if code is None:
        return Ending(0)
    if isinstance(code, int):
        return Ending(int(code), f"exit {int(code)}" if code else "")
    sys.stderr.write(f"{code}\n")
    return Ending(1, f"exit: {code}")


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name, self.callback = name, callback

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self.callback()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, callback: Callable[[], None]) -> None:
    """Call back once, right after module `name` was first imported; at once if it already is."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _AfterImport(name, callback))
