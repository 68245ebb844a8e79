"""Bands compute every row once, keep what the next one needs, and begin again where they must."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hires.plan.bands import COLLECT, ROWS, STORE, SUM, Bands, bands_of, wanted_rows
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.rules import rule_in, window_of
from tests.helpers.small_plans import config_of
from tests.helpers.tiny_nets import Forward, traced


def planned(forward: Forward, rows: Any = 4, height: int = 12, **parts: Any) -> Plan:
    graph = traced(forward, (1, 3, height, 6), False, **parts)
    return make_plan(config_of("infer", 1, band_rows=rows), graph)


def two_convs(n: Any, x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(F.conv2d(x, n.a, padding=1), n.a, padding=1)


def squeezed(n: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.conv2d(x, n.a, padding=1)
    return F.conv2d(y * y.mean((2, 3), keepdim=True).sigmoid(), n.a)


def normed(n: Any, x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(F.conv2d(x, n.a, padding=1), 3).relu()


def turned(n: Any, x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), n.a)


def strided(n: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.max_pool2d(F.conv2d(x, n.a, stride=2, padding=1), 3, 2, 1)
    return F.interpolate(y, scale_factor=2.0, mode="bilinear")


def rolled(n: Any, x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x.roll(1, 2), n.a)


def mixed(n: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.fft.fft2(x).real


NETS = {net.__name__: net for net in (two_convs, squeezed, normed, turned, strided, rolled, mixed)}
WEIGHT = {"a": torch.ones(3, 3, 3, 3)}


def test_rows_of_two_convolutions_are_those_of_the_drawing():
    bands = bands_of(planned(two_convs, a=WEIGHT["a"]))
    [one] = bands.walks
    first, second = (node.name for node in bands.graph.nodes)
    assert one.ends == {
        ("input", ""): [4, 8, 12],
        (first, ROWS): [3, 7, 12],
        (second, ROWS): [2, 6, 12],
    }
    assert one.keeps == {"input": [2, 6, 12], first: [1, 5, 12], second: [2, 6, 12]}
    assert bands.kept_bytes == 4 * 3 * 6 * 4  # two rows of 3 channels and 6 columns, of both maps
    assert (bands.stored, bands.reasons, bands.num_bands) == (set(), [], 3)


def test_maps_are_stored_where_a_node_needs_the_whole_image_first():
    bands = bands_of(planned(squeezed, **WEIGHT))
    hows = [{step.how for step in one.steps} for one in bands.walks]
    assert hows == [{ROWS, SUM}, {ROWS}]
    assert bands.stored == {bands.graph.nodes[0].name}
    assert bands.stored_bytes == 3 * 12 * 6 * 4
    hows = [{step.how for step in one.steps} for one in bands_of(planned(normed, **WEIGHT)).walks]
    assert hows == [{ROWS, COLLECT}, {ROWS}]
    [reason] = bands_of(planned(mixed)).reasons
    assert STORE in {step.how for step in bands_of(planned(mixed)).walks[0].steps}, reason


@pytest.mark.parametrize("rows", [1, 3, 5, 40])
@pytest.mark.parametrize("net", NETS)
def test_every_row_is_made_once_from_rows_that_are_held(net: str, rows: int):
    plan = planned(NETS[net], rows, 23, **({} if net == "mixed" else WEIGHT))
    assert plan.ok, plan.findings
    require_sound(bands_of(plan))


def require_sound(bands: Bands) -> None:
    for one in bands.walks:
        for (value, how), ends in one.ends.items():
            assert ends == sorted(ends)
            whole = bands.rows_of(value) if how in ("", ROWS) else one.ends[value, how][-1]
            assert ends[-1] == whole > 0
        for step, band in itertools.product(one.steps, range(bands.num_bands)):
            made = one.rows(step.node.name, step.how, band)
            rule = rule_in(bands.stage, step.node, bands.graph)
            for name in step.reads:
                how = "" if name in one.sources else ROWS
                first = one.keeps[name][band - 1] if band else 0
                axes = window_of(step.node, name, rule)
                wanted = (
                    wanted_rows(bands.graph, bands.stage, step, name, made)
                    if axes is None
                    else axes[0].need(made)
                )
                if made[0] < made[1] and wanted[0] < wanted[1]:
                    assert first <= wanted[0] <= wanted[1] <= one.ends[name, how][band]


def test_automatic_bands_are_lower_for_wider_maps(monkeypatch):
    monkeypatch.setattr("hires.plan.bands.BAND_BYTES", 2**14)
    narrow = planned(two_convs, "auto", 600, **WEIGHT).band_rows
    wide = planned(lambda n, x: two_convs(n, x.repeat(1, 1, 1, 2)), "auto", 600, **WEIGHT).band_rows
    assert (narrow, wide) == (112, 48)


@pytest.mark.parametrize(
    ("task", "keys", "text"),
    [
        ("train", {}, "are for inference, and task=train is none; leave them out"),
        ("infer", {"tiles": [2, 1]}, "one rank, all layers, not with parallel.tiles=[2, 1]"),
        ("infer", {"stages": 2}, "not with parallel.stages=2; leave that out"),
        ("evaluate", {}, "make maps row by row, and an evaluation needs them whole"),
    ],
)
def test_what_cannot_be_computed_in_bands_is_said(task: str, keys: dict[str, Any], text: str):
    graph = traced(two_convs, (2, 3, 13, 10), task == "train", **WEIGHT)
    plan = make_plan(config_of(task, 2, band_rows=4, **keys), graph)
    assert text in next(f.text for f in plan.findings if f.key == "parallel.band_rows")
