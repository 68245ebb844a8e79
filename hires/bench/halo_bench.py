"""Measures halo exchanges of networks by backend and route: ``hires bench halo``.

The plan of each network, image and grid of tiles says which pixels travel before which layer. Each
distinct exchange runs over all routes in turns, beside plain copies of as many bytes inside one
process, and every pixel is checked. Exit codes: 0 done, 1 a rank failed or a pixel is wrong, 2 bad
options, 3 a grid cannot cut a network.

Example: hires bench halo --models resnet101 --images 512,1024 --tiles 1x2,2x2
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hires import comm
from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, option
from hires.bench.comm_bench import ways_of
from hires.bench.comm_contestants import Through, join
from hires.bench.contestants import model_config
from hires.bench.message_race import RacePlan, RaceWorld, race_blocks, timed
from hires.bench.started_ranks import stream_started_ranks
from hires.bench.sweep import BASELINES, TABLE, StartOptions, former_rows, routes_here, words_of
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.task_config import TaskConfig
from hires.core.errors import ConfigError
from hires.core.ranks.world import World
from hires.core.units import size
from hires.nets.trace import trace_config
from hires.plan.halos import map_shape
from hires.plan.planner import make_plan
from hires.plan.routes import parse_route
from hires.plan.tiling import own_rects

EXCHANGE = "hires.bench.halo_bench:run_exchanges"
COPIES = "copies"
"""The way that copies the bytes inside each process, without a message."""
NOTES = """\
A row is one exchange of a layer, from packing the strips to unpacked halos; layers whose exchanges
are equal are one row, `layers` times in a forward pass. `MiB` is what the fullest tile sends.
`copies` packs and copies as many bytes inside each process: what no message can be faster than."""

log = logging.getLogger(__name__)
Grid = tuple[int, int]


def grids_of(flag: str, text: str) -> tuple[Grid, ...]:
    """Returns grids of tiles, as ``1x2,2x2``."""
    grids = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", part)
        if match is None or int(match[1]) * int(match[2]) < 2:
            raise ConfigError(f"{flag} {part} is no grid of two tiles or more; write 1x2,2x2")
        grids.append((int(match[1]), int(match[2])))
    return tuple(grids)


def pixels_of(flag: str, text: str) -> tuple[int, ...]:
    """Returns sizes of square images."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{flag} {text} must be numbers of pixels with commas between")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class HaloOptions(StartOptions):
    """The options of ``hires bench halo``."""

    models: tuple[str, ...] = option("resnet101,amoebanet-18-208", "networks", parse=words_of)
    images: tuple[int, ...] = option("512,1024", "pixels of a side", parse=pixels_of)
    tiles: tuple[Grid, ...] = option("1x2", "grids of tiles, as 1x2,2x2", parse=grids_of)
    batch: int = option(1, "images of a microbatch")
    ways: tuple[str, ...] = option("", "routes; none: every backend that is here", parse=ways_of)

    @property
    def entered(self) -> tuple[str, ...]:
        """The routes that are measured, and plain copies."""
        for way in {TABLE, *BASELINES} & {*self.ways}:
            raise ConfigError(f"--ways {way} exchanges no halos; name routes as gloo,shm")
        usual = [way for way in routes_here(self.device, self.has_mpi) if ":" not in way]
        return (*(self.ways or usual), COPIES)


def measure(options: HaloOptions, former: Result | None) -> Results:
    """Yields all rows after each exchange."""
    shown: dict[str, Any] = {**dataclasses.asdict(options), "ways": options.entered}
    shown = {key: [*value] if isinstance(value, tuple) else value for key, value in shown.items()}
    shown["tiles"] = [[*grid] for grid in options.tiles]
    rows = former_rows(former, shown)
    done = {_key(row) for row in rows}
    for grid in options.tiles:
        exchanges = [
            one
            for model in options.models
            for image in options.images
            for one in exchanges_of(model, image, grid, options.batch)
            if _key(one) not in done
        ]
        spec = {
            "exchanges": exchanges,
            "ways": options.entered,
            "device": options.device,
            "rounds": options.rounds,
            "seconds": options.seconds,
        }
        total = len(rows) + len(exchanges)
        how = (options.start, EXCHANGE, grid[0] * grid[1], options.timeout, spec)
        for row in stream_started_ranks(*how, hosts=options.hosts) if exchanges else ():
            rows.append(row)
            yield _result(shown, rows)  # an exchange that is shown has been kept
            log.info("%s %d: %d of %d exchanges", row["model"], row["image"], len(rows), total)
    yield _result(shown, rows)


def exchanges_of(model: str, image: int, grid: Grid, batch: int) -> list[dict[str, Any]]:
    """Returns the distinct exchanges of a network in tiles, as plain values, the largest first.

    PlanError: the grid cannot cut the network or the image.
    """
    config = RunConfig(image=image, batch=batch, model=model_config(model, "--models"))
    config.parallel, config.task = ParallelConfig(tiles=[*grid]), TaskConfig(name="train")
    log.info("planning %s at %d pixels in %dx%d tiles", model, image, *grid)
    plan = make_plan(config, trace_config(config))
    found: dict[str, dict[str, Any]] = {}
    for op in plan.stages[0].comm:
        if op.kind == "halo":
            shape = [*map_shape(plan.graph, plan.stages[0], op.value)]
            one = {"shape": shape, "messages": op.messages}
            counted = found.setdefault(str(one), {**one, "layers": 0})
            counted["layers"] += 1
    facts = {"model": model, "image": image, "tiles": [*grid]}
    made = [{**facts, **one, "bytes": _most_sent(one)} for one in found.values()]
    return sorted(made, key=lambda one: -int(one["bytes"]))


