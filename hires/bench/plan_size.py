"""Measures the time and memory of one plan, in a process of its own.

``python -m hires.bench.plan_size`` reads ``{"config": ..., "graph": ...}`` as JSON on standard
input and answers with a JSON object on standard output. It needs no torch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from hires.core.config.run_config import from_dict
from hires.plan.graph import Graph
from hires.plan.planner import make_plan


def measure(config: dict[str, Any], graph: dict[str, Any]) -> dict[str, Any]:
    """Returns what a plan holds and took; ``base_bytes`` is the memory before it was made."""
    run, traced = from_dict(config), Graph.from_dict(graph)
    base = _peak_bytes()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    plan = make_plan(run, traced)
    return {
        "plan_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "plan_json_bytes": len(json.dumps(plan.to_dict(), indent=1)),  # as run folders hold it
        "base_bytes": base,
        "peak_bytes": _peak_bytes(),
        "ranks": plan.world,
        "messages": plan.totals.get("messages", 0),
        "verdict": plan.verdict,
        "errors": [finding.text for finding in plan.findings if finding.severity == "error"],
    }


def _peak_bytes() -> int:
    """Returns the largest resident memory so far; the engine's function for it imports torch."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.stdout.write(json.dumps(measure(request["config"], request["graph"])) + "\n")
