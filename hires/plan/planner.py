"""Turns a config into a plan, each decision once: cut, tile, schedule, connect, prove.

A training has a second plan, that of its evaluations on the same ranks and stages, without backward
passes:

    step          0   1   2   3 |           | 4   5   6   7 |           |
    plan          training      | .validation  training     | .validation

The evaluation computes on the training's own tensors, so its stages hold the same layers. It runs
the network as it is: a rewritten one would need folded copies of all weights beside them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hires.core.config import parallel_config
from hires.core.config.data_config import AUTO, PredictConfig, ValidateConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import HALF, PRECISIONS
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
from hires.core.losses import LABELS, LOSSES, NUMBERS
from hires.core.schedules import SCHEDULES, forward_only
from hires.plan import checks, regions
from hires.plan.bands import bands_of, check_bands, note_on_bands, usual_band_rows
from hires.plan.conversions import convert
from hires.plan.graph import Graph
from hires.plan.hardware import backend_of, check_hardware, device_of
from hires.plan.layout import connected, edges_of, with_norms_together
from hires.plan.memory import RankMemory
from hires.plan.message_routes import carriers
from hires.plan.partition import layer_starts, partition, segments_of
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import CommOp, Finding, Plan, Stage, errors_of
from hires.plan.prove import judged
from hires.plan.route_choice import check_table, facts_of_table, usable_rules
from hires.plan.rules import WHOLE
from hires.plan.traffic import totals
from hires.plan.undivided import gather_prices, no_rules, vanishing
from hires.plan.updates import (
    check_order,
    division_notes,
    gradient_mode,
    order_notes,
    scatters_gradients,
)


def make_plan(config: RunConfig, graph: Graph, known: Sequence[Finding] = ()) -> Plan:
    """Returns the plan of a run; what forbids to start it is in ``plan.findings``.

    With an error, also among the ``known`` findings that others made, nothing is connected or
    proved, which takes long for thousands of ranks.
    """
    parallel, graph = config.parallel, rewritten(config, graph)
    plan, findings = uncut_plan(config, graph), [*_of_keys(config, graph)]
    possible = not errors_of((*findings, *known))
    uncut = [*checks.check_cuts(parallel, graph)]
    findings += uncut
    if not uncut:
        stages = _stages(config, graph)
        if possible:
            plan = replace(plan, stages=stages)
            order = SCHEDULES[parallel.schedule].order if plan.training else forward_only
            plan = replace(plan, schedule=order(plan.pipeline))
        made = convert(graph, stages, parallel.gather == "auto")
        graph, stages = made.graph, made.stages
        findings += no_rules(made)
        findings += checks.check_ties(graph, stages, plan.training)
    findings += known
    if errors_of(findings):
        return replace(plan, findings=findings)
    if config.comm.joint_norms:
        graph = with_norms_together(graph, stages)
    stages = [_joined(config, plan, graph, stage) for stage in stages]
    plan = replace(plan, graph=graph, stages=stages, edges=edges_of(graph, stages, plan.training))
    findings += [*vanishing(graph, stages), *gather_prices(plan, made.reasons)]
    if (rows := config.parallel.band_rows) is not None:
        rows = usual_band_rows(plan) if rows == parallel_config.AUTO else rows
        plan = replace(plan, band_rows=min(rows, graph.input_shape[2]))
        findings.append(note_on_bands(bands_of(plan)))
    verdict, sums = judged(plan), totals(plan)
    of_update = (one for one in sums["by_route"] if one["kind"] in ("gradient", "parameter"))
    notes = division_notes(plan, sum(one["bytes"] for one in of_update))
    notes += order_notes(plan, config.comm.gradient_order)
    findings += [*verdict.findings, *carriers(plan), *notes, *_residents(plan)]
    if config.engine.compile != "off":
        findings += regions.findings(plan, config.engine.compile)
    return plan.with_results(findings=findings, verdict=verdict.text, totals=sums)


def in_bands(plan: Plan, rows: int) -> Plan:
    """Returns a plan in bands whose bands have another height, and the note about them."""
    plan = replace(plan, band_rows=rows)
    notes = [
        one for one in plan.findings if (one.key, one.severity) == ("parallel.band_rows", "note")
    ]
    others = [finding for finding in plan.findings if finding not in notes]
    return replace(plan, findings=[*others, note_on_bands(bands_of(plan))])


def uncut_plan(config: RunConfig, graph: Graph) -> Plan:
    """Returns what the keys decide, with the network in one stage."""
    parallel, training = config.parallel, config.task.name == "train"
    plan = Plan(
        graph=graph,
        stages=[Stage(0, 0, len(graph.nodes), [1, 1], 0)],
        edges=[],
        num_replicas=parallel.replicas,
        num_microbatches=parallel.microbatches,
        training=training,
        dtype=PRECISIONS[config.precision.name],
        codecs=config.comm.codecs,
        outstanding=config.comm.outstanding or 0,
        shards_optimizer=config.optimizer.shard,
        optimizer_states=config.optimizer.num_states,
        scales_loss=config.scales_loss,
        clips_gradients=training and config.optimizer.clip_norm is not None,
        schedule=[[]],
        halo_overlap=parallel.halo.overlap,
        device=device_of(config),
        backend=backend_of(config),
        num_nodes=config.num_nodes,
        table=facts_of_table(config),
        routes=usable_rules(config),
        num_directions=parallel.directions,
        num_pairs=parallel.pairs,
        resident=parallel.resident,
    )
    gradients = gradient_mode(config, plan)
    divides = training and plan.shards_optimizer
    scatters = divides and scatters_gradients(config, gradients)
    return replace(plan, gradients=gradients, scatters=scatters)


def _of_keys(config: RunConfig, graph: Graph) -> Iterator[Finding]:
    yield from checks.check_numbers(config)
    yield from checks.check_output(config, graph)
    yield from checks.check_prediction(config, graph)
    yield from checks.check_kept(graph)
    yield from check_bands(config, graph)
    yield from checks.check_types(config, graph)
    yield from checks.check_precision(config, graph)
    yield from checks.check_weights(config)
    yield from check_hardware(config)
    yield from check_order(config)
    yield from check_table(config)


def _residents(plan: Plan) -> Iterator[Finding]:
    if plan.resident > 1:
        text = (
            f"{plan.num_processes} process{'es' * (plan.num_processes > 1)} of {plan.resident} of "
            f"the {plan.world} ranks each, in turn: messages between these are copies, and "
            f"predicted times are those of ranks side by side"
        )
        yield Finding("note", "parallel.resident", text)


def _joined(config: RunConfig, plan: Plan, graph: Graph, stage: Stage) -> Stage:
    stage = connected(graph, stage, config.parallel.halo.fuse, config.comm.joint_norms)
    if not plan.training:
        return stage
    is_last = stage.index == len(plan.stages) - 1
    if is_last and stage.num_ranks > 1 and stage.layout[graph.output] != WHOLE:
        num_sums = LOSSES[config.objective.name].num_sums(graph.shape(graph.output)[1])
        loss = CommOp(graph.output, "loss", graph.output, elements=num_sums)
        stage = replace(stage, comm=[*stage.comm, loss])
    actions = plan.actions_of(plan.rank_of(0, 0, stage.index, 0))
    return replace(stage, segments=segments_of(graph, stage, config.memory.checkpoint, actions))


def _stages(config: RunConfig, graph: Graph) -> list[Stage]:
    cuts = config.parallel.places
    num_ranks = [rows * cols * shards for (rows, cols), shards in cuts]
    bounds = partition(graph, num_ranks, config.parallel.balance, config.task.name == "train")
    starts = layer_starts(graph)
    stages: list[Stage] = []
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        nodes, (tiles, shards) = graph.nodes[first:last], cuts[index]
        used = [graph.params[name] for name in {name for node in nodes for name in node.params}]
        layers = sum(first <= start < last for start in starts), nodes[0].name, nodes[-1].name
        flops = sum(node.flops for node in nodes)
        params = sum(param.num_elements for param in used if param.trainable)
        place = index, first, last, tiles, sum(num_ranks[:index]), shards
        stages.append(Stage(*place, *layers, flops, params))
    return stages


_USUAL = {CLASSES: "top1", PIXELS: "mean_iou", IMAGES: "psnr", LABELS: "mean_ap", NUMBERS: "rmse"}


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
    """Returns the memory of a rank of ``plan.memory`` whose training has evaluations in between.

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
