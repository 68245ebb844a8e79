"""What ranks do in the conformance test of every backend: types, limits, kinds of tensors, errors.

Each job returns what is wrong. ``torch`` in the place of a first backend's world means the same
calls through ``torch.distributed`` and its backend ``hires``.
"""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires import comm, torch_backend
from hires.core.ranks.world import World

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


class Lib:
    """hires.comm, or torch.distributed over it, in one world."""

    def __init__(self, world: World, backends: list[str], through: str, timeout_s: float) -> None:
        warnings.simplefilter("ignore")  # of torch, about its own experiments
        self.world, self.is_torch = world, through == "torch"
        if self.is_torch:
            torch_backend.register()
            options = torch_backend.ProcessGroupOptions(backends=tuple(backends))
            limit = datetime.timedelta(seconds=timeout_s)
            place = f"tcp://{world.address}:{world.port}"
            dist.init_process_group(
                "hires", place, limit, world.size, world.rank, pg_options=options
            )
        else:
            comm.init(backends, world=world, timeout_s=timeout_s)
        self.calls: Any = dist if self.is_torch else comm

    def refusal(self, name: str, *args: Any, is_async: bool = False, **named: Any) -> str:
        """Returns the error of a call; empty: it was done. AssertionError: no error of hires."""
        try:
            work = getattr(self.calls, name)(*args, async_op=is_async, **named)
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
            errors = [
                self.refusal("all_reduce", total, is_async=is_async),
                self.refusal(
                    "all_gather_into_tensor",
                    gathered,
                    torch.full((1,), 1.0 + rank),
                    is_async=is_async,
                ),
            ]
            if any(errors) or total.tolist() != [size] * 3:
                return f"later all_reduce: {errors} {total.tolist()}"
            if gathered.flatten().tolist() != [*range(1, size + 1)]:
                return f"later all_gather: {gathered.tolist()}"
        return ""

    def leave(self) -> None:
        dist.destroy_process_group() if self.is_torch else comm.shutdown()


# ---- types x operations x values at their limits


