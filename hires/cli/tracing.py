"""How does the front end learn what a network computes without importing torch?

It asks another process: ``python -m hires.nets.trace`` reads the config and answers with the graph.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from hires.core.config import RunConfig, to_dict
from hires.core.errors import ConfigError, HiresError, PlanError, RunError
from hires.plan.graph import Graph

_KINDS: dict[str, type[HiresError]] = {
    "ConfigError": ConfigError,
    "PlanError": PlanError,
    "RunError": RunError,
}
_MODULE = "hires.nets.trace"


def trace(config: RunConfig, module: str = _MODULE) -> Graph:
    """Returns the graph of the config's network, for one microbatch.

    Raises:
        ConfigError: the network cannot be built or traced.
        RunError: the tracing process itself failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(to_dict(config)),
        capture_output=True,
        text=True,
        check=False,
    )
    answer = _answer(done)
    if "error" in answer:
        error = answer["error"]
        raise _KINDS.get(error["type"], RunError)(error["text"])
    return Graph.from_dict(answer["graph"])


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Returns what the process answered.

    Raises:
        RunError: it did not answer; the message holds its last words.
    """
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if done.returncode == 0 and isinstance(answer, dict):
        return answer
    words = " | ".join(done.stderr.strip().splitlines()[-3:]) or "it said nothing"
    raise RunError(f"tracing the network failed (exit code {done.returncode}): {words}")
