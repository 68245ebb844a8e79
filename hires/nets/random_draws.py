"""Draws random numbers that follow from their place in the batch, not from the rank.

A dropout on a tile must drop what it drops of the whole image. So no number comes from a generator:
each is a hash of the seed, the step, the draw of the network's forward pass, and its place in the
batch of the step, which ends up the same on every tile, stage, replica, microbatch and shard, and
when a segment is computed again or a run is resumed, also on another kind of device:

    place     sample of the batch, then row by row in the sample's own tensor
    number    mix(key + (place + 1) * GOLDEN),  key = mix of (seed, step, draw)

``Draws`` is a mode: under it torch's own operators (``F.dropout``, ``torch.rand`` ...) take their
noise from here, whatever they compute of it (:mod:`hires.nets.distributions`). A plain module under
it draws what its graph draws.

Source:
    SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
    the mixing constants are variant 13 of Stafford.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hires.nets.distributions import DRAWN, Finish, writes

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
CHUNK = 2**16
"""Numbers that are mixed at once: their 64 bits stay in the cache."""

Places = Sequence[range]
"""For each dim of a tensor, the indices of the whole tensor that it holds."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operators their random numbers while it is active.

    Those that :mod:`hires.nets.distributions` lacks, as Poisson numbers, come from a generator of
    the microbatch's own: the same on all ranks that compute the whole value.

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
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        if func in DRAWN:
            return DRAWN[func](self.numbers, func, {**given, "generator": None})
        # Attention without dropout draws nothing.
        drops = "dropout_p" not in names or given.get("dropout_p", 0.0) > 0
        if drops and torch.Tag.nondeterministic_seeded in func.tags:
            return self._seeded(func, given, "generator" in names)
        return func(*args, **(kwargs or {}))

    def numbers(
        self, shape: Sequence[int], dtype: torch.dtype, finish: Finish, device: Any
    ) -> Tensor:
        """Returns the next draw: what ``finish`` makes of numbers in [0, 1), float64 of 53 bits.

        ``shape`` is that of the part; the places may name its dims in finer ones.
        """
        places: Places = [range(size) for size in shape]
        places, whole = (places, shape) if self.places is None else self.places(shape)
        count = math.prod(whole)
        per_sample = count // self.samples if count % self.samples == 0 else count
        key = key_of(self.seed, self.step, next(self._draws))
        out = torch.empty([len(held) for held in places], dtype=dtype, device=device)
        first = self.first_sample * per_sample
        return fill(out, key, places, whole, finish, first).view(shape)

    def _seeded(self, func: Any, given: dict[str, Any], takes_generator: bool) -> Any:
        # Numbers are drawn in the order of memory, which may differ from one process to tiles.
        key = key_of(self.seed, self.step, next(self._draws), self.first_sample)
        dense = {n: a.contiguous() if isinstance(a, Tensor) else a for n, a in given.items()}
        device = next((a.device for a in given.values() if isinstance(a, Tensor)), None)
        if takes_generator:
            has_own = device is not None and _own_generator(device) is not None
            generator = torch.Generator(device) if has_own else torch.Generator()
            made = func(**{**dense, "generator": generator.manual_seed(key)})
        else:
            with seeded(device or torch.get_default_device(), key):
                made = func(**dense)
        if made is dense.get("self") and writes(func):
            return given["self"].copy_(made)
        return made


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

    ``out`` holds the ``places`` of a tensor of shape ``whole``; ``finish`` gets some numbers in
    [0, 1), float64, at a time, and ``first`` is the place of the whole tensor's first number in the
    batch.
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


_ONE_AT_A_TIME = threading.RLock()
"""Threads of a process, as those of tiles in a test, share the generators that are seeded."""


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds what operators on a device draw from without a generator, and restores it behind.

    Other threads wait until it is restored.
    """
    with _ONE_AT_A_TIME:
        own = _own_generator(device)
        before = torch.get_rng_state()
        of_device = None if own is None else own.get_rng_state(device)
        try:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU, too
            if own is not None:
                own.manual_seed(seed)
            yield
        finally:
            torch.set_rng_state(before)
            if own is not None:
                own.set_rng_state(of_device, device)


def _own_generator(device: torch.device) -> Any:
    # The CPU's module has none, nor has that of a device that draws from the CPU's generator.
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None
