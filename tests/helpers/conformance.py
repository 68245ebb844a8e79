"""What ranks do in the conformance suite: every operation of a backend beside a plain reference.

A world is named by a :class:`Spec`; its ranks run some ``PARTS``, each of which returns what is
wrong. Calls go to ``hires.comm``, or through ``torch.distributed`` and its backend ``hires``.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires import comm, torch_backend
from hires.comm.backends import mpi_backend, rings, rounds
from hires.core.ranks import mpi_library
from hires.core.ranks.world import World
from hires.plan.routes import OWN, Route, parse_route
from hires.plan.table_rules import CARRIES

Op = dist.ReduceOp
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex128, torch.complex64)
TYPES = (*FLOATS, *WHOLE, torch.bool, *COMPLEX)
CARRIED_ONLY = tuple(
    getattr(torch, name)
    for name in ("uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2")
)
"""Types that travel and are not reduced."""
ARITHMETIC, ORDER, BITS = (Op.SUM, Op.PRODUCT, Op.AVG), (Op.MIN, Op.MAX), (Op.BAND, Op.BOR, Op.BXOR)
PREMUL = dist._make_nccl_premul_sum(0.5)


@dataclass(frozen=True)
class Spec:
    """A world, and what carries its operations."""

    backends: tuple[str, ...]
    backend: str | None = None
    """Backend or route that operations name; None: the default."""
    through: str = "comm"
    """Or ``torch``."""
    types: tuple[torch.dtype, ...] = TYPES
    """Types of ``operations`` and ``reductions``."""
    timeout_s: float = 30.0

    @property
    def route(self) -> Route | None:
        """What operations name."""
        return parse_route(self.backend) if self.backend else None


class Lib:
    """hires.comm, or torch.distributed over it, in one world."""

    def __init__(self, world: World, spec: Spec) -> None:
        warnings.simplefilter("ignore")  # of torch, about its own experiments
        self.spec, self.is_torch = spec, spec.through == "torch"
        self.world, limit = world, datetime.timedelta(seconds=spec.timeout_s)
        # Tensors of a few thousand bytes go in many pieces.
        rounds.SLOT_BYTES, rounds.WHOLE_BYTES, rings.CELL_BYTES = 2000, 64, 1024
        mpi_backend.REDUCE_BYTES = 100
        if self.is_torch:
            torch_backend.register()
            options = torch_backend.ProcessGroupOptions(backends=spec.backends)
            place = f"tcp://{world.address}:{world.port}"
            dist.init_process_group(
                "hires", place, limit, world.size, world.rank, pg_options=options
            )
        else:
            comm.init(spec.backends, world=world, timeout_s=spec.timeout_s)
        self.calls: Any = dist if self.is_torch else comm
        self.how = {} if spec.backend is None else {"backend": spec.route}
        some = [0, *range(2, world.size)] if world.size > 2 else [0, 1]
        self.groups: list[tuple[Any, list[int]]] = [(None, [*range(world.size)])]
        made = self.calls.new_group(some)
        if world.rank in some:
            self.groups.append((made, some))

    def has(self, operation: str) -> bool:
        """Whether the route carries an operation out."""
        route, name = self.spec.route, re.sub("(_into)?_tensor$|_single$", "", operation)
        return route is None or route.algorithm == OWN or name in CARRIES[route.algorithm]

    def begin(self, name: str, *args: Any, **named: Any) -> Any:
        """Calls an operation by the route of the world."""
        return getattr(self.calls, name)(*args, **self.how, **named)

    def refusal(self, name: str, *args: Any, is_async: bool = False, **named: Any) -> str:
        """Returns the error of a call; empty: it was done."""
        try:
            work = self.begin(name, *args, async_op=is_async, **named)
            if work is not None:
                work.wait()
        except comm.CommError as error:
            return str(error)
        except Exception as error:  # torch refuses some in Python, before hires is called
            return f"{error}" if self.is_torch else f"raises {type(error).__name__}"
        return ""

    def later_calls(self) -> str:
        """Returns what is wrong with later calls of all kinds; empty: nothing is."""
        size, rank = self.world.size, self.world.rank
        for is_async in (False, True):
            total, gathered = torch.ones(3), torch.zeros(size, 1)
            own = torch.full((1,), 1.0 + rank)
            errors = [
                self.refusal("all_reduce", total, is_async=is_async),
                self.refusal("all_gather_into_tensor", gathered, own, is_async=is_async),
            ]
            if any(errors) or total.tolist() != [size] * 3:
                return f"later all_reduce: {errors} {total.tolist()}"
            if gathered.flatten().tolist() != [*range(1, size + 1)]:
                return f"later all_gather: {gathered.tolist()}"
        return ""

    def leave(self) -> None:
        """Leaves the world."""
        dist.destroy_process_group() if self.is_torch else comm.shutdown()


def conform(world: World, specs: dict[str, tuple[Spec, Sequence[str]]]) -> dict[str, list[str]]:
    """Returns what is wrong, by world and part; the worlds follow each other in one process."""
    wrong: dict[str, list[str]] = {}
    if any("mpi" in spec.backends for spec, _ in specs.values()):
        mpi = mpi_library.load()  # MPI starts once in a process
        mpi.Init_thread(mpi.THREAD_SERIALIZED)
    for name, (spec, parts) in specs.items():
        lib = Lib(world, spec)
        for part in parts:
            try:
                wrong[f"{name} {part}"] = PARTS[part](lib)
            except Exception:
                return wrong | {f"{name} {part}": [traceback.format_exc()]}
        lib.leave()
    return wrong


# ---- types x operations x values at their limits


def limits(dtype: torch.dtype, rank: int) -> Tensor:
    """Returns the numbers of a rank: each place has numbers of one sign, and of one rank NaN."""
    if dtype == torch.bool:
        return torch.tensor([True, False, rank == 1, rank != 1]).repeat(3)
    if dtype.is_complex:
        return torch.complex(*(limits(part, rank) for part in _parts_of(dtype)))
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        own = [info.max, info.min, info.max - rank, info.min + rank, rank, 3, info.max // 2 + 1]
        return torch.tensor([*own, 0 if info.min == 0 else -rank - 1], dtype=dtype).repeat(3)
    info, nan = torch.finfo(dtype), float("nan")
    own = [info.max, info.min, info.tiny, float("inf"), -float("inf"), 1.0 + rank, -2.0, 0.0, 0.5]
    broken = [nan if rank == 0 else 1.0, nan if rank == 1 else -1.0, -nan if rank == 1 else 3.0]
    return torch.tensor([*own, *broken], dtype=dtype).repeat(3)


def _parts_of(dtype: torch.dtype) -> list[torch.dtype]:
    return [torch.float64 if dtype == torch.complex128 else torch.float32] * 2


def expected(terms: list[Tensor], op: Any) -> Tensor | None:
    """Returns the reduction in exact arithmetic; None: it is not defined."""
    dtype, name = terms[0].dtype, getattr(op, "op", op)
    is_float = dtype.is_floating_point
    if dtype.is_complex:
        if name not in (Op.SUM, Op.AVG, Op.PREMUL_SUM):
            return None
        pairs = [torch.view_as_real(term) for term in terms]
        total = expected(pairs, op)
        assert total is not None
        return torch.view_as_complex(total)
    if dtype == torch.bool:
        names = {Op.SUM: torch.logical_or, Op.MAX: torch.logical_or, Op.BOR: torch.logical_or}
        names |= {Op.PRODUCT: torch.logical_and, Op.MIN: torch.logical_and}
        names |= {Op.BAND: torch.logical_and, Op.BXOR: torch.logical_xor}
        return _folded(terms, names[name]) if name in names else None
    if name in ORDER:
        return _folded(terms, torch.minimum if name == Op.MIN else torch.maximum)
    if name in BITS:
        names = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
        return None if is_float else _folded(terms, names[name])
    if name == Op.PREMUL_SUM and not is_float:
        return None
    columns = zip(*(term.flatten().tolist() for term in terms), strict=True)
    numbers = [_number(column, name, is_float) for column in columns]
    if is_float:
        return torch.tensor(numbers, dtype=torch.float64).to(dtype).view(terms[0].shape)
    info = torch.iinfo(dtype)
    wrapped = [(number - info.min) % 2**info.bits + info.min for number in numbers]
    return torch.tensor(wrapped, dtype=dtype).view(terms[0].shape)


def _number(column: tuple[Any, ...], name: Any, is_float: bool) -> Any:
    if is_float and not all(abs(one) < float("inf") for one in column):
        return sum(column) if name != Op.PRODUCT else torch.tensor(column).prod().item()
    exact = Fraction(1) if name == Op.PRODUCT else Fraction(0)
    for one in map(Fraction, column):
        exact = exact * one if name == Op.PRODUCT else exact + one
    if name in (Op.AVG, Op.PREMUL_SUM):
        exact /= len(column) if name == Op.AVG else 2
    if not is_float:
        return int(exact)  # towards zero
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else -float("inf")


def _folded(terms: list[Tensor], function: Callable[..., Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = function(total, term)
    return total


def _differs(got: Tensor, wanted: Tensor) -> str:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return f"{got.dtype} {[*got.shape]} for {wanted.dtype} {[*wanted.shape]}"
    if got.is_complex():
        got, wanted = torch.view_as_real(got), torch.view_as_real(wanted)
    if not got.is_floating_point():
        return "" if torch.equal(got, wanted) else f"{got.tolist()} for {wanted.tolist()}"
    near = torch.isclose(
        got.double(), wanted.double(), rtol=4 * torch.finfo(got.dtype).eps, atol=0, equal_nan=True
    )
    return "" if bool(near.all()) else f"{got.tolist()} for {wanted.tolist()}"


def reductions(lib: Lib) -> list[str]:
    """Returns what is wrong with the reductions of every type at its limits."""
    world, wrong = lib.world, list[str]()
    rank, ranks = world.rank, range(world.size)
    for place, dtype in enumerate((*lib.spec.types, *CARRIED_ONLY)):
        if lib.is_torch and dtype == torch.complex32:
            continue  # torch gives its real numbers, which are halves
        for number, op in enumerate((*ARITHMETIC, *ORDER, *BITS, PREMUL)):
            name = f"{str(getattr(op, 'op', op)).rpartition('.')[2]} of {dtype}"
            own, wanted = torch.ones(4).to(dtype), None
            if dtype in TYPES:
                terms = [limits(dtype, one) for one in ranks]
                own, wanted = terms[rank], expected(terms, op)
            total, root, part = own.clone(), own.clone(), torch.empty_like(own)
            parts, each = torch.empty_like(own), [own.clone() for _ in ranks]
            calls: dict[str, tuple[Any, ...]] = {
                "all_reduce": (total,),
                "reduce": (root, world.size - 1),
                "reduce_scatter": (part, each),
                "reduce_scatter_tensor": (parts, torch.stack(each).view(-1)),
            }
            waits = bool((place + number) % 2)  # every reduction is waited for in some types
            errors = [lib.refusal(call, *args, op, is_async=waits) for call, args in calls.items()]
            if wanted is None:
                wrong += [f"{name} is done" for error in errors if not error]
                if not lib.is_torch:  # which refuses some itself
                    wrong += [f"{name}: {one}" for one in errors if str(dtype) not in one]
                continue
            wrong += [f"{name}: {error}" for error in errors if error]
            if any(errors):
                continue
            results = [total, part, parts, *([root] if rank == world.size - 1 else [])]
            wrong += [f"{name}: {text}" for one in results if (text := _differs(one, wanted))]
            if rank != world.size - 1 and (text := _differs(root, own)):
                wrong.append(f"{name}: reduce changed another rank's: {text}")
        if text := lib.later_calls():
            return [*wrong, f"after {dtype}: {text}"]
    return wrong


# ---- operations x types x groups, blocking and not


def values(dtype: torch.dtype, shape: Any, rank: int, seed: int = 0) -> Tensor:
    """Returns the numbers of a rank: small whole ones, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randint(0, 4, shape, generator=generator)
    if dtype == torch.bool:
        return numbers > 1
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double().flip(-1)).to(dtype)
    return numbers.to(dtype)


