"""Lists the orders in which ranks begin, and wait for, the sums of their gradients.

Every large gradient is a sum of its own (:mod:`hires.plan.updates`), numbered as the backward pass
of the first rank completes them: the last layer's is 0. The plan holds this order, so no rank asks
another one in a step; a gradient that a rank completes earlier waits for its turn. What an order
decides is when a sum begins, and for which a rank waits before. ``b`` begins a sum, ``w`` waits for
it, on a rank that computes the gradients of four layers:

    end           | layer 3 | layer 2 | layer 1 | layer 0 | b0 b1 b2 b3 ........ w0 w1 w2 w3
    chain         | layer 3 | b0  layer 2 | b1  layer 1 | b2  layer 0 | b3 ..... w0 w1 w2 w3
    funnel        | layer 3 | b0  layer 2 | w0 b1  layer 1 | w1 b2  layer 0 | w2 b3 ...... w3
    concurrent    | layer 3 | b0  layer 2 | b1  layer 1 | w0 w1 b2  layer 0 | b3 ..... w2 w3

``chain`` and ``end`` hand all sums to one communicator, which carries one after the other, and wait
for none before all are handed over (pushes before pulls). ``funnel`` is one thread that may have
one sum under way: where sums take longer than layers, the pass stands still. ``concurrent`` may
have ``comm.outstanding`` of them under way, each on a communicator of its own; so a rank begins
those of one window in the order in which it completes them, whatever that of another rank. To wait
for all of a window is a barrier: a sum that is complete was begun by all ranks. Without the bound
there is none, and two ranks may carry sums that the other one does not come to.

Ranks begin with equal parameters, from one seed or file, so none are sent at the start.

Source:
    Mamidala, "Efficient embedding of MPI collectives in MXNET DAGs for scaling deep learning", 2022
    (Funnel, ConCum, DepCha).
"""

from __future__ import annotations

from typing import NamedTuple

AUTO = "auto"
TOGETHER = "together"
"""A mode of plans beside the orders: all gradients and statistics in one message at the end."""


class GradientOrder(NamedTuple):
    """When the sums of large gradients begin, and how many are under way."""

    summary: str
    beside: bool = True
    """Whether they begin during the last backward pass, or when all passes are done."""
    is_bounded: bool = False
    """Whether a rank waits before it begins another one."""
    is_free: bool = False
    """Whether ``comm.outstanding`` bounds them, each on a communicator of its own, so that a rank
    may begin those of a window in an order of its own; else the bound is one."""


ORDERS = {
    "end": GradientOrder("all when the backward pass is done", beside=False),
    "funnel": GradientOrder("beside the pass, one at a time", is_bounded=True),
    "concurrent": GradientOrder(
        "beside the pass, `comm.outstanding` at once on communicators of their own",
        is_bounded=True,
        is_free=True,
    ),
    "chain": GradientOrder("beside the pass, one behind the other, none waited for before its end"),
}
CHOICES = {
    AUTO: "one message through shared memory, else `chain` where cores are left for it, or `end`",
    **{name: order.summary for name, order in ORDERS.items()},
}


def is_beside(mode: str) -> bool:
    """Whether the sums of a mode, an order or ``TOGETHER``, begin during the backward pass."""
    return mode in ORDERS and ORDERS[mode].beside


def is_free(mode: str) -> bool:
    """Whether ranks may begin sums of a mode in orders of their own."""
    return mode in ORDERS and ORDERS[mode].is_free


def most_at_once(mode: str, outstanding: int) -> int:
    """Returns how many sums a rank has under way at the most; 0: there is no bound."""
    if mode not in ORDERS or not ORDERS[mode].is_bounded:
        return 0
    return outstanding if ORDERS[mode].is_free else 1
