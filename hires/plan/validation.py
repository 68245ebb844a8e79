"""Plans the evaluations of a training: the same ranks and stages, without backward passes.

    step          0   1   2   3 |           | 4   5   6   7 |           |
    plan          training      | .validation  training     | .validation
    parameters    move ------------------->   move ----------------->

The evaluation computes on the training's own tensors, so its stages hold the same layers. It runs
the network as it is: a rewritten one would need folded copies of all weights beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from hires.core.config.data_config import AUTO, PredictConfig, ValidateConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import HALF
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import EngineConfig, MemoryConfig, TaskConfig
from hires.core.evaluation_summary import (
    CLASSES,
    IMAGES,
    LOSS,
    PIXELS,
    ROW_KINDS,
    is_larger_better,
    metrics_of,
)
from hires.core.losses import LABELS, NUMBERS
from hires.plan.graph import Graph
from hires.plan.memory import RankMemory
from hires.plan.plan import Finding, Plan
from hires.plan.planner import make_plan

_USUAL = {CLASSES: "top1", PIXELS: "mean_iou", IMAGES: "psnr", LABELS: "mean_ap", NUMBERS: "rmse"}
"""What ``validate.metric=auto`` means."""


def kind_of(config: RunConfig, graph: Graph) -> str:
    """Returns what one output holds: ``classes``, ``pixels``, ``images``, or one of ROW_KINDS."""
    if config.objective.compares in (IMAGES, *ROW_KINDS):
        return config.objective.compares
    return CLASSES if len(graph.shape(graph.output)) == 2 else PIXELS


def evaluation_of(config: RunConfig, layers: list[int] | None = None) -> RunConfig:
    """Returns the config of the evaluations of a training; ``layers`` are those of its stages."""
    parallel: ParallelConfig = config.parallel
    if layers is not None and len(layers) > 1:
        parallel = dataclasses.replace(parallel, balance=layers)
    precision = config.precision
    if precision.name in HALF:  # the parameters stay in fp32
        precision = dataclasses.replace(precision, weights="fp32", loss_scale="dynamic")
    return dataclasses.replace(
        config,
        task=TaskConfig(name="evaluate"),
        data=dataclasses.replace(config.data, split="validation"),
        parallel=parallel,
        precision=precision,
        engine=EngineConfig(compile="off", fuse="off"),
        memory=dataclasses.replace(config.memory, checkpoint=MemoryConfig.checkpoint),
        validate=ValidateConfig(),
        predict=PredictConfig(),
        epochs=None,
    )


def metric_of(config: RunConfig, graph: Graph) -> str:
    """Returns the name in a summary of the number that says which evaluation is the best."""
    chosen = config.validate.metric
    return _USUAL[kind_of(config, graph)] if chosen == AUTO else chosen


def is_better(config: RunConfig, metric: str, value: float | None, best: float | None) -> bool:
    """Whether a value of the metric is better than the best before it; None: no number."""
    if value is None or best is None:
        return value is not None
    gain = value - best if is_larger_better(metric) else best - value
    return gain > config.validate.min_delta


def with_validation(config: RunConfig, plan: Plan, traced: Callable[[RunConfig], Graph]) -> Plan:
    """Returns the plan of a training with that of its evaluations, and what forbids them.

    ``traced`` returns the network of a config. Nothing is added where a run is not evaluated, or
    cannot run.
    """
    if not (config.validates and plan.ok):
        return plan
    other = evaluation_of(config, [stage.num_layers for stage in plan.stages])
    evaluation = make_plan(other, traced(other))
    plan = plan.with_results(validation=evaluation)
    plan = plan.with_findings(*_unfit(config, plan, evaluation))
    if not (plan.ok and evaluation.verdict):
        return plan
    text = f"evaluations (validate.every={config.validate.every}): {evaluation.verdict}"
    return plan.with_findings(Finding("note", "validate.every", text))


def _unfit(config: RunConfig, plan: Plan, evaluation: Plan) -> Iterator[Finding]:
    held = {finding.text for finding in plan.findings}
    for finding in evaluation.findings:
        if finding.severity == "error" and finding.text not in held:
            text = f"of the evaluations (validate.every): {finding.text}"
            yield Finding("error", finding.key, text)
    kind, metric = kind_of(config, plan.graph), metric_of(config, plan.graph)
    known = [LOSS, *metrics_of(kind, plan.graph.shape(plan.graph.output))]
    if metric not in known:
        text = (
            f"validate.metric={metric} is no number of an evaluation whose outputs are {kind}; use "
            f"one of {', '.join(known)}"
        )
        yield Finding("error", "validate.metric", text)
    for stage in evaluation.stages if evaluation.ok else ():
        here = _names(plan, stage.index)
        if missing := sorted(_names(evaluation, stage.index) - here):
            text = (
                f"stage {stage.index} of an evaluation reads {missing[0]}, which the training has "
                f"in another stage; set parallel.balance, or leave validate.every out"
            )
            yield Finding("error", "validate.every", text)
            return


def _names(plan: Plan, stage: int) -> set[str]:
    names = {name for node in plan.nodes(stage) for name in node.params}
    return set(plan.graph.own_params(names))


def with_evaluations(training: dict[str, int], evaluation: dict[str, int]) -> dict[str, int]:
    """Returns the memory of a rank of ``plan.memory`` whose training is evaluated as it goes on.

    Gradients and the optimiser's state stay while it is evaluated; what carries the messages of
    either is there all the time.
    """
    shared = {key: training[key] + evaluation[key] for key in ("shm_bytes", "nccl_bytes")}
    shared["start_bytes"] = training["start_bytes"]
    kept = {"optimizer_bytes": training["optimizer_bytes"]}
    # At the fullest moment of a step some gradients may not be there yet.
    kept["grads_bytes"] = max(training["grads_bytes"], training["params_bytes"])
    names = [field.name for field in dataclasses.fields(RankMemory)]
    both = ({**training, **shared}, {**evaluation, **shared, **kept})
    made = [RankMemory(**{name: one[name] for name in names}) for one in both]
    return max(made, key=lambda one: one.device_bytes).to_dict()
