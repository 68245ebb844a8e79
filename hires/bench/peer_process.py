"""Runs a library beside hires in a process of its own, with one thread, step by step.

this rank ── "step" ──▶ python -m hires.bench.precision_peers JSON
          ◀── {"cpu_s": ...} ──     first {"kernels": ...} or {"not_run": why}
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from typing import Any

from torch import Tensor

from hires.bench.ranks import ended
from hires.bench.timing import Runner
from hires.core.python_command import module_command

MODULE = "hires.bench.precision_peers"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class PeerProcess(Runner):
    """A contestant of ``precision_peers``; it ends when its standard input does."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.parameters = {}
        self._process = subprocess.Popen(
            module_command(MODULE, json.dumps(task)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **THREADS},
        )
        self._cpu_s = 0.0
        self.facts = self._answer()
        """What it said before its first step, ``kernels`` and ``peak_bytes``; or ``not_run``, also
        once a step has failed."""
        if "not_run" in self.facts:
            self.close()

    def step(self) -> Tensor | None:
        """Lets it run one step; after a failed one it runs none."""
        assert self._process.stdin is not None
        if "not_run" in self.facts:
            return None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its answer will say
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        if "not_run" in (answer := self._answer()):
            self.facts["not_run"] = f"in a step: {answer['not_run']}"
            return None
        self._cpu_s += answer["cpu_s"]
        return None

    def cpu_s(self) -> float:
        """Returns the processor time of this process and of all steps."""
        return super().cpu_s() + self._cpu_s

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"not_run": f"its process {ended(self._process.wait())}"}
        answer: dict[str, Any] = json.loads(line)
        return answer
