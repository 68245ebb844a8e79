"""What ranks do in the conformance suite: every operation of a backend beside a plain reference.

A world is named by a :class:`Spec`; its ranks run some ``PARTS``, each of which returns what is
wrong. Calls go to ``hires.comm``, or through ``torch.distributed`` and its backend ``hires``.
"""

from __future__ import annotations

import datetime
import itertools
import re
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires import comm, torch_backend
from hires.comm.backends import rendezvous, rings, rounds
from hires.core.ranks import mpi_library
from hires.core.ranks.world import World
from hires.plan.routes import CARRIES, OWN, parse_route
from tests.helpers import hard_tensors, new_backend
from tests.helpers.operations import CARRIED_ONLY, EVEN, FLOATS, TYPES, UNEVEN, Members, values
from tests.helpers.patience import until
from tests.helpers.ranks import error_of


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
    check: str = "late"


class Lib:
    """hires.comm, or torch.distributed over it, in one world."""

    def __init__(
        self, world: World, spec: Spec, place: rendezvous.WorldMeeting | None = None
    ) -> None:
        warnings.simplefilter("ignore")  # of torch, about its own experiments
        if "files" in spec.backends:
            new_backend.register()
        self.spec, self.world, self.is_torch = spec, world, spec.through == "torch"
        # Tensors of a few thousand bytes go in many pieces.
        rounds.SLOT_BYTES, rounds.WHOLE_BYTES, rings.CELL_BYTES = 2000, 64, 1024
        if self.is_torch:
            torch_backend.register()
            options = torch_backend.ProcessGroupOptions(backends=spec.backends)
            where, limit = f"tcp://{world.address}:{world.port}", datetime.timedelta(seconds=30)
            dist.init_process_group(
                "hires", where, limit, world.size, world.rank, pg_options=options
            )
        else:
            place = place or rendezvous.WorldMeeting(world)
            comm.init(spec.backends, world=place, timeout_s=spec.timeout_s, check=spec.check)
        self.calls: Any = dist if self.is_torch else comm
        self.route = parse_route(spec.backend) if spec.backend else None
        some = [0, *range(2, world.size)] if world.size > 2 else [0, 1]
        self.groups: list[tuple[Any, list[int]]] = [(None, [*range(world.size)])]
        group = self.calls.new_group(some)
        if world.rank in some:
            self.groups.append((group, some))

    def has(self, operation: str) -> bool:
        """Whether the route carries an operation out."""
        route, name = self.route, re.sub("(_into)?_tensor$|_single$", "", operation)
        return route is None or route.algorithm == OWN or name in CARRIES[route.algorithm]

    def begin(self, name: str, *args: Any, **named: Any) -> Any:
        """Calls an operation by the route of the world."""
        route = {"backend": self.route} if self.route else {}
        return getattr(self.calls, name)(*args, **route, **named)

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
        size = self.world.size
        for is_async in (False, True):
            total, gathered = torch.ones(3), torch.zeros(size, 1)
            own, flags = torch.full((1,), 1.0 + self.world.rank), {"is_async": is_async}
            errors = [self.refusal("all_reduce", total, **flags)]
            errors.append(self.refusal("all_gather_into_tensor", gathered, own, **flags))
            numbers = total.tolist() + gathered.flatten().tolist()
            if any(errors) or numbers != [*[size] * 3, *range(1, size + 1)]:
                return f"later calls: {errors} {numbers}"
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


def reductions(lib: Lib) -> list[str]:
    """Returns what is wrong with the reductions of every type at its limits."""
    world, wrong, last = lib.world, list[str](), lib.world.size - 1
    for place, dtype in enumerate((*lib.spec.types, *CARRIED_ONLY)):
        if lib.is_torch and dtype == torch.complex32:
            continue  # torch gives its real numbers, which are halves
        for number, op in enumerate(hard_tensors.OPS):
            name = f"{str(getattr(op, 'op', op)).rpartition('.')[2]} of {dtype}"
            own, wanted = torch.ones(4).to(dtype), None
            if dtype in TYPES:
                terms = [hard_tensors.limits(dtype, one) for one in range(world.size)]
                own, wanted = terms[world.rank], hard_tensors.reduced(terms, op)
            total, root, part = own.clone(), own.clone(), own.clone()
            each = [own.clone() for _ in range(world.size)]
            waits = bool((place + number) % 2)  # every reduction is waited for in some types
            calls: dict[str, tuple[Any, ...]] = {"all_reduce": (total,), "reduce": (root, last)}
            if waits:
                calls["reduce_scatter"] = part, each
            else:
                calls["reduce_scatter_tensor"] = part, torch.stack(each).view(-1)
            errors = [lib.refusal(call, *args, op, is_async=waits) for call, args in calls.items()]
            if wanted is None:
                wrong += [f"{name} is done" for error in errors if not error]
                if not lib.is_torch:  # which refuses some itself
                    wrong += [f"{name}: {one}" for one in errors if str(dtype) not in one]
                continue
            wrong += [f"{name}: {error}" for error in errors if error]
            wanted_of = [(one, wanted) for one in (total, part)]
            wanted_of.append((root, wanted if world.rank == last else own))
            wrong += [
                f"{name}: {text}"
                for one, other in wanted_of
                if not any(errors) and (text := hard_tensors.difference(one, other))
            ]
        if text := lib.later_calls():
            return [*wrong, f"after {dtype}: {text}"]
    return wrong


