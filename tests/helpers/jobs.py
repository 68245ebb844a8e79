"""What ranks do in tests: functions that ``run_ranks`` can name."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires import comm
from hires.comm import attach, membership, runtime
from hires.core.config.run_config import from_dict
from hires.core.errors import CommError, HiresError, ParityError
from hires.core.ranks import mailbox_limits, memory_files
from hires.core.ranks.timeline import Recorder
from hires.core.ranks.world import World
from hires.engine.build import build_rank
from hires.engine.device import open_device
from hires.engine.verify import verify_rank
from hires.parallel import cursor, gradients
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.gradients import StageGradients
from hires.parallel.halo import Borrowed, Frame, exchange_at, gather_window
from hires.parallel.window import Window
from hires.plan import groups as plan_groups
from hires.plan.event import ALONE, Event
from hires.plan.groups import groups
from hires.plan.plan import CommOp, Plan
from hires.plan.program import halo_messages
from hires.plan.rules import window_axes_of
from tests.helpers.patience import until


def verify(world: World, config: dict[str, Any], plan: dict[str, Any], folder: str) -> Any:
    """Returns verify.json of one layout, on rank 0."""
    settings, made = from_dict(config), Plan.from_dict(plan)
    device = open_device(made.device, world.local_rank)
    comm.start(world, 60, settings.comm.shared_memory, host_empty=device.host_empty)
    engine = build_rank(settings, made, world.rank, 1, device)
    verify_rank(engine, settings, Path(folder))
    comm.barrier()
    comm.shutdown()
    return json.loads((Path(folder) / "verify.json").read_text()) if world.rank == 0 else None


def wrong_verify(
    world: World, config: dict[str, Any], plan: dict[str, Any], folder: str, fault: str
) -> Any:
    """Returns :func:`verify` of a layout with a fault, on rank 0.

    ``halo``: borrowed pixels are zero; ``average``: gradients are averaged over the tiles.
    """
    pieces, terms = Borrowed.pieces, StageGradients.terms

    def blank(borrowed: Borrowed) -> Any:
        return [(rect, torch.zeros_like(pixels)) for rect, pixels in pieces(borrowed)]

    def averaged(stage: StageGradients, number: int) -> Any:
        return [term.div_(stage.num_tiles) for term in terms(stage, number)]

    if fault == "halo":
        Borrowed.pieces = blank  # type: ignore[method-assign]
    else:
        StageGradients.terms = averaged  # type: ignore[method-assign]
    try:
        return verify(world, config, plan, folder)
    except ParityError:
        comm.barrier()
        comm.shutdown()
        return json.loads((Path(folder) / "verify.json").read_text())


def adjoint(world: World, plan: dict[str, Any], node: str, seed: int) -> tuple[float, float]:
    """Returns (<H x, y>, <x, H* y>) of all that a halo exchange serves, as this rank sees them.

    ``node`` is the first reader of the exchange. H is linear: what each reader computes, without
    bias, from the pixels that it gets.
    """
    return adjoints(world, plan, [node], seed)[0]


def adjoints(
    world: World, plan: dict[str, Any], nodes: list[str], seed: int
) -> list[tuple[float, float]]:
    """Returns :func:`adjoint` of several exchanges, one after the other."""
    comm.start(world, 60)
    made = Plan.from_dict(plan)
    place = Cursor([], comm.make_groups(groups(made), 1))
    context = Context(made, world.rank, place.groups, place)
    found = []
    for node in nodes:
        op = next(op for op in context.stage.comm if op.node == node and op.kind == "halo")
        found.append(_adjoint(context, op, seed))
    comm.barrier()
    comm.shutdown()
    return found


def _adjoint(context: Context, op: CommOp, seed: int) -> tuple[float, float]:
    """Returns both products of one exchange."""
    context.cursor.events = exchange_events(context, op)
    context.cursor.restart()
    generator = torch.Generator().manual_seed(seed + context.rank)
    n, channels, *_ = context.plan.graph.shape(op.value)
    r0, r1, c0, c1 = context.extent(op.value)
    x = torch.randn(n, channels, r1 - r0, c1 - c0, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    values: dict[str, Any] = {op.value: x}
    outputs = [_linear_part(context, op, reader, values) for reader in op.readers]
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    torch.autograd.backward(outputs, weights)
    assert x.grad is not None
    pairs = zip(outputs, weights, strict=True)
    forward = sum(float((o.detach() * y).sum()) for o, y in pairs)
    return forward, float((x.detach() * x.grad).sum())


def exchange_events(context: Context, op: CommOp) -> list[Event]:
    """Returns the events of one exchange alone, forward and back."""
    made = [Event("end", -1, 0)]
    for back in (True, False):
        sends, receives = halo_messages(context.plan, context.rank, 0, op, back)
        posts = [*receives, *sends]
        made = [*posts, *(post._replace(kind=f"wait_{post.kind}") for post in posts), *made]
    return made


def _linear_part(context: Context, op: CommOp, reader: str, values: dict[str, Any]) -> Tensor:
    """Returns what a reader of an exchange computes from its pixels: a convolution, or them."""
    node = context.plan.graph.by_name[reader]
    exchange = exchange_at(context, context.stage.comm.index(op))
    if window_axes_of(node, context.plan.graph) is None:
        frame = Frame(exchange.own, context.extent(reader), exchange.size)
        return gather_window(values[op.value], exchange.borrow(values, reader), frame)
    window = Window(node, context, exchange)
    borrowed = exchange.borrow(values, reader)
    if window.strips is None:
        frame = Frame(window.held, window.rect, window.size)
        return gather_window(values[op.value], borrowed, frame)
    generator = torch.Generator().manual_seed(1)
    shape = context.plan.graph.params[node.args["weight"]["param"]].shape
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    return window(values[op.value], borrowed, {**node.args, "weight": weight, "bias": None})


def gather_of_rank(world: World, num_elements: int, shared: bool) -> list[float]:
    """Returns the gathered first elements of tensors that hold the rank's number."""
    comm.start(world, 60, shared)
    [group] = comm.make_groups([list(range(world.size))], 1).values()
    gathered = comm.all_gather(torch.full((num_elements,), float(world.rank)), group)
    total = torch.full((3,), float(world.rank))
    comm.all_reduce(total, group)
    comm.shutdown()
    return [*gathered[:, -1].tolist(), total[0].item()]


