"""What ranks do in tests of the operations of hires.comm: every one beside a plain reference."""

from __future__ import annotations

import datetime
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hires import comm
from hires.comm import ReduceOp
from hires.comm.backends import rendezvous
from hires.comm.transport import transport
from hires.core.errors import CommError, ConfigError
from hires.core.ranks.world import World
from hires.plan.tuning_table import TuningTable
from tests.helpers.patience import until

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TYPES = (*FLOATS, *WHOLE, torch.bool, torch.complex64)
PLAIN = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
OF_TRUTHS = {ReduceOp.SUM: torch.logical_or, ReduceOp.PRODUCT: torch.logical_and}
OF_TRUTHS |= {ReduceOp.MAX: torch.logical_or, ReduceOp.MIN: torch.logical_and}


def values(dtype: torch.dtype, shape: Any, rank: int, seed: int = 0) -> Tensor:
    """Returns the numbers of a rank: small whole ones, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randint(0, 4, shape, generator=generator)
    if dtype == torch.bool:
        return numbers > 1
    if dtype.is_complex:
        return torch.complex(numbers.float(), numbers.flip(-1).float()).to(dtype)
    return numbers.to(dtype)


def reduced(terms: list[Tensor], op: Any) -> Tensor:
    """Returns the plain reduction of some tensors."""
    kind, dtype = getattr(op, "op", op), terms[0].dtype
    if kind == ReduceOp.PREMUL_SUM:
        return sum(term * op.factor for term in terms)
    if dtype.is_complex and kind == ReduceOp.AVG:  # a division of complex numbers rounds twice
        return torch.view_as_complex(reduced([*map(torch.view_as_real, terms)], op))
    if kind == ReduceOp.AVG:
        total = sum(term for term in terms)
        whole = dtype in WHOLE
        return torch.div(total, len(terms), rounding_mode="trunc" if whole else None).to(dtype)
    function = OF_TRUTHS.get(kind, PLAIN[kind]) if dtype == torch.bool else PLAIN[kind]
    total = terms[0]
    for term in terms[1:]:
        total = function(total, term)
    return total


def reductions(dtype: torch.dtype) -> list[Any]:
    """Returns the operations that a type has."""
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVG]
    ops = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    if not dtype.is_floating_point:
        ops += [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    if dtype != torch.bool:
        ops.append(ReduceOp.AVG)
    return [*ops, dist._make_nccl_premul_sum(2.0)] if dtype.is_floating_point else ops


Case = tuple[str, Callable[..., Any], Callable[[], bool]]
"""What it is, the call without ``async_op`` and ``backend``, whether its result is right."""


def reducing(rank: int, ranks: list[int], group: Any, dtype: torch.dtype) -> Iterator[Case]:
    """Yields the reductions of a type."""
    place = ranks.index(rank)
    for op in reductions(dtype):
        name = str(getattr(op, "op", op)).rpartition(".")[2]
        for shape in ((2, 3), (0,), ()):
            given = values(dtype, shape, rank)
            expected = reduced([values(dtype, shape, one) for one in ranks], op)
            call = _bound(comm.all_reduce, given, op, group=group)
            yield f"all_reduce {name} {shape}", call, _equal(given, expected)
        shape = (4, 3)
        full = reduced([values(dtype, shape, one) for one in ranks], op)
        root = ranks[-1]
        given = values(dtype, shape, rank)
        expected = full if rank == root else given.clone()
        call = _bound(comm.reduce, given, root, op, group=group)
        yield f"reduce {name}", call, _equal(given, expected)
        shape = (2 * len(ranks), 3)
        full = reduced([values(dtype, shape, one) for one in ranks], op)
        output = torch.empty((2, 3), dtype=dtype)
        expected = full[2 * place : 2 * place + 2]
        call = _bound(
            comm.reduce_scatter_tensor, output, values(dtype, shape, rank), op, group=group
        )
        yield f"reduce_scatter_tensor {name}", call, _equal(output, expected)
        sizes = [(n, 2) for n in range(len(ranks))]  # the first is empty
        terms = [[values(dtype, size, one, n) for n, size in enumerate(sizes)] for one in ranks]
        output = torch.empty(sizes[place], dtype=dtype)
        expected = reduced([term[place] for term in terms], op)
        call = _bound(comm.reduce_scatter, output, terms[place], op, group=group)
        yield f"reduce_scatter {name}", call, _equal(output, expected)


def moving(rank: int, ranks: list[int], group: Any, dtype: torch.dtype) -> Iterator[Case]:
    """Yields the operations of a type that do not reduce."""
    place, count = ranks.index(rank), len(ranks)
    for shape in ((2, 3), (0,), ()):
        given, root = values(dtype, shape, rank), ranks[-1]
        call = _bound(comm.broadcast, given, root, group=group)
        yield f"broadcast {shape}", call, _equal(given, values(dtype, shape, root))
        output = torch.empty((count, *shape), dtype=dtype)
        expected = torch.stack([values(dtype, shape, one) for one in ranks])
        call = _bound(comm.all_gather_into_tensor, output, values(dtype, shape, rank), group=group)
        yield f"all_gather_into_tensor {shape}", call, _equal(output, expected)
    for what, rows in (("even", [2] * count), ("uneven", [*range(count)])):
        sizes = dict(zip(ranks, [(n, 2) for n in rows], strict=True))
        each = [values(dtype, sizes[one], one) for one in ranks]
        outputs = [torch.empty_like(one) for one in each]
        call = _bound(comm.all_gather, outputs, each[place], group=group)
        yield f"all_gather {what}", call, _equal(outputs, each)
        outputs = [torch.empty_like(one) for one in each]
        own, root = rank == ranks[0], ranks[0]
        call = _bound(comm.gather, each[place], outputs if own else None, root, group=group)
        yield f"gather {what}", call, _equal(outputs if own else [], each if own else [])
        output = torch.empty_like(each[place])
        scattered = [values(dtype, sizes[one], one, 7) for one in ranks]
        call = _bound(comm.scatter, output, scattered if own else None, root, group=group)
        yield f"scatter {what}", call, _equal(output, scattered[place])
        # Rank i sends i + j rows to rank j, or two.
        number = (lambda i, j: 2) if what == "even" else (lambda i, j: i + j)
        sent = [values(dtype, (number(place, j), 2), rank, j) for j in range(count)]
        came = [values(dtype, (number(i, place), 2), ranks[i], place) for i in range(count)]
        outputs = [torch.empty_like(one) for one in came]
        call = _bound(comm.all_to_all, outputs, sent, group=group)
        yield f"all_to_all {what}", call, _equal(outputs, came)
        output = torch.empty_like(torch.cat(came))
        splits = [[len(one) for one in came], [len(one) for one in sent]]
        splits = [None, None] if what == "even" else splits
        call = _bound(comm.all_to_all_single, output, torch.cat(sent), *splits, group=group)
        yield f"all_to_all_single {what}", call, _equal(output, torch.cat(came))
    strided = values(dtype, (3, 4), rank).t()
    call = _bound(comm.broadcast, strided, ranks[0], group=group)
    yield "broadcast strided", call, _equal(strided, values(dtype, (3, 4), ranks[0]).t())


def operations(
    world: World, backends: list[str], members: list[int] | None, timeout_s: float = 20.0
) -> list[str]:
    """Returns the operations whose result is wrong, on the first backend and each of the others.

    Every second one is asynchronous, and waited for in another order than it was issued.
    """
    comm.init(backends, world=world, timeout_s=timeout_s)
    wrong, group = [], None if members is None else comm.new_group(members)
    ranks = members or [*range(world.size)]
    if world.rank in ranks:
        for dtype in TYPES:
            for backend in (None, *backends[1:]):
                cases = [*moving(world.rank, ranks, group, dtype)]
                cases += reducing(world.rank, ranks, group, dtype)
                wrong += _run(cases, backend, dtype)
    comm.barrier()
    comm.shutdown()
    return wrong


def _run(cases: list[Case], backend: str | None, dtype: torch.dtype) -> list[str]:
    wrong, late = [], []
    for number, (what, call, is_right) in enumerate(cases):
        what = f"{what} {dtype} over {backend}"
        try:
            handle = call(async_op=bool(number % 2), backend=backend)
            if handle is None:
                wrong += [] if is_right() else [what]
            else:
                late.append((what, handle, is_right))
        except CommError as error:
            wrong.append(f"{what}: {error}")
    for number, (what, handle, is_right) in enumerate(reversed(late)):
        if number % 3 == 0:
            until(handle.is_completed)
        elif number % 3 == 1:
            handle.get_future().wait()
        handle.wait(20.0)
        wrong += [] if is_right() and handle.exception() is None else [what]
    return wrong


def messages(world: World, backends: list[str]) -> list[str]:
    """Returns the messages that arrive wrong: in groups, of all types, on two backends at once."""
    comm.init(backends, world=world, timeout_s=60)
    wrong, group = [], comm.new_group([*range(world.size)])
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for dtype in TYPES:
        for shape in ((5,), (0,), (2, 3)):
            pairs = []
            for number, backend in enumerate([*backends, *reversed(backends)]):
                among = group if number % 2 else None
                buffer = torch.empty(shape, dtype=dtype)
                sent = values(dtype, shape, world.rank, number)
                ops = [
                    comm.P2POp(comm.isend, sent, right, among, number, backend),
                    comm.P2POp(comm.irecv, buffer, left, among, number, backend),
                ]
                pairs.append((comm.batch_isend_irecv(ops), buffer, number))
            for handles, buffer, number in reversed(pairs):
                for handle in handles:
                    handle.wait(datetime.timedelta(seconds=20))
                if not torch.equal(buffer, values(dtype, shape, left, number)):
                    wrong.append(f"message {number} of {shape} {dtype}")
    received, sent = torch.empty(3, 2).t(), values(torch.float32, (2, 3), world.rank)
    for turn in range(2):
        if world.rank % 2 == turn:
            comm.send(sent, right, tag=5)
        else:
            assert comm.recv(received, left, tag=5) == left
    if world.size % 2 == 0 and not torch.equal(received, values(torch.float32, (2, 3), left)):
        wrong.append("blocking message")
    comm.barrier(group, backend=backends[-1])
    comm.shutdown()
    return wrong


def groups_of_a_mesh(world: World) -> list[Any]:
    """Returns, of four ranks in a mesh of two by two, the sums over its dims and over both."""
    comm.init(world=world, timeout_s=20)
    rendezvous.torch_world(world, 20)  # a mesh has groups of torch.distributed, too
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    found = []
    for part in (mesh["row"], mesh["column"], mesh):
        group, tensor = comm.new_group(part), torch.tensor([2**world.rank])
        comm.all_reduce(tensor, group=group)
        found.append((comm.get_process_group_ranks(group), comm.get_rank(group), int(tensor)))
    comm.shutdown()
    return found


def overlapping_groups(world: World) -> list[float]:
    """Returns the sums of this rank in groups that only their members make, each call compared."""
    comm.init(world=world, timeout_s=8, check="every")
    groups = [
        comm.new_group(ranks, members_only=True)
        for ranks in ([0, 1], [0, 2], [0, 2], [2])
        if world.rank in ranks
    ]
    found = []
    for number, group in enumerate(one for one in groups if one.size > 1):
        tensor = torch.full((group.ranks[1] + 1,), 1.0 + world.rank)
        if number == 2 or (world.rank == 2 and number == 1):
            comm.broadcast(tensor, 2, group)
            found.append(float(tensor[0]) + 2)
        else:
            comm.all_reduce(tensor, group=group)
            found.append(float(tensor[0]))
    if world.rank == 2:
        comm.all_reduce(torch.ones(1), group=groups[-1])
    factor = torch.distributed._make_nccl_premul_sum(1.0 / (1 + world.rank))
    tensor = torch.full((1,), 1.0 + world.rank)
    comm.all_reduce(tensor, factor)
    assert float(tensor) == 3.0
    comm.shutdown()
    return found


def joins_again(world: World) -> list[float]:
    """Returns the sums of three worlds at one address; rank 0 leaves each later than rank 1."""
    sums = []
    for _ in range(3):
        comm.init(("gloo", "shm"), world=world, timeout_s=4)
        tensor = torch.full((4,), 1.0 + world.rank)
        comm.all_reduce(tensor, backend="shm")
        sums.append(float(tensor[0]))
        if world.rank == 0:
            time.sleep(0.3)
        comm.shutdown()
        gc.collect()  # a store may be in a cycle
    return sums


def handles(world: World) -> list[str]:
    """Returns what rank 0 learns of operations that are late, fail, or are not its own."""
    comm.init(world=world, timeout_s=20)
    pair = comm.new_group([1, 2])
    errors, tensor = [], torch.ones(3)
    if world.rank == 0:
        handle = comm.irecv(tensor, 1, tag=4)
        assert handle.is_completed() is False
        for call in (
            lambda: handle.wait(0.05),
            lambda: comm.all_reduce(tensor, group=pair),
            lambda: comm.broadcast(tensor, 7),
            lambda: comm.all_reduce(tensor, backend="mpi"),
            lambda: comm.all_reduce(tensor, ReduceOp.BXOR),
            lambda: comm.all_gather([tensor], tensor),
            lambda: comm.new_group([0, 0]),
        ):
            try:
                call()
                errors.append("no error")
            except CommError as error:
                errors.append(str(error))
        assert handle.exception() is None
    comm.barrier()  # only now is the message sent
    if world.rank == 1:
        comm.send(torch.full((3,), 5.0), 0, tag=4)
    if world.rank == 0:
        handle.wait(10)
        errors.append(f"{handle.is_completed()} {tensor.tolist()}")
    comm.shutdown()
    return errors


def _bound(function: Callable[..., Any], *args: Any, **named: Any) -> Callable[..., Any]:
    return lambda **how: function(*args, **named, **how)


def _equal(got: Any, expected: Any) -> Callable[[], bool]:
    pairs = zip(got, expected, strict=True) if isinstance(got, list) else [(got, expected)]
    kept = [*pairs]
    return lambda: all(torch.equal(one, other) for one, other in kept)


TABLE = {
    "format": 1,
    "made": {},
    "rules": [
        {"operation": "send", "ranks": 2, "ranks_per_node": 2, "route": "shm:mailbox"},
        {"operation": "all_gather", "route": "shm:slots"},
        {"operation": "all_reduce", "route": "shm:shares"},
    ],
    "default": "gloo",
}
"""One as a plan has it, which sums in the shares of its ranks."""


def through_a_table_of_plans(world: World) -> list[Any]:
    """Returns the error of a table with a backend that is not in use, and where messages went."""
    table, found = TuningTable.from_dict(TABLE), []
    try:
        comm.init(["gloo"], world=world, timeout_s=20, table=table)
    except ConfigError as error:
        found.append(str(error))
    comm.init(["gloo", "shm"], world=world, timeout_s=20, table=table)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got, all_of_them, total = torch.zeros(1), torch.zeros(world.size), torch.ones(2000)
    handle = comm.isend(torch.tensor([float(world.rank)]), right)
    comm.recv(got, left)
    handle.wait()
    comm.all_gather_into_tensor(all_of_them, got)
    comm.all_reduce(total)
    backends = {key[0]: call.backend for key, call in transport.world.calls.items()}
    comm.shutdown()
    return [*found, all_of_them.tolist(), float(total.sum()), backends]


def sums_into_other_shapes(world: World) -> list[float]:
    """Returns this rank's reduced term, whose shape only rank 0 changes."""
    comm.init(["gloo"], world=world, timeout_s=5)
    output = torch.zeros(6) if world.rank == 0 else torch.zeros(2, 3)
    comm.reduce_scatter(output, [torch.arange(6.0).view(2, 3)] * world.size)
    comm.shutdown()
    return output.flatten().tolist()