def operations(lib: Lib) -> list[str]:
    """Returns the operations whose result is wrong, in the world and in a group.

    Each is called twice: blocking, and waited for in another order than it was issued.
    """
    wrong, rank = list[str](), lib.world.rank
    for dtype, (group, ranks) in itertools.product(lib.spec.types, lib.groups):
        members, late = Members(rank, ranks, dtype, root=len(ranks) - 1), []
        rows = [2] * len(ranks), [700 * n for n in range(len(ranks))]  # the first of these is empty
        cases: list[tuple[str, Any, Any]] = [
            *itertools.product(EVEN, ((2, 3), (0,), (), (2500,)), [[1]]),
            *itertools.product(UNEVEN, [()], rows),
        ]
        for is_async, (name, shape, counts) in itertools.product((False, True), cases):
            if not lib.has(name):
                continue
            args, is_right = members.call(name, shape, counts)
            what = f"{name} of {shape or counts} {dtype} among {ranks}, async {is_async}"
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
            elif number % 20 == 1 and lib.is_torch:
                work.get_future().wait()
            work.wait(datetime.timedelta(seconds=20))
            if not is_right() or work.exception() is not None:
                wrong.append(what)
    return wrong + _same_bits(lib)


def _same_bits(lib: Lib) -> list[str]:
    # Sums whose rounding depends on the order have the same bits on all ranks.
    wrong = []
    for dtype in FLOATS:
        generator = torch.Generator().manual_seed(lib.world.rank)
        total = torch.randn(2500, generator=generator).to(dtype)
        lib.begin("all_reduce", total)
        every = torch.empty(lib.world.size, *total.shape, dtype=dtype)
        lib.calls.all_gather_into_tensor(every, total)
        if not torch.equal(every, total.expand(every.shape)):
            wrong.append(f"sums of {dtype} differ between ranks")
    return wrong


def messages(lib: Lib) -> list[str]:
    """Returns the messages of all types and tags that arrive wrong, over all backends at once."""
    wrong, backends, rank = list[str](), [*lib.spec.backends], lib.world.rank
    after, before = ((rank + by) % lib.world.size for by in (1, -1))
    for dtype, shape in itertools.product((*TYPES, *CARRIED_ONLY), ((5,), (0,), (2, 3), (3000,))):
        pairs = []
        for number, backend in enumerate([*backends, *reversed(backends)]):
            sent, got = (values(torch.float32, shape, n, number).to(dtype) for n in (rank, 77))
            ops = [comm.P2POp(comm.isend, sent, after, None, number, backend)]
            ops.append(comm.P2POp(comm.irecv, got, before, None, number, backend))
            wanted = values(torch.float32, shape, before, number).to(dtype)
            pairs.append((comm.batch_isend_irecv(ops), got.view(-1), wanted.view(-1)))
        for handles, got, wanted in reversed(pairs):
            for handle in handles:
                handle.wait(datetime.timedelta(seconds=20))
            if not torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)):
                wrong.append(f"message of {shape} {dtype}")
    for group, ranks in lib.groups:  # blocking, between its first and last rank
        ends = ranks[0], ranks[-1]
        received, sent = torch.empty(3, 2).t(), values(torch.float32, (2, 3), rank)
        if rank in ends:
            other = sum(ends) - rank
            handle = comm.isend(sent, other, group, 5)
            if comm.recv(received, other, group, 5) != other:
                wrong.append("the sender of a message")
            handle.wait()
            if not torch.equal(received, values(torch.float32, (2, 3), other)):
                wrong.append("blocking message")
        comm.barrier(group)
    return wrong


def kinds(lib: Lib) -> list[str]:
    """Returns what is wrong with tensors of every kind, in and out of inference mode."""
    world, wrong = lib.world, list[str]()
    for mode in (False, True):
        with torch.inference_mode(mode):
            for name, make in hard_tensors.kinds(world.rank).items():
                if lib.is_torch and name == "conjugate":
                    continue  # torch refuses them itself
                for is_async in (False, True):
                    for call, args, outputs, factors in hard_tensors.calls_with(make, world):
                        what = f"{call} of {name} (mode {mode}, async {is_async})"
                        if error := lib.refusal(call, *args, is_async=is_async):
                            wrong.append(f"{what}: {error}")
                            continue
                        for output, factor in zip(outputs, factors, strict=True):
                            wanted = make().detach().clone() / (1.0 + world.rank) * factor
                            if text := hard_tensors.difference(output.detach().clone(), wanted):
                                wrong.append(f"{what}: {text}")
                            if output.requires_grad != make().requires_grad:
                                wrong.append(f"{what} changed requires_grad")
            for name, make in hard_tensors.refused().items():
                for call, args, _, _ in hard_tensors.calls_with(make, world):
                    if name in ("expanded", "overlap") and call == "gather":
                        continue  # its outputs are those of one rank
                    error = lib.refusal(call, *args)
                    if not error or (name not in error and not lib.is_torch):
                        wrong.append(f"{call} of {name}: {error or 'done'}")
                if text := lib.later_calls():
                    return [*wrong, f"after {name}: {text}"]
    for dtype in CARRIED_ONLY:
        own, sent = (torch.full((4,), float(n)).to(dtype) for n in (1 + world.rank, 2))
        parts = [torch.empty_like(own) for _ in range(world.size)]
        errors = [lib.refusal("broadcast", own, 1), lib.refusal("all_gather", parts, own)]
        if any(errors) or not torch.equal(own.view(torch.uint8), sent.view(torch.uint8)):
            wrong.append(f"broadcast of {dtype}: {errors}")
    return wrong


