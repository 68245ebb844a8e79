"""Runs one rank's calls of a program of communication, and checks their results.

Every rank makes the inputs of all ranks from the name of an operation alone, so the result is
computed plainly beside it, by the rank that checks it. Numbers are small and whole: sums of them
are exact in every type and order.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires import comm
from hires.plan.event import BYTES
from hires.plan.routes import Route, parse_route
from tests.helpers.mixed_programs import RECEIVES, SENDS, CommCall, CommProgram

Check = Callable[[], None]
OPS = {
    name: getattr(dist.ReduceOp, name.upper())
    for name in ("sum", "product", "min", "max", "avg", "band", "bor", "bxor")
}
UNTOUCHED = 99
ALGORITHMS = {
    "all_reduce": ("segmented:1KiB", "direct"),
    "reduce": ("segmented:1KiB",),
    "broadcast": ("segmented:1KiB",),
    "all_gather_into_tensor": ("segmented:1KiB", "direct"),
}
"""Operation -> algorithms beside the backend's own."""


def values(name: str, member: int, count: int, dtype: str, reduction: str = "") -> Tensor:
    """Returns what a member of an operation gives: (count,), the same on every rank."""
    start = zlib.crc32(name.encode()) % 97 + 5 * member
    least, span = (1, 2) if reduction == "product" else (0, 7)
    whole = (torch.arange(count) * (1 + start % 3) + start) % span + least
    if dtype == "bool":
        return whole % 2 == 0
    if reduction == "avg":  # of two to four ranks
        whole = whole * 12
    return whole.to(getattr(torch, dtype))


