"""Keeps what ``hires doctor --calibrate`` measured of this machine, by machine and version.

The file lies in the user's cache and survives edits of hires; a file of another machine or version
is refused. Without one the stated defaults are used (:data:`DEFAULTS`).

A sample has a factor over a roofline of the machine's fastest operators and its memory. That of
another size lies between those of its nearest samples, in the logarithm of the sizes.

Source:
    Renka, "Multivariate interpolation of large sets of scattered data", ACM TOMS 14(2), 1988, for
    the weights (a modified method of Shepard's).
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.config.fields import build
from hires.core.errors import ConfigError, RunError
from hires.core.store import provenance
from hires.core.store.cache import sealed, unsealed
from hires.core.store.file_names import CALIBRATION
from hires.core.store.files import cache_dir, make_folder, write_atomically
from hires.core.store.reading import read_bytes
from hires.plan.simulation.costs import BACK
from hires.plan.simulation.node_work import ARITHMETIC, CONVOLUTIONS, NodeWork
from hires.plan.simulation.simulate import Link, Network

SCHEMA = 3
COMMAND = "hires doctor --calibrate"
FOLDER = "calibration"
DAY_S = 86400
FALLBACK_DTYPE = "float32"
"""Its samples stand for types that were not measured."""


class Machine(NamedTuple):
    """What must be the same before measured seconds hold."""

    cpu: str
    cores: int
    torch: str
    hires: str


class Sample(NamedTuple):
    """The seconds of a pass over a node while ``ranks`` of one thread computed on the machine."""

    work: NodeWork
    ranks: int
    seconds: float


@dataclass(frozen=True)
class Links:
    """What messages take between two ranks of this machine, on the default route."""

    latency_s: float
    bytes_per_s: float
    gather_s: float
    """Of a small all-gather."""
    reduce_bytes_per_s: float
    """Of an all-reduce of gradients: bytes that each link carries."""

    def network(self) -> Network:
        """Returns them as the network of a simulation."""
        link = Link(self.latency_s, self.bytes_per_s)
        return Network(link, link, (), self.gather_s, self.reduce_bytes_per_s)


@dataclass(frozen=True)
class Overheads:
    """What a rank takes besides the passes over its nodes."""

    launch_s: float
    """Least time of an operator, the executor's Python among it."""
    pass_s: float
    """Of a pass of a microbatch besides its nodes: of reading, of the loss, of sends."""
    step_s: float
    """Of a step besides its passes and its update."""
    update_bytes_per_s: float
    """That an optimiser reads and writes."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was measured of a machine; ``source`` says when, or that nothing was."""

    machine: Machine
    time: str
    """When the machine was measured, in UTC; empty: the defaults."""
    samples: list[Sample]
    flops_per_s: dict[str, float]
    """Of the fastest operators, by type of numbers."""
    bytes_per_s: float
    """Of a core's memory while the others are idle."""
    busy_bytes_per_s: float
    """Of a core's memory while all cores compute."""
    links: Links
    overheads: Overheads
    pace_s: float = 1.0
    """Of a step that shows how fast the machine is at a moment (``hires.bench``), when
    these samples were taken and the other cores were idle."""
    busy_pace_s: float = 1.0
    """The same while all cores computed."""
    network_time: str = ""
    """When the layers of a network were added last; empty: never."""

    @property
    def is_measured(self) -> bool:
        """Whether it is of this machine, and no default."""
        return bool(self.samples)

    @property
    def source(self) -> str:
        """Returns in words where its seconds come from."""
        if not self.is_measured:
            return f"defaults, not measured here: run {COMMAND}"
        when, added = (time.partition("T")[0] for time in (self.time, self.network_time))
        when += f", its last network on {added}" if added not in ("", when) else ""
        return f"measured here on {when} ({len(self.samples)} samples, {self.machine.cpu})"

    @property
    def changed(self) -> str:
        """When its samples changed last, in UTC."""
        return max(self.time, self.network_time)

    @property
    def age(self) -> str:
        """Returns in words how long ago the machine was measured."""
        then = datetime.fromisoformat(self.time)
        days = int((datetime.now(UTC) - then).total_seconds() // DAY_S)
        return "today" if days < 1 else f"{days} day{'s' if days > 1 else ''} ago"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


DEFAULTS = Calibration(
    machine=Machine("", 1, "", ""),
    time="",
    samples=[],
    # A core with AVX-512 at 2.5 GHz does two multiply-adds of 16 numbers in a cycle: 160 GFLOP/s.
    # oneDNN's convolutions reach some 60 % of that, and half of it in float64. In bfloat16 they are
    # faster where the core has its instructions, which is not assumed.
    flops_per_s={"float32": 96e9, "float64": 48e9, "bfloat16": 96e9, "float16": 96e9},
    # One core of a server of DDR4-3200 or DDR5 gets 10 to 15 GB/s from its memory.
    bytes_per_s=12e9,
    busy_bytes_per_s=8e9,
    # gloo between processes of one machine, over the loopback.
    links=Links(latency_s=60e-6, bytes_per_s=2e9, gather_s=150e-6, reduce_bytes_per_s=1.5e9),
    # An operator of PyTorch in eager mode takes 5 to 10 us on a CPU, with autograd.
    overheads=Overheads(launch_s=10e-6, pass_s=500e-6, step_s=500e-6, update_bytes_per_s=8e9),
)
"""A generic server core, for machines that were not calibrated."""


def this_machine() -> Machine:
    """Returns what identifies this machine, with the versions that compute on it."""
    facts = provenance.collect()
    hardware = facts["hardware"]
    return Machine(hardware["cpu"], hardware["cores"], str(facts["torch"]), facts["hires"])


def kept_file(machine: Machine | None = None) -> Path:
    """Returns where the calibration of a machine, this one if none is named, is kept."""
    key = hashlib.sha256(json.dumps(machine or this_machine()).encode()).hexdigest()[:16]
    return cache_dir() / FOLDER / key / CALIBRATION


def keep_calibration(calibration: Calibration) -> Path | None:
    """Keeps a calibration; returns its file, None without a cache. RunError: it is not written."""
    if os.environ.get("HIRES_CACHE") == "off":
        return None
    path = kept_file(calibration.machine)
    make_folder(path.parent)
    write_atomically(path, sealed(calibration.to_dict(), CALIBRATION))
    return path


def load_calibration() -> Calibration | None:
    """Returns the calibration of this machine, if any; ConfigError: of another one, or damaged."""
    path = kept_file()
    if os.environ.get("HIRES_CACHE") == "off" or not path.exists():
        return None
    try:
        data = read_bytes(path) or b""
    except RunError as error:
        raise ConfigError(f"{error}; run {COMMAND}") from None
    try:
        calibration = calibration_from(unsealed(data, CALIBRATION))
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            f"the calibration {path} is damaged or of another hires ({error!s:.200}); run {COMMAND}"
        ) from None
    here = this_machine()
    if calibration.machine != here:
        raise ConfigError(
            f"the calibration {path} is of another machine or version, {calibration.machine}, and "
            f"this one is {here}; run {COMMAND}"
        )
    return calibration


