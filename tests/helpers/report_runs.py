"""Complete run folders with every file of a real one, made without starting a rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.ranks.timeline import FILE
from hires.core.store import records, rundir
from hires.core.store.message_files import ROUTED_KEYS
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.traffic import planned_rows
from tests.helpers.simulated import planned_spans
from tests.helpers.small_plans import LAYOUTS, config_of, plan_of

MIB = 2**20


def report_run(
    results: Path, layout: str = "single", *, state: str = "done", step_s: float = 0.5,
    cause: str | None = None, reason: str | None = None, **changes: Any,
) -> Path:  # fmt: skip
    """Makes a run folder with one attempt that ended, and returns it.

    ``layout`` is one of ``small_plans.LAYOUTS``; ``changes`` are top keys of the config, as
    ``image`` and ``campaign``, and ``precision``.
    """
    plan = plan_of(**LAYOUTS[layout])
    config = _config(results, layout, changes)
    argv = ["hires", "run", f"parallel={layout.split()[0]}", f"image={config.height}"]
    run = rundir.create(config, plan.to_dict(), argv)
    _fill(run.attempt_dir, plan, config, step_s)
    records.finish(run.path, run.attempt, state, cause)
    end = {"state": state, "cause": cause, "reason": reason, "exit_codes": {}}
    (run.attempt_dir / "exit.json").write_text(json.dumps(end))
    return run.path


def change(run: Path, /, *names: str, **values: Any) -> None:
    """Changes some records of a run; without names its own and that of its first attempt."""
    for name in names or ("record.json", "a0/record.json"):
        record = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**record, **values}))


def sized_campaign(results: Path) -> list[Path]:
    """Makes a campaign in which every plot has something to show."""
    runs = [
        report_run(results, layout, image=[size, size], step_s=0.1 * size / (place + 1))
        for size in (32, 64)
        for place, layout in enumerate(("single", "sp rows", "pp", "sp+gems"))
    ]
    for precision, step_s in (("bf16", 3.0), ("fp64", 9.0)):
        keys = {"precision": precision, "step_s": step_s}
        runs.append(report_run(results, "single", image=[64, 64], **keys))
    failed = {"cause": "rank 0 failed: the loss is nan at step 2", "reason": "nan"}
    return [*runs, report_run(results, "pp", state="failed", image=[96, 96], **failed)]


def _config(results: Path, layout: str, changes: dict[str, Any]) -> RunConfig:
    """Returns the config of a run."""
    values = to_dict(config_of(**LAYOUTS[layout]))
    values["parallel"]["name"] = layout.split()[0]
    values["precision"]["name"] = changes.pop("precision", "fp32")
    return from_dict({**values, "results": str(results), "steps": 6, **changes})


def _fill(folder: Path, plan: Plan, config: RunConfig, step_s: float) -> None:
    """Writes what the ranks of an attempt write."""
    error = {"fp64": 0.0, "fp32": 1e-6, "bf16": 1e-2}[config.precision.name]
    lines: list[dict[str, Any]] = []
    for rank in range(plan.world):
        known = {"params_bytes": 4 * MIB, "grads_bytes": 4 * MIB, "optimizer_bytes": 4 * MIB}
        lines.append({"kind": "ready", "rank": rank, "rss_import_bytes": MIB, **known})
        lines.append({"kind": "memory", "rank": rank, "peak_bytes": (20 + rank) * MIB})
        for step in range(config.steps):
            line = {"kind": "step", "rank": rank, "step": step, "step_s": step_s + 0.01 * step}
            loss = 2.3 / (1 + 0.1 * step) * (1 + error)
            lines.append({**line, "loss": loss, "data_s": 0.0})
        if plan.world > 1:
            lines.append(message_line(plan, rank, config.steps - 2, step_s))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    steps = planned_spans(plan)
    with (folder / FILE).open("w") as file:
        for step in steps:
            values = dataclasses.asdict(step) | {"step": config.steps - 1}
            values["spans"] = [list(span) for span in step.spans]
            file.write(json.dumps(values) + "\n")


def message_line(plan: Plan, rank: int, steps: int, step_s: float) -> dict[str, Any]:
    """Returns what a rank records of its messages: those of its plan, each of them 1 ms long."""
    planned = planned_rows([*events(plan, rank)])
    rows = []
    for row in planned:
        key = {name: row[name] for name in ROUTED_KEYS}
        sums = {"count": row["count"] * steps, "bytes": row["bytes"] * steps}
        seconds = {"issue_s": 0.0, "wait_s": 1e-3 * row["count"] * steps}
        rows.append({**key, **sums, **seconds})
    line = {"kind": "comm", "rank": rank, "first": 2, "steps": steps, "step_s": step_s * steps}
    return {**line, "rows": rows, "codes": [], "planned": planned}
