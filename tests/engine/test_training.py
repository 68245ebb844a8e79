"""Optimisers, clipping, running means and the loss scale go where torch's own go."""

from __future__ import annotations

import inspect
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError, LossError
from hires.core.optimizers import OPTIMIZERS, REFUSED, SET_BY_HIRES
from hires.core.store import checkpoints, records
from hires.core.store.attempts import Attempt
from hires.core.store.network_weights import find_weights
from hires.engine.footprint import footprint
from hires.engine.optimizer import make_optimizer, optimizer_of
from hires.engine.weights_file import open_weights
from hires.parallel import gradient_factors
from hires.parallel.gradient_factors import MOST_SKIPPED, LossScale
from tests.helpers.layouts import plan_of
from tests.helpers.plain_training import plain_training, torch_rates
from tests.helpers.saved import attempt, config_at, lines_of, make, mean_losses, tensors_at

SHAPES = [(8, 4, 3, 3), (8, 4, 1, 1), (5, 7), (9,)]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES:
        numbers: Tensor = torch.randn(shape, generator=generator).to(dtype)
        if numbers.dim() == 4:
            numbers = numbers.contiguous(memory_format=torch.channels_last)
        made.append(nn.Parameter(numbers))
    return made


ARGS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"momentum": 0.0}),
    ("sgd", {"nesterov": True}),
    ("adam", {"betas": [0.8, 0.95], "eps": 1e-6, "amsgrad": True}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
    *((name, {}) for name in OPTIMIZERS),
]