def calibration_or_defaults() -> Calibration:
    """Returns the calibration of this machine, or the defaults; errors as in loading."""
    return load_calibration() or DEFAULTS


def calibration_from(values: Mapping[str, Any]) -> Calibration:
    """Returns the calibration of plain values; ConfigError: of another schema, or damaged."""
    values = dict(values)
    if (schema := values.pop("schema", None)) != SCHEMA:
        raise ConfigError(f"it has schema {schema!r}, this hires reads {SCHEMA}")
    calibration = build(Calibration, values)
    if not calibration.samples or FALLBACK_DTYPE not in calibration.flops_per_s:
        raise ConfigError(f"it has no samples, or no speed of {FALLBACK_DTYPE}")
    return calibration


NEIGHBOURS = 6
"""Samples between which is interpolated."""
STRIDE_WEIGHT = 3.0
"""Another stride counts as so many times another size: it is another kernel."""


Located = tuple[tuple[float, ...], float]
"""Logarithms of a sample's sizes, and that of its factor."""


class CalibratedDevice:
    """The cores of a calibrated machine; as many ranks of one thread compute as are ``busy``."""

    def __init__(self, calibration: Calibration, busy: int = 1) -> None:
        self.calibration = calibration
        cores = max(1, calibration.machine.cores)
        self._all = 1.0 if cores == 1 and busy > 1 else (min(busy, cores) - 1) / max(1, cores - 1)
        """From 0, one rank alone, to 1: all cores compute."""
        self._crowd = max(1.0, busy / cores) if calibration.is_measured else 1.0
        """Ranks that share a core, which take turns."""
        self._by_class: dict[tuple[object, ...], list[Located]] = {}
        self._known: dict[NodeWork, float] = {}
        for sample in calibration.samples:
            self._add(sample, sample.ranks == 1)

    def seconds(self, work: NodeWork) -> float:
        """Returns the seconds of a pass over a node."""
        known_s = self._known.get(work)
        if known_s is None:
            known_s = self._known[work] = self._seconds(work)
        return known_s

    def update_s(self, num_bytes: float) -> float:
        """Returns the seconds in which the optimiser reads and writes some bytes."""
        return self._slower_memory * num_bytes / self.calibration.overheads.update_bytes_per_s

    def memory_s(self, num_bytes: float) -> float:
        """Returns the seconds in which a pass reads and writes some bytes in no cache."""
        return self._slower_memory * num_bytes / self.calibration.bytes_per_s

    @property
    def _slower_memory(self) -> float:
        """By how much cores that compute beside it slow down the memory of one."""
        alone, busy = self.calibration.bytes_per_s, self.calibration.busy_bytes_per_s
        return math.pow(alone / busy, self._all) * self._crowd

    def besides_s(self, num_passes: int) -> float:
        """Returns the seconds of a step that belong to no node and no update."""
        overheads = self.calibration.overheads
        return self._crowd * (overheads.step_s + num_passes * overheads.pass_s)

    def _seconds(self, work: NodeWork) -> float:
        log = 0.0
        for alone, weight in ((True, 1 - self._all), (False, self._all)):
            if weight:
                roof_s = self._roof_s(work, alone)
                log += weight * (math.log(roof_s) + self._log_factor(work, alone))
        least_s = self.calibration.overheads.launch_s
        return self._crowd * max(least_s, math.exp(log))

    def _roof_s(self, work: NodeWork, alone: bool) -> float:
        """Returns what a kernel takes that computes at full speed, then moves all its bytes."""
        rates, calibration = self.calibration.flops_per_s, self.calibration
        rate = rates.get(work.dtype) or rates[FALLBACK_DTYPE]
        memory = calibration.bytes_per_s if alone else calibration.busy_bytes_per_s
        compute_s = work.flops / rate if work.family in ARITHMETIC else 0.0
        whole_s = calibration.overheads.launch_s + compute_s + work.num_bytes / memory
        # The first layer has a gradient of its weight alone.
        return whole_s * (BACK if work.back and work.input_grad else 1)

    def _add(self, sample: Sample, alone: bool) -> None:
        work = sample.work
        log = math.log(sample.seconds / self._roof_s(work, alone))
        for key in _keys(work):
            self._by_class.setdefault((alone, *key), []).append((_logs(work), log))

    def _log_factor(self, work: NodeWork, alone: bool) -> float:
        for other in (work, work._replace(dtype=FALLBACK_DTYPE)):
            for key in _keys(other):
                for ranks in (alone, not alone):
                    located = self._by_class.get((ranks, *key))
                    if located:
                        return interpolated(located, _logs(work))
        return 0.0


