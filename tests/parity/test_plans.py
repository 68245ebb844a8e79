"""Rows of the table have the layouts that they are for: what crosses cuts, and what is gathered."""

from __future__ import annotations

import itertools

import pytest

from hires.plan.partition import layer_starts
from tests.helpers.graphs import cut_values
from tests.helpers.parity_rows import rows
from tests.helpers.traces import graph_of, plan_of


def test_state_and_skip_and_nothing_else_cross_a_cut_between_two_cells():
    row = rows()["amoebanet, sp grid"]
    graph = graph_of(row.config())
    starts = layer_starts(graph)
    crossing = [[graph.by_name[name].layer for name in cut_values(graph, i)] for i in starts]
    cells = [index for index, layers in enumerate(crossing) if _are_cells(layers)]
    assert [crossing[index] for index in cells] == [
        [f"cells.{number}", f"cells.{number + 1}"] for number in range(4)
    ]
    cuts = [0, cells[1], cells[3], len(starts)]
    balance = [last - first for first, last in itertools.pairwise(cuts)]
    parallel = {"tiles": [1, 1], "stages": 3, "balance": balance}
    edges = [(edge.source, edge.target) for edge in plan_of(row.config(parallel=parallel)).edges]
    assert edges == [(0, 1), (0, 1), (1, 2), (1, 2)]


def _are_cells(layers: list[str]) -> bool:
    """Whether values are what two cells return."""
    return len(layers) == 2 and all(layer.count(".") == 1 and "cells" in layer for layer in layers)


@pytest.mark.parametrize(("name", "count"), [("windows within tiles", 3), ("panorama, grid", 0)])
def test_nothing_else_is_gathered(name: str, count: int):
    """Of windows that lie within tiles: keys, values and transposed keys of the attention."""
    plan = plan_of(rows()[name].config())
    gathered = [op for stage in plan.stages for op in stage.comm if op.kind == "gather"]
    assert len(gathered) == count
    notes = [finding.text for finding in plan.findings if finding.key == "parallel.gather"]
    assert len(notes) == (count > 0)
    assert all("0% of the stage's operations run on every rank" in note for note in notes)
