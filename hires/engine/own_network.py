"""Builds and traces networks of the user's for the front end, with what they were made from.

It is built every time, for only that shows whether a file, or whatever else it reads, has changed;
it is traced if the description is not that of the cached trace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from hires.core.config.run_config import RunConfig, to_dict
from hires.core.store.frozen import MOST_READ
from hires.engine.build import named_tensors
from hires.engine.trace_check import check_trace, one_thread
from hires.nets.build_network import build_model
from hires.nets.built_tensors import built_network
from hires.nets.constants import constant_tensor
from hires.nets.custom import own_sources, source_hashes
from hires.nets.opened_files import OpenedFiles
from hires.nets.plain_state import digest_of_state
from hires.nets.read_variables import ReadVariables
from hires.nets.trace import trace_config
from hires.plan.graph import Graph

Values = dict[str, Any]


class OwnNetwork:
    """The networks of one process, of which it keeps the last one that was built."""

    def __init__(self) -> None:
        self._opened = OpenedFiles()
        self._variables = ReadVariables()
        self._key = ""
        self._model: nn.Module | None = None
        self._built: Values = {}

    def describe(self, config: RunConfig) -> Values:
        """Returns what a network was built from, and what was built.

        ``sources`` are the digests of files by path (None: they may have changed meanwhile),
        ``network`` those that are its own (not all, with ``more_files``), ``built`` its tensors,
        and ``state`` is a digest of its other attributes. ``environ`` are digests of all variables
        of the environment. ConfigError: it cannot be built.
        """
        model = self._made(config)
        built = dataclasses.asdict(built_network(named_tensors(model)))
        self._built = {"built": built, "environ": self._variables.at_start, **self._files(config)}
        names = [one["module"] for one in self._built["network"] if one["module"]]
        self._built["state"] = digest_of_state(model, names)
        return self._built

    def trace(self, config: RunConfig) -> Values:
        """Returns the graph of a network as well, and the ``variables`` that it reads.

        ConfigError: it cannot be traced, or differs.
        """
        answer = self.describe(config)
        model = self._made(config)
        self._model = None  # the comparison uses it up
        graph = self._compared(config, model)
        answer["built"]["graph"] = graph_digest(graph)
        constants = {n: constant_tensor(f) for n, f in graph.params.items() if f.is_constant}
        answer["built"]["constants"] = dataclasses.asdict(built_network(constants))["tensors"]
        del answer["environ"]
        read = {"variables": self._variables.read(), **self._files(config)}
        return {**answer, **read, "graph": graph.to_dict()}

    def graph(self, config: RunConfig) -> Graph:
        """Returns the graph of a network, compared with its module."""
        model, self._model = self._made(config), None
        return self._compared(config, model)

    def model(self, config: RunConfig) -> nn.Module:
        """Returns the module of a config, for its shapes."""
        return self._made(config)

    def _made(self, config: RunConfig) -> nn.Module:
        size = config.height, config.width
        key = json.dumps([to_dict(config)["model"], config.seed, size], sort_keys=True)
        if self._model is None or key != self._key:
            self._model, self._key = None, key
            with self._opened.noting(), self._variables.noting(), one_thread():
                self._model = build_model(config.model, config.seed, size)
        return self._model

    def _compared(self, config: RunConfig, model: nn.Module) -> Graph:
        with self._opened.noting(), self._variables.noting():
            graph = trace_config(config, model)
            graph.unchecked = check_trace(model, graph, config.task.name == "train")
        return graph

    def _files(self, config: RunConfig) -> Values:
        read = self._opened.read()
        network = own_sources(str(config.model.target), read)
        files = {"sources": source_hashes(read), "network": network}
        return {**files, "more_files": self._opened.is_full or _num_bytes(read) > MOST_READ}


def _num_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())


def graph_digest(graph: Graph) -> str:
    """Returns 16 digits of the operations of a network."""
    nodes = [[node.name, node.op, node.args, node.shape, node.dtype] for node in graph.nodes]
    text = json.dumps([nodes, graph.output, graph.input_shape], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
