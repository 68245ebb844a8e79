"""Declares the tables of messages: what the plan sends, and what the ranks logged of it.

Calls and bytes are those of all ranks in one step; seconds and shares are those of the mean rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from hires.core import units
from hires.core.config.fields import keys_without
from hires.core.config.run_config import RunConfig
from hires.core.store import file_names, message_files, reading
from hires.core.store.message_files import (
    PLANNED_KEYS,
    PLANNED_SUMS,
    ROUTED_KEYS,
    SUMS,
    LoggedCall,
    added,
)
from hires.core.store.reading import Note
from hires.core.units import MIB
from hires.report.columns import POINT, RANKS, Column, Row, Table, counts, table, table_of, texts
from hires.report.recorded_messages import RecordedMessages
from hires.report.runs import Found, Run

_NOT_PLANNED = {"seed", *keys_without(RunConfig, "plan")}
"""Keys and sections that change no message of the plan."""
STAGED = " staged"
"""Behind an algorithm whose messages go through buffers of the host."""
_COUNT, _BYTES = Column("count", "calls", digits=0), Column("bytes", "bytes", "MiB", 1 / MIB, 3)
_COSTS = (
    Column("issue_s", "calling", "ms", 1e3, 2),
    Column("wait_s", "waiting", "ms", 1e3, 2),
    Column("share", "share", "%", 100.0, 1),
)
_PLANNED = (
    _COUNT,
    Column("planned_count", "planned", digits=0),
    _BYTES,
    Column("planned_bytes", "planned", "MiB", 1 / MIB, 3),
    Column("ratio", "ratio", digits=2),
    *_COSTS,
)
_SUMS = (_COUNT, _BYTES, *_COSTS)
_CODES = (
    _COUNT,
    Column("code_s", "coding", "ms", 1e3, 2),
    Column("share", "share", "%", 100.0, 1),
    Column("error", "error", "%", 100.0, 3),
)
_OF_SIZE = texts(**{"operation": "operation", "from": "from"})
MAX_RANKS = 64
CAPTION = (
    "Of one step: calls and bytes of all ranks, times of the mean rank. A send and its receive are "
    "two calls; of a collective, bytes are those that a rank contributes."
)


@dataclass
class MessageSums:
    """The messages of a run's steps that count."""

    first: int
    """The first of these steps."""
    steps: int
    ranks: int
    step_s: float
    """A step of the mean rank, with the barrier before it."""
    rows: list[Row]
    """With ``message_files.KEYS`` and ``SUMS``, of one step; seconds of the mean rank."""
    planned: list[Row]
    """The same of the plan: ``ROUTED_KEYS`` and ``PLANNED_SUMS``."""
    by_rank: list[Row]
    """``rank`` and ``SUMS``, seconds of the rank itself."""
    codes: list[Row]
    """By ``codec``: ``count``, ``code_s`` of the mean rank, ``share``, and ``error``, the root mean
    square of what it changed in the first message of each rank, as a part of the numbers'."""

    @property
    def share(self) -> float | None:
        """Part of a step's time that is communication."""
        return _share(self.rows, self.step_s)

    def by(self, *keys: str) -> list[Row]:
        """Returns one row for each combination of keys: sums, ``share``, and what is planned.

        ``planned_count``, ``planned_bytes`` and how many times fewer bytes a codec makes them,
        ``ratio``, are there where the plan decides all these keys.
        """
        rows = added(self.rows, keys)
        if set(keys) <= {*PLANNED_KEYS}:
            planned, nothing = added(self.planned, keys, PLANNED_SUMS), dict.fromkeys(SUMS, 0)
            sums = {tuple(row[key] for key in keys): row for row in planned}
            # Also what was planned and never ran.
            rows = added([*rows, *(row | nothing for row in planned)], keys)
            for row in rows:
                own = sums.get(tuple(row[key] for key in keys), dict.fromkeys(PLANNED_SUMS, 0))
                row |= {"planned_count": own["count"], "planned_bytes": own["bytes"]}
                row["ratio"] = own["plain_bytes"] / own["bytes"] if own["bytes"] else None
        return [{**row, "share": _share([row], self.step_s)} for row in rows]

    def differences(self) -> list[str]:
        """Returns in words where calls, bytes or routes are not those of the plan."""
        lines = []
        for row in self.by(*PLANNED_KEYS):
            for key, noun in (("count", "calls"), ("bytes", "bytes")):
                if row[f"planned_{key}"] != row[key]:
                    numbers = f"{row[key]:g} {noun} a step, planned {row[f'planned_{key}']:g}"
                    lines.append(f"{_message_words(row)}: {numbers}")
        planned: dict[tuple[Any, ...], set[str]] = {}
        for row in self.planned:
            ways = planned.setdefault(_planned_key(row), set())
            ways.add(f"{row['backend']} {row['algorithm']}")
        for row in added(self.rows, ROUTED_KEYS):
            ways = planned.get(_planned_key(row), set())
            way = f"{row['backend']} {row['algorithm'].removesuffix(STAGED)}"
            if ways and way not in ways:
                words = f"through {way}, planned {' or '.join(sorted(ways))}"
                lines.append(f"{_message_words(row)}: {words}")
        return lines

    def headline(self) -> list[str]:
        """Returns what the tables are of, and whether the plan says the same, as lines."""
        last, differences = self.first + self.steps - 1, self.differences()
        steps = f"steps {self.first} to {last}" if self.steps > 1 else f"step {last}"
        share, step_ms = self.share, 1e3 * self.step_s
        words = "" if share is None else f": {100 * share:.1f} % of {step_ms:.1f} ms"
        lines = [f"communication of {steps} on {self.ranks} ranks{words}"]
        if not differences:
            return [*lines, "calls and bytes are those of the plan"]
        return [*lines, *(f"not as planned: {words}" for words in differences)]

    def tables(self) -> list[Table]:
        """Returns the tables of a run's messages; those of single ranks only of few ranks."""
        sizes = [{**row, "from": size_words(row["size"])} for row in self.by("operation", "size")]
        of_kind, of_size = texts(operation="operation", kind="kind"), _OF_SIZE
        of_backend = texts(backend="backend", algorithm="algorithm")
        kinds, backends = self.by("operation", "kind"), self.by("backend", "algorithm")
        tables = [
            ("By operation and kind", (*of_kind, *_PLANNED), kinds),
            ("By operation and size", (*of_size, *_PLANNED), sizes),
            ("By backend", (*of_backend, *_SUMS), backends),
        ]
        if len(self.by_rank) <= MAX_RANKS:
            tables.append(("By rank", (*counts(rank="rank"), *_SUMS), self.by_rank))
        if self.codes:
            tables.append(("By codec", (*texts(codec="codec"), *_CODES), self.codes))
        return [table_of("comm", *one) for one in tables]

    def to_dict(self) -> dict[str, Any]:
        """Returns the tables as plain values, all ranks among them."""
        return {
            "first_step": self.first,
            "steps": self.steps,
            "ranks": self.ranks,
            "step_s": self.step_s,
            "share": self.share,
            "differs_from_plan": self.differences(),
            "by_operation": self.by("operation", "kind"),
            "by_size": self.by("operation", "size"),
            "by_backend": self.by("backend", "algorithm"),
            "by_rank": self.by_rank,
            "by_codec": self.codes,
        }


