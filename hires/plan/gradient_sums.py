"""Lists the sums of a stage's gradients over its holders.

The loss of a microbatch is divided by the number of microbatches of all replicas, so one sum makes
a stage's gradients: summed over tiles, averaged over the rest. The same messages bring the running
statistics of several copies together. Three ways, chosen when the plan is made:

    together  ranks of one machine share memory, and wait for everything as for one message
    early     large gradients set out alone, as soon as the last backward pass has made them
    late      large gradients set out alone, one after the other, when all passes are done

Early sums need cores for the threads of the transport; elsewhere they slow the pass down. In two
directions the last pass completes the gradients of one of two stages only, so nothing is early.

    early:   ... B3 of conv9 | issue conv9 | B3 of conv8 | ... | small ones | wait conv9 ...

Where the update is divided, a reduce-scatter may take their place (:mod:`hires.plan.ownership`):
it leaves on each holder the sums of the elements that it updates.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from hires.core.codecs import CODECS, codec_named
from hires.core.config.run_config import RunConfig
from hires.plan.event import BYTES
from hires.plan.groups import (
    ALONE_BYTES,
    codec_of,
    num_holders,
    running_decays,
    trained,
    wide_dtype,
)
from hires.plan.message_routes import route_of
from hires.plan.ownership import ALL_GATHER, REDUCE_SCATTER, shares_of_holders
from hires.plan.plan import Plan, derived
from hires.plan.routes import MEMORY, STREAMED

TOGETHER, EARLY, LATE = "together", "early", "late"


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
    world = config.parallel.num_ranks
    if codec_of(plan, "gradient"):  # ranks meet twice for a sum: no other may come in between
        return TOGETHER
    if plan.backend in STREAMED:  # sums run beside the pass, on streams of their own
        return EARLY
    ranks, same_node = -(-world // config.num_nodes), config.num_nodes == 1
    large = route_of(plan, "all_reduce", world, same_node, "float32", ALONE_BYTES)
    if large.backend in MEMORY:
        return TOGETHER
    cores = len(os.sched_getaffinity(0)) if config.is_here else config.cluster.cores
    return EARLY if cores is not None and cores > ranks * config.launcher.threads else LATE


def scatters_gradients(config: RunConfig, mode: str) -> bool:
    """Whether the gradients of a divided update are scattered, which sends two thirds of the bytes.

    A reduce-scatter begins behind the backward pass, so sums beside the pass (``early``) are not.
    """
    wanted = config.optimizer.exchange
    return mode != EARLY if wanted == "auto" else wanted == "scatter"


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
    early = plan.gradients == EARLY and plan.num_directions == 1
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
