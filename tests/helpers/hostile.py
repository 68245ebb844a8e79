"""Run folders that somebody wrote who means harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.report_runs import report_run

ATTACK = (
    "</script></style></title><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
    "<svg onload=window.hacked=1>\"'><a href='javascript:window.hacked=1'>{{7*7}}{%raw%}$\\alpha$"
)
"""Ends whatever it stands in, and runs."""
MOVES = "line\nline\r\x1b[2J\u202etxt.exe\u2028\ud800\x00 | =cmd()"
LONG = "L" * 1_000_000


def hostile_campaign(results: Path) -> list[Path]:
    """Makes a campaign of one good run and one for each way to do harm."""
    made = [report_run(results, "sp rows")]
    for number, value in enumerate((ATTACK, MOVES, LONG, float("nan"), -1, [[[]]], {"a": 1})):
        run = report_run(results, "pp", seed=number + 1)
        _poison(run, value)
        made.append(run)
    made.append(_named(results))
    made += [_newer(results), _missing(results), _torn(results), _pipe(results)]
    _plan_campaign(made[0].parent)
    return made


def _poison(run: Path, value: Any) -> None:
    """Writes a value into every place of a run that a report shows."""
    long = value
    value = value[:5000] if isinstance(value, str) else value
    for file in (run / "record.json", run / "a0" / "record.json", run / "a0" / "exit.json"):
        values = json.loads(file.read_text())
        for key in ("model", "layout", "precision", "cause", "reproduce", "run", "campaign"):
            values[key] = value
        values["layout"] = long  # once is enough for what is long
        if file.name == "record.json":
            values["provenance"] = dict.fromkeys(("git", "hires", "torch", "host"), value)
            values["loss"] = {"first": value, "last": value, "finite": value}
            values["memory"][0] |= {"stage": [value], "source": value, "peak_bytes": value}
            values["image"] = [value, value] if isinstance(value, int) else values["image"]
        else:
            values |= {"state": value, "reason": value}
        file.write_text(json.dumps(values))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["path"] = ascii(value) if isinstance(value, str) else value
    config[ATTACK] = 1
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for file in (run / "a0" / "timeline.jsonl", run / "a0" / "metrics.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line |= {"loss": value, "clock": value}
            for span in line.get("spans", []):
                span[4] = value
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _named(results: Path) -> Path:
    """Makes a run whose folder is an attack."""
    run = report_run(results, "single", seed=90)
    name = "<img src=x onerror=window.hacked=1>'\"&$x^2$\n-0badcafe"
    return run.rename(run.with_name(name))


def _newer(results: Path) -> Path:
    """Makes a run of a hires that is to come."""
    run = report_run(results, "single", seed=91)
    for name in ("record.json", "plan.json"):
        values = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**values, "schema": 99}))
    return run


def _missing(results: Path) -> Path:
    """Makes a run of which only the config is left."""
    run = report_run(results, "single", seed=92)
    for name in ("record.json", "plan.json", "a0/record.json", "a0/exit.json", "a0/env.json"):
        (run / name).unlink()
    return run


def _torn(results: Path) -> Path:
    """Makes a run whose files were half written."""
    run = report_run(results, "sp+gems", seed=93)
    for file in [*run.glob("*.json"), *run.glob("a0/*.json*")]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return run


def _pipe(results: Path) -> Path:
    """Makes a run whose record is a pipe, which nobody will ever write to."""
    run = report_run(results, "single", seed=94)
    (run / "record.json").unlink()
    os.mkfifo(run / "record.json")
    return run


def _plan_campaign(folder: Path) -> None:
    """Writes what a sweep planned, in the same spirit."""
    points = [{"run": ATTACK, "overrides": [ATTACK, 7, None]}, 7, {"run": ["x"]}]
    excluded = [{"overrides": [f"image={ATTACK}"], "reason": ATTACK, "nearest": MOVES}]
    values = {"schema": 99, "points": points, "excluded": excluded}
    (folder / "campaign.json").write_text(json.dumps(values))
