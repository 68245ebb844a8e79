"""Columns and tables: what a number is called, its unit and digits, and every form of a table.

A table is declared once, with its columns and the function of its rows, under ``@table``; frames,
screens, CSV, Markdown, LaTeX and the page follow from the declaration.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hires.core.store.reading import text
from hires.core.units import aligned, spreadsheet_text

if TYPE_CHECKING:
    from hires.report.runs import Found

Cell = str | int | float | None
Row = dict[str, Any]
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
    }
)
_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;", **{c: f"\\{c}" for c in "`*_[]\\"}})
_TEX = """\
% needs \\usepackage{{booktabs}} and \\usepackage{{graphicx}}
\\begin{{table}}
  \\centering
  \\caption{{{caption}}}
  \\label{{tab:{name}}}
  \\resizebox{{\\linewidth}}{{!}}{{%
  \\begin{{tabular}}{{{sides}}}
  \\toprule
  {head}
  \\midrule
{rows}
  \\bottomrule
  \\end{{tabular}}}}
\\end{{table}}
{again}
"""


@dataclass(frozen=True)
class Column:
    """One column: its name in CSV and frames, its heading, and how its numbers are shown."""

    key: str
    title: str
    unit: str = ""
    factor: float = 1.0  # numbers are shown multiplied by it: bytes in CSV are MiB on screen
    digits: int | None = None  # decimals that are shown; None: a text

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title

    @property
    def numeric(self) -> bool:
        """Whether the cells are numbers, set flush right."""
        return self.digits is not None

    def text(self, cell: Cell) -> str:
        """Returns a cell as it is shown; ``-`` for a missing value."""
        if cell is None:
            return "-"
        if self.digits is None or isinstance(cell, str):
            return str(cell)
        return f"{cell * self.factor:.{self.digits}f}"


@dataclass(frozen=True)
class Table:
    """Columns and rows of plain values."""

    name: str  # file name without its ending
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]] = ()
    caption: str = ""
    empty: str = ""  # what is shown instead of a table without rows

    def text_rows(self) -> list[list[str]]:
        """Returns the rows as they are shown."""
        texts = [column.text for column in self.columns]
        return [[text(c) for text, c in zip(texts, row, strict=True)] for row in self.rows]

    def mapped(self, change: Callable[[str], str]) -> Table:
        """Returns a table whose texts were changed."""
        rows = [[change(c) if isinstance(c, str) else c for c in row] for row in self.rows]
        return replace(self, rows=rows)

    def to_csv(self) -> str:
        """Returns the table as CSV: names of columns, then plain values; missing ones are empty.

        A text that a spreadsheet would compute gets an apostrophe.
        """
        data = io.StringIO()
        writer = csv.writer(data, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        writer.writerows(self.mapped(spreadsheet_text).rows)
        return data.getvalue()

    def to_markdown(self) -> str:
        """Returns the table as Markdown, aligned so that it is readable as plain text."""
        heads = [column.heading for column in self.columns]
        table = self.mapped(lambda cell: cell.translate(_MARKDOWN))
        rows = [[cell.replace("|", "\\|") for cell in row] for row in table.text_rows()]
        widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
        sides = "".join("r" if column.numeric else "l" for column in self.columns)
        ends = sides.translate({ord("r"): ":", ord("l"): "-"})
        rule = ["-" * (width - 1) + end for width, end in zip(widths, ends, strict=True)]
        cells = [(*row, "") for row in (heads, rule, *rows)]  # the last one ends each line in |
        lines = aligned(cells, f"{sides}l", " | ")
        caption = f"\n{self.caption.translate(_MARKDOWN)}\n" if self.caption else ""
        return f"## {self.title}\n\n" + "".join(f"| {line}\n" for line in lines) + caption

    def to_latex(self) -> str:
        """Returns the table for LaTeX: booktabs rules, as wide as the text, everything escaped.

        The reproduce lines, its last column and too long for a page, follow as comments.
        """
        *shown, _ = self.columns
        rows = [[column.heading for column in shown], *(row[:-1] for row in self.text_rows())]
        head, *lines = [" & ".join(cell.translate(_LATEX) for cell in row) for row in rows]
        run = [column.key for column in shown].index(RUN.key)
        again = dict.fromkeys(f"% {row[run] or '-'}: {row[-1] or '-'}" for row in self.rows)
        return _TEX.format(
            name=self.name,
            caption=f"{self.title}. {self.caption}".translate(_LATEX),
            sides="".join("r" if column.numeric else "l" for column in shown),
            head=f"{head} \\\\",
            rows="\n".join(f"  {line} \\\\" for line in lines),
            again="\n".join(again),
        )


def table_of(name: str, title: str, columns: Sequence[Column], rows: Iterable[Row]) -> Table:
    """Returns a table with some columns of some rows."""
    words = {True: "yes", False: "no"}
    cells = [
        [words[cell] if isinstance(cell, bool) else cell for cell in map(row.get, keys(columns))]
        for row in rows
    ]
    return Table(name, title, columns, cells)


def filled(table: Table, always: Iterable[str] = ()) -> Table:
    """Returns a table without the columns that no row fills, but for some that stay ``always``."""
    cells = [*zip(*table.rows, strict=True)] or [()] * len(table.columns)
    wanted = [
        place
        for place, column in enumerate(table.columns)
        if column.key in always or any(cell is not None for cell in cells[place])
    ]
    rows = [[row[place] for place in wanted] for row in table.rows]
    return replace(table, columns=[table.columns[place] for place in wanted], rows=rows)


def keys(*groups: Iterable[Column]) -> tuple[str, ...]:
    """Returns the names of columns in CSV and frames."""
    return tuple(column.key for group in groups for column in group)


def texts(**titles: str) -> tuple[Column, ...]:
    """Returns columns of text by their names."""
    return tuple(Column(key, title) for key, title in titles.items())


def counts(**titles: str) -> tuple[Column, ...]:
    """Returns columns of whole numbers by their names."""
    return tuple(Column(key, title, digits=0) for key, title in titles.items())


CAMPAIGN, RUN, REPRODUCE = texts(campaign="campaign", run="run", reproduce="reproduce")
POINT = texts(model="model", image="image", layout="layout", precision="precision")
KEYS = Column("keys", "keys")
"""Keys of a run without a column of their own that not all rows of a table share."""
RANKS, BATCH, ATTEMPT = counts(ranks="ranks", batch="images/step", attempt="attempt")


@dataclass(frozen=True)
class DeclaredTable:
    """A table of runs: its columns, and what its rows are."""

    name: str
    title: str
    columns: Sequence[Column]
    """Behind campaign and run, before the line that reproduces the run."""
    hidden: Sequence[Column]
    """Columns of its frame alone."""
    caption: str
    empty: str
    """What a report says if there is no row; empty: it is a frame and no table of a report."""
    place: int
    """Where it stands in a report."""
    rows: Callable[[Found], Iterable[Row]] = field(repr=False)

    @property
    def all_columns(self) -> list[Column]:
        """The columns of its frame."""
        return [CAMPAIGN, RUN, *self.columns, *self.hidden, REPRODUCE]


TABLES: dict[str, DeclaredTable] = {}
_Rows = Callable[["Found"], Iterable[Row]]


def table(
    name: str, columns: Sequence[Column], title: str = "", *, hidden: Sequence[Column] = (),
    caption: str = "", empty: str = "", place: int = 0,
) -> Callable[[_Rows], _Rows]:  # fmt: skip
    """Returns a decorator that declares a table by the function of its rows."""

    def register(rows: _Rows) -> _Rows:
        TABLES[name] = DeclaredTable(name, title, columns, hidden, caption, empty, place, rows)
        return rows

    return register


def value_text(value: Any) -> str:
    """Returns a config value as short text, as one would type it."""
    if isinstance(value, str):
        return text(value, 200) or ""
    if isinstance(value, list) and len(value) <= 16:
        return text(f"[{','.join(map(value_text, value))}]", 200) or ""
    if value is None or isinstance(value, (bool, int, float)):
        return text(json.dumps(value), 200) or ""
    return f"({type(value).__name__})"
