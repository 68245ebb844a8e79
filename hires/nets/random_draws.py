"""Draws random numbers that follow from their place in the batch, not from the rank.

A dropout on a tile must drop what it drops of the whole image. So no number comes from a generator:
each is a hash of the seed, the step, the draw of the network's forward pass, and its place in the
batch of the step, which ends up the same on every tile, stage, replica, microbatch and shard, and
when a segment is computed again or a run is resumed:

    place     sample of the batch, then row by row in the sample's own tensor
    number    mix(key + (place + 1) * GOLDEN),  key = mix of (seed, step, draw)

``Draws`` is a mode: under it torch's own operators (``F.dropout``, ``torch.rand`` ...) take their
noise from here, whatever they compute of it. A plain module under it draws what its graph draws.

Source:
    SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
    the mixing constants are variant 13 of Stafford.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
CHUNK = 2**16
"""Numbers that are mixed at once: their 64 bits stay in the cache."""

Places = Sequence[range]
"""For each dim of a tensor, the indices of the whole tensor that it holds."""
Finish = Callable[[Tensor], Tensor]
"""Numbers in [0, 1) -> what is drawn."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operators their random numbers while it is active.

    Args:
        seed: of the run.
        step: number of the step.
        first_sample: of the microbatch, in the batch of the step.
        samples: of the microbatch.
        draw: number of the first draw in the forward pass; later ones count on.
        places: what a part of a tensor holds of the whole one, by the shape of the part's noise;
            None: noise is drawn for whole tensors.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        first_sample: int,
        samples: int,
        draw: int = 0,
        places: Callable[[Sequence[int]], tuple[Places, Sequence[int]]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.step = seed, step
        self.first_sample, self.samples = first_sample, samples
        self.places = places
        self._draws = itertools.count(draw)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch's compiler: 4 s and 76 MiB in every rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator, or draws for it."""
        draw = _DRAWN.get(func)
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        if draw is None:
            # Attention without dropout draws nothing; others draw on their own, but count.
            drops = "dropout_p" not in names or given.get("dropout_p", 0.0) > 0
            if drops and torch.Tag.nondeterministic_seeded in func.tags:
                next(self._draws)
            return func(*args, **(kwargs or {}))
        return draw(self, func, {**given, "generator": None})

    def numbers(
        self, shape: Sequence[int], dtype: torch.dtype, finish: Finish, device: Any
    ) -> Tensor:
        """Returns the next draw: what ``finish`` makes of numbers in [0, 1), float64 of 53 bits.

        ``shape`` is that of the part; the places may name its dims in finer ones.
        """
        places: Places = [range(size) for size in shape]
        whole = shape
        if self.places is not None:
            places, whole = self.places(shape)
        count = math.prod(whole)
        per_sample = count // self.samples if count % self.samples == 0 else count
        key = key_of(self.seed, self.step, next(self._draws))
        out = torch.empty([len(held) for held in places], dtype=dtype, device=device)
        first = self.first_sample * per_sample
        return fill(out, key, places, whole, finish, first).view(shape)


def key_of(*numbers: int) -> int:
    """Returns 64 bits that follow from some numbers, in their order."""
    key = 0
    for number in numbers:
        key = _mixed((key + (number + 1) * GOLDEN) & MASK)
    return key


def fill(
    out: Tensor, key: int, places: Places, whole: Sequence[int], finish: Finish, first: int = 0
) -> Tensor:
    """Fills a dense tensor with what ``finish`` makes of the numbers of its places.

    Args:
        out: holds the ``places`` of a tensor of shape ``whole``.
        key: of the draw.
        places: as above.
        whole: as above.
        finish: numbers in [0, 1), float64, some at a time -> those of ``out``.
        first: place of the whole tensor's first number in the batch.
    """
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    cut = len(places)
    while cut and math.prod(map(len, places[cut - 1 :])) <= CHUNK:
        cut -= 1
    outer = _flat_places(places[:cut], strides[:cut], out.device) + (first + 1)
    inner = _flat_places(places[cut:], strides[cut:], out.device)
    if not out.numel():
        return out
    rows, target = CHUNK // len(inner), out.view(len(outer), len(inner))
    for begin in range(0, len(outer), rows):
        z = outer[begin : begin + rows].unsqueeze(1) + inner
        _mix(z.mul_(_signed(GOLDEN)).add_(_signed(key)))
        target[begin : begin + rows] = finish(_shifted(z, 11).double().mul_(2.0**-53))
    return out


def _flat_places(places: Places, strides: Sequence[int], device: Any) -> Tensor:
    flat = torch.zeros(1, dtype=torch.int64, device=device)
    for held, stride in zip(places, strides, strict=True):
        one = torch.arange(held.start, held.stop, held.step, device=device) * stride
        flat = (flat.unsqueeze(1) + one).flatten()
    return flat


def _mix(z: Tensor) -> Tensor:
    # In place, on int64: products wrap around, and a shift to the right must bring in zeros.
    z ^= _shifted(z, 30)
    z *= _signed(FIRST)
    z ^= _shifted(z, 27)
    z *= _signed(SECOND)
    z ^= _shifted(z, 31)
    return z


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * FIRST) & MASK
    z = ((z ^ (z >> 27)) * SECOND) & MASK
    return z ^ (z >> 31)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _keep_with(draws: Draws, func: Any, args: dict[str, Any]) -> Tensor:
    # bernoulli() takes its probabilities from its input, if it gets no others.
    x: Tensor = args["self"]
    given = args.get("p", 0.5 if _writes(func) else x)
    if isinstance(given, Tensor):
        ones = draws.numbers(x.shape, torch.float64, lambda u: u, x.device) < given
    else:
        ones = draws.numbers(x.shape, x.dtype, lambda u: u < given, x.device)
    return _output(func, x).copy_(ones)


