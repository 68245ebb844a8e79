"""Gets graphs and memory from a process that has torch, since the front end imports no torch.

``python -m hires.engine.torch_server`` starts with the first request that the cache of answers does
not hold, or before where one is likely. ``HIRES_CACHE=off`` leaves the cache alone; a damaged entry
is made again.

    ~/.cache/hires/trace/HASH.json     graph of a network of hires
    ~/.cache/hires/memory/HASH.json    memory of every rank of a plan

A custom network is traced once per command: its code may read files that are not known here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.programs import module_command
from hires.core.store.cache import cached, keep, key_of
from hires.core.store.network_weights import WeightsPlace
from hires.launcher.ranks import spawn
from hires.plan.graph import Graph
from hires.plan.plan import Plan

Shapes = Mapping[str, list[int]]
_END_S = 5.0  # of a process that gave no answer, to end by itself


class TorchProcess(contextlib.AbstractContextManager["TorchProcess"]):
    """A process that has torch and answers requests, one line of JSON each."""

    def __init__(self, module: str = "hires.engine.torch_server") -> None:
        self._module = module
        self._process: spawn.Child | None = None
        self.tensors: dict[str, list[str]] = {}
        """Names of all tensors of the user's networks that were traced, by :func:`trace_key`."""
        self._pipes: list[IO[str]] = []
        """Its standard input, output and error, as this process writes and reads them."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._process is not None:
            if kind is not None:
                self._process.kill()  # Ctrl-C is not worth waiting for
            self._end()

    def trace(self, config: RunConfig) -> Graph:
        """Returns the graph of the config's network, for one microbatch."""
        key, is_custom = trace_key(config), config.model.name == "custom"
        answer = None if is_custom else cached("trace", key)
        if answer is None:
            answer = self._ask("tracing the network", {"trace": to_dict(config)})
            if not is_custom:
                keep("trace", key, answer)
        self.tensors[key] = answer.get("tensors", [])
        return Graph.from_dict(answer["graph"])

    def weights(self, path: Path) -> dict[str, Any]:
        """Returns ``shapes``, ``dtypes`` and ``digest`` of a pickle of torch.

        ConfigError: it holds more than tensors.
        """
        return self._ask("reading the weights", {"weights": str(path)})

    def write_weights(
        self,
        config: RunConfig,
        source: Path,
        path: Path,
        names: Mapping[str, str],
        first: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Writes weights as one file (``hires.engine.network_files``); returns their bytes."""
        question = {"config": to_dict(config), "source": str(source), "path": str(path)}
        question |= {"names": dict(names), "first": [*first]}
        return self._ask("writing the weights", {"stored": question})

    def write_network(self, config: RunConfig, form: str, path: Path) -> dict[str, Any]:
        """Writes a network with its weights (``hires.engine.network_files``)."""
        question = {"config": to_dict(config), "form": form, "path": str(path)}
        return self._ask("exporting the network", {"exported": question})

    def quantised(self, config: RunConfig, plan: Plan, path: Path, mark: str) -> dict[str, Any]:
        """Writes the tensors of a quantised network, planned for one process, into a file.

        Returns their bytes, and those of the network before (``write_quantised``).
        """
        question = {"config": to_dict(config), "plan": plan.to_dict(), "path": str(path)}
        return self._ask("writing the weights", {"quantised": {**question, "mark": mark}})

    def output_noise(self, config: RunConfig, plans: Mapping[str, Plan]) -> dict[str, Any]:
        """Computes int8 networks on the first batch (``hires.engine.network_files``)."""
        every = {name: plan.to_dict() for name, plan in plans.items()}
        question = {"config": to_dict(config), "plans": every}
        return self._ask("measuring the output's noise", {"output_noise": question})

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
            command, environ = module_command(self._module), spawn.helper_environment()
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
        with contextlib.suppress(OSError):  # of a question that it did not read
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


def tensors_of(place: WeightsPlace, process: TorchProcess) -> tuple[Shapes, Mapping[str, str]]:
    """Returns shapes and types of the tensors of some weights; the process reads a pickle."""
    if place.is_pickle:
        answer = process.weights(place.path)
        return answer["shapes"], answer["dtypes"]
    return place.shapes(), place.dtypes()


def trace_key(config: RunConfig) -> str:
    """Returns the key of a trace: the network, shape and type of its input, and the task."""
    samples = max(1, config.batch // config.parallel.pieces)
    facts = [to_dict(config)["model"], samples, config.image, config.task.name == "train"]
    facts.append(config.image_type)
    if config.model.name == "custom":
        facts.append(config.seed)  # the function may draw what it builds
    return key_of(facts)