def limits(dtype: torch.dtype, rank: int) -> Tensor:
    """Returns the numbers of a rank: each place has numbers of one sign, and of one rank NaN."""
    if dtype == torch.bool:
        return torch.tensor([True, False, rank == 1, rank != 1]).repeat(10)
    if dtype.is_complex:
        return torch.complex(*(limits(part, rank) for part in _parts_of(dtype)))
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        own = [info.max, info.min, info.max - rank, info.min + rank, rank, 3, info.max // 2 + 1]
        return torch.tensor([*own, 0 if info.min == 0 else -rank - 1], dtype=dtype).repeat(10)
    info, nan = torch.finfo(dtype), float("nan")
    own = [info.max, info.min, info.tiny, float("inf"), -float("inf"), 1.0 + rank, -2.0, 0.0, 0.5]
    broken = [nan if rank == 0 else 1.0, nan if rank == 1 else -1.0, -nan if rank == 1 else 3.0]
    return torch.tensor([*own, *broken], dtype=dtype).repeat(10)


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


def reductions(world: World, backends: list[str], through: str, backend: str | None) -> list[str]:
    """Returns what is wrong with the reductions of every type at its limits."""
    lib, wrong = Lib(world, backends, through, 30.0), list[str]()
    how = {} if backend is None else {"backend": backend}
    rank, ranks = world.rank, range(world.size)
    for dtype in (*TYPES, *CARRIED_ONLY):
        if lib.is_torch and dtype == torch.complex32:
            continue  # torch gives its real numbers, which are halves
        for op in (*ARITHMETIC, *ORDER, *BITS, PREMUL):
            name = f"{str(getattr(op, 'op', op)).rpartition('.')[2]} of {dtype}"
            for turn in range(2):
                lib_async = {**how, "is_async": bool(turn)}
                own = limits(dtype, rank) if dtype in TYPES else torch.ones(4).to(dtype)
                wanted = None
                if dtype in TYPES:
                    wanted = expected([limits(dtype, one) for one in ranks], op)
                total, root, part = own.clone(), own.clone(), torch.empty_like(own)
                each = [own.clone() for _ in ranks]
                parts = torch.empty_like(own)
                errors = [
                    lib.refusal("all_reduce", total, op, **lib_async),
                    lib.refusal("reduce", root, world.size - 1, op, **lib_async),
                    lib.refusal("reduce_scatter", part, each, op, **lib_async),
                    lib.refusal(
                        "reduce_scatter_tensor",
                        parts,
                        torch.stack(each).view(-1),
                        op,
                        **lib_async,
                    ),
                ]
                if wanted is None:
                    wrong += [f"{name} is done" for error in errors if not error]
                    if not lib.is_torch:  # which refuses some itself
                        wrong += [f"{name}: {one}" for one in errors if str(dtype) not in one]
                    continue
                wrong += [f"{name}: {error}" for error in errors if error]
                if any(errors):
                    break
                results = [total, part, parts, *([root] if rank == world.size - 1 else [])]
                wrong += [f"{name}: {text}" for one in results if (text := _differs(one, wanted))]
                if rank != world.size - 1 and (text := _differs(root, own)):
                    wrong.append(f"{name}: reduce changed another rank's: {text}")
        if text := lib.later_calls():
            return [*wrong, f"after {dtype}: {text}"]
    lib.leave()
    return wrong


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


def kinds(world: World, backends: list[str], through: str, backend: str | None) -> list[str]:
    """Returns what is wrong with tensors of every kind, in and out of inference mode."""
    lib, wrong = Lib(world, backends, through, 30.0), list[str]()
    how = {} if backend is None else {"backend": backend}
    sums = sum(range(1, world.size + 1))
    for mode in (False, True):
        with torch.inference_mode(mode):
            for name, make in tensors(world.rank).items():
                if lib.is_torch and name == "conjugate":
                    continue  # torch refuses them itself
                for is_async in (False, True):
                    flags = {**how, "is_async": is_async}
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
                    error = lib.refusal(call, *args, **how)
                    if not error:
                        wrong.append(f"{call} of {name} is done")
                    elif name not in error and not lib.is_torch:
                        wrong.append(f"{call} of {name}: {error}")
                if text := lib.later_calls():
                    return [*wrong, f"after {name}: {text}"]
    for dtype in CARRIED_ONLY:
        x = (torch.ones(4) * (1 + world.rank)).to(dtype)
        errors = [
            lib.refusal("broadcast", x, 1, **how),
            lib.refusal("all_gather", [torch.empty_like(x) for _ in range(world.size)], x, **how),
        ]
        wrong += [f"{dtype}: {error}" for error in errors if error]
        if not any(errors) and x.view(torch.uint8).tolist() != (
            (torch.ones(4) * 2).to(dtype).view(torch.uint8).tolist()
        ):
            wrong.append(f"broadcast of {dtype}")
    lib.leave()
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


def overlaps(world: World, backends: list[str], through: str, backend: str | None) -> list[str]:
    """Returns the operations whose result differs where its input lies in its output."""
    lib, wrong = Lib(world, backends, through, 30.0), list[str]()
    how = {} if backend is None else {"backend": backend}
    size, rank, width = world.size, world.rank, 200_000

    def numbers(of: int, rows: int = size) -> Tensor:
        return torch.arange(rows * width, dtype=torch.float32).view(rows, width) + 100_000 * of

    every = torch.stack([numbers(one) for one in range(size)])  # (rank, row, width)
    for is_async in (False, True):
        flags = {**how, "is_async": is_async}

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
    lib.leave()
    return wrong


def _gathered(every: Tensor, shift: int) -> Tensor:
    size = len(every)
    return torch.stack([every[one, (one + shift) % size] for one in range(size)])


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


def mistake(world: World, backends: list[str], through: str, name: str) -> list[str]:
    """Returns what this rank gets of a call in which rank 1 is wrong, and of two later ones."""
    lib = Lib(world, backends, through, 4.0)
    got = [MISTAKES[name](lib, world.rank) or "done"]
    for _ in range(2):
        total = torch.ones(3)
        error = lib.refusal("all_reduce", total)
        got.append(error or ("done" if total.tolist() == [world.size] * 3 else f"wrong {total}"))
    with contextlib.suppress(comm.CommError):
        lib.leave()
    return got
