"""Makes rows of the layouts that ``hires plan --choose`` lists, and weighs its predictions."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hires.bench.bench_rows import BenchRow
from hires.bench.precision_inputs import hires_output
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.plan.search.candidates import candidate_of
from hires.plan.simulation.machine_calibration import COMMAND, calibration_or_defaults

NEAR = 0.05
"""A choice within so much of the best measured layout counts as right."""
SHAPE = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")


def chosen_rows(values: Mapping[str, Any], timeout_s: float) -> list[BenchRow]:
    """Returns the layouts of different shapes that a search lists for a case, fastest first.

    HiresError: there is no calibration, or the search fails.
    """
    config, words = from_dict(values["config"]), values["words"]
    hires_output(["doctor", "--calibrate", *words, "--json"], timeout_s)  # the network's own layers
    if not calibration_or_defaults().is_measured:
        raise ConfigError(f"steps are predicted with a calibration of this machine: run {COMMAND}")
    choice = json.loads(hires_output(["plan", "--choose", *words, "--json"], timeout_s))
    rows: list[BenchRow] = []
    for option in of_different_shapes(choice["options"], values["choose"]):
        changed = candidate_of(option["keys"]).change.apply(config)
        if changed is None:
            raise ConfigError(f"the layout {option['keys']} makes no sense for this network")
        name, what = f"{len(rows) + 1} {option['layout']}", option["overrides"]
        rows.append(BenchRow(name, changed, what=what, predicted_s=option["step_s"]))
    return rows


def of_different_shapes(options: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns the first option, then the best of each shape, from the fastest to the slowest.

    Where there are more shapes than asked for, they are spread from the fastest to the slowest:
    layouts that differ much test the predicted order best.
    """
    shapes: dict[str, dict[str, Any]] = {}
    for option in options:
        key = json.dumps([option["keys"][f"parallel.{name}"] for name in SHAPE])
        shapes.setdefault(key, dict(option))
    best = [*shapes.values()]
    if len(best) <= count:
        return best
    return [best[round(number * (len(best) - 1) / (count - 1))] for number in range(count)]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns Kendall's tau-a of some pairs of numbers; 1 for fewer than two pairs.

    Source:
        Kendall, "A new measure of rank correlation", Biometrika 30, 1938.
    """
    both = itertools.combinations(pairs, 2)
    signs = [float(np.sign((a[0] - b[0]) * (a[1] - b[1]))) for a, b in both]
    return statistics.mean(signs) if signs else 1.0


def choice_facts(result: Mapping[str, Any]) -> list[str]:
    """Returns how well all cases were predicted, in one line; nothing where none was chosen."""
    every = [
        [row for row in rows if row.get("step_s") and row["predicted_s"]]
        for rows in result["groups"].values()
    ]
    cases = [[(row["predicted_s"], row["step_s"]["median"]) for row in rows] for rows in every]
    if not (cases := [case for case in cases if case]):
        return []
    errors = [abs(predicted / measured - 1) for case in cases for predicted, measured in case]
    right = [case[0][1] <= (1 + NEAR) * min(measured for _, measured in case) for case in cases]
    tau = statistics.mean(map(kendall_tau, cases))
    return [
        f"predicted steps: mean error {statistics.mean(errors):.1%}, median "
        f"{statistics.median(errors):.1%}; mean of Kendall's tau {tau:.2f}; the choice is within "
        f"{NEAR:.0%} of the best measured layout in {sum(right)} of {len(right)}"
    ]
