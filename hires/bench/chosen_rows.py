"""Makes rows of the layouts that ``hires plan --choose`` lists, and compares them with its model.

The layouts of a case take turns with the steps of a network of the calibration, which show the pace
of the machine. Every layout is compared with the mean of its round, and that with the pace: so a
step is known as it would be at the pace at which the machine was calibrated.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hires.bench.bench_rows import BenchRow
from hires.bench.precision_inputs import hires_output
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.plan.search.candidates import candidate_of
from hires.plan.simulation.machine_calibration import COMMAND, calibration_or_defaults

NEAR = 0.05
"""A choice within so much of the best measured layout counts as right."""
PACE = "pace"
"""Name of the row that shows it."""
SHAPE = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")


def chosen_rows(values: Mapping[str, Any], timeout_s: float) -> list[BenchRow]:
    """Returns the pace, and the layouts of different shapes that a search lists for a case.

    HiresError: there is no calibration, or the search fails.
    """
    config, words = from_dict(values["config"]), values["words"]
    hires_output(["doctor", "--calibrate", *words, "--json"], timeout_s)  # the network's own layers
    calibration = calibration_or_defaults()
    if not calibration.is_measured:
        raise ConfigError(f"steps are predicted with a calibration of this machine: run {COMMAND}")
    choice = json.loads(hires_output(["plan", "--choose", *words, "--json"], timeout_s))
    paced = min(config.ranks or 2, calibration.machine.cores)
    then_s = calibration.busy_pace_s if paced > 1 else calibration.pace_s
    rows = [BenchRow(PACE, config, peer=PACE, checked=False, ranks=paced, predicted_s=then_s)]
    for option in of_different_shapes(choice["options"], values["choose"]):
        changed = candidate_of(option["keys"]).change.apply(config)
        if changed is None:
            raise ConfigError(f"the layout {option['keys']} makes no sense for this network")
        name = f"{len(rows)} {option['layout']}"
        row = BenchRow(name, changed, what=option["overrides"], predicted_s=option["step_s"])
        rows.append(replace(row, baseline=rows[1].name if len(rows) > 1 else name))
    return rows


def of_different_shapes(options: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns the first option, then the best of each shape, from the fastest to the slowest.

    Where there are more shapes than asked for, they are spread from the fastest to the slowest:
    layouts that differ much test the predicted order best.
    """
    shapes: dict[str, Mapping[str, Any]] = {}
    for option in options:
        key = json.dumps([option["keys"][f"parallel.{name}"] for name in SHAPE])
        shapes.setdefault(key, option)
    best = [dict(option) for option in shapes.values()]
    if len(best) <= count:
        return best
    places = {round(number * (len(best) - 1) / (count - 1)) for number in range(count)}
    return [best[place] for place in sorted(places)]


def normalised(rows: list[dict[str, Any]]) -> None:
    """Gives the rows of a case their seconds at the pace of the calibration (``at_pace_s``)."""
    pace = next(row for row in rows if row["name"] == PACE)
    layouts = [row for row in rows if row["name"] != PACE]
    steps_s = [row["samples_s"] for row in layouts]
    numbers = normalise_by_reference(steps_s, pace["samples_s"], pace["predicted_s"])
    for row, seconds in zip(layouts, numbers, strict=True):
        row["at_pace_s"] = seconds


def normalise_by_reference(
    steps_s: Sequence[Sequence[float]], reference_s: Sequence[float], then_s: float
) -> list[float]:
    """Returns the seconds of each layout on the machine as it was when a reference took ``then_s``.

    ``steps_s`` of each layout and ``reference_s`` have one number a round.
    """
    rounds_s = [statistics.geometric_mean(steps) for steps in zip(*steps_s, strict=True)]
    common = statistics.median(r / p for r, p in zip(rounds_s, reference_s, strict=True))
    shares = (
        statistics.median(s / r for s, r in zip(steps, rounds_s, strict=True)) for steps in steps_s
    )
    return [then_s * common * share for share in shares]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns Kendall's tau-a of some pairs of numbers; 1 for fewer than two pairs.

    Source:
        Kendall, "A new measure of rank correlation", Biometrika 30, 1938.
    """
    products = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    signs = [math.copysign(1, product) if product else 0 for product in products]
    return sum(signs) / len(signs) if signs else 1.0


def choice_facts(result: Mapping[str, Any]) -> list[str]:
    """Returns how well all cases were predicted, in one line; nothing where none was chosen."""
    cases = [[row for row in rows if row.get("at_pace_s")] for rows in result["groups"].values()]
    pairs = [[(row["predicted_s"], row["at_pace_s"]) for row in rows] for rows in cases if rows]
    if not pairs:
        return []
    errors = [abs(predicted / measured - 1) for case in pairs for predicted, measured in case]
    right = [case[0][1] <= (1 + NEAR) * min(measured for _, measured in case) for case in pairs]
    return [
        f"steps at the pace of the calibration: mean error {statistics.mean(errors):.1%}, median "
        f"{statistics.median(errors):.1%}; mean of Kendall's tau "
        f"{statistics.mean(map(kendall_tau, pairs)):.2f}; the choice is within {NEAR:.0%} of the "
        f"best measured layout in {sum(right)} of {len(right)}"
    ]
