"""Writes tables as files for a paper, a pull request, a spreadsheet or a program."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path

from hires.core.errors import ConfigError
from hires.core.store.files import make_folder, write_atomically
from hires.report.columns import Column, Table
from hires.report.frames import Frames
from hires.report.summaries import cells

FORMATS = ("csv", "md", "tex", "parquet")
FRAMES = (
    "runs", "attempts", "samples", "memory", "communication", "precision", "failures", "planned",
    "configs",
)  # fmt: skip
"""Frames that ``hires export`` writes, by their names in :class:`Frames`."""
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
"""How a text begins that a spreadsheet computes; a number below 0 is no formula, nor are places,
as ``- / 1,0``."""
OPTION = "--out DIR"


def encoded(table: Table, form: str) -> bytes:
    """Returns a table as a file.

    Raises:
        ConfigError: the format needs a library that is not installed.
    """
    if form != "parquet":
        return _TEXTS[form](table).encode()
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--format parquet needs pyarrow, which is not installed; pip install pyarrow, or "
            "choose csv"
        ) from None
    data = io.BytesIO()
    table.frame.to_parquet(data, index=False)
    return data.getvalue()


def write_frames(frames: Frames, out: Path) -> list[Path]:
    """Writes every frame that has rows as CSV, and returns the files.

    Raises:
        ConfigError: a file cannot be written.
    """
    make_folder(out, OPTION)
    files = []
    for name in FRAMES:
        frame = getattr(frames, name)
        if len(frame):
            columns = [Column(str(key), str(key)) for key in frame.columns]
            files.append(out / f"{name}.csv")
            text = safe_csv(Table(name, name, columns, cells(frame)))
            write_atomically(files[-1], text, option=OPTION)
    return files


def safe_csv(table: Table) -> str:
    """Returns a table as CSV; a text that a spreadsheet would compute gets an apostrophe."""
    return _mapped(table, lambda t: f"'{t}" if _FORMULA.match(t) else t).to_csv()


def markdown_text(table: Table) -> str:
    """Returns a table as Markdown, its caption below it."""
    return f"{_mapped(table, _no_markup).to_markdown()}\n{_no_markup(table.caption)}\n"


def latex_text(table: Table) -> str:
    """Returns a table for LaTeX: booktabs rules, numbers flush right, everything escaped.

    It is as wide as the text, however many columns it has, which ``DataFrame.to_latex`` cannot do.
    The reproduce lines, too long for a page, follow the table as comments.
    """
    shown = [i for i, column in enumerate(table.columns) if column.key != "reproduce"]
    columns = [table.columns[i] for i in shown]
    keys = [column.key for column in table.columns]
    run, again = keys.index("run"), keys.index("reproduce")
    return "\n".join(
        [
            "% needs \\usepackage{booktabs} and \\usepackage{graphicx}",
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{latex(table.title)}. {latex(table.caption)}}}",
            f"  \\label{{tab:{table.name}}}",
            r"  \resizebox{\linewidth}{!}{%",
            f"  \\begin{{tabular}}{{{''.join('r' if c.numeric else 'l' for c in columns)}}}",
            r"  \toprule",
            f"  {' & '.join(latex(column.heading) for column in columns)} \\\\",
            r"  \midrule",
            *(f"  {' & '.join(latex(row[i]) for i in shown)} \\\\" for row in table.text_rows()),
            r"  \bottomrule",
            r"  \end{tabular}}",
            r"\end{table}",
            *dict.fromkeys(f"% {row[run] or '-'}: {row[again] or '-'}" for row in table.rows),
            "",
        ]
    )


def latex(text: str) -> str:
    """Returns a text that LaTeX sets as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def _no_markup(text: str) -> str:
    """Returns a text that Markdown shows as it is, HTML in it included."""
    kept = text.replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "`*_[]\\" else c for c in kept)


def _mapped(table: Table, change: Callable[[str], str]) -> Table:
    """Returns a table whose texts were changed."""
    rows = [[change(c) if isinstance(c, str) else c for c in row] for row in table.rows]
    return dataclasses.replace(table, rows=rows)


_TEXTS = {"csv": safe_csv, "md": markdown_text, "tex": latex_text}