Check = Callable[[], bool]
Case = tuple[str, tuple[Any, ...], Check]
"""An operation, its arguments, and whether its result is right."""


def _cases(rank: int, ranks: list[int], dtype: torch.dtype) -> Iterator[Case]:
    """Yields calls of all operations on tensors that no other call has."""
    place, count, first, last = ranks.index(rank), len(ranks), ranks[0], ranks[-1]
    for shape in ((2, 3), (0,), (), (2500,)):
        given, every = values(dtype, shape, rank), [values(dtype, shape, one) for one in ranks]
        yield "broadcast", (given, last), _equal(given, every[-1])
        output = torch.empty((count, *shape), dtype=dtype)
        given = values(dtype, shape, rank)
        yield "all_gather_into_tensor", (output, given), _equal(output, torch.stack(every))
        total, given = _plain(every), values(dtype, shape, rank)
        yield "all_reduce", (given,), _equal(given, total)
        given = values(dtype, shape, rank)
        yield "reduce", (given, last), _equal(given, total if rank == last else every[place])
        each = [[values(dtype, shape, one, n) for n in range(count)] for one in ranks]
        wanted, output = _plain([own[place] for own in each]), torch.empty_like(given)
        yield "reduce_scatter_tensor", (output, torch.stack(each[place])), _equal(output, wanted)
    strided = values(dtype, (3, 4), rank).t()
    yield "broadcast", (strided, first), _equal(strided, values(dtype, (3, 4), first).t())
    for rows in ([2] * count, [700 * n for n in range(count)]):  # the first of these is empty
        yield from _uneven_cases(rank, ranks, dtype, rows)


