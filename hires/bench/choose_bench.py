"""Compares chosen layouts with measured ones: ``hires bench choose``.

``python -m hires.bench.choose_bench`` asks ``hires plan --choose`` for the layouts of each network,
image and number of ranks, runs the best of each shape, and compares predicted with measured steps:
their error, whether their order is right (Kendall's tau), and how far the choice is from the best
that was measured. Exit codes: 0 done, 1 a run failed, 2 bad options.

Example: hires bench choose --only resnet18 --layouts 4
"""

from __future__ import annotations

import fnmatch
import importlib.util
import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, option
from hires.bench.calibrated_networks import Timed, planned
from hires.bench.contestants import bench_data
from hires.bench.hires_command import composed, hires_output
from hires.bench.pace import pace_steps
from hires.bench.ranks import stream_ranks
from hires.bench.runners import HiresSteps
from hires.bench.timing import Runner, race
from hires.comm import make_groups
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError
from hires.core.store.reading import read_named_values
from hires.core.units import seconds
from hires.nets.trace import trace_config
from hires.plan.search.candidates import candidate_of
from hires.plan.simulation.machine_calibration import Calibration, calibration_or_defaults
from hires.plan.simulation.machine_model import machine_of

NEAR = 0.05
"""A choice within so much of the best measured layout counts as right."""
AIMS = {"error": 0.08, "tau": 0.85, "right": 0.9}
"""Mean error of the step time at the most; mean tau and share of right choices at the least."""
PACE = "pace"
WARMUP = 2
NOTES = """\
Predicted is the simulated step of the plan, on this machine's calibration, to which `hires doctor
--calibrate` with the keys of a network has added its layers (not with --no-calibrate). The layouts
of a case take turns step by step, in the processes of one world; measured is the median step. The
machine's pace at that moment is that of a network of the calibration, which every core computes in
each round by itself: `pace` is how much longer it takes than when the machine was calibrated. `at
pace` is the step at that former pace: each layout is compared with the mean of its round, and that
mean with the pace. The errors, tau and the best layout are of these; errors of the steps as
measured stand beside them. `tau` is Kendall's over the layouts of a case: 1 if their order is that
of the measurement, 0 if the two are unrelated. `repeat` is the tau of the measurement with itself,
of its odd with its even rounds: no prediction can be expected to do better. `behind` is how much
longer the chosen layout takes than the best measured one."""

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


@dataclass(frozen=True)
class ChoiceCase:
    """One network, image and number of ranks."""

    network: str
    image: int
    ranks: int
    words: tuple[str, ...]
    """The overrides of all its layouts."""


def measure(options: ChooseOptions) -> Results:
    """Yields all cases after each new one, and what follows from them."""
    rows: list[dict[str, Any]] = []
    known, before = None, calibration_or_defaults()
    for case in cases_of(options):
        began_s = time.monotonic()
        try:
            if options.calibrate and known != (case.network, case.image):
                log.info("measuring the layers of %s at %d", case.network, case.image)
                known = case.network, case.image
                hires_output(["doctor", "--calibrate", *case.words, "--json"], options.timeout)
            rows.append(compared(case, options, before))
        except HiresError as error:
            rows.append({**_named(case), "error": str(error)})
        yield {"ok": all("error" not in row for row in rows), "rows": rows, **summary(rows)}
        log.info("%s: %.0f s", _named(case), time.monotonic() - began_s)


def cases_of(options: ChooseOptions) -> Iterator[ChoiceCase]:
    """Yields what is to be compared; ConfigError: the file, or a pattern, names nothing."""
    data = bench_data("choose.yaml")
    data = read_named_values(options.file) if options.file else data
    patterns = [pattern.strip() for pattern in options.only.split(",")]
    names = [n for n in data["networks"] if any(fnmatch.fnmatch(n, p) for p in patterns)]
    if not names:
        raise ConfigError(f"--only {options.only} names none of {', '.join(data['networks'])}")
    counts = data["ranks"]
    if options.ranks:
        try:
            counts = [int(word) for word in options.ranks.split(",")]
        except ValueError:
            raise ConfigError(f"--ranks {options.ranks}: give numbers, as 2,4") from None
    for name in names:
        network = data["networks"][name]
        library = network.get("needs")
        if library and importlib.util.find_spec(library) is None:
            log.warning("%s is left out: %s is not installed (hires[networks])", name, library)
            continue
        images = network["image"][: options.images or None]
        for image, ranks in itertools.product(images, counts):
            keys = {**data.get("every", {}), **network["keys"], "image": image}
            words = (*_words(keys), *options.overrides)
            yield ChoiceCase(name, image, ranks, words)


