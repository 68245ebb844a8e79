"""How much memory will a plan need, does it fit, and what would if it does not?

A forecast takes about as long as tracing the network, so it is kept in the user's cache folder,
under a hash of everything that decides it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import hires
from hires.cli.compose.plan_keys import deciding
from hires.cli.tracing import TorchProcess
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.store.files import write_atomically
from hires.plan.memory import memory_finding, room_of
from hires.plan.partition import layer_starts
from hires.plan.plan import Finding, Plan
from hires.plan.planner import make_plan
from hires.plan.search.remedies import Search

_DECIDE = ("image", "model", "data", "parallel", "precision", "comm", "task", "memory", "seed")
"""Parts of the config that may decide the memory together with the plan."""
_DERIVED = ("findings", "verdict", "totals", "memory", "placement")
"""What follows from the rest of a plan."""
_PARTS = ("params_bytes", "grads_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")


def add_forecast(config: RunConfig, plan: Plan, process: TorchProcess) -> None:
    """Adds the memory of every rank to a plan, and an error with what would fit if it does not.

    A forecast that fails is a warning: the run may go well all the same.
    """
    shortage = add_memory(config, plan, process)
    if shortage is not None:
        room = room_of(config)
        search = Search(config, room, lambda changed: _predicted(changed, config, plan, process))
        _say_searching()
        remedies = search.remedies(len(layer_starts(plan.graph)))
        plan.findings.append(memory_finding(shortage, remedies, search.summary()))


def add_memory(config: RunConfig, plan: Plan, process: TorchProcess | None) -> str | None:
    """Adds the memory of every rank to a plan, and returns in words what does not fit, if so.

    Args:
        config: of the plan.
        plan: one with errors is left as it is.
        process: answers for torch; None: a forecast that is not in the cache is not made.
    """
    if not plan.ok:
        return None
    try:
        plan.memory = forecast(config, plan, process)
    except HiresError as error:
        text = f"the memory of the ranks could not be predicted: {error}"
        plan.findings.append(Finding("warning", "memory", text))
        return None
    return room_of(config).shortage(config, plan)


def forecast(config: RunConfig, plan: Plan, process: TorchProcess | None) -> list[dict[str, int]]:
    """Returns the memory of every rank of a replica, from the cache if it is there.

    Raises:
        HiresError: the plan could not be rehearsed.
    """
    path = cache_dir() / "memory" / f"{_key(config, plan)}.json"
    found = _read(path, plan)
    if found is None:
        if process is None:
            raise RunError("the time for it is used up; planning again goes on with what is kept")
        found = process.footprint(config, plan)
        with contextlib.suppress(HiresError, OSError):  # a cache that cannot be written is none
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(found))
    return found


def cache_dir() -> Path:
    """Returns the folder of this user for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # The standard says to ignore a relative path.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "hires"


def _key(config: RunConfig, plan: Plan) -> str:
    """Returns a hash of what decides the memory: config, plan, version of torch, our code."""
    values = {key: value for key, value in deciding(config).items() if key in _DECIDE}
    values["memory"].pop("limit")
    facts = {key: value for key, value in plan.to_dict().items() if key not in _DERIVED}
    decides = [values, facts, _torch_version(), _code()]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _torch_version() -> str:
    """Returns the version of the torch that is installed, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _code() -> list[Any]:
    """Returns what changes whenever a file of hires does: name, size and time of each."""
    folder = Path(hires.__file__).parent
    files = [(path, path.stat()) for path in sorted(folder.rglob("*.py"))]
    return [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in files]


def _read(path: Path, plan: Plan) -> list[dict[str, int]] | None:
    """Returns a cached forecast, or None if there is none or the file is damaged."""
    try:
        found: list[dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    good = isinstance(found, list) and len(found) == plan.ranks_per_replica
    keys = {*_PARTS, "peak_bytes"}
    if not good or not all(isinstance(entry, dict) and set(entry) == keys for entry in found):
        return None
    return found


def _say_searching() -> None:
    """Says in a terminal why the answer takes a while; the next words overwrite it."""
    if sys.stderr.isatty():
        print(f"{'looking for what would fit ...':<40}", end="\r", file=sys.stderr, flush=True)


def _predicted(
    config: RunConfig, before: RunConfig, plan: Plan, process: TorchProcess
) -> Plan | None:
    """Returns the plan of a changed config with its memory, or None if it has errors.

    Args:
        config: the changed config.
        before: the config that does not fit.
        plan: its plan, whose graph serves as long as the microbatches stay as large.
        process: answers for torch.
    """
    with contextlib.suppress(HiresError):  # a change that makes no sense here
        same = config.parallel.pieces == before.parallel.pieces
        changed = make_plan(config, plan.graph if same else process.trace(config))
        if changed.ok:
            changed.memory = forecast(config, changed, process)
            return changed
    return None
