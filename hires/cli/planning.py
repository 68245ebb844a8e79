"""Turns configs into plans with all findings; nothing is started here.

Points that differ only in keys that do not decide the plan have one plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from hires.cli.data_keys import DataSize, trained_network
from hires.cli.overrides import key_in
from hires.cli.screen import print_activity
from hires.cli.show_plan import finding_lines
from hires.cli.tracing import Shapes, TorchProcess, tensors_of, trace_key
from hires.core.config.fields import keys_without
from hires.core.config.parallel_config import AUTO
from hires.core.config.precision_config import INT8, PrecisionConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.config.training_config import INFERENCE
from hires.core.errors import ConfigError, HiresError, PlanError
from hires.core.evaluation_summary import IMAGES, PIXELS
from hires.core.store import checkpoints, frozen, network_weights
from hires.core.store.cache import cached, keep, key_of
from hires.core.store.frozen import RunInputs, SourceFile, frozen_of
from hires.core.store.network_weights import WeightsPlace, find_weights, require_fit
from hires.core.store.rundir import run_path
from hires.data.content import HAS_FILES, content_of
from hires.plan.bands import LEAST_ROWS, bands_of
from hires.plan.checks import check_colours, check_numbers, has_weights, indivisible
from hires.plan.graph import Graph
from hires.plan.hardware import CPU, check_hardware
from hires.plan.memory import cublas_workspaces, rooms_of, spill_findings
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import Finding, Plan, errors_of
from hires.plan.planner import (
    evaluation_of,
    in_bands,
    kind_of,
    make_plan,
    with_evaluations,
    with_validation,
)
from hires.plan.route_choice import table_digest
from hires.plan.search.candidates import DECIDED
from hires.plan.search.remedies import fewer_on_a_node, offered
from hires.quant.affine import LARGEST
from hires.quant.scales import Scales, read_scales, require_pair, scales_of, stored_scales

T = TypeVar("T")
LAYOUT_KEYS = frozenset({"parallel", "parallel.objective", "ranks", *DECIDED})
"""Keys that say which layout, or which one is to be chosen."""
_CONFIG_DIR = "--config-dir"
_DERIVED = ("findings", "verdict", "totals", "memory", "placement", "validation")
"""What follows from the rest of a plan."""
_AS_QUANTISED = "use the model, model.classes and engine.fuse with which it was quantised"
_CANNOT = "the layout cannot run: "
_MOST_GRAPHS = 128  # kept at the same time; a large one takes some megabytes
_MOST_PLANS = 16


class MemoryNeeds(NamedTuple):
    """Predicted memory of a run."""

    peak_bytes: int | None
    """Of the rank that needs most; None if unknown."""
    host_bytes: int
    """Of all ranks of the host with their libraries; 0 if unknown."""
    gpus: int
    """GPUs of the first machine that its ranks take."""

    @classmethod
    def of(cls, config: RunConfig, plan: Plan) -> MemoryNeeds:
        """Returns the memory that a plan needs."""
        room, *others = [dataclasses.replace(one, rank_bytes=None) for one in rooms_of(config)]
        gpus = min(plan.num_processes, room.devices)
        if not plan.memory:
            return cls(None, 0, gpus)
        peak = max(entry["peak_bytes"] for entry in plan.memory)
        return cls(peak, [room, *others][-1].needed(plan), gpus)


class Planner(contextlib.AbstractContextManager["Planner"]):
    """Plans configs with one process that has torch, which ends with its block."""

    def __init__(self, process: TorchProcess | None = None) -> None:
        self._process = TorchProcess() if process is None else process
        self._kept: dict[str, dict[str, Any]] = {}
        """Plans, graphs and what files hold, by what they are and the keys that decide them."""
        self.sizes: dict[str, DataSize] = {}
        """Those of each data that was looked at."""

    def __exit__(self, *error: Any) -> None:
        self._process.__exit__(*error)

    def plan(self, config: RunConfig, argv: Sequence[str] = (), *, memory: bool = True) -> Plan:
        """Returns the plan of a config, with all findings.

        The config is one of :func:`hires.cli.data_keys.resolve_data`, ``argv`` its command line.
        With ``memory`` the memory of every rank is predicted and compared with what there is; what
        does not fit is an error. ConfigError: the network cannot be built or traced, or
        ``checkpoint.resume`` names nothing that the run can go on with.
        """
        self._check_begin(config)  # it is no part of the plan, so not of the key
        key = json.dumps([plan_key(config), has_weights(config), memory], sort_keys=True)

        def make() -> Plan:
            plan = make_plan(config, self.traced(config), offered(config))
            plan = with_validation(config, plan, self.traced)
            return self.with_memory(config, plan, argv) if memory else plan

        plan = self._once("plan", key, make, _MOST_PLANS)
        print_activity("")
        has_maps = config.task.name == "predict" and kind_of(config, plan.graph) in (PIXELS, IMAGES)
        more = _data_findings(config, has_maps) if memory else []
        return plan.with_findings(*more)

    def graph(self, config: RunConfig) -> Graph:
        """Returns the network that the ranks of a config compute; errors are those of a trace."""
        return rewritten(config, self.traced(config))

    def write_quantised(
        self, config: RunConfig, plan: Plan, path: Path, mark: str
    ) -> dict[str, Any]:
        """Writes what the network of a plan for one process holds; see :class:`TorchProcess`."""
        return self._process.quantised(config, plan, path, mark)

    def output_noise(self, config: RunConfig) -> dict[str, Any]:
        """Returns noise and classes of the int8 network's output for each ``quant.weights``.

        ``config`` is that of one process; nothing is returned if fp32 does not fit into its memory.
        """
        if not self.plan(dataclasses.replace(config, precision=PrecisionConfig())).ok:
            return {}
        kinds = ((n, dataclasses.replace(config.quant, weights=n)) for n in LARGEST)
        each = {n: dataclasses.replace(config, quant=quant) for n, quant in kinds}
        plans = {name: self.plan(one, memory=False) for name, one in each.items()}
        return self._process.output_noise(config, plans)

    def with_memory(self, config: RunConfig, plan: Plan, argv: Sequence[str] = ()) -> Plan:
        """Returns a plan with the memory of every rank, and an error if it does not fit.

        The error ends with the command that lists the layouts that fit, of the keys in ``argv``.

        A step that a rank cannot run is an error, too; a prediction that fails for another reason
        is a warning.
        """
        if not plan.ok:
            return plan
        print_activity("predicting the memory ...")
        try:
            plan = plan.with_results(memory=self._memory_of(config, plan))
        except PlanError as error:  # a rank cannot run it
            keys = [k for k in ("loss.target", "optimizer.args") if f"{k}=" in str(error)]
            return plan.with_findings(Finding("error", [*keys, "model"][0], str(error)))
        except HiresError as error:
            text = f"the memory of the ranks could not be predicted: {error}"
            return plan.with_findings(Finding("warning", "memory", text))
        plan = plan.with_findings(*spill_findings(config, plan))
        room, *beside = rooms_of(config)
        shortage = room.shortage(config, plan)
        if shortage and (smaller := _smaller_bands(config, plan)) is not None:
            return self.with_memory(config, smaller, argv)
        for host in beside:
            if lacking := host.shortage(config, plan):
                text = f"{lacking}; {fewer_on_a_node(config)}"
                plan = plan.with_findings(Finding("error", "cluster.memory", text))
        if shortage:
            others = _choose_command(argv, config.parallel.num_ranks)
            text = f"{shortage}; `{others}` lists the layouts that fit, or how many ranks would do"
            if plan.training and plan.device == CPU and config.memory.spill is None:
                text += "; memory.spill=FOLDER keeps activations on a disk, and parallel.resident"
                text += " trains more parallel.tiles in one process, in turn"
            if config.task.name in INFERENCE and not plan.band_rows:
                text += "; parallel=stream computes images of any height in bands of rows"
            plan = plan.with_findings(Finding("error", "memory.limit", text))
        return plan

    def _once(self, kind: str, key: str, make: Callable[[], T], most: int = 10**6) -> T:
        """Returns what is kept under a key, or makes it; of too many the oldest one goes."""
        kept = self._kept.setdefault(kind, {})
        kept[key] = kept.pop(key) if key in kept else make()  # the last is the one used last
        if len(kept) > most:
            del kept[next(iter(kept))]
        return cast(T, kept[key])

    def _check_begin(self, config: RunConfig) -> None:
        """Refuses weights, or a checkpoint of another run, that this one cannot begin with."""
        if config.weights is not None:
            self._check_weights(config)
        source = config.checkpoint.source
        if source is not None:
            inputs = self.inputs(config)
            run = run_path(config, inputs)
            candidates, _ = checkpoints.candidates(run, config, frozen_of(config, {}, inputs))
            if candidates and candidates[0].path.parent != run / checkpoints.FOLDER:
                needed, held = shapes_of(self.traced(config)), candidates[0].shapes()
                how = "use the model and model.classes of its run"
                require_fit(f"checkpoint.resume={source}", held, needed, held, how)

    def _check_weights(self, config: RunConfig) -> None:
        stored = stored_scales(config)
        place, digest = self._weights(config)
        graph = self.traced(config) if stored is None else self.graph(config)
        types = {name: one.dtype for name, one in graph.params.items()}
        if stored is not None and stored.weights != digest:
            raise ConfigError(
                f"weights={config.weights} is not the file that the scales beside it were written "
                f"with; copy both again, or make them again with `hires quantize`"
            )
        if stored is not None:
            require_pair(place, stored, types)

        def require_fitting() -> None:
            shapes, theirs = tensors_of(place, self._process)
            # A network of the user's may hold tensors that no layer reads.
            others = self._process.tensors.get(trace_key(config), ())
            how = trained_network(config) if stored is None else _AS_QUANTISED
            require_fit(place.key, shapes, shapes_of(graph), others, how)
            if stored is None:
                network_weights.require_types(place.key, theirs, types)

        self._once("fit", json.dumps([config.weights, digest, trace_key(config)]), require_fitting)

    def _weights(self, config: RunConfig) -> tuple[WeightsPlace, str]:
        """Returns what ``weights`` names, which is set, and its digest."""

        def make() -> tuple[WeightsPlace, str]:
            place = find_weights(config.weights or "")
            if place.is_pickle:  # only torch reads it
                return place, self._process.weights(place.path)["digest"]
            return place, place.digest()

        return self._once("weights", config.weights or "", make)

    def inputs(self, config: RunConfig) -> RunInputs:
        """Returns what decides a run beside its config (:func:`hires.cli.data_keys.resolve_data`).

        ConfigError: the network's files or the images cannot be read.
        """
        network, data = self._sources(config), None
        table, weights = table_digest(config), self._weights(config)[1] if config.weights else ""
        scales = scales_of(config) if config.precision.name == INT8 else None
        loss = frozen.module_digest(config.loss.target) if config.loss.target else ""
        if config.data.name in HAS_FILES:
            key = json.dumps(vars(config.data))
            data = self._once("data", key, lambda: content_of(config.data))
        return RunInputs(network, data, table, weights, scales.digest if scales else "", loss)

    def _sources(self, config: RunConfig) -> tuple[SourceFile, ...]:
        """Returns the files of a network of the user's, as they were before this command ran it."""
        if config.model.name != "custom":
            return ()
        target, files = str(config.model.target), config.model.files
        key = json.dumps([target, files])
        return self._once("network", key, lambda: frozen.network_sources(target, files))

    def scales_in(self, path: Path) -> Scales:
        """Returns the scales of a file, read once in a command; errors are those of read_scales."""
        return self._once("scales", str(path), lambda: read_scales(path))

    def traced(self, config: RunConfig) -> Graph:
        """Returns the network of a config, for one microbatch, as it is traced."""
        self._sources(config)  # one that is edited while it is traced is refused by its ranks

        def make() -> Graph:
            print_activity("tracing the network ...")
            try:
                return self._process.trace(config)
            except ConfigError as error:  # which also says what is wrong with the layout
                problems = [*check_numbers(config), *offered(config)]
                # The samples that were traced are those of no batch that divides.
                texts = [] if indivisible(config) else [str(error)]
                raise ConfigError("; ".join([*texts, *map(str, problems)])) from None

        return self._once("graph", trace_key(config), make, _MOST_GRAPHS)

    def search_memory(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
        """Returns the memory of every rank of a plan of a search, that of its evaluations included.

        HiresError: it cannot be predicted; PlanError: the evaluations cannot run.
        """
        plan = with_validation(config, plan, self.traced)
        for problem in plan.findings:
            if problem.severity == "error":
                raise PlanError(problem.text)
        return self._memory_of(config, plan)

    def _memory_of(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
        memory = self.rehearsed(config, plan)
        if plan.validation is None:
            return memory
        beside = self.rehearsed(evaluation_of(config), plan.validation)
        return [with_evaluations(*both) for both in zip(memory, beside, strict=True)]

    def rehearsed(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
        """Returns the memory of every rank of a plan; HiresError: it cannot be predicted."""
        values = plan_key(config) | {"cublas_workspaces": cublas_workspaces(config)}
        del values["memory"]["limit"]
        facts = {key: value for key, value in plan.to_dict().items() if key not in _DERIVED}
        key = key_of(values, facts, [file.sha256 for file in self._sources(config)])
        memory: list[dict[str, int]] = cached("memory", key)
        if memory is None:
            memory = self._process.footprint(config, plan)
            keep("memory", key, memory)
        return memory


def _smaller_bands(config: RunConfig, plan: Plan) -> Plan | None:
    """Returns a plan in bands that needs less memory; None: it is none, or there is none."""
    if not plan.band_rows:
        return None
    stored = bands_of(plan).stored_bytes if not plan.stores_on_disk else 0
    rows, needed = plan.band_rows, max(one["activations_bytes"] for one in plan.memory)
    if config.parallel.band_rows == AUTO and rows > LEAST_ROWS and 2 * stored < needed:
        return in_bands(plan, max(LEAST_ROWS, rows // 2 // LEAST_ROWS * LEAST_ROWS))
    if not stored:
        return None
    folder = tempfile.gettempdir()
    text = f"maps between two walks are stored in temporary files in {folder} (TMPDIR)"
    plan = dataclasses.replace(plan, stores_on_disk=True)
    return plan.with_findings(Finding("note", "memory.limit", text))


def _choose_command(argv: Sequence[str], ranks: int) -> str:
    """Returns the command that lists the layouts of so many ranks for a run's other keys."""
    kept = ["hires", "plan", "--choose", f"ranks={ranks}"]
    for before, word in itertools.pairwise(["", *argv]):
        if before == _CONFIG_DIR or word.startswith(f"{_CONFIG_DIR}="):
            kept.append(f"{_CONFIG_DIR}={word.removeprefix(f'{_CONFIG_DIR}=')}")
        elif "=" in word and not word.startswith("-") and key_in(word) not in LAYOUT_KEYS:
            kept.append(word)
    return shlex.join(kept)


def plan_key(config: RunConfig) -> dict[str, Any]:
    """Returns a config as plain values without the keys that do not decide its plan."""
    values = to_dict(config)
    for key in keys_without(RunConfig, "plan"):
        section, _, name = key.rpartition(".")
        del (values[section] if section else values)[name]
    # A run of fewer steps than microbatches are read ahead holds fewer of them.
    values["ahead"] = min(config.steps, config.data.prefetch + 1)
    if config.data.path is not None:
        from hires.data.start_check import decoding_bytes  # which imports the decoders

        values["decoding"] = decoding_bytes(config)
    if config.model.name != "custom":  # a user's function may draw what it builds
        del values["seed"]
    return values


def _data_findings(config: RunConfig, has_maps: bool) -> list[Finding]:
    """Returns findings that points of one plan do not share."""
    findings = [*check_colours(config)]
    if config.data.path is not None:
        from hires.data.start_check import data_findings  # which imports the decoders

        found = data_findings(config, has_maps)
        findings += [Finding(one.severity, one.key, str(one)) for one in found]
    return findings


def require_feasible(plan: Plan) -> None:
    """Prints warnings and notes; raises PlanError with all errors of a plan that has any."""
    others = [finding for finding in plan.findings if finding.severity != "error"]
    for line in finding_lines(others):
        print(line, file=sys.stderr)
    if not plan.ok:
        raise PlanError(f"{_CANNOT}{plan.errors}")


def require_hardware(config: RunConfig) -> None:
    """Raises PlanError of what a machine lacks, before anything imports torch."""
    if lacks := errors_of(check_hardware(config)):
        raise PlanError(f"{_CANNOT}{lacks}")


def shapes_of(graph: Graph) -> Shapes:
    """Returns the shapes of a network's own parameters and buffers, in the order of its layers."""
    names = (name for node in graph.nodes for name in node.params)
    own = (one for name in dict.fromkeys(names) for one in sorted(graph.own_params([name])))
    return {name: list(graph.params[name].shape) for name in own}