def overlaps(lib: Lib) -> list[str]:
    """Returns the operations whose result differs where its input lies in its output."""
    wrong, size, rank, width = list[str](), lib.world.size, lib.world.rank, 20_000

    def numbers(of: int) -> Tensor:
        return torch.arange(size * width, dtype=torch.float32).view(size, width) + 10_000 * of

    every = torch.stack([numbers(one) for one in range(size)])  # (rank, row, width)
    swapped, total, at = every[:, rank], every.sum(0)[rank], (rank + 1) % size
    is_root = rank == 0

    def gathered(shift: int) -> Tensor:
        return torch.stack([every[one, (one + shift) % size] for one in range(size)])

    calls: list[tuple[str, Callable[[Tensor], tuple[Any, ...]], Any, Tensor]] = [
        # operation, its arguments in x, the part of x with the result, the result
        ("all_to_all_single", lambda x: (x, x), slice(None), swapped),
        ("all_to_all", lambda x: ([*x], [*x]), slice(None), swapped),
        ("all_to_all", lambda x: ([*x.flip(0)], [*x]), slice(None), every[rank]),
        ("all_gather_into_tensor", lambda x: (x.view(-1), x[rank]), slice(None), gathered(0)),
        ("all_gather_into_tensor", lambda x: (x.view(-1), x[at]), slice(None), gathered(1)),
        ("all_gather", lambda x: ([*x], x[at]), slice(None), gathered(1)),
        ("reduce_scatter_tensor", lambda x: (x[rank], x.view(-1)), rank, total),
        ("reduce_scatter_tensor", lambda x: (x[at], x.view(-1)), at, total),
        ("reduce_scatter", lambda x: (x[at], [*x]), at, total),
        (
            *("gather", lambda x: (x[1], [*x] if is_root else None, 0), slice(None)),
            every[:, 1] if is_root else every[rank],
        ),
        ("scatter", lambda x: (x[1], [*x] if is_root else None, 0), 1, every[0, rank]),
    ]
    for is_async in (False, True):
        for name, arguments, part, wanted in calls:
            x = numbers(rank)
            error = lib.refusal(name, *arguments(x), is_async=is_async)
            if error or not torch.equal(x[part], wanted):
                wrong.append(f"{name} in place: {error or 'wrong numbers'}")
        x = numbers(rank)
        for name, args in (("all_gather", x[1]), ("all_to_all", [*x])):
            if "share memory" not in lib.refusal(name, [x[0]] * size, args, is_async=is_async):
                wrong.append(f"{name} into one tensor is not refused")
    return [*wrong, text] if (text := lib.later_calls()) else wrong


PARTS: dict[str, Callable[[Lib], list[str]]] = {
    one.__name__: one for one in (reductions, operations, messages, kinds, overlaps)
}
"""What is wrong with a part of what a backend must do."""


def late_for_a_group(world: World, backend: str, given_up: str) -> list[str]:
    """Returns the errors of a group to which rank 1 comes late, and of calls in a world left."""
    comm.init([backend], world=world, timeout_s=60)
    if world.rank:
        until(Path(given_up).exists)
    errors = [error_of(lambda: comm.new_group(timeout=0.5))]
    Path(given_up).touch()
    group, total = comm.new_group(), torch.ones(2)
    comm.all_reduce(total, group=group)
    comm.shutdown()
    for call in (
        lambda: comm.all_reduce(total, group=group),
        lambda: comm.new_group([0, 1], world=group.world),
        lambda: comm.gather_texts("", world=group.world),
    ):
        errors.append(error_of(call))
    return [*errors, f"{total.tolist()}"]


def assert_late_and_left(answers: list[list[str]]) -> None:
    """Checks what :func:`late_for_a_group` returned on two ranks."""
    for error, text in zip(
        answers, ("rank 1 has not come in time", "rank 0 has given up"), strict=True
    ):
        assert error[0].partition("failed: ")[2].startswith(text)
        assert all("has left the world" in one for one in error[1:4])
        assert error[4] == "[2.0, 2.0]"