def _uneven_cases(
    rank: int, ranks: list[int], dtype: torch.dtype, rows: list[int]
) -> Iterator[Case]:
    """Yields calls with tensors of other sizes for each rank."""
    place, count, root = ranks.index(rank), len(ranks), ranks[0]
    each = [values(dtype, (n, 2), one) for n, one in zip(rows, ranks, strict=True)]
    outputs = [torch.empty_like(one) for one in each]
    yield "all_gather", (outputs, each[place]), _equal(outputs, each)
    outputs = [torch.empty_like(one) for one in each] if rank == root else None
    check = _equal(outputs or [], each if outputs else [])
    yield "gather", (each[place], outputs, root), check
    output, given = torch.empty_like(each[place]), None
    if rank == root:
        given = [values(dtype, (n, 2), one, 7) for n, one in zip(rows, ranks, strict=True)]
    yield "scatter", (output, given, root), _equal(output, values(dtype, (rows[place], 2), rank, 7))
    terms = [[values(dtype, (n, 2), one, n) for n in rows] for one in ranks]
    output, wanted = torch.empty_like(each[place]), _plain([own[place] for own in terms])
    if rank == root:  # the shape of one rank's output decides no route
        output, wanted = output.view(-1), wanted.view(-1)
    yield "reduce_scatter", (output, terms[place]), _equal(output, wanted)
    # Rank i sends rows[i] + j rows to rank j, or two.
    is_even = len({*rows}) == 1

    def sent(i: int, j: int) -> Tensor:
        return values(dtype, (2 if is_even else rows[i] + j, 2), ranks[i], j)

    given, came = [sent(place, j) for j in range(count)], [sent(i, place) for i in range(count)]
    outputs = [torch.empty_like(one) for one in came]
    yield "all_to_all", (outputs, given), _equal(outputs, came)
    output, splits = torch.empty_like(torch.cat(came)), [[*map(len, came)], [*map(len, given)]]
    args = (output, torch.cat(given), *([None, None] if is_even else splits))
    yield "all_to_all_single", args, _equal(output, torch.cat(came))


