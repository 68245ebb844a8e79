"""Turns a config into a plan, each decision once: cut, tile, schedule, connect, prove."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hires.core.config.precision_config import PRECISIONS
from hires.core.config.run_config import RunConfig
from hires.core.losses import LOSSES
from hires.core.schedules import SCHEDULES, forward_only
from hires.plan import checks, regions
from hires.plan.channels import carriers
from hires.plan.conversions import convert
from hires.plan.gradient_sums import gradient_mode, scatters_gradients
from hires.plan.graph import Graph
from hires.plan.hardware import backend_of, check_hardware, device_of
from hires.plan.layout import connected, edges_of
from hires.plan.norm_levels import with_norms_together
from hires.plan.ownership import division_notes
from hires.plan.partition import layer_starts, partition, segments_of
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import CommOp, Finding, Plan, Stage
from hires.plan.proof.prove import judged
from hires.plan.route_choice import check_table, facts_of_table, usable_rules
from hires.plan.rules import WHOLE
from hires.plan.traffic import totals
from hires.plan.undivided import far_halos, gather_prices, no_rules, vanishing


def make_plan(config: RunConfig, graph: Graph, known: Sequence[Finding] = ()) -> Plan:
    """Returns the plan of a run; what forbids to start it is in ``plan.findings``.

    With an error, also among the ``known`` findings that others made, nothing is connected or
    proved, which takes long for thousands of ranks.
    """
    parallel, graph = config.parallel, rewritten(config, graph)
    plan, findings = uncut_plan(config, graph), [*_of_keys(config, graph)]
    possible = _are_ok((*findings, *known))
    uncut = [*checks.check_cuts(parallel, graph)]
    findings += uncut
    if not uncut:
        stages = _stages(config, graph)
        if possible:
            plan = replace(plan, stages=stages)
            order = SCHEDULES[parallel.schedule].order if plan.training else forward_only
            plan = replace(plan, schedule=order(plan.pipeline))
            findings += checks.check_directions(plan)
        made = convert(graph, stages, parallel.gather == "auto")
        graph, stages = made.graph, made.stages
        findings += no_rules(made)
        if not possible:  # the errors of a layout come without its messages, which may be many
            findings += vanishing(graph, stages)
        findings += checks.check_ties(graph, stages, plan.training)
    findings += known
    if not _are_ok(findings):
        return replace(plan, findings=findings)
    if config.comm.joint_norms:
        graph = with_norms_together(graph, stages)
    stages = [_joined(config, plan, graph, stage) for stage in stages]
    plan = replace(plan, graph=graph, stages=stages, edges=edges_of(graph, stages, plan.training))
    findings += [*vanishing(graph, stages), *far_halos(stages), *gather_prices(plan, made.reasons)]
    verdict, sums = judged(plan), totals(plan)
    of_update = (one for one in sums["by_route"] if one["kind"] in ("gradient", "parameter"))
    notes = division_notes(plan, sum(one["bytes"] for one in of_update))
    findings += [*verdict.findings, *carriers(plan), *notes]
    if config.engine.compile != "off":
        findings += regions.findings(plan, config.engine.compile)
    return plan.with_results(findings=findings, verdict=verdict.text, totals=sums)


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
    )
    gradients = gradient_mode(config, plan)
    divides = training and plan.shards_optimizer
    scatters = divides and scatters_gradients(config, gradients)
    return replace(plan, gradients=gradients, scatters=scatters)


def _of_keys(config: RunConfig, graph: Graph) -> Iterator[Finding]:
    """Yields what is wrong with keys and network, whatever the stages."""
    yield from checks.check_numbers(config)
    yield from checks.check_output(config, graph)
    yield from checks.check_prediction(config, graph)
    yield from checks.check_kept(graph)
    yield from checks.check_types(config, graph)
    yield from checks.check_precision(config, graph)
    yield from checks.check_weights(config)
    yield from check_hardware(config)
    yield from check_table(config)


def _are_ok(findings: Iterable[Finding]) -> bool:
    return all(finding.severity != "error" for finding in findings)


def _joined(config: RunConfig, plan: Plan, graph: Graph, stage: Stage) -> Stage:
    """Returns a stage with the messages between its ranks, and its segments."""
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
    cuts = [*zip(config.parallel.grids, config.parallel.shards, strict=True)]
    num_ranks = [rows * cols * shards for (rows, cols), shards in cuts]
    bounds = partition(graph, num_ranks, config.parallel.balance, config.task.name == "train")
    starts = layer_starts(graph)
    stages: list[Stage] = []
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        nodes = graph.nodes[first:last]
        used = [graph.params[name] for name in {name for node in nodes for name in node.params}]
        tiles, shards = cuts[index]
        stage = Stage(
            index,
            first,
            last,
            tiles,
            sum(num_ranks[:index]),
            shards,
            num_layers=sum(first <= start < last for start in starts),
            first_layer=nodes[0].name,
            last_layer=nodes[-1].name,
            flops=sum(node.flops for node in nodes),
            params=sum(param.num_elements for param in used if param.trainable),
        )
        stages.append(stage)
    return stages
