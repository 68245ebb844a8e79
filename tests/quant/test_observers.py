"""Ranges of observers are those of plain numpy, however divided, and scales those of the thesis."""

from __future__ import annotations

import itertools
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.quant.affine import LAST, Affine, affine_of, signed_affine
from hires.quant.observers import AVERAGING, HALF, Observed, reduce_all


def numbers(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def seen(x: torch.Tensor) -> Observed:
    observed = Observed(len(x), counting=True)
    observed.add(x, 0)
    return observed


def thesis(x: float, low: float, high: float) -> int:
    """Equation 2.3 with the s and z of equations 2.1 and 2.2, the latter without its misprint."""
    s = (2**8 - 1) / (high - low)
    z = -round(low * s) - 2**7
    return int(min(max(round(x * s + z), -(2**7)), 2**7 - 1))


def test_integers_are_those_of_the_thesis_plus_128_and_hold_zero_exactly():
    """The thesis quantises to signed integers, oneDNN multiplies unsigned activations."""
    drawn = random.Random(1)
    for _ in range(200):
        low, high = -drawn.expovariate(0.1), drawn.expovariate(0.1)
        signed, unsigned = signed_affine(low, high), affine_of(low, high)
        for number, end in ((-128, low), (127, high)):
            assert abs(signed.real(number) - end) <= 0.5001 * signed.scale
        assert unsigned == (signed.scale, signed.zero_point + 128)
        assert 0 <= unsigned.zero_point <= LAST
        assert unsigned.real(unsigned.quantized(0.0)) == 0.0
        for _ in range(20):
            x = drawn.uniform(1.2 * low, 1.2 * high)
            near_half = abs((x / signed.scale) % 1 - 0.5) < 1e-9
            assert near_half or unsigned.quantized(x) == thesis(x, low, high) + 128
            if low <= x <= high:
                assert abs(unsigned.real(unsigned.quantized(x)) - x) <= 0.5001 * unsigned.scale
    assert affine_of(3.0, 255.0) == affine_of(0.0, 0.0) == Affine(1.0, 0)
    assert affine_of(-255.0, -1.0) == Affine(1.0, 255)
    for ends in ((math.nan, 1.0), (0.0, math.inf)):
        with pytest.raises(ValueError, match="has no scale"):
            affine_of(*ends)


def test_counts_and_ranges_of_images_are_those_of_numpy():
    observed = seen(numbers(1, 4, 2000, scale=0.37))
    x, top = numbers(1, 4, 2000, scale=0.37), 2.0**observed.level
    assert top / 2 <= float(x.abs().max()) < top
    edges = np.linspace(-top, top, 2 * HALF + 1)
    assert observed.counts.tolist() == np.histogram(x.numpy(), edges)[0].tolist()
    x = numbers(0, 6, 3, 5, 7)
    low, high = x.numpy().reshape(6, -1).min(1), x.numpy().reshape(6, -1).max(1)
    assert seen(x).range("min_max", 100) == (low.min(), high.max())
    means = []
    for ends in (low, high):
        mean = ends[0]
        for end in ends[1:]:
            mean = mean + AVERAGING * (end - mean)
        means.append(mean)
    assert seen(x).range("moving_average", 100) == tuple(means)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_division_gives_the_same_bits(data):
    """Tiles, shards and replicas change nothing."""
    n, h, w = (data.draw(st.integers(1, 6)) for _ in range(3))
    scale = 2.0 ** data.draw(st.integers(-140, 60))
    x = numbers(data.draw(st.integers(0, 99)), n, 2, h, w, scale=scale)
    x = x.relu() if data.draw(st.booleans()) else x
    if data.draw(st.booleans()):
        x = x.float()
    parts = []
    rows, cols = ([0, data.draw(st.integers(0, size)), size] for size in (h, w))
    split = data.draw(st.integers(0, n))
    for a, b in ((0, split), (split, n)):
        for r0, r1 in itertools.pairwise(rows):
            for c0, c1 in itertools.pairwise(cols):
                part = Observed(n, counting=True)
                part.add(x[a:b, :, r0:r1, c0:c1], a)
                parts.append(part)
    whole = seen(x)
    assert max(part.level for part in parts) == whole.level
    for part in parts:  # as ranks do
        part.raise_to(whole.level)
    assert torch.equal(sum(part.counts for part in parts), whole.counts)
    assert torch.equal(torch.stack([part.lows for part in parts]).amin(0), whole.lows)
    assert torch.equal(torch.stack([part.highs for part in parts]).amax(0), whole.highs)


def reduce_together(ranks: list[dict[str, Observed]], names: list[str]) -> None:
    """Reduces what two ranks, each a thread, have seen."""
    ops = {"min": torch.minimum, "max": torch.maximum, "sum": torch.add}
    barrier, shared = threading.Barrier(2), {}

    def work(rank: int) -> None:
        def reduce(tensor: torch.Tensor, how: str) -> None:
            shared[rank] = tensor.clone()
            barrier.wait(30)
            total = ops[how](shared[0], shared[1])
            barrier.wait(30)
            tensor.copy_(total)

        reduce_all(ranks[rank], names, reduce)

    with ThreadPoolExecutor(2) as pool:
        [*pool.map(work, range(2))]


def test_reduction_over_ranks_is_the_merge():
    x, y = numbers(2, 4, 3, 8, 8), numbers(3, 4, 3, 8, 8, scale=9.0)
    ranks = [{name: Observed(4, True) for name in "ab"} for _ in range(2)]
    for rank, held in enumerate(ranks):
        held["a"].add(x[:, :, 4 * rank : 4 * rank + 4], 0)
    ranks[0]["b"].add(y, 0)  # a stage of its own
    reduce_together(ranks, ["a", "b"])
    for name, whole in (("a", seen(x)), ("b", seen(y))):
        for held in ranks:
            assert torch.equal(held[name].counts, whole.counts)
            assert torch.equal(held[name].lows, whole.lows)
            assert held[name].range("entropy", 0) == whole.range("entropy", 0)


@pytest.mark.parametrize("percentile", [90.0, 99.9, 100.0])
def test_percentile_is_that_of_numpy_within_a_bin(percentile):
    x = numbers(4, 1, 20000)
    observed = seen(x)
    low, high = observed.range("percentile", percentile)
    tail = (100 - percentile) / 2
    width = 2.0**observed.level / HALF
    # numpy interpolates between two numbers, which are far apart in the tails.
    wanted = [np.percentile(sign * x.numpy(), tail, method="inverted_cdf") for sign in (1, -1)]
    assert abs(low - wanted[0]) <= width
    assert abs(high + wanted[1]) <= width


def divergence(bins: np.ndarray, first: int, last: int) -> float:
    """The definition of the sources, group by group."""
    inner = bins[first:last]
    p = inner.copy()
    p[0] += bins[:first].sum()
    p[-1] += bins[last:].sum()
    q, n = np.zeros(len(inner)), len(inner)
    starts = sorted({k * n // 256 for k in range(256)})
    for a, b in zip(starts, [*starts[1:], n], strict=True):
        filled = p[a:b] > 0
        if filled.any():
            q[a:b][filled] = inner[a:b].sum() / filled.sum()
    p, q = p / p.sum(), q / q.sum()
    return sum(a * math.log(a / max(b, 1e-12)) for a, b in zip(p, q, strict=True) if a > 0)


@pytest.mark.parametrize("relu", [False, True])
def test_entropy_range_is_the_least_of_all_thresholds(relu):
    # Laplacian, with long tails that are worth cutting off.
    drawn = np.random.default_rng(0).laplace(size=(1, 30000))
    x = torch.from_numpy(drawn)
    observed = seen(x.relu() if relu else x)
    low, high = observed.range("entropy", 0)
    full = observed.range("min_max", 0)
    counts, width = observed.counts.numpy(), 2.0**observed.level / HALF
    while max(-full[0], full[1]) / width > 2**11:
        counts, width = counts.reshape(-1, 2).sum(1), 2 * width
    half, bins = len(counts) // 2, counts.astype(float)
    bins[half] = min(bins[half], bins[half + 1])
    first = math.floor(full[0] / width) + half
    last = math.floor(full[1] / width) + half + 1
    chosen = round(max(-low, high) / width)
    losses = {
        t: divergence(bins, max(first, half - t), min(last, half + t))
        for t in {chosen, *range(128, max(half - first, last - half) + 1, 5)}
    }
    assert losses[chosen] <= 1.05 * min(losses.values()) + 1e-9  # every 16th is looked at
    assert high < 0.9 * full[1]
    assert low == 0.0 if relu else low < 0


@pytest.mark.parametrize("number", [0.0, -2.0, 1e-42])
def test_constant_values_have_a_scale(number):
    observed = seen(torch.full((2, 3, 4, 4), number, dtype=torch.float64))
    for observer in ("entropy", "percentile", "min_max", "moving_average"):
        low, high = observed.range(observer, 99.9)
        assert low == high == pytest.approx(number, rel=1e-12)
    affine = affine_of(low, high)
    assert abs(affine.real(affine.quantized(number)) - number) <= max(1e-40, 0.01 * affine.scale)


def test_image_that_is_not_finite_is_refused_and_counts_once_on_two_tiles():
    x = numbers(5, 3, 2, 4, 4)
    x[1:, 0, :, 2] = torch.tensor([math.nan, -math.inf]).view(2, 1)
    ranks = []
    for rank in range(2):
        held = Observed(3, True)
        held.add(x[:, :, 2 * rank : 2 * rank + 2], 0)
        held.add(x[:, :, :1], 0)  # a rank may have several parts of an image
        ranks.append({"a": held})
    reduce_together(ranks, ["a"])
    for held in ranks:
        with pytest.raises(ValueError, match=r"^2 images have NaN or infinite"):
            held["a"].range("entropy", 0)
    unseen = Observed(5, counting=False)
    unseen.add(numbers(6, 3, 2, 2, 2), 0)
    with pytest.raises(ValueError, match="3 of 5 images were seen"):
        unseen.range("min_max", 100)


def test_images_that_were_not_asked_for_do_not_count():
    observed, x = Observed(3, counting=True), numbers(7, 4, 2, 2, 2)
    x[3] *= 100
    observed.add(x, 0)
    observed.add(x, 4)
    assert observed.range("min_max", 100) == seen(x[:3]).range("min_max", 100)
    assert int(observed.counts.sum()) == x[:3].numel()
