"""Lists the sums of a stage's gradients over its holders, and divides its update among them.

The loss of a microbatch is divided by the number of microbatches of all replicas, so one sum makes
a stage's gradients: summed over tiles, averaged over the rest. The same messages bring the running
statistics of several copies together. When the plan is made, one way is chosen:

    together       ranks of one machine share memory, and wait for everything as for one message
    chain, end ..  large gradients are sums of their own, in one of the orders of
                   :mod:`hires.core.gradient_orders`; the others are one message at the end

Sums beside the pass need cores for the threads of the transport. In two directions the last pass
completes the gradients of one of two stages only, so all begin when the passes are done. The sums
are the same in all orders, and so are their bits.

With ``optimizer.shard`` each of n holders keeps the optimiser's state of about 1/n of the
elements, updates those, and sends them to the others, in one of two ways:

    broadcast   holder 0   sums all        | updates conv1        | sends conv1     receives
                holder 1   sums all        | updates conv2, fc 0-9| receives        sends conv2, ...

    scatter     holder 0   sums of conv1   | updates conv1        | gathers what both have updated
                holder 1   sums of conv2.. | updates conv2, fc 0-9| gathers what both have updated

Of b bytes of gradients and as many of parameters, n ranks send 3 (n - 1) b in the first way and
2 (n - 1) b in the second. Both have the same shares.

A share is a run of whole rows of the parameters (along their first dim) in the order of the
network. It begins at a multiple of ``UNIT`` elements of its parameter, where a kernel with vectors
computes the same bits as over all of it.

Source:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    2020, stage 1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

from hires.core.codecs import CODECS, GRADIENT, codec_named
from hires.core.config.run_config import RunConfig
from hires.core.gradient_orders import AUTO, TOGETHER, is_beside, most_at_once
from hires.core.units import size
from hires.plan.event import BYTES
from hires.plan.groups import (
    ALONE_BYTES,
    codec_of,
    gradient_group,
    groups,
    held_stages,
    num_holders,
    num_lanes,
    running_decays,
    trained,
    wide_dtype,
)
from hires.plan.message_routes import route_of
from hires.plan.plan import Finding, Plan, derived
from hires.plan.routes import MEMORY, STREAMED

UNIT = 64
PUBLISH, REDUCE_SCATTER, ALL_GATHER = "publish", "reduce_scatter", "all_gather"
"""Kinds of events of a divided update."""


class Rows(NamedTuple):
    """Rows of a parameter."""

    name: str
    first: int
    last: int
    elements: int


class Publication(NamedTuple):
    """The message in which holders of a stage send what they have updated to the others."""

    owner: int
    """As a rank; -1: each sends its own part."""
    parts: tuple[Rows, ...]
    dtype: str
    elements: int
    """Numbers that a rank contributes at the most, with a codec those of whole blocks."""
    codec: str = ""

    @property
    def kind(self) -> str:
        """The kind of its event."""
        return ALL_GATHER if self.owner < 0 else PUBLISH


@derived
def shares_of_holders(plan: Plan, stage: int) -> dict[int, list[Rows]]:
    """Returns the rows that each holder of a stage updates, by rank; nothing: each updates all."""
    holders = groups(plan)[gradient_group(plan, stage)]
    if len(holders) == 1 or not plan.shards_optimizer:
        return {}
    names = [*trained(plan, stage)]
    total = sum(plan.graph.params[name].num_elements for name in names)
    shares: dict[int, list[Rows]] = {rank: [] for rank in holders}
    begin = 0  # of a parameter, among all elements
    for name in names:
        parameter = plan.graph.params[name]
        rows = parameter.shape[0] if parameter.shape else 1
        each = max(1, parameter.num_elements // max(1, rows))  # elements of a row
        step = UNIT // math.gcd(UNIT, each)  # rows that make a multiple of UNIT
        bounds = [0]
        for number in range(1, len(holders)):
            ideal = total * number / len(holders) - begin
            bounds.append(min(rows, max(bounds[-1], step * round(ideal / (each * step)))))
        for rank, first, last in zip(holders, bounds, [*bounds[1:], rows], strict=True):
            if first < last:
                shares[rank].append(Rows(name, first, last, (last - first) * each))
        begin += rows * each
    return shares


@derived
def publications(plan: Plan, stage: int) -> list[Publication]:
    """Returns what follows an update: one gather of scattered sums, else one of each owner."""
    dtype = wide_dtype(plan.dtype)  # training keeps its parameters in this type
    codec = codec_of(plan, "parameter")
    padded = codec_named(codec).padded if codec else int
    shares = {rank: (*rows,) for rank, rows in shares_of_holders(plan, stage).items() if rows}
    sizes = {rank: sum(padded(part.elements) for part in rows) for rank, rows in shares.items()}
    if plan.scatters and shares:
        every = tuple(part for rows in shares.values() for part in rows)
        return [Publication(-1, every, dtype, max(sizes.values()), codec)]
    return [Publication(rank, rows, dtype, sizes[rank], codec) for rank, rows in shares.items()]


def updated_elements(plan: Plan, rank: int) -> int:
    """Returns how many elements of the parameters a rank updates."""
    shares = {stage: shares_of_holders(plan, stage) for stage in held_stages(plan, rank)}
    own_rows = sum(part.elements for own in shares.values() if own for part in own[rank])
    whole = (name for stage, own in shares.items() if not own for name in trained(plan, stage))
    return own_rows + sum(plan.graph.params[name].num_elements for name in whole)


def division_notes(plan: Plan, sent_bytes: int) -> list[Finding]:
    """Returns a note on what dividing the optimiser's state is worth, and on the bytes it sends."""
    if not plan.shards_optimizer or not plan.training:
        return []
    if not any(shares_of_holders(plan, stage.index) for stage in plan.stages):
        text = (
            "optimizer.shard=true divides nothing: each stage is held by one rank; leave it "
            "out, or use parallel.replicas, parallel.tiles or parallel.directions=2"
        )
        return [Finding("warning", "optimizer.shard", text)]
    most = max(updated_elements(plan, rank) for rank in range(plan.world))
    way = "reduce-scatters and all-gathers" if plan.scatters else "all-reduces and broadcasts"
    text = (
        f"a rank updates up to {most:,} elements, and keeps the optimiser's state of these; "
        f"gradients and parameters travel by {way}, {size(sent_bytes)} a step of all ranks"
    )
    return [Finding("note", "optimizer.shard", text)]


