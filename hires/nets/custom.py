"""Imports networks of the user by name, as ``model.target=package.module:function``.

It also lists the source files that such a network came from, so that its trace can be kept. A trace
is stale once one of these files has changed: modules that were imported while the network was
built, and all that are neither of Python, of hires nor installed (a forward pass may import).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hires
from hires.core.errors import ConfigError
from hires.core.registry import nearest
from hires.core.store.frozen import MOST_READ, sha256_of, source_file
from hires.nets.build_network import NETS
from hires.nets.network_call import on_images

_started_ns = _parent_started_ns = time.time_ns()
_of_parent: frozenset[str] = frozenset()
"""Modules that a process was forked with: its parent has imported them, perhaps long ago."""
_OWN = Path(hires.__file__).parent
_PYTHON = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_GENERATED = ("_remote_module_non_scriptable",)
"""Modules that torch writes into a temporary folder when torch.distributed.nn is imported."""
_INSTALLED = {"site-packages", "dist-packages"}
_SHOWN = 8
"""Functions of a module that an error names."""
_AT_START = frozenset(sys.modules)
"""Modules that came before any network, as of a ``sitecustomize.py``, an IDE or a profiler."""
_imported_to_build: set[str] = set()
"""Names of the modules that networks imported while they were built by this process."""


@NETS.register("custom")
def custom(
    target: str, args: dict[str, Any], inputs: Any = None, output: str | None = None
) -> nn.Module:
    """Returns the module that a function of the Python path or the current folder makes.

    It is called on images alone (:mod:`hires.nets.network_call`). ConfigError: the target cannot be
    imported or does not return a torch module.
    """
    before, key = set(sys.modules), f"model.target={target!r}"
    try:
        net = _made(imported(target), target, args)
    finally:
        _imported_to_build.update(set(sys.modules) - before)
    if isinstance(net, torch.jit.ScriptModule):
        raise ConfigError(f"{key} returned a ScriptModule; return the plain nn.Module")
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{key} returned {type(net).__name__}, not a torch.nn.Module")
    tensors = [*net.named_parameters(), *net.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise ConfigError(f"{key} leaves {on_meta[0]} on the meta device; make it on the CPU")
    return on_images(net, inputs, output)


def own_sources(target: str, read: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Returns the files of the user's that this process imported, as what a run is frozen from.

    They are neither of Python nor of hires, nor installed but for the target's own package: what an
    installed library holds is its version's matter. Nor are they modules that were there before any
    network, unless it imports them. Each is a SourceFile as plain values. Those that the network
    ``read`` follow, without a module, as far as 64 GiB go.
    """
    package = target.partition(":")[0].partition(".")[0]
    files = {}
    for name, path in sorted(_source_files()):
        installed = is_installed(path) and name.partition(".")[0] not in {package} - {"torch"}
        if not installed and name != "__main__":
            files[name] = path
    others = {n for n in files if n in _AT_START and n.partition(".")[0] != package}
    waiting = [name for name in files if name not in others] if others else []
    while waiting:
        needed = others & _imported_by(waiting.pop())
        waiting += needed
        others -= needed
    kept = [(name, path) for name, path in files.items() if name not in others]
    sources, left = [], MOST_READ
    for name, path in [*kept, *(("", path) for path in _data_files(read))]:
        if file := source_file(name, path, left):  # else it is of an archive, or gone
            sources.append(dataclasses.asdict(file))
            left -= file.size
    return sources


def source_hashes(read: Iterable[Path] = ()) -> dict[str, str] | None:
    """Returns the SHA-256 of every source file, and of those ``read``, by its absolute path.

    None if a file may have changed since it was imported: its hash may be of other code.
    """
    hashes = {}
    for name, path in [*_source_files(), *(("", path) for path in _data_files(read))]:
        if name and is_installed(path) and name not in _imported_to_build:
            continue
        try:
            changed_ns = path.stat().st_mtime_ns
        except OSError:
            return None
        sha256 = _sha256_at(path, changed_ns)
        since_ns = _parent_started_ns if name in _of_parent else _started_ns
        if sha256 is None or changed_ns >= since_ns:
            return None
        hashes[str(path)] = sha256
    return hashes