def message_sums(log: RecordedMessages | None) -> MessageSums | None:
    """Returns the sums of one step of what a record holds of messages; None: of no message."""
    if log is None or log.steps < 1 or not log.ranks:
        return None
    steps, world = log.steps, len(log.ranks)
    by_rank = []
    for rank in log.ranks:
        row = _of_a_step({key: getattr(rank, key) for key in ("rank", *SUMS)}, steps, steps)
        by_rank.append({**row, "share": _share([row], rank.step_s / steps)})
    rows = [_of_a_step(vars(row), steps, steps * world) for row in log.rows]
    planned = [
        {key: getattr(row, key) for key in (*ROUTED_KEYS, *PLANNED_SUMS)} for row in log.planned
    ]
    step_s = log.step_s / steps / world
    codes = [
        {
            "codec": row.codec,
            "count": row.count / steps,
            "code_s": (code_s := row.code_s / steps / world),
            "share": code_s / step_s if step_s else None,
            "error": math.sqrt(row.changed / row.numbers) if row.numbers else None,
        }
        for row in log.codes
    ]
    return MessageSums(log.first, steps, world, step_s, rows, planned, by_rank, codes)


def size_words(size: int) -> str:
    """Returns the smallest size of a class in words, as ``4 KiB``; ``empty`` for no bytes."""
    return "empty" if size < 0 else units.size(2**size).replace(".0 ", " ")