def interpolated(located: Sequence[Located], place: tuple[float, ...]) -> float:
    """Returns the value at a place: that of its samples, or between the nearest."""
    exact = sorted(value for at, value in located if at == place)
    if exact:
        return sum(exact) / len(exact)
    distances = ((math.dist(place, at), value) for at, value in located)
    near = heapq.nsmallest(NEIGHBOURS + 1, distances)
    # The weight falls to 0 at the first sample that is left out, so that none enters at once.
    edge = near[NEIGHBOURS][0] if len(near) > NEIGHBOURS else math.inf
    pairs = [(1 / distance - 1 / edge, value) for distance, value in near[:NEIGHBOURS]]
    weights = [max(weight, 1e-12) ** 2 for weight, _ in pairs]
    return sum(w * v for w, (_, v) in zip(weights, pairs, strict=True)) / sum(weights)


def _keys(work: NodeWork) -> list[tuple[object, ...]]:
    """Returns what samples must have in common with a node, from the most to the least."""
    phase = work.phase, work.dtype
    own = (work.kind, work.shared), (work.family, work.shared), (work.kind,), (work.family,)
    return [(*phase, *one) for one in own]


def _logs(work: NodeWork) -> tuple[float, ...]:
    logs = [math.log2(max(1.0, size)) for size in work.sizes]
    if work.family in CONVOLUTIONS:
        logs[4] *= STRIDE_WEIGHT
    return (*logs, 0.0 if work.input_grad else STRIDE_WEIGHT)
