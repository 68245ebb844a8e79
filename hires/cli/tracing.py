"""How does the front end learn from torch what it needs without importing torch?

It asks another process, ``python -m hires.engine.footprint``: what does this network compute, and
how much memory does every rank of this plan need? The process starts with the first question, so
torch is imported once, and ends with the last.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import IO, Any

from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError, HiresError, PlanError, RunError
from hires.plan.graph import Graph
from hires.plan.plan import Plan

_KINDS: dict[str, type[HiresError]] = {
    "ConfigError": ConfigError,
    "PlanError": PlanError,
    "RunError": RunError,
}
_END_S = 5.0
"""How long a process that gave no answer may take to end by itself."""
_MODULE = "hires.engine.footprint"


class TorchProcess:
    """A process that has torch and answers questions, one line of JSON each; a context manager."""

    def __init__(self, module: str = _MODULE) -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def __enter__(self) -> TorchProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        if self._process is None or self._errors is None:
            return
        if kind is not None:
            self._process.kill()  # Ctrl-C does not wait for an answer
        with contextlib.suppress(OSError):
            self._process.communicate()
        self._forget()

    def trace(self, config: RunConfig) -> Graph:
        """Returns the graph of the config's network, for one microbatch.

        Raises:
            ConfigError: the network cannot be built or traced.
            RunError: the process itself failed.
        """
        answer = self._ask("tracing the network", {"trace": to_dict(config)})
        return Graph.from_dict(answer["graph"])

    def footprint(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
        """Returns the memory of each rank of a replica, as ``plan.memory`` holds it.

        Raises:
            RunError: the plan cannot be rehearsed, or the process itself failed.
        """
        question = {"config": to_dict(config), "plan": plan.to_dict()}
        answer = self._ask("predicting the memory", {"memory": question})
        memory: list[dict[str, int]] = answer["memory"]
        return memory

    def _ask(self, what: str, question: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question.

        Raises:
            HiresError: the answer is an error.
            RunError: there was no answer; the message holds the process's last words.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RunError(f"{what} failed {self._last_words(process)}")
        if "error" in answer:
            error = answer["error"]
            raise _KINDS.get(error["type"], RunError)(error["text"])
        return answer

    def _started(self) -> subprocess.Popen[str]:
        """Returns the process, which is started if it was not."""
        if self._process is None:
            self._errors = tempfile.TemporaryFile(  # noqa: SIM115, closed when the process is done
                "w+", errors="replace"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        return self._process

    def _last_words(self, process: subprocess.Popen[str]) -> str:
        """Returns the exit code of a process that gave no answer, and what it wrote last."""
        assert self._errors is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)
        process.kill()  # one that still runs has answered with something else
        process.wait()
        self._errors.seek(0)
        words = " | ".join(self._errors.read().strip().splitlines()[-3:]) or "it said nothing"
        self._forget()
        return f"(exit code {process.returncode}): {words}"

    def _forget(self) -> None:
        """Lets go of a process that has ended; the next question starts another one."""
        assert self._errors is not None
        self._errors.close()
        self._process = self._errors = None


def trace(config: RunConfig, module: str = _MODULE) -> Graph:
    """Returns the graph of the config's network, as :meth:`TorchProcess.trace` does."""
    with TorchProcess(module) as process:
        return process.trace(config)