def _plain(terms: list[Tensor]) -> Tensor:
    # The sum of small whole numbers, which is exact in any order.
    return _folded(terms, torch.logical_or if terms[0].dtype == torch.bool else torch.add)


def _equal(got: Any, wanted: Any) -> Check:
    pairs = [*zip(got, wanted, strict=True)] if isinstance(got, list) else [(got, wanted)]
    kept = [(one, other.clone()) for one, other in pairs]
    return lambda: all(torch.equal(one, other) for one, other in kept)


def operations(lib: Lib) -> list[str]:
    """Returns the operations whose result is wrong, in the world and in a group.

    Each is called twice: blocking, and waited for in another order than it was issued.
    """
    wrong, rank = list[str](), lib.world.rank
    for dtype, (group, ranks) in itertools.product(lib.spec.types, lib.groups):
        late = []
        for is_async in (False, True):
            for name, args, is_right in _cases(rank, ranks, dtype):
                if not lib.has(name):
                    continue
                what = f"{name} of {dtype} among {ranks}, async {is_async}"
                try:
                    work = lib.begin(name, *args, group=group, async_op=is_async)
                except Exception as error:
                    wrong.append(f"{what}: {error}")
                    continue
                if is_async:
                    late.append((what, work, is_right))
                elif not is_right():
                    wrong.append(what)
        for number, (what, work, is_right) in enumerate(reversed(late)):
            if number % 20 == 0:
                while not work.is_completed():
                    time.sleep(1e-4)
            elif number % 20 == 1:
                work.get_future().wait()
            work.wait(datetime.timedelta(seconds=20))
            if not is_right() or work.exception() is not None:
                wrong.append(what)
    return wrong + _same_bits(lib)


