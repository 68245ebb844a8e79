"""Run folders that somebody wrote who means harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from hires.core.store import campaign
from hires.core.store.campaign import Campaign, ExcludedPoint, PlannedPoint
from hires.core.store.file_names import line_files
from tests.helpers.report_runs import change, report_run

ATTACK = (
    "</script></style></title><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
    "<svg onload=window.hacked=1>\"'><a href='javascript:window.hacked=1'>{{7*7}}{%raw%}$\\alpha$"
)
"""Ends whatever it stands in, and runs."""
MOVES = "line\nline\r\x1b[2J\u202etxt.exe\u2028\ud800\x00 | =cmd()"
LONG = "L" * 1_000_000


def hostile_campaign(results: Path) -> list[Path]:
    """Makes a campaign of one good run and one for each way to do harm; the last is a pipe."""
    runs = [report_run(results, "sp rows")]
    for number, value in enumerate((ATTACK, MOVES, LONG, float("nan"), -1, [[[]]], {"a": 1})):
        runs.append(report_run(results, "pp", seed=number + 1))
        _poison(runs[-1], value)
    named, newer, missing, pipe = (report_run(results, seed=n) for n in range(90, 94))
    name = "<img src=x onerror=window.hacked=1>'\"&$x^2$\n-0badcafe"
    named = named.rename(named.with_name(name))
    change(newer, "record.json", "plan.json", schema=99)  # of a hires that is to come
    for name in ("record.json", "plan.json", "a0/record.json", "a0/exit.json", "a0/env.json"):
        (missing / name).unlink()  # only its config is left
    torn = report_run(results, "sp+gems", seed=94)
    for file in [*torn.glob("*.json"), *torn.glob("a0/*.json*")]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (pipe / "record.json").unlink()
    os.mkfifo(pipe / "record.json")  # nobody will ever write to it
    excluded = [ExcludedPoint([f"image={ATTACK}", MOVES], ATTACK)]
    planned = Campaign(ATTACK, points=[PlannedPoint(ATTACK, [ATTACK])], excluded=excluded)
    campaign.write(pipe.parent, planned)
    return [*runs, named, newer, missing, torn, pipe]


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
    for name in ("timeline.jsonl", "metrics.jsonl"):
        file = next(path for path in line_files(run / "a0", name) if path.exists())
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line |= {"loss": value, "clock": value}
            for span in line.get("spans", []):
                span[4] = value
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
