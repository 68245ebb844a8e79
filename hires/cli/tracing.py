"""Gets graphs and memory from a process that has torch, since the front end imports no torch.

``python -m hires.engine.footprint`` starts with the first request that the user's cache of answers
does not hold, or before where one is likely. ``HIRES_CACHE=off`` leaves the cache alone; a damaged
entry is made again.

    ~/.cache/hires/trace/HASH.json     graph of a network, with hashes of the files it came from
    ~/.cache/hires/memory/HASH.json    memory of every rank of a plan
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
from hires.core.python_command import module_command
from hires.core.store.built_network import BuiltNetwork
from hires.core.store.cache import cached, keep, key_of
from hires.core.store.frozen import RunInputs, digest, sha256_of
from hires.launcher.ranks import spawn
from hires.plan.graph import Graph
from hires.plan.memory import machine_bytes
from hires.plan.plan import Plan

_END_S = 5.0  # of a process that gave no answer, to end by itself


class TorchProcess(contextlib.AbstractContextManager["TorchProcess"]):
    """A process that has torch and answers requests, one line of JSON each."""

    def __init__(self, module: str = "hires.engine.footprint") -> None:
        self._module = module
        self._process: spawn.Child | None = None
        self._imported: dict[str, Any] | None = None
        """Keys of the last network of the user's."""
        self.networks: dict[str, RunInputs] = {}
        """What the traced networks of the user's were made from, by :func:`trace_key`."""
        self._pipes: list[IO[str]] = []
        """Its standard input, output and error, as this process writes and reads them."""
        self._was_asked = False

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._process is None:
            return
        if kind is not None or not self._was_asked:
            self._process.kill()  # neither Ctrl-C nor its imports are worth waiting for
        self._end()

    def start(self) -> None:
        """Starts it before its first question, so that it imports torch meanwhile."""
        if self._process is None:
            self._start()

    def trace(self, config: RunConfig) -> Graph:
        """Returns the graph of the config's network, for one microbatch."""
        key = trace_key(config)
        held, now = cached("trace", key), None
        if config.model.name == "custom":
            self._forget_other_networks(config)
            # What it reads may have changed: only what is built now shows that it has not.
            if held is not None:
                now = self._ask("building the network", {"build": to_dict(config)})
                held = held if same_network(held, now) else None
        if held is not None and same_sources(held["sources"]):
            graph = Graph.from_dict(held["graph"])
            self._note(key, held if now is None else _with_times(held, now))
            return graph
        answer = self._ask("tracing the network", {"trace": to_dict(config)})
        if answer.get("sources") is not None:
            keep("trace", key, answer)
        self._note(key, answer)
        return Graph.from_dict(answer["graph"])

    def kept_inputs(self, config: RunConfig) -> RunInputs | None:
        """Returns what the kept trace of a network of the user's was made from; None: it is old.

        Its files and variables are those of now. That they still make the same network, as they do
        of nearly all, is only seen where it is built, which :meth:`trace` does.
        """
        held = cached("trace", trace_key(config))
        with contextlib.suppress(ConfigError, KeyError, TypeError, AttributeError):
            environ = spawn.helper_environment()
            now = {name: digest(environ[name]) for name in held["variables"] if name in environ}
            before = {name: one for name, one in held["variables"].items() if one is not None}
            if now == before and same_sources(held["sources"]):
                return _inputs(held)
        return None

    def _note(self, key: str, answer: dict[str, Any]) -> None:
        self.networks[key] = _inputs(answer)

    def weights(self, path: Path) -> dict[str, list[int]]:
        """Returns the shapes of the tensors in a pickle of torch; ConfigError: it holds others."""
        return cast("dict[str, list[int]]", self._held(path)["shapes"])

    def weight_types(self, path: Path) -> dict[str, str]:
        """Returns the types of the tensors in a pickle of torch; ConfigError: it holds others."""
        return cast("dict[str, str]", self._held(path)["dtypes"])

    def _held(self, path: Path) -> dict[str, Any]:
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
        question["mark"] = mark
        return self._ask("writing the weights", {"quantised": question})

    def footprint(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
        """Returns the memory of each rank of a replica, as ``plan.memory`` holds it."""
        self._forget_other_networks(config)
        question = {"config": to_dict(config), "plan": plan.to_dict()}
        answer = self._ask("predicting the memory", {"memory": question})
        return cast("list[dict[str, int]]", answer["memory"])

    def _forget_other_networks(self, config: RunConfig) -> None:
        """Ends a process that has imported another network of the user's than the config's.

        Its files would count as files of this one, whose identity would depend on the order.
        """
        model = to_dict(config)["model"] if config.model.name == "custom" else None
        if model is not None and self._imported not in (None, model) and self._process is not None:
            self._end()
        self._imported = model or self._imported

    def _ask(self, what: str, question: dict[str, Any]) -> dict[str, Any]:
        self.start()
        self._was_asked = True
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


def trace_key(config: RunConfig) -> str:
    """Returns the key of a trace: the network, shape and type of its input, and the task."""
    samples = max(1, config.batch // config.parallel.pieces)
    facts = [to_dict(config)["model"], samples, config.image, config.task.name == "train"]
    facts.append(config.image_type)
    if config.model.name == "custom":
        # The user's function may draw what it builds; its module is looked up in these folders.
        facts += [config.seed, str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        facts.append(machine_bytes())  # with too little its graph is not compared
    return key_of(facts)


def _inputs(answer: dict[str, Any]) -> RunInputs:
    names = ("network", "built", "more_files")
    return RunInputs.from_dict({name: answer.get(name) for name in names})


def same_sources(hashes: Any) -> bool:
    """Whether files have the content that they had when they were traced."""
    try:
        return all(sha256_of(Path(path)) == digest for path, digest in hashes.items())
    except (AttributeError, TypeError):
        return False


def same_network(held: Any, now: dict[str, Any]) -> bool:
    """Whether a network that is built ``now`` is the one of a trace: its files and its numbers.

    So are the variables of the environment that it reads, perhaps in its forward pass only. A
    digest of the numbers decides on one machine; two machines round them differently.
    """
    try:
        before, files = held["sources"], now["sources"]
        if files is None or any(before.get(path) != digest for path, digest in files.items()):
            return False
        environ = now["environ"]
        if any(environ.get(name) != digest for name, digest in held["variables"].items()):
            return False
        old, new = (BuiltNetwork.from_dict(one["built"]) for one in (held, now))
        return bool(held["state"] == now["state"]) and not new.other_tensors(old, exact=True)
    except (ConfigError, AttributeError, KeyError, TypeError):
        return False


def _with_times(held: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns a trace with the times that its files have now; their contents are the same."""
    files = {(one["module"], one["path"]): one for one in now["network"]}
    network = [files.get((one["module"], one["path"]), one) for one in held["network"]]
    return {**held, "network": network}