def _same_bits(lib: Lib) -> list[str]:
    # Sums whose rounding depends on the order have the same bits on all ranks.
    wrong, size = [], lib.world.size
    for dtype in FLOATS:
        generator = torch.Generator().manual_seed(lib.world.rank)
        total = torch.randn(2500, generator=generator).to(dtype)
        lib.begin("all_reduce", total)
        every = torch.empty(size, *total.shape, dtype=dtype)
        lib.calls.all_gather_into_tensor(every, total)
        if not torch.equal(every, total.expand(every.shape)):
            wrong.append(f"sums of {dtype} differ between ranks")
    return wrong


def messages(lib: Lib) -> list[str]:
    """Returns the messages of all types and tags that arrive wrong, over all backends at once."""
    wrong, backends = [], [*lib.spec.backends]
    after, before = ((lib.world.rank + by) % lib.world.size for by in (1, -1))
    for dtype, shape in itertools.product((*TYPES, *CARRIED_ONLY), ((5,), (0,), (2, 3), (3000,))):
        pairs = []
        for number, backend in enumerate([*backends, *reversed(backends)]):
            sent, got = (_carried(dtype, shape, one, number) for one in (lib.world.rank, 77))
            facts = None, number, backend
            ops = [comm.P2POp(comm.isend, sent, after, *facts)]
            ops.append(comm.P2POp(comm.irecv, got, before, *facts))
            pairs.append((comm.batch_isend_irecv(ops), got, number))
        for handles, got, number in reversed(pairs):
            for handle in handles:
                handle.wait(datetime.timedelta(seconds=20))
            wanted = _carried(dtype, shape, before, number)
            if not torch.equal(got.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)):
                wrong.append(f"message {number} of {shape} {dtype}")
    received, sent = torch.empty(3, 2).t(), values(torch.float32, (2, 3), lib.world.rank)
    for turn in range(2):
        if lib.world.rank % 2 == turn:
            comm.send(sent, after, tag=5)
        elif comm.recv(received, before, tag=5) != before:
            wrong.append("the sender of a message")
    for group, ranks in lib.groups[1:]:  # between its first and last rank
        ends = ranks[0], ranks[-1]
        if lib.world.rank in ends:
            other, got = sum(ends) - lib.world.rank, torch.zeros(5)
            handle = comm.isend(torch.full((5,), 1.0 + lib.world.rank), other, group, 5)
            comm.recv(got, other, group, 5)
            handle.wait()
            if got.tolist() != [1.0 + other] * 5:
                wrong.append("message of a group")
        comm.barrier(group)
    if not torch.equal(received, values(torch.float32, (2, 3), before)):
        wrong.append("blocking message")
    return wrong


