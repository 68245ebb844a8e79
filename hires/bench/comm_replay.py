"""Plays recorded mixes of operations through every backend and by a tuning table.

The ways take turns in whole steps of a mix; the slowest rank is the sample. A first, untimed step
of each way checks every result. `hires bench comm --replay` runs it.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hires import comm
from hires.bench.bench_output import BenchTable, Result, Results
from hires.bench.comm_contestants import Through, join
from hires.bench.message_operations import BenchBuffers, bind_start
from hires.bench.message_race import RaceWorld, summary
from hires.bench.mixes import MOST_OPEN, SEND, Mix, MixCall, read_mix
from hires.bench.started_ranks import stream_started_ranks
from hires.bench.sweep import BASELINES, TABLE, WorldOptions
from hires.core.ranks.world import World
from hires.core.units import size
from hires.plan.routes import parse_route
from hires.plan.tuning_table import TuningTable

PLAY = "hires.bench.comm_replay:play_mixes"
LEAST_STEPS, MOST_STEPS = 3, 200
STEPS_S = 10.0
"""Seconds of a way in a mix for one second of ``--seconds``, all steps together."""
_TAG = 21


def replay(
    options: WorldOptions,
    names: Sequence[str],
    ways: Sequence[str],
    shown: dict[str, Any],
    table: TuningTable | None,
) -> Results:
    """Yields all mixes after each one, on each number of ranks."""
    played: list[Result] = []
    singles = [way for way in ways if way not in (*BASELINES, TABLE) and ":" not in way]
    for ranks in options.ranks:
        mixes = [read_mix(name, ranks) for name in names]
        spec = {
            "mixes": mixes,
            "ways": [*singles, *([TABLE] if table is not None else [])],
            "table": table.to_dict() if table is not None else None,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "device": options.device,
        }
        how = (options.start, PLAY, ranks, options.timeout, spec)
        for one in stream_started_ranks(*how, hosts=options.hosts):
            played.append(one)
            wrong = [way for mix in played for way, row in mix["ways"].items() if row.get("wrong")]
            yield {"ok": not wrong, "options": shown, "wrong": wrong, "mixes": played}


def play_mixes(world: World, spec: dict[str, Any]) -> Iterator[Result]:
    """Yields what each mix of ``spec``, whose values are plain, took by each way, on a rank."""
    table = TuningTable.from_dict(spec["table"]) if spec["table"] else None
    agreed = join(world, spec["ways"], table, spec["device"])
    for name, about, calls in spec["mixes"]:
        mix = Mix(name, about, tuple(_call(one) for one in calls))
        yield _race(mix, spec, agreed)
    comm.barrier()
    comm.shutdown()


class Player:
    """A mix on one rank, through one way."""

    def __init__(self, mix: Mix, library: Any, agreed: RaceWorld, groups: dict[Any, Any]) -> None:
        self._agreed = agreed
        self.names: list[str] = []
        """Operation of each call that this rank takes part in."""
        self._calls: list[tuple[Any, bool, BenchBuffers]] = []
        held: dict[Any, BenchBuffers] = {}
        for number, call in enumerate(mix.calls):
            members = call.ranks or tuple(range(agreed.ranks))
            if agreed.rank not in members:
                continue
            # A call under way has its tensors for itself, others of its kind share theirs.
            key = (call, number) if call.is_async else call
            buffers = held.setdefault(key, _buffers(call, members, agreed))
            self._calls.append((_begin(call, library, buffers, groups), call.is_async, buffers))
            self.names.append(call.operation)

    def step(self) -> list[float]:
        """Plays all calls; returns the seconds of each, without those of waits at the end."""
        clock, open_works, seconds = time.perf_counter, [], []
        for begin, is_async, _ in self._calls:
            began = clock()
            work = begin()
            if is_async and work is not None:
                open_works.append(work)
                if len(open_works) > MOST_OPEN:
                    open_works.pop(0).wait()
            elif work is not None:
                work.wait()
            seconds.append(clock() - began)
        for work in open_works:
            work.wait()
        self._agreed.synchronize()
        return seconds

    def num_wrong(self) -> int:
        """Plays all calls one by one; returns how many numbers were wrong on this rank."""
        wrong = 0
        for begin, _, buffers in self._calls:
            buffers.fill()
            work = begin()
            if work is not None:
                work.wait()
            wrong += buffers.num_wrong()
        self.rest()
        return wrong

    def rest(self) -> None:
        """Prepares steps without a check."""
        for _, _, buffers in self._calls:
            buffers.rest()


def _buffers(call: MixCall, members: Sequence[int], agreed: RaceWorld) -> BenchBuffers:
    name = "bandwidth" if call.operation == SEND else call.operation
    place = (members.index(agreed.rank), len(members), agreed.device, members)
    return BenchBuffers(name, call.num_bytes, getattr(torch, call.dtype), *place)


def _begin(call: MixCall, library: Any, buffers: BenchBuffers, groups: dict[Any, Any]) -> Any:
    if call.operation != SEND:
        among = {"group": groups[call.ranks]} if call.ranks else {}
        return bind_start(library, buffers, async_op=True, **among)
    source, target = call.ranks
    if buffers.rank == 0:
        return lambda: library.isend(buffers.given, target, tag=_TAG)
    return lambda: library.irecv(buffers.taken, source, tag=_TAG)


def _race(mix: Mix, spec: dict[str, Any], agreed: RaceWorld) -> Result:
    groups = {ranks: comm.new_group([*ranks]) for ranks in _groups_of(mix)}
    players, rows = {}, dict[str, dict[str, Any]]()
    for way in spec["ways"]:
        route = None if way == TABLE else parse_route(way)
        players[way] = Player(mix, Through(route), agreed, groups)
        wrong = torch.tensor([float(players[way].num_wrong())], dtype=torch.float64)
        agreed.largest(wrong)
        rows[way] = {"wrong": int(wrong.item())}
    samples: dict[str, list[Any]] = {way: [] for way in players}
    by_call: dict[str, list[Any]] = defaultdict(list)
    for index in range(_num_steps(players, spec, agreed)):
        order = [*players]
        random.Random(index).shuffle(order)  # the same on all ranks
        for way in order:
            agreed.fence()
            began = time.perf_counter()
            seconds = players[way].step()
            took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            agreed.largest(took)
            samples[way].append(took.numpy())
            by_call[way].append(seconds)
    for way, player in players.items():
        rows[way] |= summary(samples[way])
        medians = np.median(by_call[way], axis=0).tolist()
        rows[way]["operations"] = _by_operation(player.names, medians)
    facts = {"name": mix.name, "about": mix.about, "ranks": agreed.ranks}
    num_bytes = sum(call.num_bytes for call in mix.calls)
    return {**facts, "calls": len(mix.calls), "bytes": num_bytes, "ways": rows}


def _num_steps(players: dict[str, Player], spec: dict[str, Any], agreed: RaceWorld) -> int:
    """Returns how many steps each way plays, after one that warms up."""
    slowest = 0.0
    for player in players.values():
        agreed.fence()
        began = time.perf_counter()
        player.step()
        slowest = max(slowest, time.perf_counter() - began)
    took = torch.tensor([slowest], dtype=torch.float64)
    agreed.largest(took)
    fitting = int(spec["seconds"] * STEPS_S / took.item())
    least: int = max(LEAST_STEPS, spec["rounds"])
    return min(MOST_STEPS, max(least, fitting))


def _call(values: Sequence[Any]) -> MixCall:
    *first, ranks = values
    return MixCall._make([*first, tuple(ranks)])


def _groups_of(mix: Mix) -> list[tuple[int, ...]]:
    return sorted({call.ranks for call in mix.calls if call.ranks and call.operation != SEND})


def _by_operation(names: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, one in zip(names, seconds, strict=True):
        sums[name] += one
    return dict(sums)


def mix_tables(result: Result) -> list[BenchTable]:
    """Returns a table of ways for each mix and number of ranks."""
    return [
        BenchTable(
            f"{mix['name']}, {mix['ranks']} ranks: {mix['calls']} calls, {size(mix['bytes'])}",
            [_cells(way, row, mix) for way, row in mix["ways"].items()],
            mix["about"],
        )
        for mix in result["mixes"]
    ]


def _cells(way: str, row: dict[str, Any], mix: Result) -> dict[str, str]:
    least = min(one["p50_s"] for one in mix["ways"].values())
    parts = sorted(row["operations"].items(), key=lambda one: -one[1])
    return {
        "way": way + " WRONG" * bool(row["wrong"]),
        "step ms": f"{row['p50_s'] * 1e3:.3f}",
        "p99 ms": f"{row['p99_s'] * 1e3:.3f}",
        "n": str(row["count"]),
        "over the best": f"{row['p50_s'] / least:.2f}",
        "ms in calls of rank 0": ", ".join(f"{name} {one * 1e3:.2f}" for name, one in parts[:4]),
    }