def labels_of_rank(world: World) -> list[str]:
    """Returns what the time line calls a gather and a sum."""
    comm.start(world, 60)
    [group] = comm.make_groups([list(range(world.size))], 1).values()
    group.recorder = Recorder()
    group.recorder.begin_step()
    group.recorder.action = "F0"
    comm.all_gather(torch.zeros(2), group)
    comm.all_reduce(torch.zeros(2), group)
    comm.shutdown()
    return [span.what for span in group.recorder.steps[-1].spans]


def agreement_of_rank(world: World) -> tuple[int, int, list[str]]:
    """Returns what ranks agreed on, without and with patience, and what rank 0 told them."""
    comm.start(world, 60)
    number = comm.max_all(world.rank)
    patient = comm.max_all(7 - world.rank, patient=True)
    told = [comm.broadcast_text(text) for text in (f"r\u00e4nk {world.rank} of {world.size}", "")]
    comm.shutdown()
    return number, patient, told


def sums_of_rank(
    world: World, sizes: list[int], way: str
) -> tuple[bool, list[list[float]], list[int]]:
    """Returns whether ranks read each other's memory, sums of tensors, and sizes of messages."""
    if way == "forbidden":
        attach._reader = lambda: None
    comm.start(world, 60, shared_memory=way != "sent")
    everybody = [[*range(world.size)]]
    group = comm.make_groups(everybody)[0]
    generator = torch.Generator().manual_seed(world.rank)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors += [torch.full((3, 5), world.rank + 0.5, dtype=torch.float64)]
    messages: list[int] = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda sent, **named: (
        messages.append(sent.numel()) or all_reduce(sent, **named)
    )
    comm.all_reduce_coalesced(tensors, group)
    comm.barrier()
    comm.shutdown()
    return group.peers is not None, [tensor.flatten().tolist() for tensor in tensors], messages


def many_gathers(world: World, rounds: int) -> int:
    """Gathers again and again, each rank late in turn; returns how many answers were wrong."""
    comm.start(world, 60)
    [group] = comm.make_groups([list(range(world.size))], 1).values()
    assert group.shared is not None, "this machine should share memory"
    chance = random.Random(world.rank)
    wrong = 0
    for number in range(rounds):
        if chance.random() < 0.1:
            time.sleep(chance.random() / 200)
        gathered = comm.all_gather(torch.tensor([[number, world.rank]]), group)
        expected = [[[number, rank]] for rank in range(world.size)]
        wrong += gathered.tolist() != expected
    comm.shutdown()
    return wrong


def late_gather(world: World, done: Path) -> str:
    """Rank 1 never comes to a gather; returns what rank 0 is told."""
    comm.start(world, 60)
    membership.transport.timeout_s = 0.5  # of the group's waits
    [group] = comm.make_groups([[0, 1]], 1).values()
    if world.rank == 1:
        until(done.exists)
        return ""
    try:
        comm.all_gather(torch.zeros(2), group)
    except CommError as error:
        return str(error)
    finally:
        done.touch()
    return "no error"


