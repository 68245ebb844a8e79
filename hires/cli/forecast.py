"""Adds the predicted memory of every rank to a plan, and what would fit if it does not.

A forecast takes seconds, so it is kept in the user's cache folder (:mod:`hires.cli.answer_cache`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from hires.cli import answer_cache
from hires.cli.compose.plan_keys import deciding
from hires.cli.tracing import TorchProcess
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.plan.memory import room_of
from hires.plan.plan import Finding, Plan
from hires.plan.planner import make_plan
from hires.plan.search.advice import would_fit
from hires.plan.search.layout_search import DEADLINE_S, Budget

_DECIDE = ("image", "model", "data", "parallel", "precision", "comm", "task", "memory", "seed")
"""Parts of the config that may decide the memory together with the plan."""
_DERIVED = ("findings", "verdict", "totals", "memory", "placement")
"""What follows from the rest of a plan."""
_PARTS = ("params_bytes", "grads_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")


def add_forecast(
    config: RunConfig, plan: Plan, process: TorchProcess, began_s: float | None = None
) -> None:
    """Adds the memory of every rank to a plan, and an error with what would fit if it does not.

    A forecast that fails is a warning: the run may go well all the same.

    Args:
        config: of the plan.
        plan: one with errors is left as it is.
        process: answers for torch.
        began_s: when planning began, on the monotonic clock; None: now. A search for what would
            fit ends in time for an answer within ``DEADLINE_S``.
    """
    now_s = time.monotonic()
    shortage = add_memory(config, plan, process)
    if shortage is not None:
        _say_searching()
        # A quarter of the time is left for the search, however long the plan itself took.
        deadline_s = (now_s if began_s is None else began_s) + DEADLINE_S
        budget = Budget(max(deadline_s, time.monotonic() + DEADLINE_S / 4))
        plan.findings.append(
            would_fit(
                config,
                shortage,
                plan.graph,
                lambda changed: _predicted(changed, config, plan, process),
                budget,
            )
        )


def add_memory(config: RunConfig, plan: Plan, process: TorchProcess | None) -> str | None:
    """Adds the memory of every rank to a plan, and returns what does not fit in words, or None.

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
    key = _key(config, plan)
    memory: list[dict[str, int]] = answer_cache.read("memory", key)
    if not _whole(memory, plan):
        if process is None:
            raise RunError("the time for it is used up; planning again goes on with what is kept")
        memory = process.footprint(config, plan)
        answer_cache.write("memory", key, memory)
    return memory


def _key(config: RunConfig, plan: Plan) -> str:
    """Returns the key of a plan's memory: what of the config may decide it, and the plan."""
    values = {key: value for key, value in deciding(config).items() if key in _DECIDE}
    values["memory"].pop("limit")
    facts = {key: value for key, value in plan.to_dict().items() if key not in _DERIVED}
    return answer_cache.key_of(values, facts)


def _whole(entries: Any, plan: Plan) -> bool:
    """Whether a cached forecast holds the memory of every rank."""
    keys = {*_PARTS, "peak_bytes"}
    whole = isinstance(entries, list) and len(entries) == plan.ranks_per_replica
    return whole and all(isinstance(entry, dict) and set(entry) == keys for entry in entries)


def _say_searching() -> None:
    """Shows the search in the current line of a terminal; the next output overwrites it."""
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