def compared(case: ChoiceCase, options: ChooseOptions, before: Calibration) -> dict[str, Any]:
    """Returns the layouts of a case, predicted and measured; HiresError: something failed.

    ``before``: the calibration without the layers of this network.
    """
    began_s = time.monotonic()
    choice = json.loads(
        hires_output(
            ["plan", "--choose", f"ranks={case.ranks}", *case.words, "--json"], options.timeout
        )
    )
    asked_s = time.monotonic() - began_s
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
        "asked_s": asked_s,
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

    The first ``paced`` ranks run the steps that show the pace, each by itself.
    """
    world = make_groups([[*range(num_ranks)]])[0]
    runners: dict[str, Runner | None] = {}
    for number, timed in enumerate(entrants):
        runners[str(number)] = HiresSteps(timed.config, timed.plan, rank)
    runners[PACE] = pace_steps() if rank < paced else None
    for samples in race(runners, rounds, WARMUP, world):
        steps_s = [samples[str(number)].step_s for number in range(len(entrants))]
        yield steps_s, samples[PACE].step_s


def at_one_pace(
    steps_s: Sequence[Sequence[float]], pace_s: Sequence[float], then_s: float
) -> list[float]:
    """Returns the seconds of each layout on the machine as it was when a pace took ``then_s``.

    A round is as slow as its layouts are together: each is compared with their geometric mean, and
    that with the pace. Both are medians over the rounds.

    Args:
        steps_s: of each layout, one number a round.
        pace_s: one number a round.
        then_s: what the pace took when the machine was calibrated.
    """
    rounds_s = [statistics.geometric_mean(one) for one in zip(*steps_s, strict=True)]
    common = statistics.median(r / p for r, p in zip(rounds_s, pace_s, strict=True))
    shares = (
        statistics.median(s / r for s, r in zip(one, rounds_s, strict=True)) for one in steps_s
    )
    return [then_s * common * share for share in shares]


def _entrant(config: RunConfig, keys: Mapping[str, Any]) -> Timed:
    """Returns a layout of a case with its plan; ConfigError: its keys make no sense together."""
    changed = candidate_of(keys).change.apply(config)
    if changed is None:
        raise ConfigError(f"the layout {dict(keys)} makes no sense for this network")
    return planned(changed, trace_config(changed))


def of_different_shapes(options: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns the first option, then the best of each shape, from the fastest to the slowest.

    Where there are more shapes than asked for, they are spread from the fastest to the slowest:
    layouts that differ much test the predicted order best.
    """
    shapes: dict[str, Mapping[str, Any]] = {}
    names = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")
    for one in options:
        key = json.dumps([one["keys"][f"parallel.{name}"] for name in names])
        shapes.setdefault(key, one)
    best = [dict(one) for one in shapes.values()]
    if len(best) <= count:
        return best
    places = {round(number * (len(best) - 1) / (count - 1)) for number in range(count)}
    return [best[place] for place in sorted(places)]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns Kendall's tau-a of some pairs of numbers; 1 for fewer than two pairs.

    Source:
        Kendall, "A new measure of rank correlation", Biometrika 30, 1938.
    """
    both = [*itertools.combinations(pairs, 2)]
    if not both:
        return 1.0
    signs = [_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in both]
    return sum(signs) / len(both)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns errors, order and right choices over all cases that were measured."""
    done = [row for row in rows if "error" not in row]
    if not done:
        return {}
    every = [one for row in done for one in row["layouts"]]
    errors = [abs(one["predicted_s"] / one["at_pace_s"] - 1) for one in every]
    generic = [abs(one["generic_s"] / one["at_pace_s"] - 1) for one in every]
    raw = [abs(one["predicted_s"] / one["measured_s"] - 1) for one in every]
    halves = [abs(one["halves_s"][0] / one["halves_s"][1] - 1) for one in every]
    right = [row["behind"] <= NEAR for row in done]
    return {
        "mean_error": statistics.mean(errors),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "mean_error_as_measured": statistics.mean(raw),
        "mean_error_of_generic": statistics.mean(generic),
        "mean_error_of_halves": statistics.mean(halves),
        "mean_tau": statistics.mean(row["tau"] for row in done),
        "mean_tau_of_halves": statistics.mean(row["tau_of_halves"] for row in done),
        "right": sum(right),
        "cases": len(done),
        "longest_search_s": max(row["search_s"] for row in done),
    }


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def _named(case: ChoiceCase) -> dict[str, Any]:
    return {"network": case.network, "image": case.image, "ranks": case.ranks}


def _words(keys: Mapping[str, Any]) -> list[str]:
    """Returns keys as overrides of Hydra."""
    return [f"{key}={_written(value)}" for key, value in keys.items()]


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    )


def _tables(result: Result) -> list[BenchTable]:
    cases, layouts = [], []
    for row in result["rows"]:
        name = f"{row['network']} {row['image']}, {row['ranks']} ranks"
        if "error" in row:
            cases.append({**_case_cells(name), "why": row["error"][:300]})
            continue
        found = _case_cells(name) | {"pace": f"{row['pace']:.2f}"}
        found |= {"tau": f"{row['tau']:.2f}", "repeat": f"{row['tau_of_halves']:.2f}"}
        found |= {"behind": f"{row['behind']:.1%}"}
        found |= {"search s": f"{row['search_s']:.1f}", "why": ""}
        cases.append(found)
        layouts += [_layout_cells(name, one) for one in row["layouts"]]
    return [
        BenchTable("Choices", cases, fact=_facts(result)),
        BenchTable("Layouts", layouts),
    ]


def _case_cells(name: str) -> dict[str, str]:
    return {
        "case": name,
        "pace": "-",
        "tau": "-",
        "repeat": "-",
        "behind": "-",
        "search s": "-",
        "why": "",
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
