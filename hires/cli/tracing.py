"""Gets graphs and memory from a process that has torch, since the front end imports no torch.

``python -m hires.engine.footprint`` starts with the first request that the cache cannot answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from typing import IO, Any, cast

from hires.cli import answer_cache
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError, PlanError, RunError
from hires.launcher.ranks import spawn
from hires.plan.graph import Graph
from hires.plan.plan import Plan

_END_S = 5.0
"""How long a process that gave no answer may take to end by itself."""


class TorchProcess(contextlib.AbstractContextManager["TorchProcess"]):
    """A process that has torch and answers requests, one line of JSON each."""

    def __init__(self, module: str = "hires.engine.footprint") -> None:
        self._module = module
        self._process: spawn.Child | None = None
        self._pipes: list[IO[str]] = []
        """Its standard input, output and error, as this process writes and reads them."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._process is None:
            return
        if kind is not None:
            self._process.kill()  # Ctrl-C does not wait for an answer
        self._end()

    def trace(self, config: RunConfig) -> Graph:
        """Returns the graph of the config's network, for one microbatch."""
        key = answer_cache.trace_key(config)
        answer = answer_cache.read("trace", key)
        if isinstance(answer, dict) and answer_cache.same_sources(answer.get("sources")):
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                return Graph.from_dict(answer["graph"])
        answer = self._ask("tracing the network", {"trace": to_dict(config)})
        if answer.get("sources") is not None:
            answer_cache.write("trace", key, answer)
        return Graph.from_dict(answer["graph"])

    def footprint(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
        """Returns the memory of each rank of a replica, as ``plan.memory`` holds it."""
        question = {"config": to_dict(config), "plan": plan.to_dict()}
        answer = self._ask("predicting the memory", {"memory": question})
        return cast("list[dict[str, int]]", answer["memory"])

    def _ask(self, what: str, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        stdin, stdout, _ = self._pipes
        answer = None
        with contextlib.suppress(BrokenPipeError, ValueError):
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
        if not isinstance(answer, dict):
            raise RunError(f"{what} failed {self._last_output()}")
        if "error" in answer:
            kinds = {"ConfigError": ConfigError, "PlanError": PlanError}
            raise kinds.get(answer["error"]["type"], RunError)(answer["error"]["text"])
        return answer

    def _start(self) -> None:
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed by _end
        (stdin, questions), (answers, stdout) = os.pipe(), os.pipe()
        self._pipes = [os.fdopen(questions, "w"), os.fdopen(answers), errors]
        try:
            command, environ = [sys.executable, "-m", self._module], spawn.helper_environment()
            self._process = spawn.start(
                command, environ, stdin=stdin, stdout=stdout, stderr=errors.fileno()
            )
        finally:
            os.close(stdin)
            os.close(stdout)

    def _last_output(self) -> str:
        """Returns the exit code of a process that gave no answer, and its last output."""
        assert self._process is not None
        stdin, _, errors = self._pipes
        stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()  # one that still runs has answered with something else
        code = self._process.wait()
        errors.seek(0)
        output = " | ".join(errors.read().strip().splitlines()[-3:]) or "it wrote nothing"
        self._end()
        return f"(exit code {code}): {output}"

    def _end(self) -> None:
        """Waits for the process to end; the next question starts another one."""
        assert self._process is not None
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # of questions that the process did not read
                pipe.close()
        self._process.wait()
        self._process, self._pipes = None, []
