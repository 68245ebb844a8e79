"""Turns a config into a plan, each decision once: cut, tile, schedule, connect, prove."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hires.core.config.run_config import RunConfig
from hires.core.losses import LOSSES
from hires.core.precisions import PRECISIONS
from hires.plan import checks, regions
from hires.plan.channels import carriers
from hires.plan.conversions import convert
from hires.plan.gradient_sums import gradient_mode
from hires.plan.graph import Graph
from hires.plan.hardware import check_hardware, device_of
from hires.plan.layout import connect, edges_of
from hires.plan.message_routes import choose_routes
from hires.plan.norm_levels import with_norms_together
from hires.plan.partition import add_segments, layer_starts, partition
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import CommOp, Finding, Plan, Stage
from hires.plan.proof.prove import verify
from hires.plan.route_choice import check_table, choice_of, facts_of_table
from hires.plan.rules import WHOLE
from hires.plan.schedule import SCHEDULES, forward_only
from hires.plan.traffic import route_cases, totals
from hires.plan.undivided import far_halos, gather_prices, no_rules, vanishing
from hires.plan.update_exchange import exchange_notes, scatters_gradients


def make_plan(config: RunConfig, graph: Graph, known: Sequence[Finding] = ()) -> Plan:
    """Returns the plan of a run; what forbids to start it is in ``plan.findings``.

    With an error, also among the ``known`` findings that others made, nothing is connected or
    proved, which takes long for thousands of ranks.
    """
    parallel, choice, graph = config.parallel, choice_of(config), rewritten(config, graph)
    plan = Plan(
        graph=graph,
        stages=[Stage(0, 0, len(graph.nodes), [1, 1], 0)],
        edges=[],
        num_replicas=parallel.replicas,
        num_microbatches=parallel.microbatches,
        training=config.task.name == "train",
        dtype=PRECISIONS[config.precision.name],
        message_dtype=PRECISIONS.get(config.comm.dtype),
        shards_optimizer=config.optimizer.shard,
        optimizer_states=config.optimizer.num_states,
        scales_loss=config.scales_loss,
        clips_gradients=config.task.name == "train" and config.optimizer.clip_norm is not None,
        schedule=[[]],
        halo_overlap=parallel.halo.overlap,
        device=device_of(config),
        backend=choice.backend,
        num_nodes=config.num_nodes,
        table=facts_of_table(config),
        gradients=gradient_mode(config, choice),
        num_directions=parallel.directions,
        num_pairs=parallel.pairs,
        findings=[
            *checks.check_numbers(config),
            *checks.check_output(config, graph),
            *checks.check_prediction(config, graph),
            *checks.check_kept(graph),
            *checks.check_types(config, graph),
            *checks.check_precision(config),
            *checks.check_weights(config),
            *check_hardware(config),
            *check_table(config),
        ],
    )
    possible = plan.ok and all(finding.severity != "error" for finding in known)
    uncut = checks.check_cuts(parallel, graph)
    plan.findings += uncut
    if not uncut:
        stages = _stages(config, graph)
        if possible:
            plan.graph, plan.stages = graph, stages
            make = SCHEDULES[parallel.schedule] if plan.training else forward_only
            plan.schedule = make(plan.pipeline)
            plan.findings += checks.check_directions(plan)
        graph, refused = convert(graph, stages, parallel.gather == "auto")
        plan.findings += no_rules(graph, refused)
        if not possible:  # the errors of a layout come without its messages, which may be many
            plan.findings += vanishing(graph, stages)
        plan.findings += checks.check_ties(graph, stages, plan.training)
    plan.findings += known
    if not plan.ok:
        return plan
    if config.comm.joint_norms:
        graph = with_norms_together(graph, plan.stages)
    plan.graph = graph
    connect(graph, plan.stages, parallel.halo.fuse, config.comm.joint_norms)
    last = plan.stages[-1]
    if plan.training and last.num_ranks > 1 and last.layout[graph.output] != WHOLE:
        num_sums = LOSSES[config.objective.name].num_sums(graph.shape(graph.output)[1])
        last.comm.append(CommOp(graph.output, "loss", graph.output, elements=num_sums))
    add_segments(plan, config.memory.checkpoint)
    plan.edges = edges_of(graph, plan.stages, plan.training)
    plan.findings += vanishing(graph, plan.stages)
    plan.findings += far_halos(plan.stages)
    plan.findings += gather_prices(plan)
    plan.scatters = scatters_gradients(config, plan)
    choose_routes(plan, choice, route_cases(plan))
    plan.findings += verify(plan)
    plan.findings += carriers(plan)
    plan.findings += exchange_notes(plan)
    if config.engine.compile != "off":
        plan.findings += regions.findings(plan, config.engine.compile)
    plan.totals = totals(plan)
    return plan


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