def reduced(parts: list[Tensor], reduction: str) -> Tensor:
    """Returns the reduction of tensors, one after the other."""
    if reduction == "avg":
        return (sum(part.double() for part in parts) / len(parts)).to(parts[0].dtype)
    total = parts[0].clone()
    two = {
        "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }[reduction]  # fmt: skip
    for part in parts[1:]:
        total = two(total, part)
    return total


class ProgramRank:
    """One rank in a program."""

    def __init__(self, program: CommProgram, rank: int, groups: dict[Any, Any]) -> None:
        self.program, self.rank, self.groups = program, rank, groups
        self.counts: Counter[Any] = Counter()
        self.open: dict[str, tuple[Any, Check]] = {}

    def run(self) -> None:
        """Runs the rank's calls; AssertionError: a result is wrong."""
        calls = self.program.ranks[self.rank]
        at = 0
        while at < len(calls):
            call, end = calls[at], at + 1
            if call.operation == "wait":
                for name in [call.handle] if call.handle else [*self.open]:
                    self._end(name)
            elif call.batch:
                while end < len(calls) and calls[end].batch == call.batch:
                    end += 1
                self._batch(calls[at:end])
            else:
                handle, check = self._begin(call)
                if call.is_blocking:
                    assert handle is None or call.operation in (*SENDS, *RECEIVES), call
                    self._checked(call, check)
                else:
                    self.open[call.handle] = handle, lambda c=call, k=check: self._checked(c, k)
            at = end

    def _end(self, name: str) -> None:
        handle, check = self.open.pop(name)
        if handle is not None:
            handle.wait()
            assert handle.is_completed()
        check()

    def _checked(self, call: CommCall, check: Check) -> None:
        try:
            check()
        except AssertionError as error:
            where = f"rank {self.rank}: {call}"
            raise AssertionError(f"{where}: {error}") from error

    def _batch(self, calls: list[CommCall]) -> None:
        made = [self._message(call) for call in calls]
        posts = [
            comm.P2POp(
                comm.isend if call.operation == "isend" else comm.irecv,
                tensor,
                call.peer,
                tag=call.tag,
                backend=call.backend,
            )
            for call, (tensor, _) in zip(calls, made, strict=True)
        ]
        handles = comm.batch_isend_irecv(posts)
        for call, handle, (_, check) in zip(calls, handles, made, strict=True):
            self.open[call.handle] = handle, lambda c=call, k=check: self._checked(c, k)

    def _begin(self, call: CommCall) -> tuple[Any, Check]:
        if call.operation in (*SENDS, *RECEIVES):
            tensor, check = self._message(call)
            function = getattr(comm, call.operation)
            return function(tensor, call.peer, tag=call.tag, backend=call.backend), check
        members = self.program.members(call)
        self.counts[call.backend, members] += 1
        name = f"{call.backend} {members} {self.counts[call.backend, members]}"
        options = {
            "group": self.groups[members],
            "async_op": not call.is_blocking,
            "backend": _route(call, name),
        }
        return getattr(self, f"_{call.operation}")(call, name, members, options)

    def _message(self, call: CommCall) -> tuple[Tensor, Check]:
        sends = call.operation in SENDS
        channel = (self.rank, call.peer) if sends else (call.peer, self.rank)
        channel = (*channel, call.backend, call.tag)
        self.counts[channel, sends] += 1
        expected = values(f"{channel} {self.counts[channel, sends]}", 0, _count(call), call.dtype)
        if sends:
            return expected.clone(), lambda: None
        buffer = _empty(_count(call), call.dtype)
        return buffer, lambda: _same(buffer, expected)

    # ---- collectives: each returns its handle and what checks its result

    def _barrier(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        return comm.barrier(**options), lambda: None

    def _own(self, members: tuple[int, ...]) -> int:
        return members.index(self.rank)

    def _inputs(self, call: CommCall, name: str, members: Any, count: int) -> list[Tensor]:
        numbers = range(len(members))
        return [values(name, m, count, call.dtype, call.reduction) for m in numbers]

    def _all_reduce(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        inputs = self._inputs(call, name, members, _count(call))
        tensor = _strided(inputs[self._own(members)], name)
        handle = comm.all_reduce(tensor, OPS[call.reduction], **options)
        return handle, lambda: _same(tensor, reduced(inputs, call.reduction))

    def _reduce(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        inputs = self._inputs(call, name, members, _count(call))
        tensor = _strided(inputs[self._own(members)], name)
        handle = comm.reduce(tensor, call.peer, OPS[call.reduction], **options)
        if self.rank != call.peer:
            return handle, lambda: None
        return handle, lambda: _same(tensor, reduced(inputs, call.reduction))

    def _broadcast(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        inputs = self._inputs(call, name, members, _count(call))
        tensor = _strided(inputs[self._own(members)], name)
        handle = comm.broadcast(tensor, call.peer, **options)
        return handle, lambda: _same(tensor, inputs[members.index(call.peer)])

    def _counts(self, call: CommCall, members: Any) -> list[int]:
        return list(call.parts) if call.parts else [_count(call)] * len(members)

    def _all_gather(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        counts = self._counts(call, members)
        parts = [values(name, m, count, call.dtype) for m, count in enumerate(counts)]
        outputs = [_empty(count, call.dtype) for count in counts]
        handle = comm.all_gather(outputs, parts[self._own(members)].clone(), **options)
        return handle, lambda: _same_lists(outputs, parts)

    def _all_gather_into_tensor(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        parts = self._inputs(call, name, members, _count(call))
        output = _empty(_count(call) * len(members), call.dtype)
        own = parts[self._own(members)].clone()
        handle = comm.all_gather_into_tensor(output, own, **options)
        return handle, lambda: _same(output, torch.cat(parts))

    def _pieces(self, call: CommCall, name: str, members: Any) -> list[list[Tensor]]:
        # [member][piece]: what each member gives to each.
        counts = self._counts(call, members)
        whole = [
            values(name, m, sum(counts), call.dtype, call.reduction) for m in range(len(members))
        ]
        return [list(torch.split(one, counts)) for one in whole]

    def _reduce_scatter(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        pieces, own = self._pieces(call, name, members), self._own(members)
        output = _empty(len(pieces[0][own]), call.dtype)
        given = [piece.clone() for piece in pieces[own]]
        handle = comm.reduce_scatter(output, given, OPS[call.reduction], **options)
        expected = reduced([one[own] for one in pieces], call.reduction)
        return handle, lambda: _same(output, expected)

    def _reduce_scatter_tensor(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        pieces, own = self._pieces(call, name, members), self._own(members)
        output = _empty(_count(call), call.dtype)
        given = torch.cat(pieces[own])
        handle = comm.reduce_scatter_tensor(output, given, OPS[call.reduction], **options)
        expected = reduced([one[own] for one in pieces], call.reduction)
        return handle, lambda: _same(output, expected)

    def _exchanged(self, call: CommCall, name: str, members: Any) -> tuple[list[Tensor], Any]:
        # What this rank gives to each member, and what it gets from each.
        size, own = len(members), self._own(members)
        counts = self._counts(call, members)

        def given(member: int) -> list[Tensor]:
            numbers = [counts[(member + other) % size] for other in range(size)]
            return list(torch.split(values(name, member, sum(numbers), call.dtype), numbers))

        return given(own), [given(member)[own] for member in range(size)]

    def _all_to_all(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        given, expected = self._exchanged(call, name, members)
        outputs = [_empty(len(one), call.dtype) for one in expected]
        handle = comm.all_to_all(outputs, [one.clone() for one in given], **options)
        return handle, lambda: _same_lists(outputs, expected)

    def _all_to_all_single(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        given, expected = self._exchanged(call, name, members)
        output = _empty(sum(map(len, expected)), call.dtype)
        splits = ([*map(len, expected)], [*map(len, given)]) if call.parts else (None, None)
        handle = comm.all_to_all_single(output, torch.cat(given), *splits, **options)
        return handle, lambda: _same(output, torch.cat(expected))

    def _gather(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        counts = self._counts(call, members)
        parts = [values(name, m, count, call.dtype) for m, count in enumerate(counts)]
        is_root = self.rank == call.peer
        outputs = [_empty(count, call.dtype) for count in counts] if is_root else None
        own = parts[self._own(members)].clone()
        handle = comm.gather(own, outputs, call.peer, **options)
        return handle, lambda: _same_lists(outputs or [], parts if is_root else [])

    def _scatter(self, call: CommCall, name: str, members: Any, options: Any) -> Any:
        pieces = self._pieces(call, name, members)[members.index(call.peer)]
        output = _empty(len(pieces[self._own(members)]), call.dtype)
        given = [piece.clone() for piece in pieces] if self.rank == call.peer else None
        handle = comm.scatter(output, given, call.peer, **options)
        return handle, lambda: _same(output, pieces[self._own(members)])


def _route(call: CommCall, name: str) -> str | Route:
    # Of some collectives another algorithm on the same backend, the same on all ranks.
    choices = ALGORITHMS.get(call.operation, ())
    number = zlib.crc32(name.encode()) // 7 % (2 * len(choices) or 1)
    return (
        parse_route(f"{call.backend}:{choices[number]}") if number < len(choices) else call.backend
    )


def _count(call: CommCall) -> int:
    return call.num_bytes // BYTES[call.dtype]


def _empty(count: int, dtype: str) -> Tensor:
    return torch.full((count,), 1 if dtype == "bool" else UNTOUCHED, dtype=getattr(torch, dtype))


def _strided(tensor: Tensor, name: str) -> Tensor:
    # A copy; of some operations every second number of a larger tensor, which is not contiguous.
    if zlib.crc32(name.encode()) % 5:
        return tensor.clone()
    wide = torch.zeros(2 * len(tensor), dtype=tensor.dtype)
    wide[::2] = tensor
    return wide[::2]


def _same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if not torch.equal(found, expected):
        wrong = (found != expected).nonzero().flatten()
        at = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {len(found)} numbers are wrong, the first at {at}: "
            f"{found[at].item()}, not {expected[at].item()}"
        )


def _same_lists(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        _same(one, other)