class GradientSum(NamedTuple):
    """One message of gradients: the sum of some tensors over all holders of a stage."""

    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    """Running statistics whose terms of this step are summed along."""
    elements: int
    dtype: str
    alone: bool
    """Whether it is one large gradient, whose sum is begun and waited for apart."""
    node: str = ""
    """The node whose backward pass makes it; empty: it sets out when all passes are done."""
    operation: str = "all_reduce"
    """Or ``reduce_scatter``: each holder gets the sums of the rows that it updates; ``all_gather``:
    each gets the codes of all."""
    codec: str = ""
    """Of its messages; ``elements`` are those of whole blocks then."""

    @property
    def scatters(self) -> bool:
        """Whether it leaves a part of the sums on each holder."""
        return self.operation == REDUCE_SCATTER


def gradient_mode(config: RunConfig, plan: Plan) -> str:
    """Returns how a run sums its gradients; of the plan the routes are enough."""
    world = config.parallel.num_processes
    if codec_of(plan, "gradient"):  # ranks meet twice for a sum: no other may come in between
        return TOGETHER
    if plan.resident > 1:  # a sum is due when all residents have made their part of it
        return "end"
    if config.comm.gradient_order != AUTO:
        return config.comm.gradient_order
    if plan.backend in STREAMED:  # sums run beside the pass, on streams of their own
        return "chain"
    ranks, same_node = -(-world // config.num_nodes), config.num_nodes == 1
    large = route_of(plan, "all_reduce", world, same_node, "float32", ALONE_BYTES)
    if large.backend in MEMORY:
        return TOGETHER
    cores = len(os.sched_getaffinity(0)) if config.is_here else config.cluster.cores
    return "chain" if cores is not None and cores > ranks * config.launcher.threads else "end"


def check_order(config: RunConfig) -> Iterator[Finding]:
    """Yields errors if the sums of gradients cannot have the order that the config names."""
    order, key = config.comm.gradient_order, "comm.gradient_order"
    if config.task.name != "train" or not is_beside(order):
        return
    begins = f"{key}={order} begins sums beside the backward pass, and"
    if codec := config.comm.codecs.get(GRADIENT):
        text = (
            f"{begins} for a sum of codes (comm.codec={codec} of gradients) ranks meet twice, when "
            f"the pass is done; use {key}=end, or a comm.codec of other kinds of messages"
        )
        yield Finding("error", key, text)
    if config.optimizer.shard and config.optimizer.exchange == "scatter":
        text = (
            f"{begins} optimizer.exchange=scatter is one message behind it; use "
            f"optimizer.exchange=broadcast, or {key}=end"
        )
        yield Finding("error", key, text)


def order_notes(plan: Plan, order: str) -> list[Finding]:
    """Returns a note on what an order that a user names decides, or why it decides nothing."""
    sums = [one for stage in plan.stages for one in sums_of(plan, stage.index)]
    if order == AUTO or not plan.training or not sums:
        return []
    alone = [one for one in sums if one.alone]
    sent = size(sum(one.elements * BYTES[one.dtype] for one in alone))
    text = f"{len(alone)} large gradients ({sent}) are sums of their own, in this order, "
    text += "and the others one message behind the passes"
    if is_beside(order) and not any(one.node for one in alone):
        text += "; so are these, since the last pass completes the gradients of one direction only"
    if not alone:
        text = "no gradient is a sum of its own, so nothing is left to order"
    return [Finding("note", "comm.gradient_order", f"{order}: {text}")]


def scatters_gradients(config: RunConfig, mode: str) -> bool:
    """Whether the gradients of a divided update are scattered, which sends two thirds of the bytes.

    A reduce-scatter begins behind the backward pass, so sums beside the pass are not.
    """
    wanted = config.optimizer.exchange
    return not is_beside(mode) if wanted == "auto" else wanted == "scatter"


def at_once(plan: Plan) -> int:
    """Returns how many sums of large gradients a rank has under way at the most; 0: all."""
    return most_at_once(plan.gradients, plan.outstanding)


def lane_of(plan: Plan, number: int) -> int:
    """Returns the lane on which a sum of ``sums_of`` travels: those under way have one each."""
    return number % num_lanes(plan)


@derived
def sums_of(plan: Plan, stage: int) -> list[GradientSum]:
    """Returns the messages in which a stage's gradients are summed, in the order of issue."""
    if not plan.training or num_holders(plan, stage) == 1:
        return []
    params, users = plan.graph.params, trained(plan, stage)
    dtype, codec = wide_dtype(plan.dtype), codec_of(plan, "gradient")
    padded = codec_named(codec).padded if codec else int
    several = plan.num_replicas * plan.num_directions > 1
    statistics = tuple(running_decays(plan, stage)) if several else ()
    if plan.scatters and shares_of_holders(plan, stage):
        rows = (part for own in shares_of_holders(plan, stage).values() for part in own)
        elements = sum(padded(part.elements) for part in rows)
        summed = sum(params[name].num_elements for name in statistics)
        scattered = GradientSum((*users,), (), elements, dtype, False, "", REDUCE_SCATTER, codec)
        sums = [scattered, GradientSum((), statistics, summed, dtype, False)]
        return [one for one in sums if one.elements]
    least = ALONE_BYTES // BYTES[dtype]
    # The backward pass makes the last layer's gradients first.
    large = [name for name in reversed(users) if params[name].num_elements >= least]
    alone = [] if plan.gradients == TOGETHER else large
    early = is_beside(plan.gradients) and plan.num_directions == 1
    sums = []
    for name in alone:
        # Complete at the first of its nodes: with several, others may precede that one.
        node = users[name][0] if early and len(users[name]) == 1 else ""
        sums.append(GradientSum((name,), (), params[name].num_elements, dtype, True, node))
    sums.sort(key=lambda one: not one.node)
    rest = [name for name in large if name not in alone]
    rest += [name for name in users if name not in large]
    # Statistics travel with the gradients, unless these have a codec.
    learned = tuple(rest)
    for names, terms in [(learned, ()), ((), statistics)] if codec else [(learned, statistics)]:
        of_gradients = codec if names else ""
        size = padded if of_gradients else int
        if elements := sum(size(params[name].num_elements) for name in names + terms):
            operation = ALL_GATHER if of_gradients and CODECS[codec].leaves else "all_reduce"
            facts = elements, dtype, False, "", operation, of_gradients
            sums.append(GradientSum(names, terms, *facts))
    return sums
