"""How does a table become a file for a paper, a pull request, a spreadsheet or a program?"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path

from hires.core.errors import ConfigError
from hires.core.store.files import cannot_write, write_atomically
from hires.report.tables.run_tables import Cell, Table, to_csv, to_markdown
from hires.report.tables.summaries import Summary

FORMATS = ("csv", "md", "tex", "parquet")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
}
_FORMULA = re.compile(r"[=+@\t]|-(?!$|(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?%?$| / [\d,]+$| / -$)")
"""How a text begins that a spreadsheet takes for a formula; a number below 0 is none, nor is what
stands for places, as ``- / 1,0``."""
OPTION = "--out DIR"


def write_table(folder: Path, summary: Summary, form: str) -> Path:
    """Writes a table in one format and returns the file.

    Raises:
        ConfigError: the file cannot be written, or needs a library that is not installed.
    """
    path = folder / f"{summary.name}.{form}"
    if form == "parquet":
        _write_parquet(path, summary)
    else:
        write_atomically(path, TEXTS[form](summary), option=OPTION)
    return path


def csv_text(summary: Summary) -> str:
    """Returns a table as CSV, plain values under names with units.

    A text that a spreadsheet would compute gets an apostrophe in front.
    """
    return safe_csv(summary.table)


def safe_csv(table: Table) -> str:
    """Returns a table as CSV in which no text is a formula, and what cannot be one is as it is."""
    return to_csv(_mapped(table, lambda t: f"'{t}" if _FORMULA.match(t) else t))


def markdown_text(summary: Summary) -> str:
    """Returns a table as Markdown, its caption below it."""
    table = _mapped(summary.table, _no_markup)
    return f"{to_markdown(table)}\n{_no_markup(summary.caption)}\n"


def latex_text(summary: Summary) -> str:
    """Returns a table for LaTeX: booktabs rules, numbers flush right, everything escaped.

    It is as wide as the text, however many columns it has.

    The reproduce lines, too long for a page, stand behind the table as comments.
    """
    table = summary.table
    shown = [i for i, column in enumerate(table.columns) if column.key != "reproduce"]
    columns = [table.columns[i] for i in shown]
    heads = " & ".join(latex(column.heading) for column in columns)
    rows = [
        "  " + " & ".join(latex(cells[i]) for i in shown) + r" \\" for cells in table.text_rows()
    ]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs} and \\usepackage{graphicx}",
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{latex(summary.table.title)}. {latex(summary.caption)}}}",
            f"  \\label{{tab:{table.name}}}",
            r"  \resizebox{\linewidth}{!}{%",
            f"  \\begin{{tabular}}{{{''.join('r' if c.numeric else 'l' for c in columns)}}}",
            r"  \toprule",
            f"  {heads} \\\\",
            r"  \midrule",
            *rows,
            r"  \bottomrule",
            r"  \end{tabular}}",
            r"\end{table}",
            *_latex_again(table),
            "",
        ]
    )


def latex(text: str) -> str:
    """Returns a text that LaTeX sets as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def _latex_again(table: Table) -> list[str]:
    """Returns a comment for every row: how it is made again."""
    keys = [column.key for column in table.columns]
    run, again = keys.index("run"), keys.index("reproduce")
    lines = dict.fromkeys(f"% {row[run] or '-'}: {row[again] or '-'}" for row in table.rows)
    return list(lines)


def _write_parquet(path: Path, summary: Summary) -> None:
    """Writes a table with its types."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--format parquet needs pyarrow, which is not installed; pip install pyarrow, or "
            "choose csv"
        ) from None
    data = io.BytesIO()
    summary.frame.to_parquet(data, index=False)
    try:
        path.write_bytes(data.getvalue())
    except OSError as error:
        raise cannot_write(path, error, OPTION) from error


def _no_markup(text: str) -> str:
    """Returns a text that Markdown shows as it is, HTML in it included."""
    kept = text.replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "`*_[]\\" else c for c in kept)


def _mapped(table: Table, change: Callable[[str], str]) -> Table:
    """Returns a table whose texts were changed."""

    def cell(value: Cell) -> Cell:
        return change(value) if isinstance(value, str) else value

    return dataclasses.replace(table, rows=[[cell(value) for value in row] for row in table.rows])


TEXTS = {"csv": csv_text, "md": markdown_text, "tex": latex_text}