@table(
    "communication",
    (
        *(*POINT, RANKS, *texts(kind="kind", size_class="size of a message")),
        Column("messages_per_step", "messages/step", digits=0),
        Column("bytes_per_step", "sent per step", "MiB", 1 / MIB, 3),
    ),
    "Communication by size class",
    caption="What one step of the plan sends over all ranks. A sum of gradients counts as the "
    "least bytes that any algorithm sends.",
    empty="All runs have one rank, or no plan that can be read: nothing is sent.",
    place=3,
)
def communication(found: Found) -> Iterator[Row]:
    """Yields one row a kind and size class of messages of each run."""
    counted: dict[tuple[Any, ...], dict[tuple[str, str], list[int]]] = {}
    for run in found.runs:
        if run.record.messages.messages == 0:
            continue  # one rank sends nothing: its plan need not be read
        facts = run.identity(*_NOT_PLANNED).items()
        key = tuple(one for one in sorted(facts) if one[0].partition(".")[0] not in _NOT_PLANNED)
        if key not in counted:  # equal plans are counted once
            plan, sums = run.plan(), counted.setdefault(key, {})
            try:
                for row in plan.totals["by_route"] if plan else ():
                    own = sums.setdefault((row["kind"], row["class"]), [0, 0])
                    own[:] = own[0] + row["messages"], own[1] + row["bytes"]
            except (KeyError, TypeError, ValueError) as error:
                why = f"cannot be counted: {error!r}"[:200]
                run.notes.append(Note(f"{run.name}/{file_names.PLAN}", why))
                sums.clear()
        for (kind, size), (messages, num_bytes) in counted[key].items():
            sent = {"messages_per_step": messages, "bytes_per_step": num_bytes}
            yield {**run.point, "kind": kind, "size_class": size, **sent}


@table(
    "messages",
    (
        *(*POINT, *texts(operation="operation", kind="kind", backends="backend")),
        Column("least_bytes", "from", "B", digits=0),
        Column("calls_per_step", "calls", "/step", digits=0),
        Column("planned_calls_per_step", "planned", "/step", digits=0),
        Column("bytes_per_step", "bytes", "MiB/step", 1 / MIB, 3),
        Column("issue_s", "calling", "ms/step", 1e3, 2),
        Column("wait_s", "waiting", "ms/step", 1e3, 2),
        Column("share_percent", "of a step", "%", digits=1),
    ),
    "What messages cost",
    hidden=(RANKS,),
    caption=f"{CAPTION} Sizes go from a power of two to the next one.",
    empty="No run logged messages: they have one rank, or comm.log=off.",
    place=4,
)
def messages(found: Found) -> Iterator[Row]:
    """Yields one row an operation, kind and size of messages that a run has logged."""
    for run in found.runs:
        sums = message_sums(run.record.comm)
        backends: dict[tuple[Any, ...], list[str]] = {}
        for row in [] if sums is None else added(sums.rows, (*PLANNED_KEYS, "backend")):
            backends.setdefault(_planned_key(row), []).append(row["backend"])
        for row in [] if sums is None else sums.by(*PLANNED_KEYS):
            yield {
                **run.point,
                **{key: row[key] for key in ("operation", "kind", "issue_s", "wait_s")},
                "backends": ", ".join(backends.get(_planned_key(row), [])) or None,
                "least_bytes": 0 if row["size"] < 0 else 2 ** row["size"],
                "calls_per_step": row["count"],
                "planned_calls_per_step": row["planned_count"],
                "bytes_per_step": row["bytes"],
                "share_percent": None if row["share"] is None else 100 * row["share"],
            }


@table("calls", texts(**{name: name for name in ("clock", *(f.name for f in fields(LoggedCall)))}))
def calls(found: Found) -> Iterator[Row]:
    """Yields one row a call of a rank that ``comm.log=full`` has kept; times by its ``clock``."""
    for run in found.runs:
        _note_missing_calls(run)
        for rank in message_files.read(run.shown.folder, run.notes):
            for call in rank.messages:
                others = " ".join(map(str, call.ranks))
                place = {"campaign": run.campaign, "run": run.name, "clock": rank.clock}
                yield {**place, **vars(call), "ranks": others}


def _note_missing_calls(run: Run) -> None:
    """Notes the first rank of a complete attempt whose calls were kept and are not there."""
    world, folder = run.record.world or 1, run.shown.folder
    if run.record.state != "done" or world == 1 or run.flat_config.get("comm.log") != "full":
        return
    there = file_names.message_files(folder)
    lacking = next((rank for rank in range(world) if rank not in there), None)
    if lacking is not None:
        path = file_names.rank_messages(folder, lacking)
        run.notes.append(reading.note(path, "is missing, though comm.log=full kept it"))


def _share(rows: Iterable[Row], step_s: float) -> float | None:
    """Returns which part of a step some rows are; None if its time is unknown."""
    seconds = sum(float(row["issue_s"] + row["wait_s"]) for row in rows)
    return seconds / step_s if step_s > 0 else None


def _planned_key(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in PLANNED_KEYS)


def _message_words(row: Row) -> str:
    return f"{row['operation']} {row['kind']} of {size_words(row['size'])}"


def _of_a_step(row: Row, steps: int, seconds: int) -> Row:
    """Returns the sums of one step; counts of whole steps stay whole."""
    numbers = {name: row[name] / steps for name in ("count", "bytes")}
    numbers = {key: int(n) if n == int(n) else n for key, n in numbers.items()}
    return {**row, **numbers, **{name: row[name] / seconds for name in ("issue_s", "wait_s")}}
