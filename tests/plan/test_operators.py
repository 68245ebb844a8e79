"""Everything about an operator is in its entry: no other list, no kernel forgotten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hires.parallel.convolution import SUBSTITUTES
from hires.parallel.image_kernels import IMAGE_KERNELS
from hires.parallel.reductions import REDUCTIONS
from hires.parallel.window import WINDOW_KERNELS
from hires.plan.operators.operator_facts import (
    OPERATORS,
    facts_of,
    operator_rows,
)
from tests.helpers import new_operator
from tests.helpers.layouts import config_of, plan_of, verified

PACKAGE = Path(__file__).resolve().parents[2] / "hires"


FAMILIES = PACKAGE / "plan" / "operators"


AUTOCAST = "simulated_device.py"
"""It imitates torch, whose autocast has lists of operators."""


MESSAGES = {"gather", "scatter"}
"""Operators that share their names with operations of messages."""


BESIDE = ("plan", "parallel", "nets", "engine", "comm", "bench")


def test_every_window_has_its_pixels_and_a_kernel():
    windowed = {name for name in OPERATORS if "window" in facts_of(name).tiling}
    assert windowed == {name for name in OPERATORS if facts_of(name).window is not None}
    assert windowed == set(WINDOW_KERNELS)


def test_every_sum_over_the_image_has_a_kernel():
    summed = {
        n for n in OPERATORS if {"statistics", "reduction", "softmax"} & {*facts_of(n).tiling}
    }
    assert summed == set(IMAGE_KERNELS)
    statistics = {name for name in OPERATORS if "statistics" in facts_of(name).tiling}
    assert statistics == {name for name in OPERATORS if facts_of(name).statistics is not None}
    softmax = {name for name in OPERATORS if "softmax" in facts_of(name).tiling}
    assert summed - statistics - softmax == set(REDUCTIONS)


def test_every_kernel_is_of_an_operator_that_is_listed():
    for kernels in (WINDOW_KERNELS, IMAGE_KERNELS):
        assert set(kernels) <= set(OPERATORS)
    # Those without a rule, as conv1d, are computed whole, perhaps by a kernel of ours.
    unlisted = set(SUBSTITUTES) - set(OPERATORS)
    assert {name for name in unlisted if not hasattr(torch.ops.aten, name)} == set()


def test_no_other_module_lists_operators():
    lists = [
        f"{path.relative_to(PACKAGE)}:{line}: {', '.join(sorted(names))}"
        for package in BESIDE
        for path in sorted((PACKAGE / package).rglob("*.py"))
        if FAMILIES not in path.parents and path.name != AUTOCAST
        for line, names in listed_operators(ast.parse(path.read_text(encoding="utf-8")))
        if not names <= MESSAGES
    ]
    assert not lists, "\n".join(lists)


def listed_operators(tree: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Yields the collections that name several operators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            items: list[ast.expr | None] = [*node.keys]
        elif isinstance(node, (ast.Set, ast.Tuple, ast.List)):
            items = [*node.elts]
        else:
            continue
        names = {str(item.value) for item in items if isinstance(item, ast.Constant)}
        if len(names & set(OPERATORS)) > 1:
            yield node.lineno, names & set(OPERATORS)


@pytest.fixture
def only_here() -> Iterator[None]:
    """Enters the new operator, whose network may have been traced before, and removes it again."""
    new_operator.register()
    yield
    for table in (OPERATORS, WINDOW_KERNELS):
        table._items.pop("diff", None)


@pytest.mark.dist
@pytest.mark.usefixtures("only_here")
@pytest.mark.parametrize("parallel", [{"tiles": [3, 1]}, {"stages": 2, "local_dp": 2}])
def test_new_operator_is_one_entry_and_one_kernel(tmp_path, parallel):
    model = {"name": "custom", "target": "tests.helpers.new_operator:network", "classes": 4}
    keys = {"image": [10, 9], "model": model, "parallel": parallel}
    plan = plan_of(config_of(**keys))
    assert plan.ok
    if "tiles" in parallel:
        assert "diff" in {op.node for stage in plan.stages for op in stage.comm}
    assert operator_rows()["diff"].tiles == "window"
    answer = verified(tmp_path, **keys)
    assert answer["max_rel_err"] < 1e-10, answer
