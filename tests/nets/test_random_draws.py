"""Random numbers that follow from their place: well spread, and the same whoever draws them."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.nets.random_draws import GOLDEN, MASK, Draws, fill, key_of, seeded
from tests.helpers.simulated_tiles import check_tiles
from tests.helpers.tiny_nets import Forward, Net


def numbers(key: int, *shape: int) -> Tensor:
    out = torch.empty(shape, dtype=torch.float64)
    return fill(out, key, [range(size) for size in shape], shape, lambda u: u)


def test_numbers_are_those_of_splitmix():
    # The algorithm in whole numbers, as its paper has it.
    def splitmix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    key = key_of(3, 1, 4)
    expected = [(splitmix((key + (i + 1) * GOLDEN) & MASK) >> 11) / 2**53 for i in range(99)]
    assert numbers(key, 9, 11).flatten().tolist() == expected


def test_large_tensors_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch):
    whole = numbers(5, 3, 7, 11)
    monkeypatch.setattr("hires.nets.random_draws.CHUNK", 16)
    assert torch.equal(numbers(5, 3, 7, 11), whole)
    part = torch.empty(2, 3, 4, dtype=torch.float64)
    fill(part, 5, [range(1, 3), range(2, 5), range(7, 11)], (3, 7, 11), lambda u: u)
    assert torch.equal(part, whole[1:3, 2:5, 7:11])


def masks(samples: int, first: int = 0, step: int = 0, seed: int = 0) -> list[Tensor]:
    x = torch.ones(samples, 3, 8, 8)
    with Draws(seed, step, first, samples):
        return [
            F.dropout(x, 0.3),
            F.dropout2d(x, 0.3),
            F.alpha_dropout(x, 0.3, training=True),
            F.feature_alpha_dropout(x, 0.3, training=True),
            torch.native_dropout(x, 0.3, True)[0],
            x * torch.rand(samples, 1, 1, 1),
            torch.randn_like(x),
            x.new_empty(samples, 1, 1, 1).bernoulli_(0.5),
            torch.bernoulli(torch.full_like(x, 0.25)),
            torch.empty_like(x).uniform_(-1, 1),
            torch.empty_like(x).normal_(2, 3),
            torch.normal(1.0, 2.0, x.shape),
            torch.normal(x, 2 * x),
            torch.normal(x, 2.0),
            torch.empty_like(x).exponential_(2.0),
            torch.empty_like(x).random_(2, 9),
            torch.randint(2, 9, x.shape),
            torch.randint_like(x, 5),
            F.rrelu(-x, training=True),
        ]


def test_microbatches_draw_what_the_batch_draws():
    halves = zip(masks(2), masks(2, first=2), strict=True)
    for whole, parts in zip(masks(4), halves, strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_steps_and_draws_differ_and_repeat():
    others = masks(2), masks(2, step=1), masks(2, seed=1)
    for one, again, later, other in zip(masks(2), *others, strict=True):
        assert torch.equal(one, again)
        assert not torch.equal(one, later)
        assert not torch.equal(one, other)
    with Draws(0, 0, 0, 2):
        assert not torch.equal(torch.rand(2, 9), torch.rand(2, 9))
    counts = set()  # which a generator draws
    for seed, step, first in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 2), (0, 0, 0)):
        with Draws(seed, step, first, 2):
            counts.add(tuple(torch.poisson(torch.full((99,), 9.0)).tolist()))
    assert len(counts) == 4


DROPS: dict[str, Forward] = {
    "dropout": lambda n, x: F.dropout(x, 0.4),
    "alpha": lambda n, x: F.alpha_dropout(x, 0.4, training=True),
    "everything": lambda n, x: F.dropout(x, 1.0),
    "path": lambda n, x: x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.6).div_(0.6),
    "older path": lambda n, x: (
        x * (0.6 + torch.rand((2, 1, 1, 1), dtype=x.dtype, device=x.device)).floor()
    ),
    "bell": lambda n, x: x * torch.zeros_like(x).normal_(1, 0.5),
    "in place": lambda n, x: F.dropout2d(F.dropout(x * 2, 0.3, inplace=True), 0.3, inplace=True),
    "numbers": lambda n, x: x * torch.normal(1.0, 0.5, (2, 4, 1, 1), dtype=x.dtype),
    "gumbel": lambda n, x: F.gumbel_softmax(x, dim=1),
    "noise": lambda n, x: x + torch.randn_like(x) * torch.rand_like(x),
    "one row": lambda n, x: F.dropout2d(x[:, :, :3], 0.5) + F.dropout(x[:, :, :3], 0.5),
    "unused": lambda n, x: (F.dropout(x, 0.7), F.dropout(x, 0.3))[1],
    "border": lambda n, x: F.max_pool2d(F.dropout(x, 0.4), 3, 1, 1),
    "slopes": lambda n, x: F.rrelu(F.rrelu(x, training=True) - 1, training=True, inplace=True),
    "counts": lambda n, x: x.mean((2, 3)) + torch.poisson(x.detach().mean((2, 3)).abs() * 9),
    "whole numbers": lambda n, x: x * torch.randint_like(x, -2, 3) + torch.randint_like(x, 4),
    "masks": lambda n, x: (
        x * torch.randint(0, 2, (2, 1, 1, 1)) * torch.randint(3, x.shape[:2])[..., None, None]
    ),
    "choice": lambda n, x: x.mean((2, 3)).gather(
        1, torch.multinomial(x.detach().mean((2, 3)).softmax(1), 2)
    ),
    "order": lambda n, x: x[:, torch.randperm(4)],
    "binomial": lambda n, x: F.dropout(
        x.mean((2, 3)) * torch.binomial(torch.full((2, 1), 9.0), torch.full((2, 1), 0.4)), 0.5
    ),
    "recurrent": lambda n, x: F.dropout(n.op(x.mean((2, 3)))[0], 0.5),
    "recurrent gates": lambda n, x: F.dropout(n.gates(x.mean((2, 3)))[0], 0.5),
}


def attention(
    x: Tensor, heads: int = 2, causal: bool = False, mask: Any = None, scale: float | None = None
) -> Tensor:
    """Attention of all pixels of (n, C, H, W) to each other that drops weights."""
    tokens = x.flatten(2).transpose(1, 2)
    q = tokens.unflatten(2, (2, -1)).transpose(1, 2)
    given = mask(q, tokens) if mask else None
    y = F.scaled_dot_product_attention(
        q, q[:, :heads], q[:, :heads] * 2, given, 0.3, causal, enable_gqa=heads == 1, scale=scale
    )
    return y.transpose(1, 2).flatten(2).transpose(1, 2).view_as(x)


ATTENTIONS: dict[str, Forward] = {
    "plain": lambda n, x: attention(x),
    "causal": lambda n, x: attention(x, causal=True),
    "scaled": lambda n, x: attention(x, scale=2.0),
    "shared keys": lambda n, x: attention(x, heads=1),
    "mask": lambda n, x: attention(x, mask=lambda q, t: (t[:, None, :, :1] > 0).mT),
    "all masked": lambda n, x: attention(
        x, mask=lambda q, t: (t[:, None, :, :1] > 0).expand(-1, 2, -1, t.shape[1])
    ),
    "bias": lambda n, x: attention(x, mask=lambda q, t: q @ q.mT),
}


def test_attention_drops_the_same_weights_in_its_graph():
    for forward in ATTENTIONS.values():
        check_tiles(nn.Sequential(nn.Conv2d(3, 4, 1), Net(forward)), (2, 3, 6, 5), (1, 1))


def test_tiles_draw_what_one_process_draws():
    def along_rows(n: Net, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).flatten(0, 1).unflatten(2, (2, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(rows, rows * 2, rows, dropout_p=0.3)
        return y.transpose(1, 2).flatten(2).unflatten(0, (2, -1)).permute(0, 3, 1, 2)

    check_tiles(Net(along_rows), (2, 4, 9, 7), (3, 1))
    # Recurrent layers draw between their layers.
    parts = {"op": nn.LSTM(4, 3, 2, dropout=0.3), "gates": nn.GRU(4, 3, 3, dropout=0.3)}
    parts = {name: part.requires_grad_(False) for name, part in parts.items()}  # all tiles alike
    for forward in DROPS.values():
        check_tiles(Net(forward, **parts), (2, 4, 9, 7), (2, 2))


def test_distributions_have_their_mean_and_spread():
    x = torch.ones(8, 64, 64, dtype=torch.float64)
    with Draws(5, 0, 0, 8):
        slopes = F.rrelu(-x, 0.25, 0.75, training=True)
        whole = torch.randint(-3, 4, x.shape)
        bell, kept = torch.randn_like(x), F.dropout(x, 0.3)
        waits = torch.empty_like(x).exponential_(0.5)
        others = [
            (torch.rand_like(x), 0.5, 1 / 12),
            (torch.empty_like(x).uniform_(-1, 3), 1, 16 / 12),
            (torch.empty_like(x).normal_(2, 3), 2, 9),
            (torch.normal(2.0, 3.0, x.shape), 2, 9),
            (torch.normal(2 * x, 3 * x), 2, 9),
            (torch.empty_like(x).random_(2, 9), 5, 4),
            (torch.randint_like(x, 7), 3, 4),
            (torch.bernoulli(x / 4), 0.25, 3 / 16),
            (torch.empty_like(x).bernoulli_(0.25), 0.25, 3 / 16),
            (torch.native_dropout(x, 0.3, True)[0], 1, 0.3 / 0.7),
        ]
    for drawn, mean, var in (
        *others,
        (slopes, -0.5, 0.25 / 12),
        (whole.double(), 0, 4),
        (bell, 0, 1),
        (waits, 2, 4),
        (kept, 1, 0.3 / 0.7),
    ):
        error = math.sqrt(var / drawn.numel())
        assert float(drawn.mean()) == pytest.approx(mean, abs=4 * error)
        assert float(drawn.var()) == pytest.approx(var, rel=0.05)
    assert whole.unique().tolist() == [*range(-3, 4)]
    assert float(waits.min()) > 0


def test_attention_without_dropout_counts_as_no_draw():
    # The kernel is marked as random whatever its rate: what followed it drew other numbers than the
    # graph, whose node draws nothing.
    x = torch.ones(2, 1, 4, 8)
    with Draws(0, 0, 0, 2):
        alone = torch.dropout(x, 0.5, True)
    with Draws(0, 0, 0, 2):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        assert torch.equal(torch.dropout(x, 0.5, True), alone)


def test_draws_without_a_generator_leave_that_of_the_device_as_it_was(monkeypatch):
    own = torch.Generator()
    module = types.SimpleNamespace(
        get_rng_state=lambda device: own.get_state(),
        set_rng_state=lambda state, device: own.set_state(state),
        manual_seed=own.manual_seed,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    before, host = own.get_state(), torch.get_rng_state()
    drawn = []
    for seed in (3, 3, 4):
        with seeded(torch.device("cpu"), seed):
            drawn.append((float(torch.rand(1)), float(torch.rand(1, generator=own))))
        assert torch.equal(own.get_state(), before)
        assert torch.equal(torch.get_rng_state(), host)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][1] != drawn[2][1]
