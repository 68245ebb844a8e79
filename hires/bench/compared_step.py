"""Compares one step of a layout, on ranks of its own, with one process: a row of a benchmark."""

from __future__ import annotations

import contextlib
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

from hires.bench.ranks import run_ranks
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import HiresError
from hires.core.store import file_names
from hires.core.store.reading import read_json
from hires.engine.build import build_rank
from hires.engine.verify import verify_rank
from hires.plan.plan import Plan

Settings = dict[str, Any]
"""Keys of the config, as ``parallel.stages``, and their values."""
Answer = dict[str, Any]
"""``ok``, ``max_rel_err`` and ``errors`` by kind; ``failure`` where nothing was compared."""


def config_from(settings: Settings) -> RunConfig:
    """Returns the config of a row, in float64; ConfigError: its values do not fit."""
    values: dict[str, Any] = {"precision": {"name": "fp64"}, "steps": 3}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return from_dict(values)


def overrides(settings: Settings) -> list[str]:
    """Returns the words after ``hires verify`` that make a row again."""
    return [f"{key}={_word(value)}" for key, value in settings.items()]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def compare_step(config: RunConfig, plan: Plan, timeout_s: float, limit: int = 0) -> Answer:
    """Returns how far a layout's ranks differ from one process; a bad plan is an answer, too.

    With a ``limit`` no rank may allocate more bytes.
    """
    with tempfile.TemporaryDirectory(prefix="hires-compared-") as folder:
        answer: Answer = {"ok": False, "max_rel_err": None, "errors": {}}
        try:
            plan.require_ok()
            run_ranks(_step, plan.world, timeout_s, config, plan, Path(folder), limit)
        except HiresError as error:
            answer["failure"] = str(error)
        with contextlib.suppress(HiresError):  # ranks that differ have written by how much
            answer.update(read_json(Path(folder) / file_names.VERIFY))
    return answer


def limit_memory(limit: int) -> None:
    """Lets this process allocate no more than so many bytes; 0: as many as there are."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _step(rank: int, config: RunConfig, plan: Plan, folder: Path, limit: int) -> None:
    limit_memory(limit)
    verify_rank(build_rank(config, plan, rank, 1), config, folder)