def silent_peer(world: World) -> str:
    """Rank 1 never answers; returns what rank 0 is told."""
    comm.start(world, 3)
    if world.rank == 1:
        time.sleep(6)
        return ""
    try:
        comm.irecv(torch.empty(3), 1, tag=5).wait()
    except CommError as error:
        return str(error)
    return "no error"


def logged_step(
    world: World,
    config: dict[str, Any],
    plan: dict[str, Any],
    mail_bytes: int,
    alone_bytes: int,
    swapped: tuple[int, int, int] | None = None,
) -> list[tuple]:
    """Returns what a rank really does in one step and before it, in order.

    (``create``, ranks), (``send`` or ``recv``, peer, tag, shape, whether through memory),
    (``wait_send`` or ``wait_recv``, peer, tag), (``collective``, ``issue`` or ``wait_issued``,
    ranks, numbers), and the kinds of what concerns no other rank, with its action.

    Args:
        world: this rank and where the ranks meet.
        config: of the run, as plain values.
        plan: the same.
        mail_bytes: largest message that goes through memory.
        alone_bytes: smallest gradient that travels alone.
        swapped: a rank, and two positions among its events that change places.
    """
    mailbox_limits.MAIL_BYTES = mail_bytes
    plan_groups.ALONE_BYTES = alone_bytes
    log: list[tuple] = []
    create = dist.new_group

    def creating(ranks: list[int] | None = None, **named: Any) -> Any:
        # All ranks call it for each group, as torch asks; only the members wait for each other.
        if ranks is not None and world.rank in ranks:
            log.append(("create", tuple(ranks)))
        return create(ranks, **named)

    dist.new_group = creating
    _log_messages(log)
    comm.start(world, 60)
    engine = build_rank(from_dict(config), Plan.from_dict(plan), world.rank, 1)
    walk = engine.executor.cursor
    if swapped is not None and swapped[0] == world.rank:
        events = list(walk.events)
        _, one, other = swapped
        events[one], events[other] = events[other], events[one]
        walk.events = events
    for kind, method in engine.executor.methods.items():
        if kind in ALONE:
            engine.executor.methods[kind] = _logged_first(log, method)
    engine.executor.begin(lambda: not log.append(("barrier", "")))
    engine.executor.step(engine.loaders)
    engine.close()
    comm.barrier()
    comm.shutdown()
    return log


def _logged_first(log: list[tuple], method: Any) -> Any:
    """Returns a method of the executor that logs its event first."""
    return lambda event: (log.append((event.kind, event.part.action)), method(event))


def _log_messages(log: list[tuple]) -> None:
    """Logs every message of this process inside a step."""

    def posting(kind: str, function: Any) -> Any:
        def call(tensor: Tensor, peer: int, tag: int, group: Any = None, channel: int = 0) -> Any:
            through_memory = runtime._memory_for(tensor, group) is not None
            log.append((kind, peer, tag, tuple(tensor.shape), through_memory))
            handle = function(tensor, peer, tag, group, channel)
            wait = handle.wait
            handle.wait = lambda: (log.append((f"wait_{kind}", peer, tag)), wait())
            return handle

        return call

    def meeting(function: Any) -> Any:
        def call(tensors: Any, group: Any, wait: bool = True) -> Any:
            listed = tensors if isinstance(tensors, list) else [tensors]
            size = sum(tensor.numel() for tensor in listed)
            log.append(("collective" if wait else "issue", tuple(group.ranks), size))
            if wait:
                return function(tensors, group)
            handle = function(tensors, group, wait=False)
            finish = handle.wait
            done = ("wait_issued", tuple(group.ranks), size)
            handle.wait = lambda: (log.append(done), finish())
            return handle

        return call

    cursor.isend = posting("send", comm.isend)
    cursor.irecv = posting("recv", comm.irecv)
    cursor.all_gather = meeting(comm.all_gather)
    cursor.all_reduce = meeting(comm.all_reduce)
    gradients.all_reduce = meeting(comm.all_reduce)
    gradients.all_reduce_coalesced = meeting(comm.all_reduce_coalesced)


def no_room(world: World) -> str:
    """Returns how making a group ends where the shared memory is full."""
    comm.start(world, 60)
    memory_files.free_bytes = lambda: 10**5
    try:
        comm.make_groups([[0, 1]], num_close=1)
    except HiresError as error:
        return str(error)
    return "it was made"
