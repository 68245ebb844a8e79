"""Puts predicted and measured points of a published figure beside the numbers that its text gives.

The bars of a figure are read off no picture: what the text does not print has no published value.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hires.core.config.value_checks import Checks, Section
from hires.core.errors import ConfigError
from hires.core.published import EACH, MOST, PublishedNumber, numbers_of
from hires.core.units import MIB
from hires.report.columns import Cell, Column, Table

PREDICTED, MEASURED = "predicted", "measured"
SPEED, MEMORY = "speed", "memory"
NO_NUMBER = "not published as a number"
BASE_PRECISION = "fp32"
CIRCLE = (
    "The predicted arithmetic of every precision is as fast as Table 2.1 says (256x256, batch 64): "
    "a predicted ratio shows what size, tiles and messages change in that one."
)
"""What a predicted speed does not show."""


@dataclass
class FigureSpec(Section, key="figure"):
    """``figure`` of a stored sweep: which published figure it draws, and what that one shows."""

    number: str
    """As the thesis numbers it: ``2.4``."""
    title: str
    shows: list[str]
    """``speed``, ``memory`` or both."""
    by_rank: bool = False
    """Whether the figure has a bar for each GPU."""
    note: str = ""
    """What the text leaves open, and how it is read here."""

    def _check_more(self, check: Checks) -> None:
        if not self.shows or not {*self.shows} <= {SPEED, MEMORY}:
            check.problems.append(f"figure.shows={self.shows} must hold {SPEED}, {MEMORY} or both")


@dataclass(frozen=True)
class FigurePoint:
    """One combination of network, image, layout and precision."""

    source: str
    """``predicted`` or ``measured``."""
    model: str
    image: tuple[int, int]
    batch: int
    layout: str
    tiles: int
    """Of the first stage."""
    ranks: int
    precision: str
    img_per_s: float | None = None
    rank_bytes: tuple[int, ...] = ()
    """The fullest moment of each rank."""
    state: str = ""
    """``done``, or why it has no numbers or could not run."""

    @property
    def total_bytes(self) -> int | None:
        """Of all ranks together."""
        return sum(self.rank_bytes) or None

    @property
    def place(self) -> tuple[Any, ...]:
        """What points of different precisions share."""
        return self.source, self.model, self.image, self.batch, self.layout, self.tiles, self.ranks

    @property
    def grid(self) -> str:
        """Layout with its tiles and ranks, as ``sp+lp, 4+1``."""
        beside = self.ranks - self.tiles
        if self.ranks == 1:
            return self.layout
        return f"{self.layout}, {self.tiles}+{beside}" if beside else f"{self.layout}, {self.tiles}"


class Compared(NamedTuple):
    """A published number beside what ours come to."""

    number: PublishedNumber
    layout: str
    """Empty: of all points together."""
    predicted: float | None
    measured: float | None

    @property
    def label(self) -> str:
        """What the number is of, in words."""
        return f"{self.ratio}, {self.scope}"

    @property
    def ratio(self) -> str:
        """What is divided by what, or what is measured."""
        one = self.number
        return (
            f"{one.precision}, all GPUs" if one.what == "GB" else f"{one.precision} over {one.over}"
        )

    @property
    def scope(self) -> str:
        """Which bars it is for."""
        one = self.number
        places = [f"{one.image}x{one.image}"] if one.image else []
        return ", ".join([*places, *([self.layout] if self.layout else [])]) or one.how

    @property
    def off_by(self) -> float | None:
        """The factor between the prediction and the published number, 1 or more."""
        if not self.predicted:
            return None
        return max(self.predicted / self.number.value, self.number.value / self.predicted)


_ABOUT = (
    Column("source", "source"),
    Column("model", "model"),
    Column("image", "image"),
    Column("batch", "batch", digits=0),
    Column("layout", "layout"),
    Column("ranks", "ranks", digits=0),
    Column("precision", "precision"),
)
_SPEED = (Column("img_per_s", "speed", "img/s", digits=2), Column("speedup", "speed-up", digits=2))
_MEMORY = (
    Column("fullest_bytes", "fullest rank", "MiB", 1 / MIB, 1),
    Column("total_bytes", "all ranks", "MiB", 1 / MIB, 1),
    Column("reduction", "reduction", digits=2),
)
_LAST = (Column("published", "published ratio", digits=2), Column("state", "state"))
COMPARED = (
    Column("number", "of"),
    Column("published", "published", digits=2),
    Column("predicted", "predicted", digits=2),
    Column("off_by", "off by", digits=2),
    Column("measured", "measured", digits=2),
)


@dataclass
class PublishedFigure:
    """A published figure drawn anew."""

    spec: FigureSpec
    points: list[FigurePoint] = field(default_factory=list)
    setting: str = ""
    """What was predicted and measured where, in a sentence."""

    @property
    def numbers(self) -> list[PublishedNumber]:
        """What the text gives for it."""
        return numbers_of(self.spec.number)

    @property
    def over(self) -> str:
        """What its ratios are over."""
        return self.numbers[0].over if self.numbers else BASE_PRECISION

    @property
    def meaning(self) -> str:
        """How to read the tables, below them."""
        lines = [
            f"Ratios are over {self.over}, all else alike; more is better.",
            f"A dash below published ratio: {NO_NUMBER}.",
            CIRCLE if SPEED in self.spec.shows else "",
            self.spec.note,
            self.setting,
        ]
        return " ".join(line for line in lines if line)

    def ratio(self, point: FigurePoint, what: str) -> float | None:
        """Returns by how much a point is faster or smaller than its base; None: unknown."""
        base = self._base(point)
        if base is None:
            return None
        if what == SPEED:
            return point.img_per_s / base.img_per_s if point.img_per_s and base.img_per_s else None
        own, others = point.total_bytes, base.total_bytes
        return others / own if own and others else None

    def compared(self) -> list[Compared]:
        """Returns every published number with what the points come to."""
        rows = []
        for number in self.numbers:
            of = [point for point in self.points if _is_of(number, point)]
            grids = list(dict.fromkeys(point.grid for point in of))
            layouts = grids if number.how == EACH and len(grids) > 1 else [""]
            for layout in layouts:
                own = [point for point in of if layout in ("", point.grid)]
                values = [self._value(number, own, source) for source in (PREDICTED, MEASURED)]
                rows.append(Compared(number, layout, *values))
        return rows

    def tables(self) -> list[Table]:
        """Returns the points, and the published numbers beside ours."""
        name, title = f"figure{self.spec.number}", f"Figure {self.spec.number}"
        shows = [*(_SPEED if SPEED in self.spec.shows else ())]
        shows += [*(_MEMORY if MEMORY in self.spec.shows else ())]
        columns = [*_ABOUT, *shows, *_LAST]
        rows = [self._row(point) for point in self.points]
        cells = [[row[column.key] for column in columns] for row in rows]
        points = Table(name, f"{title}: {self.spec.title}", columns, cells, self.meaning)
        there = {point.precision for point in self.points}  # others would be rows of dashes
        compared = [
            [one.label, one.number.value, one.predicted, one.off_by, one.measured]
            for one in self.compared()
            if one.number.precision in there or not there
        ]
        beside = Table(
            f"{name}-published", f"{title}: what the text gives, and ours", COMPARED, compared,
            missing=f"{title}: {self._why_no_number()}",
        )  # fmt: skip
        return [points, beside]

    def _why_no_number(self) -> str:
        others = dict.fromkeys(number.precision for number in self.numbers)
        if not others:
            return NO_NUMBER
        return f"the text gives numbers of {', '.join(others)} only, which are not shown here"

    def _row(self, point: FigurePoint) -> dict[str, Cell]:
        published = [
            n.value for n in self.numbers if n.how == EACH and n.what != "GB" and _is_of(n, point)
        ]
        height, width = point.image
        return {
            "source": point.source,
            "model": point.model,
            "image": f"{height}x{width}",
            "batch": point.batch,
            "layout": point.grid,
            "ranks": point.ranks,
            "precision": point.precision,
            "img_per_s": point.img_per_s,
            "speedup": self.ratio(point, SPEED),
            "fullest_bytes": max(point.rank_bytes, default=None),
            "total_bytes": point.total_bytes,
            "reduction": self.ratio(point, MEMORY),
            "published": published[0] if published else None,
            "state": point.state,
        }

    def _base(self, point: FigurePoint) -> FigurePoint | None:
        for other in self.points:
            if self.over == BASE_PRECISION:
                same = other.precision == BASE_PRECISION and other.place == point.place
            else:
                alike = ("source", "model", "image", "batch", "precision")
                same = other.ranks == 1 and all(
                    getattr(other, key) == getattr(point, key) for key in alike
                )
            if same:
                return other
        return None

    def _value(
        self, number: PublishedNumber, points: Sequence[FigurePoint], source: str
    ) -> float | None:
        own = [point for point in points if point.source == source]
        if number.what == "GB":
            found = [point.total_bytes / 1e9 for point in own if point.total_bytes]
        else:
            ratios = [self.ratio(point, number.what) for point in own]
            found = [ratio for ratio in ratios if ratio is not None]
        if not found:
            return None
        return max(found) if number.how == MOST else statistics.mean(found)


def _is_of(number: PublishedNumber, point: FigurePoint) -> bool:
    """Whether a published number is for a point."""
    return (
        number.precision == point.precision
        and number.image in (None, *(point.image if point.image[0] == point.image[1] else ()))
        and number.tiles in (None, point.tiles)
    )


def labels(points: Iterable[FigurePoint]) -> Iterator[str]:
    """Yields a short name of each point, of what differs between them besides the precision."""
    listed = list(points)
    facts = {
        "image": [str(point.image[0]) for point in listed],
        "grid": [point.grid for point in listed],
        "batch": [f"batch {point.batch}" for point in listed],
    }
    differing = [values for values in facts.values() if len(set(values)) > 1]
    for place in range(len(listed)):
        yield "\n".join(values[place] for values in differing) or facts["image"][place]


def require_number(spec: FigureSpec) -> None:
    """Refuses a figure that is none of the chapter; ConfigError names it."""
    if not numbers_of(spec.number):
        raise ConfigError(
            f"figure.number={spec.number} is none of which hires.core.published holds a number"
        )
