"""Makes what random operators draw from numbers that are spread evenly in [0, 1).

    numbers(shape, type, finish, device)      one even number u for each place, or finish(u)

Bell curves and waiting times are the inverse of their distribution at u, so that each
follows from its place alone (:mod:`hires.nets.random_draws`).

Source:
    Devroye, "Non-uniform random variate generation", 1986, chapter II.2 (inversion).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Finish = Callable[[Tensor], Tensor]
"""Numbers in [0, 1) -> what is drawn."""
Numbers = Callable[..., Tensor]
"""(shape, dtype, finish, device) -> one draw."""
Arguments = dict[str, Any]
HOST = None
"""Where draws are computed that need logarithms and the like, whose last bits differ from device to
device. Even numbers are made of whole numbers and one product, so they are the same on all."""


def writes(func: Any) -> bool:
    """Whether an operator writes what it draws over its input."""
    return bool(func._schema.name.endswith("_"))


def _output(func: Any, x: Tensor) -> Tensor:
    return x if writes(func) else torch.empty_like(x)


def _keep_with(numbers: Numbers, func: Any, args: Arguments) -> Tensor:
    # bernoulli() takes its probabilities from its input, if it gets no others.
    x: Tensor = args["self"]
    given = args.get("p", 0.5 if writes(func) else x)
    if isinstance(given, Tensor):
        ones = numbers(x.shape, torch.float64, lambda u: u, x.device) < given
    else:
        ones = numbers(x.shape, x.dtype, lambda u: u < given, x.device)
    return _output(func, x).copy_(ones)


def _dropout(numbers: Numbers, func: Any, args: Arguments) -> tuple[Tensor, Tensor]:
    # What F.dropout is on a GPU.
    x, keep = args["input"], 1 - args["p"]
    mask = numbers(x.shape, torch.bool, lambda u: u < keep, x.device)
    return x * mask * (1 / keep), mask


def _rrelu(numbers: Numbers, func: Any, args: Arguments) -> Any:
    # Negative numbers are multiplied by slopes, which the backward pass reads from ``noise``.
    x, low, high = args["self"], args.get("lower", 1 / 8), args.get("upper", 1 / 3)
    if not args.get("training"):
        return func(**args)
    slopes = numbers(x.shape, x.dtype, lambda u: low + (high - low) * u, x.device)
    noise = torch.where(x > 0, 1.0, slopes)
    if func is torch.ops.aten.rrelu_with_noise_functional.default:
        return x * noise, noise
    made = x * args["noise"].copy_(noise)
    return x.copy_(made) if writes(func) else made


def _fresh(numbers: Numbers, func: Any, args: Arguments) -> Tensor:
    return _write(numbers, _created(func, args), "randn" in func._schema.name)


def _created(func: Any, args: Arguments, dtype: torch.dtype | None = None) -> Tensor:
    # An empty tensor of a size, or like another, for an operator that makes one.
    keys = ("dtype", "layout", "device", "pin_memory", "memory_format")
    kept = {key: args[key] for key in keys if args.get(key) is not None}
    if func._schema.name.endswith("_like"):
        return torch.empty_like(args["self"], **kept)
    return torch.empty(args["size"], **({} if dtype is None else {"dtype": dtype}) | kept)


def _whole_numbers(numbers: Numbers, func: Any, args: Arguments) -> Tensor:
    # randint(low, high, size), randint_like(x, low, high), x.random_(from, to)
    if "random" in func._schema.name:
        out, low, high = _output(func, args["self"]), args.get("from", 0), args.get("to")
        high = _largest(out.dtype) + 1 if high is None else high
    else:
        out, low, high = _created(func, args, torch.int64), args.get("low", 0), args["high"]
    low, high = int(low), int(high)

    def finish(u: Tensor) -> Tensor:
        # The type may round a large number up to the end, which is excluded.
        return (u * (high - low)).floor_().clamp_(max=high - low - 1) + low

    return out.copy_(numbers(out.shape, out.dtype, finish, out.device))


def _largest(dtype: torch.dtype) -> int:
    # As torch has it: whole numbers that a type holds exactly.
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return min(torch.iinfo(dtype).max, 2**53 - 1) if dtype != torch.bool else 1


def _spread(numbers: Numbers, func: Any, args: Arguments) -> Tensor:
    low, high = args.get("from", 0.0), args.get("to", 1.0)
    return _write(numbers, _output(func, args["self"]), False).mul_(high - low).add_(low)


def _normal(numbers: Numbers, func: Any, args: Arguments) -> Tensor:
    drawn = _write(numbers, _output(func, args["self"]), True)
    return drawn.mul_(args.get("std", 1.0)).add_(args.get("mean", 0.0))


def _exponential(numbers: Numbers, func: Any, args: Arguments) -> Tensor:
    # Never 0, because a Gumbel number is its logarithm.
    out = _output(func, args["self"])
    least = max(2.0**-54, torch.finfo(out.dtype).tiny)

    def finish(u: Tensor) -> Tensor:
        return torch.log1p(-u).neg_().div_(args.get("lambd", 1.0)).clamp_(min=least)

    return out.copy_(numbers(out.shape, out.dtype, finish, HOST))


def _bell_of(numbers: Numbers, func: Any, args: Arguments) -> Tensor:
    # normal(mean, std): two tensors, a tensor and a number, or numbers and a size.
    mean, std = args["mean"], args.get("std", 1.0)
    if "size" in args:
        keys = {key: args[key] for key in ("dtype", "device") if key in args}
        out = torch.empty(args["size"], **keys)
    else:
        out = torch.empty_like(mean + std)
    return _write(numbers, out, True).mul_(std).add_(mean)


def _write(numbers: Numbers, out: Tensor, normal: bool) -> Tensor:
    def finish(u: Tensor) -> Tensor:
        if normal:
            return torch.special.ndtri(u + 2.0**-54)  # type: ignore[no-any-return]
        # Of 24 bits in float32, as torch has them: rounding must not reach 1.
        return u if out.dtype == torch.float64 else (u * 2**24).floor_() * 2.0**-24

    out.copy_(numbers(out.shape, out.dtype, finish, HOST if normal else out.device))
    return out


_NAMES: dict[Callable[[Numbers, Any, Arguments], Any], str] = {
    _dropout: "native_dropout",
    _keep_with: "bernoulli bernoulli_",
    _rrelu: "rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional",
    _fresh: "rand randn rand_like randn_like",
    _whole_numbers: "randint randint_like random random_",
    _spread: "uniform uniform_",
    _exponential: "exponential exponential_",
    _normal: "normal_functional normal_",
    _bell_of: "normal",
}
DRAWN: dict[Any, Callable[[Numbers, Any, Arguments], Any]] = {
    getattr(packet, overload): draw
    for draw, names in _NAMES.items()
    for packet in (getattr(torch.ops.aten, name) for name in names.split())
    for overload in packet.overloads()
    if "out" not in overload
}
"""Operator, every overload but those that write into ``out`` -> draws for it."""