@functools.cache
def _sha256_at(path: Path, changed_ns: int) -> str | None:
    """Returns the digest of a file that was changed at some time; a search traces a network often.

    Thousands of files take seconds.
    """
    return sha256_of(path)


def _note_fork() -> None:
    # The user's files are imported by the child of a warm process, and may be edited before that.
    global _of_parent, _started_ns
    _of_parent, _started_ns = frozenset(sys.modules), time.time_ns()


os.register_at_fork(after_in_child=_note_fork)


def _data_files(read: Iterable[Path]) -> list[Path]:
    """Returns the files that are neither installed, nor of hires, nor the source of a module."""
    modules = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    others = (path for path in read if str(path) not in modules and not is_installed(path))
    return [path for path in others if not path.is_relative_to(_OWN)]


def _source_files() -> Iterator[tuple[str, Path]]:
    """Yields the names and files of all imported modules but those of hires."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not Path(file).is_absolute() or name in _GENERATED:
            continue  # torch.ops and the like name files that are not there
        if not Path(file).is_relative_to(_OWN) and name.partition(".")[0] != "hires":
            yield name, Path(file)


def _imported_by(name: str) -> set[str]:
    """Returns the names of the modules that the source of a module may import, with packages."""
    module = sys.modules[name]
    path = Path(str(module.__file__))
    changed_ns = path.stat().st_mtime_ns if path.exists() else 0
    return _imported_at(name, module.__package__ or "", path, changed_ns)


@functools.cache
def _imported_at(name: str, package: str, path: Path, changed_ns: int) -> set[str]:
    """Returns the names that a file has which was changed at some time."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # it is compiled, or gone
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            with contextlib.suppress(ImportError):  # it stands where it is not executed
                base = importlib.util.resolve_name(base, package)
                names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    dots = ((name, [i for i, sign in enumerate(f"{name}.") if sign == "."]) for name in names)
    return {name[:end] for name, ends in dots for end in ends}


def is_installed(path: Path) -> bool:
    """Whether a file is of Python or of an installed package."""
    installed = any(path.is_relative_to(folder) for folder in _PYTHON)
    return installed or not _INSTALLED.isdisjoint(path.parts)


def imported(target: str, key: str = "model.target") -> Callable[..., Any]:
    """Returns the function that a key names; ConfigError: it cannot be imported."""
    # The current folder comes last: a file in it stands for no library (hires.core.python_command).
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing executes the user's file
        raise ConfigError(
            f"{key}={target!r} cannot be imported: {error_line(error)}; use "
            f"package.module:function of a module on the Python path or below {Path.cwd()}"
        ) from error
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    own = [k for k, v in functions.items() if getattr(v, "__module__", "") == module.__name__]
    mine, found = (
        Path.cwd() / f"{module_name.replace('.', '/')}.py",
        getattr(module, "__file__", None),
    )
    hidden = mine.exists() and str(mine) != found
    raise ConfigError(
        f"{key}={target!r}: {module.__name__} has no function {name!r}; "
        f"{_offered(name, own)}"
        f"{f'. {mine} is hidden by {found or module_name}: rename it' if hidden else ''}"
    )


def _offered(name: str, own: list[str]) -> str:
    hits = nearest(name, own)
    if hits or not own:
        return f"did you mean {' or '.join(hits)}?" if hits else "it has none at all"
    more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
    return f"it has {', '.join(own[:_SHOWN])}{more}"


def _made(function: Callable[..., Any], target: str, args: dict[str, Any]) -> Any:
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise ConfigError(
            f"model.args={args} do not fit {target}{inspect.signature(function)}: {error}"
        ) from error
    except ValueError:
        pass  # a function without a signature: the call itself checks the arguments
    try:
        return function(**args)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"model.target={target!r} failed with model.args={args}: {error_line(error)} "
            f"({place.filename}:{place.lineno})"
        ) from error


def error_line(error: BaseException) -> str:
    """Returns an error of the user's code in one line, with the operator that raised it."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return " ".join([text, *(f"({note})" for note in getattr(error, "__notes__", []))])
