"""Reads what a record holds of messages, and adds it up for tables.

Calls and bytes are those of all ranks in one step; seconds and shares are those of the mean rank.
What is no number of the right kind is left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hires.core import units
from hires.core.store.message_sums import KEYS, PLANNED_KEYS, ROUTED_KEYS, SUMS, added
from hires.core.store.reading import text
from hires.report.columns import Row
from hires.report.read.plain_values import count, dicts, dig, number

_LARGEST = 62
STAGED = " staged"
"""Behind an algorithm whose messages go through buffers of the host."""
STUDY = (10, 17, 24, 25, 26)
"""Powers of two between the classes of the EDSR study, which has none below 1 KB and from 64 MB."""
STUDY_CLASSES = ("below 1 KB", "1-128 KB", "128 KB-16 MB", "16-32 MB", "32-64 MB", "64 MB and more")
"""In which the study of EDSR under Horovod gives the time of all-reduces; a KB has 1024 bytes."""


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
    """With ``message_sums.KEYS`` and ``SUMS``, of one step; seconds of the mean rank."""
    planned: list[Row]
    """The same of the plan: ``ROUTED_KEYS`` (in an older record ``PLANNED_KEYS``), ``count`` and
    ``bytes``."""
    by_rank: list[Row]
    """``rank`` and ``SUMS``, seconds of the rank itself."""

    @property
    def share(self) -> float | None:
        """Part of a step's time that is communication."""
        return share(self.rows, self.step_s)

    def by(self, *keys: str) -> list[Row]:
        """Returns one row for each combination of keys: sums, ``share``, and what is planned.

        ``planned_count`` and ``planned_bytes`` are there where the plan decides all these keys.
        """
        return self._grouped(added(self.rows, keys), keys)

    def by_study_class(self) -> list[Row]:
        """Returns one row for each class of the EDSR study in which there are messages."""

        def classed(rows: Iterable[Row]) -> list[Row]:
            return [{**row, "class": bisect.bisect(STUDY, row["size"])} for row in rows]

        keys, planned = ("class",), added(classed(self.planned), ("class",), SUMS[:2])
        rows = self._grouped(added(classed(self.rows), keys), keys, planned)
        return [{**row, "class": STUDY_CLASSES[row["class"]]} for row in rows]

    def differences(self) -> list[str]:
        """Returns in words where the calls or bytes are not those of the plan."""
        found = []
        for row in self.by(*PLANNED_KEYS):
            for what in ("count", "bytes"):
                planned, measured = row[f"planned_{what}"], row[what]
                if planned != measured:
                    words = f"{row['operation']} {row['kind']} of {size_words(row['size'])}"
                    noun = "calls" if what == "count" else "bytes"
                    found.append(f"{words}: {measured:g} {noun} a step, planned {planned:g}")
        return found + self._other_routes()

    def _other_routes(self) -> list[str]:
        """Returns in words which messages travelled in another way than the plan has them."""
        planned = {
            tuple(row[key] for key in ROUTED_KEYS) for row in self.planned if row.get("backend")
        }
        known: dict[tuple[Any, ...], list[str]] = {}
        for *message, backend, algorithm in sorted(planned):
            known.setdefault(tuple(message), []).append(f"{backend} {algorithm}")
        found = []
        for row in added(self.rows, ROUTED_KEYS):
            ways = known.get(tuple(row[key] for key in PLANNED_KEYS))
            way = f"{row['backend']} {row['algorithm'].removesuffix(STAGED)}"
            if ways is not None and way not in ways:
                words = f"{row['operation']} {row['kind']} of {size_words(row['size'])}"
                found.append(f"{words}: through {way}, planned {' or '.join(ways)}")
        return found

    def _grouped(
        self, rows: list[Row], keys: Sequence[str], planned: list[Row] | None = None
    ) -> list[Row]:
        if planned is None and set(keys) <= set(PLANNED_KEYS):
            planned = added(self.planned, keys, SUMS[:2])
        if planned is not None:
            # Also what was planned and never ran.
            held = {tuple(row[key] for key in keys): row for row in planned}
            missing = held.keys() - {tuple(row[key] for key in keys) for row in rows}
            nothing = dict.fromkeys(SUMS, 0)
            rows = sorted(
                [*rows, *({**dict(zip(keys, key, strict=True)), **nothing} for key in missing)],
                key=lambda row: [row[key] for key in keys],
            )
            for row in rows:
                own = held.get(tuple(row[key] for key in keys), nothing)
                row |= {"planned_count": own["count"], "planned_bytes": own["bytes"]}
        return [{**row, "share": share([row], self.step_s)} for row in rows]


def message_sums(record: Any) -> MessageSums | None:
    """Returns what a record holds of messages; None if it holds nothing that can be used."""
    held = dig(record, "comm")
    steps, step_s = count(dig(held, "steps")), number(dig(held, "step_s"))
    own = dicts(dig(held, "ranks"))
    if not steps or not own or step_s is None or step_s < 0:
        return None
    world = len(own)
    by_rank = []
    for one in own:
        rank_s, total = number(one.get("step_s")), _rows([one], ("rank",), SUMS)
        if total:
            row = _divided(total[0], steps, steps)
            by_rank.append({**row, "share": share([row], (rank_s or 0.0) / steps)})
    rows = [_divided(row, steps, steps * world) for row in _rows(held.get("rows"), KEYS, SUMS)]
    planned = _rows(held.get("planned"), ROUTED_KEYS, SUMS[:2])
    planned = planned or _rows(held.get("planned"), PLANNED_KEYS, SUMS[:2])
    first = count(held.get("first")) or 0
    return MessageSums(first, steps, world, step_s / steps / world, rows, planned, by_rank)


def share(rows: Iterable[Row], step_s: float) -> float | None:
    """Returns which part of a step some rows are; None if its time is unknown."""
    seconds = sum(float(row["issue_s"] + row["wait_s"]) for row in rows)
    return seconds / step_s if step_s > 0 else None


def size_words(size: int) -> str:
    """Returns the smallest size of a class in words, as ``4 KiB``; ``empty`` for no bytes."""
    return "empty" if size < 0 else units.size(2**size).replace(".0 ", " ")


def _divided(row: Row, steps: int, seconds: int) -> Row:
    """Returns a row of one step; counts of whole steps stay whole."""
    one = {name: row[name] / steps for name in ("count", "bytes")}
    one = {name: int(value) if value == int(value) else value for name, value in one.items()}
    return {**row, **one, **{name: row[name] / seconds for name in ("issue_s", "wait_s")}}


def _rows(entries: Any, keys: Sequence[str], sums: Sequence[str]) -> list[Row]:
    names = (*keys, *sums)
    rows = [{n: _READ[n](entry.get(n)) for n in names} for entry in dicts(entries)]
    return [row for row in rows if None not in row.values()]


def _name(value: Any) -> str | None:
    return text(value, 40)


def _seconds(value: Any) -> float | None:
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < 1e12 else None


def _size(value: Any) -> int | None:
    size = -1 if value == -1 else count(value)
    return size if size is not None and size <= _LARGEST else None


_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("operation", "kind", "backend", "algorithm"), _name),
    **dict.fromkeys(("rank", "count", "bytes"), count),
    **dict.fromkeys(("issue_s", "wait_s"), _seconds),
    "size": _size,
}