def _carried(dtype: torch.dtype, shape: Any, rank: int, seed: int) -> Tensor:
    return values(torch.float32, shape, rank, seed).to(dtype)


def at_once(lib: Lib) -> list[str]:
    """Returns the sums that are wrong of several algorithms under way at once.

    Ranks wait in opposite orders for what all began in one; between them a rank that waits for a
    message gives no time to what it began: other ranks must not need it for that.
    """
    rank, size, token = lib.world.rank, lib.world.size, torch.zeros(1)
    name = lib.spec.backends[0]
    routes = [Route(name), Route(name, "segmented", 32), Route(name, "direct")]
    tensors = [torch.full((50 + 3 * i,), float(rank + i)) for i in range(12)]
    handles = [
        comm.all_reduce(tensor, async_op=True, backend=routes[i % 3])
        for i, tensor in enumerate(tensors)
    ]
    if rank == size - 1:
        comm.recv(token, 0, tag=5)
    else:
        for handle in reversed(handles):
            handle.wait()
    if rank == 0:
        comm.send(token, size - 1, tag=5)
    for handle in handles:
        handle.wait()
    sums = [sum(one + i for one in range(size)) for i in range(12)]
    return [f"sum {i}" for i in range(12) if not bool((tensors[i] == sums[i]).all())]


# ---- kinds of tensors


def tensors(rank: int) -> dict[str, Callable[[], Tensor]]:
    """Returns tensors of four numbers of each kind that hires carries."""

    def inference() -> Tensor:
        with torch.inference_mode():
            return torch.full((4,), 1.0 + rank)

    def plain(*shape: int) -> Tensor:
        return torch.full(shape, 1.0 + rank)

    return {
        "inference": inference,
        "inference view": lambda: inference()[::2],
        "leaf": lambda: plain(4).requires_grad_(),
        "not a leaf": lambda: plain(4).requires_grad_() * 1,
        "parameter": lambda: torch.nn.Parameter(plain(4)),
        "0-d": plain,
        "empty": lambda: plain(0),
        "empty rows": lambda: plain(0, 3),
        "strided": lambda: plain(4, 4).t()[::2],
        "channels last": lambda: plain(1, 2, 2, 2).to(memory_format=torch.channels_last),
        "conjugate": lambda: torch.complex(plain(4), plain(4)).conj(),
        "negative": lambda: torch.complex(plain(4), plain(4)).conj().imag,
    }


def refused_tensors() -> dict[str, Callable[[], Tensor]]:
    """Returns tensors of each kind that no rank can be sent, by what an error must name."""
    ones = torch.ones(4)
    return {
        "sparse_coo": ones.to_sparse,
        "sparse_csr": lambda: torch.ones(2, 2).to_sparse_csr(),
        "quint8": lambda: torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": lambda: torch.ones(4, device="meta"),
        "expanded": lambda: torch.ones(1).expand(4),
        "overlap": lambda: torch.ones(5).as_strided((2, 3), (1, 1)),
    }


