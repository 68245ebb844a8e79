"""Compares chosen layouts with measured ones: ``hires bench choose``.

``python -m hires.bench.choose_bench`` asks ``hires plan --choose`` for the layouts of each network,
image and number of ranks, runs the best of each shape, and compares predicted with measured steps:
their error, whether their order is right (Kendall's tau), and how far the choice is from the best
that was measured. Exit codes: 0 done, 1 a run failed, 2 bad options.

Example: hires bench choose --only resnet18 --layouts 4
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, option
from hires.bench.calibrated_networks import Timed, planned
from hires.bench.choice_cases import (
    ChoiceCase,
    cases_of,
    matching,
    named_networks,
    of_different_shapes,
)
from hires.bench.choice_statistics import NEAR, at_one_pace, kendall_tau, summary
from hires.bench.hires_command import composed, hires_output
from hires.bench.pace import pace_steps
from hires.bench.ranks import stream_ranks
from hires.bench.runners import HiresSteps
from hires.bench.timing import Runner, race
from hires.comm import make_groups
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError
from hires.core.units import seconds
from hires.nets.trace import trace_config
from hires.plan.search.candidates import candidate_of
from hires.plan.simulation.machine_calibration import COMMAND, Calibration, calibration_or_defaults
from hires.plan.simulation.machine_model import machine_of

AIMS = {"error": 0.08, "tau": 0.85, "right": 0.9}
"""Mean error of the step time at the most; mean tau and share of right choices at the least."""
PACE = "pace"
"""Name of the steps that show it, beside the numbers of the layouts."""
WARMUP = 2
NOTES = """\
Predicted is the simulated step of the plan, on this machine's calibration, to which `hires doctor
--calibrate` with the keys of a network has added its layers (not with --no-calibrate). The layouts
of a case take turns step by step, in the processes of one world; measured is the median step. The
machine's pace at that moment is that of a network of the calibration, which every core computes by
itself between them: `pace` is how much longer it takes than when the machine was calibrated. `at
pace` is the step at that former pace: each layout is compared with the mean of its round, and that
mean with the pace. The errors, tau and the best layout are of these; errors of the steps as
measured stand beside them. `tau` is Kendall's over the layouts of a case: 1 if their order is that
of the measurement, 0 if the two are unrelated. `repeat` is the tau of the measurement with itself,
of its odd with its even rounds: not much more can be expected of a prediction. `behind` is how much
longer the chosen layout takes than the best measured one. `search s` is what the search says of
itself, `again s` the whole command once its answer is kept."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChooseOptions:
    """The options of ``hires bench choose``."""

    overrides: tuple[str, ...] = option(
        (), "keys of every run", flag="overrides", nargs="*", metavar="KEY=VALUE"
    )
    only: str = option("*", "patterns of networks with commas between, as 'resnet*,unet'")
    file: str = option("", "YAML file of other networks, in the form of hires/bench/choose.yaml")
    images: int = option(0, "images of each network, the first ones; 0: all", low=0)
    ranks: str = option("", "numbers of ranks with commas between; unset: those of the file")
    layouts: int = option(6, "layouts of a case that run, of different shapes")
    rounds: int = option(16, "steps of each layout, in turns", low=2)
    calibrate: bool = option(True, "measure no layers of the networks before their cases")
    timeout: float = option(900.0, "seconds for each case, and for each calibration")

    def __post_init__(self) -> None:
        if self.layouts < 2:
            raise ConfigError(f"--layouts {self.layouts}: an order needs 2 or more")


def measure(options: ChooseOptions) -> Results:
    """Yields all cases and searches after each new one, and what follows from them.

    ConfigError: there is no calibration to predict with.
    """
    rows: list[dict[str, Any]] = []
    searches: list[dict[str, Any]] = []

    def result() -> dict[str, Any]:
        good = all("error" not in row for row in (*rows, *searches))
        return {"ok": good, "rows": rows, "searches": searches, **summary(rows)}

    data = named_networks(options.file, options.only)
    cases = [*cases_of(data, options.ranks, options.images, options.overrides)]
    with _own_cache(options) if options.calibrate else contextlib.nullcontext():
        before = calibration_or_defaults()
        if not before.is_measured:
            off = os.environ.get("HIRES_CACHE") == "off"
            why = "HIRES_CACHE=off keeps none; unset it" if off else f"run {COMMAND}"
            raise ConfigError(f"steps are predicted with a calibration of this machine: {why}")
        calibrated = None
        for case in cases:
            began_s = time.monotonic()
            try:
                if options.calibrate and calibrated != (case.network, case.image):
                    log.info("measuring the layers of %s at %d", case.network, case.image)
                    hires_output(["doctor", "--calibrate", *case.words, "--json"], options.timeout)
                    calibrated = case.network, case.image
                rows.append(compared(case, options, before))
            except HiresError as error:
                rows.append({**_named(case), "error": str(error)})
            yield result()
            log.info("%s: %.0f s", _named(case), time.monotonic() - began_s)
        for name in matching(data.get("searches") or {}, options.only):
            searches.append(timed_search(name, data["searches"][name], options.timeout))
            yield result()


@contextlib.contextmanager
def _own_cache(options: ChooseOptions) -> Iterator[None]:
    """Calibrates this machine in a cache that is empty at first and removed at the end.

    So the search and its traces start cold, and what is kept for the user stays.
    """
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="hires-bench-choose-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            log.info("calibrating this machine")
            hires_output(["doctor", "--calibrate", "--json"], options.timeout)
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def timed_search(name: str, words: str, timeout_s: float) -> dict[str, Any]:
    """Returns the seconds of a search and of the same one again, each as a whole command."""
    row: dict[str, Any] = {"name": name, "command": f"hires plan --choose {words}"}
    command = ["plan", "--choose", *shlex.split(words), "--json"]
    try:
        for key in ("first_s", "again_s"):
            began_s = time.monotonic()
            choice = json.loads(hires_output(command, timeout_s))
            row[key] = time.monotonic() - began_s
            if key == "first_s":  # one that planned too few is not kept
                row |= {"planned": choice["planned"], "considered": choice["considered"]}
    except HiresError as error:
        return {**row, "error": str(error)}
    return row


def compared(case: ChoiceCase, options: ChooseOptions, before: Calibration) -> dict[str, Any]:
    """Returns the layouts of a case, predicted and measured; HiresError: something failed.

    ``before``: the calibration without the layers of this network.
    """
    search = ["plan", "--choose", f"ranks={case.ranks}", *case.words, "--json"]
    choice = json.loads(hires_output(search, options.timeout))
    began_s = time.monotonic()
    hires_output(search, options.timeout)
    again_s = time.monotonic() - began_s
    layouts = of_different_shapes(choice["options"], options.layouts)
    config = composed(case.words, options.timeout)
    entrants = [_entrant(config, layout["keys"]) for layout in layouts]
    calibration = calibration_or_defaults()
    paced = min(case.ranks, calibration.machine.cores)
    job = options.timeout, entrants, paced, case.ranks, options.rounds
    *_, (steps_s, pace_s) = stream_ranks(race_layouts, case.ranks, *job)
    then_s = calibration.busy_pace_s if paced > 1 else calibration.pace_s
    slower = statistics.median(pace_s) / then_s
    at_pace_s = at_one_pace(steps_s, pace_s, then_s)
    halves_s = [
        at_one_pace([one[half::2] for one in steps_s], pace_s[half::2], then_s) for half in (0, 1)
    ]
    rows = []
    for number, (layout, timed) in enumerate(zip(layouts, entrants, strict=True)):
        row = {
            "overrides": layout["overrides"],
            "label": layout["layout"],
            "predicted_s": layout["step_s"],
            "generic_s": machine_of(timed.config, before).step_time(timed.plan).step_s,
            "measured_s": statistics.median(steps_s[number]),
            "at_pace_s": at_pace_s[number],
            "halves_s": [half_s[number] for half_s in halves_s],
        }
        rows.append(row)
        words = [seconds(row[key]) for key in ("predicted_s", "measured_s", "at_pace_s")]
        log.info(
            "%s: predicted %s, measured %s, at the calibration's pace %s", row["label"], *words
        )
    best_s = min(at_pace_s)
    return {
        **_named(case),
        "source": choice["source"],
        "search_s": choice["seconds"],
        "again_s": again_s,
        "pace": slower,
        "layouts": rows,
        "tau": kendall_tau([(row["predicted_s"], row["at_pace_s"]) for row in rows]),
        "tau_of_halves": kendall_tau([tuple(row["halves_s"]) for row in rows]),
        "behind": at_pace_s[0] / best_s - 1,
    }


def race_layouts(
    rank: int, entrants: list[Timed], paced: int, num_ranks: int, rounds: int
) -> Iterator[tuple[list[list[float]], list[float]]]:
    """Yields the seconds of the steps of all layouts, and those of the pace, after each round.

    The first ``paced`` ranks run the steps that show the pace, each by itself, as often as there
    are layouts: a single one would show a moment, and the layouts fill the round.
    """
    world = make_groups([[*range(num_ranks)]])[0]
    runners: dict[str, Runner | None] = {}
    for number, timed in enumerate(entrants):
        runners[str(number)] = HiresSteps(timed.config, timed.plan, rank)
    pace = pace_steps() if rank < paced else None
    runners |= {f"{PACE} {number}": pace for number in range(len(entrants))}
    for samples in race(runners, rounds, WARMUP, world):
        steps_s, paces_s = (
            [samples[f"{name}{number}"].step_s for number in range(len(entrants))]
            for name in ("", f"{PACE} ")
        )
        yield steps_s, [*map(statistics.geometric_mean, zip(*paces_s, strict=True))]


def _entrant(config: RunConfig, keys: Mapping[str, Any]) -> Timed:
    """Returns a layout of a case with its plan; ConfigError: its keys make no sense together."""
    changed = candidate_of(keys).change.apply(config)
    if changed is None:
        raise ConfigError(f"the layout {dict(keys)} makes no sense for this network")
    return planned(changed, trace_config(changed))


def _named(case: ChoiceCase) -> dict[str, Any]:
    return {"network": case.network, "image": case.image, "ranks": case.ranks}


def _tables(result: Result) -> list[BenchTable]:
    cases, layouts = [], []
    for row in result["rows"]:
        name = f"{row['network']} {row['image']}, {row['ranks']} ranks"
        if "error" in row:
            cases.append({**_case_cells(name), "why": row["error"][:300]})
            continue
        cells = _case_cells(name) | {"pace": f"{row['pace']:.2f}"}
        if len(row["layouts"]) > 1:
            cells |= {"tau": f"{row['tau']:.2f}", "repeat": f"{row['tau_of_halves']:.2f}"}
            cells |= {"behind": f"{row['behind']:.1%}"}
        cells |= {"search s": f"{row['search_s']:.1f}", "again s": f"{row['again_s']:.1f}"}
        cases.append(cells)
        layouts += [_layout_cells(name, one) for one in row["layouts"]]
    return [
        BenchTable("Choices", cases, fact=_facts(result)),
        BenchTable("Layouts", layouts),
        BenchTable("Searches", [_search_cells(row) for row in result["searches"]]),
    ]


def _case_cells(name: str) -> dict[str, str]:
    names = ("pace", "tau", "repeat", "behind", "search s", "again s")
    return {"case": name, **dict.fromkeys(names, "-"), "why": ""}


def _search_cells(row: Mapping[str, Any]) -> dict[str, str]:
    times = {key: f"{row[key]:.1f}" if key in row else "-" for key in ("first_s", "again_s")}
    return {
        "search": row["name"],
        "first s": times["first_s"],
        "again s": times["again_s"],
        "layouts": f"{row['planned']} of {row['considered']}" if "planned" in row else "-",
        "command": row["command"],
        "why": row.get("error", "")[:300],
    }


def _layout_cells(name: str, one: Mapping[str, Any]) -> dict[str, str]:
    error = one["predicted_s"] / one["at_pace_s"] - 1
    return {
        "case": name,
        "layout": one["label"],
        "predicted ms": f"{one['predicted_s'] * 1e3:.1f}",
        "measured ms": f"{one['measured_s'] * 1e3:.1f}",
        "at pace ms": f"{one['at_pace_s'] * 1e3:.1f}",
        "error": f"{error:+.1%}",
        "keys": one["overrides"],
    }


def _facts(result: Result) -> str:
    if "mean_error" not in result:
        return ""
    source = next((row["source"] for row in result["rows"] if "source" in row), "")
    return (
        f"Step times: mean error {result['mean_error']:.1%} (aim {AIMS['error']:.0%}), median "
        f"{result['median_error']:.1%}, largest {result['largest_error']:.0%}; as measured, mean "
        f"{result['mean_error_as_measured']:.1%}; without the layers of these networks, mean "
        f"{result['mean_error_of_generic']:.1%}. Mean tau "
        f"{result['mean_tau']:.2f} (aim {AIMS['tau']}). Of odd and even rounds of the measurement "
        f"itself: error {result['mean_error_of_halves']:.1%}, tau "
        f"{result['mean_tau_of_halves']:.2f}. The choice is within {NEAR:.0%} of the "
        f"best measured layout in {result['right']} of {result['cases']} cases (aim "
        f"{AIMS['right']:.0%}). The seconds are of: {source}."
    )


BENCHMARK = Benchmark("choose", __doc__, ChooseOptions, measure, _tables, NOTES)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