def _output(func: Any, x: Tensor) -> Tensor:
    return x if _writes(func) else torch.empty_like(x)


def _writes(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))


def _dropout(draws: Draws, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    # What F.dropout is on a GPU.
    x, keep = args["input"], 1 - args["p"]
    mask = draws.numbers(x.shape, torch.bool, lambda u: u < keep, x.device)
    return x * mask * (1 / keep), mask


def _fresh(draws: Draws, func: Any, args: dict[str, Any]) -> Tensor:
    kept = {key: arg for key, arg in args.items() if key != "generator"}
    like = func._schema.name.endswith("_like")
    source = kept.pop("self" if like else "size")
    out = (torch.empty_like if like else torch.empty)(source, **kept)
    return _write(draws, out, "randn" in func._schema.name)


def _spread(draws: Draws, func: Any, args: dict[str, Any]) -> Tensor:
    low, high = args.get("from", 0.0), args.get("to", 1.0)
    return _write(draws, _output(func, args["self"]), False).mul_(high - low).add_(low)


def _normal(draws: Draws, func: Any, args: dict[str, Any]) -> Tensor:
    return (
        _write(draws, _output(func, args["self"]), True)
        .mul_(args.get("std", 1.0))
        .add_(args.get("mean", 0.0))
    )


def _exponential(draws: Draws, func: Any, args: dict[str, Any]) -> Tensor:
    # By the inverse of its distribution; never 0, because a Gumbel number is its logarithm.
    out = _output(func, args["self"])
    least = max(2.0**-54, torch.finfo(out.dtype).tiny)

    def finish(u: Tensor) -> Tensor:
        return torch.log1p(-u).neg_().div_(args.get("lambd", 1.0)).clamp_(min=least)

    return out.copy_(draws.numbers(out.shape, out.dtype, finish, out.device))


def _bell(draws: Draws, func: Any, args: dict[str, Any]) -> Tensor:
    # normal(mean, std): two tensors, a tensor and a number, or numbers and a size.
    mean, std = args["mean"], args.get("std", 1.0)
    if "size" in args:
        keys = {key: args[key] for key in ("dtype", "device") if key in args}
        out = torch.empty(args["size"], **keys)
    else:
        out = torch.empty_like(mean + std)
    return _write(draws, out, True).mul_(std).add_(mean)


def _write(draws: Draws, out: Tensor, normal: bool) -> Tensor:
    def finish(u: Tensor) -> Tensor:
        if normal:
            bell: Tensor = torch.special.ndtri(u + 2.0**-54)
            return bell
        # Of 24 bits in float32, as torch has them: rounding must not reach 1.
        return u if out.dtype == torch.float64 else (u * 2**24).floor_() * 2.0**-24

    out.copy_(draws.numbers(out.shape, out.dtype, finish, out.device))
    return out


_aten = torch.ops.aten
_DRAWN: dict[Any, Callable[[Draws, Any, dict[str, Any]], Any]] = {
    _aten.bernoulli_.float: _keep_with,
    _aten.bernoulli.default: _keep_with,
    _aten.bernoulli.p: _keep_with,
    _aten.bernoulli.Tensor: _keep_with,
    _aten.bernoulli_.Tensor: _keep_with,
    _aten.native_dropout.default: _dropout,
    _aten.rand.default: _fresh,
    _aten.randn.default: _fresh,
    _aten.rand_like.default: _fresh,
    _aten.randn_like.default: _fresh,
    _aten.uniform.default: _spread,
    _aten.uniform_.default: _spread,
    _aten.exponential.default: _exponential,
    _aten.exponential_.default: _exponential,
    _aten.normal_functional.default: _normal,
    _aten.normal_.default: _normal,
    _aten.normal.float_float: _bell,
    _aten.normal.Tensor_float: _bell,
    _aten.normal.float_Tensor: _bell,
    _aten.normal.Tensor_Tensor: _bell,
}