@pytest.mark.parametrize(("name", "args"), ARGS)
def test_optimiser_goes_where_torch_goes(name: str, args: dict[str, Any]):
    keys = {"name": name, "lr": 0.1, "args": args, "ema": 0.5}
    keys |= {"weight_decay": 0.0} if name == "rprop" else {}
    config = from_dict({"optimizer": keys})
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    halves = {id(p): (len(p) // 2, len(p)) for p in ours}  # of a rank that moves rows
    optimizer = make_optimizer(config, ours, halves)
    kind, settings = optimizer_of(config)
    reference = kind(theirs, **settings)
    assert optimizer is not None
    assert optimizer.kept_of(ours[0]) == {} or name == "adagrad"  # it was never moved
    before = [p.detach().clone() for p in ours]
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        if step == 2:  # as a checkpoint does
            again = make_optimizer(config, ours, halves)
            assert again is not None
            assert again.restore_numbers(optimizer.numbers())
            for p in ours:
                for key, tensor in again.kept_of(p, make=True).items():
                    tensor.copy_(optimizer.kept_of(p)[key])
            optimizer = again
        for own, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(own.shape, generator=generator).double()
            own.grad, other.grad = torch.empty_like(own).copy_(gradient), gradient.clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in ours)
    for own, other, first in zip(ours, theirs, before, strict=True):
        half = len(own) // 2
        torch.testing.assert_close(own[half:], other[half:], rtol=1e-13, atol=0)
        assert torch.equal(own[:half], first[:half])
        held = optimizer.kept_of(own)
        assert [*held] == optimizer.kept
        assert all(tensor.shape == own[half:].shape for tensor in held.values())
    assert len(optimizer.kept) == config.optimizer.num_states


def test_refused_optimisers_name_the_cause():
    kinds = {n for n, k in vars(torch.optim).items() if isinstance(k, type)} - {"Optimizer"}
    assert {kind.lower() for kind in kinds} == {*OPTIMIZERS, *REFUSED}
    assert from_dict({"optimizer": {"name": "RMSprop"}}).optimizer.name == "rmsprop"
    with pytest.raises(ConfigError, match=r"optimizer=muon: it needs each matrix as a whole"):
        from_dict({"optimizer": {"name": "Muon"}})
    with pytest.raises(ConfigError, match=r"optimizer.args.lr .* write optimizer.lr"):
        from_dict({"optimizer": {"args": {"lr": 0.1}}})
    wrong = from_dict({"optimizer": {"name": "adam", "args": {"betas": [0.9, 1.0]}}})
    with pytest.raises(ConfigError, match=r"optimizer=adam optimizer.args=.*beta"):
        make_optimizer(wrong, parameters(torch.float32))
    with pytest.raises(ConfigError, match=r"optimizer.args.beta is no argument of adam; .*betas"):
        from_dict({"optimizer": {"name": "adam", "args": {"beta": 1}}})
    with pytest.raises(ConfigError, match="rprop has none"):
        from_dict({"optimizer": {"name": "rprop", "weight_decay": 0.1}})
    for kind in OPTIMIZERS.values():
        signature = inspect.signature(getattr(torch.optim, kind.torch_class)).parameters
        assert {*kind.takes.split()} == {*signature} - {"params", "maximize", *SET_BY_HIRES}
        usual = {k: signature[k].default for k in ("lr", "weight_decay") if k in signature}
        assert kind.torch_class == "SGD" or usual == {k: getattr(kind, k) for k in usual}


@pytest.fixture
def one_rank(monkeypatch):
    """There is one rank, without a transport."""
    monkeypatch.setattr(gradient_factors, "max_all", lambda number: number)


def test_loss_scale_follows_that_of_torch(one_rank):
    # Overflows at random; the gradients are unscaled and checked by both.
    ours, theirs = LossScale(3), torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    moved, draws, skipped = parameter.detach().clone(), random.Random(0), 0
    for _ in range(60):
        gradient = torch.full((5,), draws.choice([1.0, 3.0, 1e38, float("nan")]))
        theirs.scale(torch.zeros(1))  # begins a step
        assert theirs.get_scale() == ours.scale
        parameter.grad = gradient * ours.scale
        own = gradient * ours.scale
        ours.agree([own])
        theirs.step(optimizer)
        theirs.update()
        if not ours.skips:
            assert torch.equal(own, parameter.grad)
            moved -= 0.5 * own
        ours.update()
        skipped += ours.skips
        assert torch.equal(moved, parameter.detach())
        restored = LossScale(3)  # as after a checkpoint in every step
        restored.restore(ours.state())
        assert vars(restored) == {**vars(ours), "skips": False}
        ours = restored
    assert ours.scale < 2.0**16
    assert ours.skipped == skipped


def test_loss_scale_stays_in_range_or_fixed_and_ends_a_run_that_always_overflows(one_rank):
    largest, fixed, hopeless = LossScale(1), LossScale(1, fixed=512.0), LossScale(2000)
    largest.scale = 2.0**126
    for _ in range(3):
        largest.agree([torch.zeros(2)])
        largest.update()
    assert largest.scale == 2.0**127  # a number of fp32
    for value, skips in ((1.0, False), (float("inf"), True), (1.0, False)):
        fixed.agree([torch.full((2,), value)])
        fixed.update()
        assert (fixed.skips, fixed.scale) == (skips, 512.0)
    for _ in range(MOST_SKIPPED):
        hopeless.require_progress()
        hopeless.agree([torch.full((2,), float("inf"))])
        hopeless.update()
    with pytest.raises(LossError, match="precision=bf16"):
        hopeless.require_progress()


def test_rank_whose_own_gradients_are_finite_skips_with_the_others(monkeypatch):
    monkeypatch.setattr(gradient_factors, "max_all", lambda number: 1)
    ours = LossScale(2000)
    ours.agree([torch.ones(2)])
    assert ours.skips


GEMS = {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"}
SHARD = {"shard": True, "exchange": "broadcast"}


@pytest.mark.dist
def test_training_equals_that_of_torch(tmp_path: Path):
    # eps far above what noise in a gradient of 0 may be: Adam divides a gradient by its own size.
    update: dict[str, Any] = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05}
    update["args"] = {"betas": [0.8, 0.9], "eps": 1e-3}
    run = make(
        tmp_path,
        batch=4,
        steps=4,
        parallel=GEMS,
        optimizer={**update, "clip_norm": 0.7, "ema": 0.75, **SHARD},
        lr_schedule={"name": "one_cycle", "warmup": 1, "steps": 4},
        checkpoint={"every": 4},
    )
    assert set(attempt(run)) == {0}
    config = config_at(run)
    plain = plain_training(config)
    assert mean_losses(run, 0) == pytest.approx(plain.losses, rel=1e-10)
    steps = lines_of(run, 0, "step")
    for rank in {line["rank"] for line in steps}:
        own = [line for line in steps if line["rank"] == rank]
        assert [line["lr"] for line in own] == pytest.approx(torch_rates(config))
        assert [line["grad_norm"] for line in own] == pytest.approx(plain.norms, rel=1e-10)
    assert max(plain.norms) > 0.7  # or nothing was clipped
    tensors = tensors_at(run, 4).items()
    held = {key: tensor for (file, key), tensor in tensors if file.startswith("stage")}
    means = open_weights(f"{run}/ema")
    assert means.shapes == find_weights(f"{run}/ema").shapes()
    assert means.shapes.keys() == find_weights(str(run)).shapes().keys()  # also buffers
    assert not torch.equal(means.tensor("fc.weight"), held["fc.weight"])
    running = {key: means.tensor(key) for key in plain.means}
    for wanted, found in ((plain.parameters, held), (plain.means, running)):
        for key, tensor in wanted.items():
            largest = max(1.0, float(tensor.abs().max()))
            assert float((found[key] - tensor).abs().max()) < 1e-10 * largest, key
    # The state is predicted as what is measured; a divided one is a part of the whole.
    measured = [0] * plan_of(config).world
    for line in Attempt(run, 0).metrics:
        measured[line["rank"]] = max(measured[line["rank"]], line.get("optimizer_bytes", 0))
    memory = footprint(config, plan_of(config))
    assert [one.optimizer_bytes for one in memory] == measured
    parts = checkpoints.read(checkpoints.place(run, 4)).files
    assert {"exp_avg00.000.safetensors", "exp_avg00.001.safetensors"} <= parts.keys()


@pytest.mark.dist
def test_fp16_training_skips_overflows_and_is_within_its_rounding(tmp_path: Path):
    steep = {"name": "custom", "target": "tests.helpers.custom_nets:Steep", "classes": 4}
    keys: dict[str, Any] = {"image": [18, 14], "batch": 4, "steps": 6, "model": steep}
    run = make(
        tmp_path,
        **keys,
        parallel={"tiles": [2, 1]},
        precision={"name": "fp16", "scale_interval": 2},
        optimizer={"clip_norm": 0.5},
    )
    assert attempt(run) == [0, 0]
    first = [line for line in lines_of(run, 0, "step") if line["rank"] == 0]
    skipped = {line["step"] for line in first if line["skipped"]}
    assert 0 in skipped
    assert len(skipped) < 6
    for line, later in itertools.pairwise(first):
        scale = line["loss_scale"]
        assert later["loss_scale"] in ((scale / 2,) if line["skipped"] else (scale, scale * 2))
    # The forward pass rounds about 10 times on its way: 4 * 2^-11 * sqrt(10) = 0.6 %. The gradients
    # are off by as much twice, and by sqrt(3 * 2^-11) = 4 % for ReLUs on the other side of zero; of
    # what the updates change, which is at most half of a loss here, that is another 2 %.
    plain = plain_training(config_at(run), skipped)
    assert mean_losses(run, 0) == pytest.approx(plain.losses, rel=0.03)
    for line, norm in zip(first, plain.norms, strict=True):
        assert line["skipped"] or line["grad_norm"] == pytest.approx(norm, rel=0.1)
    record = records.read_record(run)
    assert record["skipped_steps"] == len(skipped)
    assert record["loss_scale"] == first[5]["loss_scale"]


@pytest.mark.dist
def test_running_means_begin_with_the_weights_of_a_run_that_had_none(tmp_path: Path):
    keys: dict[str, Any] = {"precision": {"name": "fp32"}, "measure": {"warmup": 0}}
    none = make(tmp_path / "none", **keys, steps=2, checkpoint={"every": 2})
    assert attempt(none) == [0]
    with pytest.raises(ConfigError, match=r"holds no running means .* optimizer.ema=0.999"):
        find_weights(f"{none}/ema")
    later = {"resume": str(none), "every": 3}
    run = make(tmp_path / "later", **keys, steps=3, checkpoint=later, optimizer={"ema": 0.75})
    assert attempt(run) == [0]
    before, after = (
        open_weights(str(checkpoints.place(path, n))).tensor("fc.weight")
        for path, n in ((none, 2), (run, 3))
    )
    mean = open_weights(f"{run}/ema").tensor("fc.weight")
    torch.testing.assert_close(mean, torch.lerp(before, after, 0.25), rtol=1e-6, atol=1e-7)


def test_shorter_interval_of_a_resumed_run_doubles_the_scale_at_once():
    longer, ours = LossScale(2000), LossScale(3)
    for _ in range(10):
        longer.update()
    ours.restore(longer.state())
    ours.update()
    assert (ours.scale, ours.good_steps) == (2 * longer.scale, 0)
