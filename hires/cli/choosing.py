"""Chooses the layout of a config: ``parallel=auto``, ``hires plan --choose`` and ``--largest``.

overrides -> keys that stay     traces of two batches -> graphs of all microbatches
          -> hires.plan.search.choose -> layouts, ranked -> the first one is the config's
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hires.cli.calibration import with_scales
from hires.cli.overrides import key_in
from hires.cli.planning import LAYOUT_KEYS, Planner, plan_key
from hires.cli.screen import print_activity
from hires.core.config.parallel_config import AUTO, OBJECTIVES, ParallelConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError, PlanError
from hires.core.store.cache import cached, keep, key_of
from hires.core.units import seconds, size
from hires.plan.graph import Graph, GraphOfSamples, plain
from hires.plan.hardware import CUDA, device_of, gpus_of_node
from hires.plan.memory import machine_bytes
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import Finding
from hires.plan.route_choice import resolve
from hires.plan.search.candidates import DECIDED, Given
from hires.plan.search.choice import Choice, NoRoomError
from hires.plan.search.choose import MEMORY, Chooser
from hires.plan.search.remedies import ranks_offered
from hires.plan.simulation.machine_calibration import calibration_or_defaults
from hires.plan.simulation.machine_model import machine_of

STEP = 32
"""Pixels between two sizes that ``--largest`` tries: networks halve their maps up to five times."""
MOST_SIDE = 1 << 17
"""Of an image whose size is looked for."""
IMAGE = OBJECTIVES[2]
OF_A_SIZE = 0.25
"""The share of the work of a search that one size of an image may take."""
CACHE = "choice"
"""Kind of the entries that keep choices."""


def is_open(config: RunConfig) -> bool:
    """Whether the layout of a config is still to be chosen."""
    return config.parallel.name == AUTO


def given_keys(words: Iterable[str]) -> list[str]:
    """Returns the keys of a layout that the overrides give, which a search leaves as they are.

    ConfigError: a layout is given beside them, though one is to be chosen.
    """
    keys = set()
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if key == "parallel" and value != AUTO:
            raise ConfigError(
                f"parallel={value} is a layout, and one is to be chosen; leave it out, or give the "
                f"keys that are to stay, as parallel.replicas=2"
            )
        if key in DECIDED:
            keys.add(key)
    return sorted(keys)


def given_values(config: RunConfig, words: Iterable[str]) -> Given:
    """Returns these keys with their values; ConfigError: stages have grids of their own."""
    # Files of the user's own may set keys of other groups; parallel=auto leaves its group open.
    others = (key for key in sorted(DECIDED) if not key.startswith("parallel."))
    own = [key for key in others if _value(config, key) != _value(RunConfig(), key)]
    values = {key: _value(config, key) for key in [*given_keys(words), *own]}
    if config.parallel.listed and "parallel.tiles" in values:
        raise ConfigError(
            f"parallel.tiles={config.parallel.tiles} gives each stage a grid, and a search chooses "
            f"one for all spatial stages; give one, as parallel.tiles=[2,1], or leave it out"
        )
    return values


def _value(config: RunConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def ranks_of(config: RunConfig) -> int:
    """Returns for how many ranks a layout is chosen; ConfigError: nothing says how many."""
    if config.ranks is not None:
        return config.ranks
    nodes, threads = config.num_nodes, config.launcher.threads
    gpus = gpus_of_node(config) or 0 if device_of(config) == CUDA else 0
    if not gpus and config.cluster.cores is None and not config.is_here:
        raise ConfigError(
            f"ranks is unset, and nothing says what a node of launcher={config.launcher.name} has; "
            f"give ranks=N, or cluster.cores (with device=cuda cluster.gpus)"
        )
    cores = config.cluster.cores or (os.cpu_count() or 1)
    return min(nodes * (gpus or max(1, cores // threads)), config.offered_ranks)


@dataclass
class LayoutSearch:
    """Searches with one planner; graphs are traced once for each image size."""

    planner: Planner
    words: tuple[str, ...] = ()
    """The overrides that the user typed."""

    def choose(
        self, config: RunConfig, objective: str | None = None, effort: float = 1.0
    ) -> Choice:
        """Returns the layouts of ``ranks`` ranks, the best first, after a share of the usual work.

        PlanError: none has so many, none fits, or the launcher does not offer so many.
        ConfigError: the network cannot be traced, or the cluster has no numbers to predict with.
        """
        objective = objective or config.parallel.objective
        machine, ranks = machine_of(config, calibration_or_defaults()), ranks_of(config)
        for problem in ranks_offered(config, ranks):
            raise PlanError(str(problem))
        given = given_values(config, self.words)
        with tempfile.TemporaryDirectory(prefix="hires-choose-") as folder:
            scaled, _ = with_scales(config, self.planner, self.words, assumed=folder)
            whole = dataclasses.replace(scaled, parallel=ParallelConfig())
            calibration = machine.calibration and machine.calibration.changed
            key = key_of(
                *(plan_key(config), ranks, given, objective, effort, machine_bytes()),
                *(plain(machine.network), machine.cores, plain(machine.device), calibration),
                self.planner.inputs(whole).digests,
            )
            held = cached(CACHE, key)
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, ConfigError):
                return dataclasses.replace(Choice.from_dict(held, config), kept=True)
            search, graphs = self.planner.search_memory, self._graphs(scaled)
            chooser = Chooser(
                scaled, graphs, machine, search, given, objective, print_activity, effort
            )
            choice = chooser.choose(ranks)
        keep(CACHE, key, choice.to_dict())
        return choice

    def chosen(self, config: RunConfig) -> tuple[RunConfig, Choice | None]:
        """Returns a config with its layout chosen, if that is open, and what it was chosen from."""
        if not is_open(config):
            if config.ranks is not None and config.ranks != config.parallel.num_ranks:
                raise ConfigError(
                    f"ranks={config.ranks}, but the layout has {config.parallel.num_ranks}; use "
                    f"parallel=auto to have one chosen, or leave ranks out"
                )
            return dataclasses.replace(config, ranks=None), None
        given_keys(self.words)  # refuses a layout beside it
        if config.parallel.objective == IMAGE:
            config, choice = self.largest(config)
        else:
            choice = self.choose(config)
        layout = choice.best.config
        label = layout.parallel.label
        parallel = dataclasses.replace(layout.parallel, name=label, objective=OBJECTIVES[0])
        config = dataclasses.replace(layout, parallel=parallel, quant=config.quant, ranks=None)
        print_activity("")
        return resolve(config), choice

    def largest(self, config: RunConfig) -> tuple[RunConfig, Choice]:
        """Returns the config with the largest image that fits, and its layouts.

        Sizes are multiples of ``STEP`` on the shorter side, in the proportions of ``image``. They
        are doubled until one does not fit; then the interval between the two is halved.
        A size that the network refuses counts as one that does not fit; the first one is of those
        near ``image`` that it accepts. The choice has the reason where a larger one was refused.
        PlanError: not even the smallest one fits, or there is no layout of so many ranks.
        ConfigError: the network refuses all sizes that were tried, or the machine has no numbers.
        """
        fits: dict[int, Choice] = {}
        refused: dict[int, HiresError] = {}

        def has_room(side: int) -> bool:
            sized = _with_short_side(config, side * STEP)
            print_activity(f"trying image={sized.height}x{sized.width} ...")
            try:
                fits[side] = self.choose(sized, MEMORY, OF_A_SIZE)
            except NoRoomError:
                return False
            except (ConfigError, PlanError) as error:  # the network may refuse some sizes
                refused[side] = error
                return False
            return True

        low, high = 0, MOST_SIDE // STEP
        for first in _first_sides(min(config.height, config.width)):
            if has_room(first):
                low = first
                break
            if first not in refused:
                high = first
                break
        else:
            raise next(iter(refused.values()))
        while high - low > 1:
            doubled = min(2 * low, high - 1)
            side = doubled if high == MOST_SIDE // STEP else (low + high) // 2
            low, high = (side, high) if has_room(side) else (low, side)
        if not fits:
            smallest = _with_short_side(config, STEP)
            raise PlanError(
                f"not even image={smallest.height}x{smallest.width} fits {ranks_of(config)} ranks; "
                f"use more ranks, a larger memory.limit, a smaller batch or network"
            )
        sized = _with_short_side(config, low * STEP)
        try:  # the fastest of those that fit
            choice = self.choose(sized, OBJECTIVES[0])
        except PlanError:
            choice = fits[low]
        larger = min((side for side in refused if side > low), default=None)
        why = "" if larger is None else str(refused[larger])
        return sized, dataclasses.replace(choice, objective=IMAGE, refused=why)

    def _graphs(self, config: RunConfig) -> Callable[[int], Graph]:
        """Returns what gives the graph of a microbatch of so many samples.

        Two are traced and the others lie between them; a network that changes otherwise is traced
        for each. A single sample is traced where the network might refuse or treat it differently.
        """

        def traced(samples: int) -> Graph:
            own = dataclasses.replace(config, batch=samples, parallel=ParallelConfig())
            return self.planner.traced(own)

        first, between = traced(config.batch), None
        # A network may refuse a single sample, whose batch norms have nothing to divide by.
        for other in (config.batch // 2, 2 * config.batch):
            with contextlib.suppress(ConfigError):
                between = between or (GraphOfSamples(first, traced(other)) if other else None)

        def graph(samples: int) -> Graph:
            with contextlib.suppress(PlanError):
                if between is not None and (samples > 1 or config.model.name != "custom"):
                    made = between.graph(samples)
                    if samples > 1 or not _norms_one_number(made):
                        return made
            return traced(samples)

        return graph


def explicit(argv: Sequence[str], config: RunConfig, choice: Choice) -> list[str]:
    """Returns a command line with the chosen layout in place of ``parallel=auto``.

    A choice may be another one once the machine is calibrated; what ran is made again by its keys.
    """
    chosen = {*LAYOUT_KEYS, "image"} if choice.objective == IMAGE else LAYOUT_KEYS
    kept = [word for word in argv if key_in(word) not in chosen]
    size = [f"image=[{config.height},{config.width}]"] if choice.objective == IMAGE else []
    return [*kept, *size, *choice.best.candidate.overrides.split()]


def choice_note(choice: Choice) -> Finding:
    """Returns what was chosen and why, as the plan of the run keeps it."""
    described = [
        f"{one.candidate.overrides} with {seconds(one.time.step_s)} a step, a highest peak of "
        f"{size(one.peak_bytes)}, limited by {one.limit}"
        for one in choice.options[:2]
    ]
    text = (
        f"parallel=auto chose {'; next '.join(described)}; among {choice.considered} layouts of "
        f"{choice.ranks} ranks (parallel.objective={choice.objective})"
    )
    return Finding("note", "parallel", f"{text}; step times: {choice.source}")


def _first_sides(short: int) -> Iterator[int]:
    """Yields sizes to begin with, in steps: that of the config, then powers of two near it."""
    own = max(1, short // STEP)
    yield own
    below = 1 << own.bit_length() - 1
    for side in (below, 2 * below, 4 * below, below // 2, 8 * below, below // 4, below // 8):
        if side and side != own:
            yield side


def _norms_one_number(graph: Graph) -> bool:
    """Whether a norm over samples and pixels has one number of each channel, and refuses it."""
    shapes = [node.shape for node in graph.nodes if facts_of(node.kind).statistics is not None]
    return any(shape and math.prod(shape) == shape[1] for shape in shapes)


def _with_short_side(config: RunConfig, short: int) -> RunConfig:
    """Returns the config with an image of the same proportions."""
    own, longer = sorted((config.height, config.width))
    long = max(STEP, math.floor(longer * short / own / STEP) * STEP)
    sides = [short, long] if config.height <= config.width else [long, short]
    return dataclasses.replace(config, image=sides)


def plain_choice(choice: Choice) -> dict[str, Any]:
    """Returns a choice as a run folder keeps it."""
    return {"schema": 1, **choice.to_dict()}
