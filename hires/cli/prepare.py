"""Turns a config into a plan with all findings, for the verbs ``run``, ``plan`` and ``verify``.

The number of classes is read from the data, the network is traced, the layout is planned and its
memory predicted; a plan with errors is refused. Nothing is started here.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from hires.cli.screens.show_plan import finding_lines
from hires.cli.tracing import TorchProcess
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError
from hires.core.store import checkpoints
from hires.core.store.checkpoints import Checkpoint, refuse_other_network
from hires.core.store.naming import run_name
from hires.plan.graph import Graph
from hires.plan.partition import layer_starts
from hires.plan.plan import Plan
from hires.plan.search.advice import offered


def planned(config: RunConfig, memory: bool = True) -> Plan:
    """Returns the plan of a config, with all findings.

    Args:
        config: as :func:`with_classes` returns it.
        memory: whether the memory of every rank is predicted and compared with what there is.

    Raises:
        ConfigError: the network cannot be built or traced, or ``checkpoint.resume`` names nothing
            that the run can go on with.
    """
    begins = from_elsewhere(config)
    from hires.cli.forecast import add_forecast
    from hires.plan.planner import make_plan

    began_s = time.monotonic()
    with TorchProcess() as process:
        _say("tracing the network ...")
        graph = traced(config, process)
        refuse_other_network(begins, shapes_of(graph), config.checkpoint.source)
        plan = make_plan(config, graph, offered(config, len(layer_starts(graph))))
        if memory:
            _say("predicting the memory ...")
            add_forecast(config, plan, process, began_s)
    _say("")
    return plan


def from_elsewhere(config: RunConfig) -> list[Checkpoint]:
    """Returns the checkpoints of another run with which a run may begin, the best first.

    Raises:
        ConfigError: ``checkpoint.resume`` names nothing that the run can go on with.
    """
    run = Path(config.results) / config.campaign / run_name(config)
    candidates, _ = checkpoints.candidates(run, config)
    return [one for one in candidates if one.path.parent != run / checkpoints.FOLDER]


def shapes_of(graph: Graph) -> dict[str, list[int]]:
    """Returns the shapes of a network's parameters and buffers, in the order of its layers."""
    names = dict.fromkeys(name for node in graph.nodes for name in node.params)
    return {name: list(graph.params[name].shape) for name in names}


def traced(config: RunConfig, process: TorchProcess) -> Graph:
    """Returns the graph of the network.

    Raises:
        ConfigError: it cannot be traced; the message also holds what is wrong with the layout.
    """
    from hires.plan.checks import check_numbers

    try:
        return process.trace(config)
    except ConfigError as error:
        others = [f"{f.text} [{f.key}]" for f in [*check_numbers(config), *offered(config)]]
        raise ConfigError("; ".join([str(error), *others])) from None


def classes_of_data(config: RunConfig) -> int:
    """Returns how many classes the data of a config has.

    Raises:
        ConfigError: the data folder is missing or unusable.
    """
    from hires.data.source import open_data

    return open_data(config).num_classes


def with_classes(config: RunConfig, classes_in_data: int | None = None) -> RunConfig:
    """Returns the config with ``model.classes`` as many as the data has, unless it is set.

    Args:
        config: as composed.
        classes_in_data: what :func:`classes_of_data` returned; None: it is called.

    Raises:
        ConfigError: the data folder is missing or unusable, or has more classes than the network.
    """
    num_classes = classes_of_data(config) if classes_in_data is None else classes_in_data
    classes = config.model.classes or num_classes
    if classes < num_classes and config.target_size is None:
        raise ConfigError(
            f"model.classes={classes} is fewer than the {num_classes} classes of the data; "
            f"leave model.classes out, or set it to {num_classes} or more"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, classes=classes))


def require_feasible(plan: Plan) -> None:
    """Prints warnings and notes; refuses a plan that has errors.

    Raises:
        PlanError: the plan has errors; the message holds all of them.
    """
    errors = [finding for finding in plan.findings if finding.severity == "error"]
    others = [finding for finding in plan.findings if finding.severity != "error"]
    for line in finding_lines([dataclasses.asdict(finding) for finding in others]):
        print(line, file=sys.stderr)
    if errors:
        text = "; ".join(f"{finding.text} [{finding.key}]" for finding in errors)
        raise PlanError(f"the layout cannot run: {text}")


def _say(what: str) -> None:
    """Shows the progress in the current line of a terminal; the next output overwrites it."""
    if sys.stderr.isatty():
        print(f"{what:<40}", end="\r", file=sys.stderr, flush=True)