def run_exchanges(world: World, spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what each exchange of ``spec``, whose values are plain, took, on a rank."""
    routes = [way for way in spec["ways"] if way != COPIES]
    agreed = join(world, routes, None, spec["device"])
    plan = RacePlan(spec["rounds"], spec["seconds"])
    for one in spec["exchanges"]:
        halo = HaloBuffers(one, agreed)
        makers = {COPIES: functools.partial(timed, halo.copy, agreed)}
        for way in routes:
            call = functools.partial(halo.exchange, Through(parse_route(way)))
            makers[way] = functools.partial(timed, call, agreed)
        yield {**one, "ways": race_blocks(halo, makers, agreed, plan)}
    comm.barrier()
    comm.shutdown()


class HaloBuffers:
    """A tile of a map, and the strips around it, on one rank."""

    def __init__(self, exchange: dict[str, Any], agreed: RaceWorld) -> None:
        n, channels, height, width = exchange["shape"]
        rects = own_rects((height, width), exchange["tiles"])
        own = rects[agreed.rank]
        rows, cols = own[1] - own[0], own[3] - own[2]
        empty = torch.empty(n, channels, rows, cols, device=agreed.device)
        self._tile = empty.to(memory_format=torch.channels_last)
        self._own = own
        self._sent = [
            (target, rect, number)
            for number, (source, target, *rect) in enumerate(exchange["messages"])
            if source == agreed.rank
        ]
        self._taken = [
            (source, rect, number, self._tile.new_empty(n, r1 - r0, c1 - c0, channels))
            for number, (source, target, *rect) in enumerate(exchange["messages"])
            for r0, r1, c0, c1 in [rect]
            if target == agreed.rank
        ]

        self._right = [
            _places(rect).permute(0, 2, 3, 1).to(strip).expand_as(strip).contiguous()
            for _, rect, _, strip in self._taken
        ]

    def fill(self) -> None:
        """Writes the place of each pixel into the tile, and poison into the strips."""
        self._tile.copy_(_places(self._own))
        for *_, strip in self._taken:
            strip.fill_(-1.0)

    def rest(self) -> None:
        """Does nothing: an exchange leaves the tile as it is."""

    def num_wrong(self) -> int:
        """Returns how many numbers of the strips are wrong."""
        pairs = zip(self._taken, self._right, strict=True)
        return sum(int((strip != right).sum()) for (*_, strip), right in pairs)

    def exchange(self, library: Any) -> None:
        """Sends the strips of this tile, and waits for those around it."""
        works = [library.irecv(strip, rank, tag=tag) for rank, _, tag, strip in self._taken]
        works += [library.isend(self._strip(rect), rank, tag=tag) for rank, rect, tag in self._sent]
        for work in works:
            work.wait()

    def copy(self) -> None:
        """Packs the strips of this tile, and writes as many bytes as arrive."""
        for _, rect, _ in self._sent:
            self._strip(rect)
        for (*_, strip), right in zip(self._taken, self._right, strict=True):
            strip.copy_(right)

    def _strip(self, rect: Sequence[int]) -> torch.Tensor:
        r0, r1, c0, c1 = rect
        top, left = self._own[0], self._own[2]
        part = self._tile[:, :, r0 - top : r1 - top, c0 - left : c1 - left]
        return part.permute(0, 2, 3, 1).contiguous()


def _places(rect: Sequence[int]) -> torch.Tensor:
    # A number for each pixel, (1, 1, rows, columns), that fp32 holds exactly.
    r0, r1, c0, c1 = rect
    rows, cols = torch.arange(r0, r1), torch.arange(c0, c1)
    return (rows[:, None] * 4099 % 8191 + cols % 4093)[None, None].float()


def _most_sent(one: dict[str, Any]) -> int:
    n, channels = one["shape"][:2]
    sent: dict[int, int] = {}
    for source, _, r0, r1, c0, c1 in one["messages"]:
        sent[source] = sent.get(source, 0) + n * channels * (r1 - r0) * (c1 - c0) * 4
    return max(sent.values(), default=0)


def _key(row: dict[str, Any]) -> str:
    return str([row[name] for name in ("model", "image", "tiles", "shape", "messages")])


def _result(shown: Result, rows: list[dict[str, Any]]) -> Result:
    ok = not any(one.get("wrong") for row in rows for one in row["ways"].values())
    return {"ok": ok, "options": shown, "rows": rows}


def _tables(result: Result) -> list[BenchTable]:
    tables: dict[str, list[dict[str, str]]] = {}
    for row in result["rows"]:
        grid = "x".join(map(str, row["tiles"]))
        title = f"{row['model']}, {row['image']} pixels, {grid} tiles, us for one exchange"
        tables.setdefault(title, []).append(_cells(row))
    return [BenchTable(title, rows) for title, rows in tables.items()]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    _, channels, height, width = row["shape"]
    cells = {"map": f"{channels}x{height}x{width}", "layers": str(row["layers"])}
    cells |= {"sent": size(row["bytes"])}
    for way, one in row["ways"].items():
        value = f"{one['p50_s'] * 1e6:.1f}" if "p50_s" in one else "-"
        cells[way] = value + " WRONG" * bool(one.get("wrong"))
    return cells


BENCHMARK = Benchmark("halo", __doc__, HaloOptions, measure, _tables, NOTES, resumes=True)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