def calls_with(x: Tensor, like: Callable[[], Tensor], world: World) -> Iterator[tuple[Any, ...]]:
    """Yields calls into and from a tensor: name, arguments, result -> expected."""
    size = world.size
    yield "all_reduce", (x,)
    yield "reduce", (like(), 0)
    yield "broadcast", (like(), 1)
    yield "all_gather", ([like() for _ in range(size)], like())
    yield "gather", (like(), [like() for _ in range(size)] if world.rank == 0 else None, 0)
    yield "scatter", (like(), [like() for _ in range(size)] if world.rank == 0 else None, 0)
    yield "reduce_scatter", (like(), [like() for _ in range(size)])
    yield "all_to_all", ([like() for _ in range(size)], [like() for _ in range(size)])


def kinds(lib: Lib) -> list[str]:
    """Returns what is wrong with tensors of every kind, in and out of inference mode."""
    world, wrong = lib.world, list[str]()
    sums = sum(range(1, world.size + 1))
    for mode in (False, True):
        with torch.inference_mode(mode):
            for name, make in tensors(world.rank).items():
                if lib.is_torch and name == "conjugate":
                    continue  # torch refuses them itself
                for is_async in (False, True):
                    flags = {"is_async": is_async}
                    for call, args in calls_with(make(), make, world):
                        if error := lib.refusal(call, *args, **flags):
                            wrong.append(f"{call} of {name} (mode {mode}): {error}")
                            continue
                        results, scale = _results(call, args, world, sums)
                        for result, number in zip(results, scale, strict=True):
                            want = make().detach().clone() / (1.0 + world.rank) * number
                            if text := _differs(result.detach().clone(), want):
                                wrong.append(f"{call} of {name} (mode {mode}): {text}")
                            if result.requires_grad != make().requires_grad:
                                wrong.append(f"{call} of {name} changed requires_grad")
                if text := lib.later_calls():
                    return [*wrong, f"after {name}: {text}"]
            for name, make in refused_tensors().items():
                for call, args in calls_with(make(), make, world):
                    if lib.is_torch and name.startswith("sparse") and call == "all_reduce":
                        continue
                    if name in ("expanded", "overlap") and call == "gather":
                        continue  # its outputs are those of one rank
                    error = lib.refusal(call, *args)
                    if not error:
                        wrong.append(f"{call} of {name} is done")
                    elif name not in error and not lib.is_torch:
                        wrong.append(f"{call} of {name}: {error}")
                if text := lib.later_calls():
                    return [*wrong, f"after {name}: {text}"]
    for dtype in CARRIED_ONLY:
        x = (torch.ones(4) * (1 + world.rank)).to(dtype)
        errors = [
            lib.refusal("broadcast", x, 1),
            lib.refusal("all_gather", [torch.empty_like(x) for _ in range(world.size)], x),
        ]
        wrong += [f"{dtype}: {error}" for error in errors if error]
        if not any(errors) and x.view(torch.uint8).tolist() != (
            (torch.ones(4) * 2).to(dtype).view(torch.uint8).tolist()
        ):
            wrong.append(f"broadcast of {dtype}")
    return wrong


def _results(call: str, args: Any, world: World, sums: int) -> tuple[list[Tensor], list[float]]:
    rank, every = world.rank, [*range(1, world.size + 1)]
    if call in ("all_reduce", "reduce_scatter"):
        return [args[0]], [sums]
    if call == "reduce":
        return [args[0]], [sums if rank == 0 else 1 + rank]
    if call == "broadcast":
        return [args[0]], [2]
    if call == "gather":
        return (args[1], every) if rank == 0 else ([], [])
    if call == "scatter":
        return [args[0]], [1]
    return args[0], every


# ---- operations whose input and output share memory


