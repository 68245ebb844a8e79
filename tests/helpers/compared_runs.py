"""Complete run folders whose numbers a test chooses, without ranks or plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.store import file_names, records
from hires.core.store.naming import SCHEMA, model_label, plain, run_name
from tests.helpers.report_runs import change

ORIGIN = {
    "git": "0123456789abcdef" * 2 + "01234567", "hires": "0.1.0", "torch": "2.11.0",
    "python": "3.11.7", "hardware": {"cpu": "a processor", "cores": 2, "memory": 8 << 30},
    "host": "node1",
}  # fmt: skip


def compared_run(
    results: Path,
    attempts: Sequence[Sequence[float]],
    *,
    peaks: Sequence[int] = (100 << 20,),
    losses: Sequence[float | None] = (2.0,),
    origin: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Makes a run with complete attempts and returns its folder.

    Args:
        results: folder of campaigns.
        attempts: seconds of the steps that count, of every attempt.
        peaks: bytes of the fullest rank of every attempt; the last one is of all others, too.
        losses: last loss of every attempt, in the same way; None: not finite.
        origin: what differs from ``ORIGIN``.
        changes: top keys of the config.
    """
    config = from_dict({**plain(RunConfig()), "results": str(results), "batch": 4, **changes})
    run = results / config.campaign / run_name(config)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(plain(config), sort_keys=False))
    for number, steps in enumerate(attempts):
        peak, loss = peaks[min(number, len(peaks) - 1)], losses[min(number, len(losses) - 1)]
        record = _record(config, number, steps, {**ORIGIN, **(origin or {})})
        record["run"] = run.name
        record["memory"] = [{"rank": 0, "peak_bytes": peak // 2}, {"rank": 1, "peak_bytes": peak}]
        record["loss"] = {"first": 2.5, "last": loss, "finite": loss is not None}
        folder = file_names.attempt_dir(run, number)
        folder.mkdir()
        end = {"state": "done", "cause": None, "reason": None, "exit_codes": {"0": 0}}
        (folder / "exit.json").write_text(json.dumps(end))
        for path in (folder, run):
            (path / "record.json").write_text(json.dumps(record))
    return run


def failed_run(results: Path, cause: str = "rank 0 was killed", **changes: Any) -> Path:
    """Makes a run that failed and returns its folder."""
    run = compared_run(results, [[1.0]], **changes)
    change(run, "record.json", "a0/record.json", "a0/exit.json", state="failed", cause=cause)
    return run


def _record(
    config: RunConfig, attempt: int, steps: Sequence[float], origin: dict[str, Any]
) -> dict[str, Any]:
    """Returns the record of an attempt, its first step warm-up."""
    step_s = records.spread(steps) or {}
    img_per_s = records.rates(config.batch, step_s) or {}
    kept = ("median", "p10", "p90")
    return {
        "schema": SCHEMA, "state": "done", "cause": None, "attempt": attempt,
        "campaign": config.campaign,
        "throughput": {
            "img_per_s": {key: img_per_s[key] for key in kept},
            "step_s": {key: step_s[key] for key in kept},
            "samples": len(steps),
            "discarded": [{"step": 0, "why": "warm-up"}],
        },
        "samples": [{"step": n, "step_s": float(s)} for n, s in enumerate([9.0, *steps])],
        "messages": {"messages": 3, "bytes": 4096},
        "world": 2, "images_per_step": config.batch,
        "precision": config.precision.name, "layout": config.parallel.name,
        "model": model_label(config.model), "image": [config.height, config.width],
        "provenance": {
            **origin, "started": "2031-01-01T00:00:00", "ended": f"2031-01-0{attempt + 1}",
        },
        "reproduce": f"hires run batch={config.batch} campaign={config.campaign}",
    }  # fmt: skip
