"""Gradients have the same bits in every order of their sums, whenever a rank has each of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from hires.core.config.run_config import from_dict, to_dict
from hires.core.gradient_orders import AUTO, ORDERS
from hires.core.ranks.world import World
from hires.engine.build import build_rank
from hires.parallel.gradients import GradientSync
from hires.plan import updates
from hires.plan.plan import Plan
from tests.helpers.jobs import join
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.pool import preload
from tests.helpers.ranks import run_ranks

ALONE_BYTES = 2**12
STEPS = 3
preload("tests.parallel.test_gradient_sums")
Layouts = list[tuple[str, dict[str, Any], dict[str, Any]]]


def bits_of_rank(world: World, layouts: Layouts) -> dict[str, tuple[str, list[int]]]:
    """Returns for each layout a digest of losses and parameters, and the order in which sums began.

    Rank 1 has two gradients after each other in the other order. Of rank 2 the first of both is
    never ready, as where a tile has no pixels: it begins when the pass is done.
    """
    updates.ALONE_BYTES = ALONE_BYTES
    plans = [Plan.from_dict(plan) for _, _, plan in layouts]
    join(world, *plans, check="every")
    ready, start, began = GradientSync._gradient_is_ready, GradientSync.start, list[int]()
    late: list[tuple[int, int]] = []

    def swapped(self: Any, key: tuple[int, int], parameter: Any) -> None:
        late.append(key)
        if len(late) > 1:
            others = [late.pop(), late.pop()][: 3 - world.rank]
            for other in others:
                if other not in self._under_way:  # of tiles, as the pass could wait no longer
                    ready(self, other, parameter)

    def noted(self: Any, event: Any) -> None:
        began.extend([event.tag] * (not self.has_begun(event)))
        start(self, event)

    GradientSync.start = noted  # type: ignore[method-assign]
    if world.rank in (1, 2):
        GradientSync._gradient_is_ready = swapped  # type: ignore[method-assign]
    answers = {}
    for (name, config, _), plan in zip(layouts, plans, strict=True):
        digest = hashlib.sha256()
        engine = build_rank(from_dict(config), plan, world.rank, STEPS)
        for number in range(STEPS):
            began.clear()
            late.clear()
            result = engine.executor.step(engine.loaders, number=number)
            digest.update(repr(result.loss).encode())
        for tensor in named_parameters(engine):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        answers[name] = digest.hexdigest(), [*began]
        engine.close()
    return answers


def named_parameters(engine: Any) -> list[Any]:
    """Returns the parameters of a rank in the order of their names."""
    sync = engine.executor.sync
    return [own for stage in sync.by_group.values() for _, own in sorted(stage.parameters.items())]


def layouts_of(base: dict[str, Any], orders: list[str], **comm: Any) -> Layouts:
    made = []
    for order in orders:
        both = {**base.get("comm", {}), **comm, "gradient_order": order}
        config = config_of(**{"batch": 12, **base, "comm": both}, precision={"name": "fp32"})
        plan = plan_of(config)
        assert plan.ok, plan.findings
        made.append((order, to_dict(config), plan.to_dict()))
    return made


EVERY = [AUTO, *ORDERS]
SHARD = {"optimizer": {"shard": True, "exchange": "broadcast"}}
CASES: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "gloo": ({"parallel": {"replicas": 3}}, EVERY, {"shared_memory": False}),
    "shm": ({"parallel": {"replicas": 3}}, EVERY, {"outstanding": 3}),
    "tiles, coded halos": (
        {"parallel": {"tiles": [2, 1], "replicas": 2}, "comm": {"codec": {"halo": "bf16"}}},
        EVERY,
        {"shared_memory": False},
    ),
    "gems": (
        {"parallel": {"stages": 2, "directions": 2, "schedule": "gems", "replicas": 2}},
        EVERY,
        {"shared_memory": False},
    ),
    "divided, coded parameters": (
        {"parallel": {"replicas": 3}, **SHARD, "comm": {"codec": {"parameters": "int8"}}},
        EVERY,
        {"shared_memory": False},
    ),
    "coded gradients": (
        {"parallel": {"replicas": 2}, "comm": {"codec": {"gradient": "bf16"}}},
        [AUTO, "end"],
        {"shared_memory": False},
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_every_order_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(updates, "ALONE_BYTES", ALONE_BYTES)
    base, orders, comm = CASES[name]
    layouts = layouts_of(base, orders, **comm)
    ranks = run_ranks(bits_of_rank, layouts[0][2]["world"], layouts)
    check(ranks, orders)
    if name in ("gloo", "shm"):  # odd ranks have begun their own order
        began = [[rank[order][1] for rank in ranks] for order in ("chain", "concurrent")]
        assert began[0][0] == began[0][1] == sorted(began[0][0])
        assert began[1][0] != began[1][1]
        assert sorted(began[1][1]) == began[1][0]


@pytest.mark.mpi
def test_every_order_has_the_same_bits_over_mpi(
    mpi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(updates, "ALONE_BYTES", ALONE_BYTES)
    keys = {"parallel": {"replicas": 3}, "launcher": {"name": "mpirun", "mpi": mpi}}
    layouts = layouts_of(keys, EVERY, backend="mpi", shared_memory=False)
    check(run_mpi(mpi, bits_of_rank, 3, layouts, folder=tmp_path), EVERY)


def check(ranks: list[dict[str, tuple[str, list[int]]]], orders: list[str]) -> None:
    """Compares the digests of all orders on each rank."""
    for rank in ranks:
        assert [*rank] == orders
        assert len({digest for digest, _ in rank.values()}) == 1, rank