def overlaps(lib: Lib) -> list[str]:
    """Returns the operations whose result differs where its input lies in its output."""
    world, wrong = lib.world, list[str]()
    size, rank, width = world.size, world.rank, 20_000

    def numbers(of: int, rows: int = size) -> Tensor:
        return torch.arange(rows * width, dtype=torch.float32).view(rows, width) + 10_000 * of

    every = torch.stack([numbers(one) for one in range(size)])  # (rank, row, width)
    for is_async in (False, True):
        flags = {"is_async": is_async}

        def check(name: str, args: Any, got: Tensor, wanted: Tensor, flags: Any = flags) -> None:
            error = lib.refusal(name, *args, **flags)
            if error or not torch.equal(got, wanted):
                wrong.append(f"{name} in place: {error or 'wrong numbers'}")

        x = numbers(rank)
        check("all_to_all_single", (x, x), x, every[:, rank])
        x = numbers(rank)
        check("all_to_all", ([*x], [*x]), x, every[:, rank])
        x = numbers(rank)
        check("all_to_all", ([*x.flip(0)], [*x]), x, every[rank])
        for shift in (0, 1):  # its own place, and that of another rank
            x, place = numbers(rank), (rank + shift) % size
            check("all_gather_into_tensor", (x.view(-1), x[place]), x, _gathered(every, shift))
            x = numbers(rank)
            check("all_gather", ([*x], x[place]), x, _gathered(every, shift))
            x = numbers(rank)
            summed = every.sum(0)[rank]
            check("reduce_scatter_tensor", (x[place], x.view(-1)), x[place], summed)
            x = numbers(rank)
            check("reduce_scatter", (x[place], [*x]), x[place], summed)
        x = numbers(rank)
        parts = [*x] if rank == 0 else None
        check("gather", (x[1], parts, 0), x, every[:, 1] if rank == 0 else numbers(rank))
        x = numbers(rank)
        parts = [*x] if rank == 0 else None
        check("scatter", (x[1], parts, 0), x[1], every[0, rank])
        x = numbers(rank)
        same = [x[0]] * size
        for name, args in (("all_gather", (same, x[1])), ("all_to_all", (same, [*x]))):
            if "share memory" not in lib.refusal(name, *args, **flags):
                wrong.append(f"{name} into one tensor is not refused")
    if text := lib.later_calls():
        wrong.append(text)
    return wrong


def _gathered(every: Tensor, shift: int) -> Tensor:
    size = len(every)
    return torch.stack([every[one, (one + shift) % size] for one in range(size)])


PARTS: dict[str, Callable[[Lib], list[str]]] = {
    "reductions": reductions,
    "operations": operations,
    "messages": messages,
    "kinds": kinds,
    "overlaps": overlaps,
    "at_once": at_once,
}
"""What is wrong with a part of what a backend must do."""


# ---- errors of one rank


MISTAKES: dict[str, Callable[[Lib, int], str]] = {
    "size": lambda lib, rank: lib.refusal("all_reduce", torch.ones(5 if rank == 1 else 4)),
    "type": lambda lib, rank: lib.refusal(
        "all_reduce", torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32)
    ),
    "operation": lambda lib, rank: lib.refusal(
        "all_reduce", torch.ones(4), Op.MAX if rank == 1 else Op.SUM
    ),
    "refused": lambda lib, rank: lib.refusal(
        "all_reduce", torch.ones(4, dtype=torch.uint16 if rank == 1 else torch.float32)
    ),
}
"""What rank 1 does otherwise than the others."""


def mistake(world: World, spec: Spec, name: str) -> list[str]:
    """Returns what this rank gets of a call in which rank 1 is wrong, and of two later ones."""
    lib = Lib(world, spec)
    got = [MISTAKES[name](lib, world.rank) or "done"]
    for _ in range(2):
        total = torch.ones(3)
        error = lib.refusal("all_reduce", total)
        got.append(error or ("done" if total.tolist() == [world.size] * 3 else f"wrong {total}"))
    with contextlib.suppress(comm.CommError):
        lib.leave()
    return got
