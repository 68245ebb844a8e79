"""Writes tables as files for a paper, a pull request, a spreadsheet or a program."""

from __future__ import annotations

import io
from pathlib import Path

from hires.core.store.files import make_folder, write_atomically
from hires.report.columns import Column, Table, safe_csv
from hires.report.frames import Frames
from hires.report.summaries import cells
from hires.report.templates import rendered

FORMATS = ("csv", "md", "tex", "parquet")
FRAMES = (
    "runs", "attempts", "samples", "memory", "communication", "precision", "failures", "planned",
    "configs",
)  # fmt: skip
"""Frames that ``hires export`` writes, by their names in :class:`Frames`."""
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
OPTION = "--out DIR"
_MARKS = {
    "block_start_string": "<%", "block_end_string": "%>",
    "variable_start_string": "<<", "variable_end_string": ">>",
}  # fmt: skip
"""Of a template for LaTeX, which needs Jinja's own braces."""


def encoded(table: Table, form: str) -> bytes | None:
    """Returns a table as a file, None if it has no rows."""
    if not table.rows:
        return None
    if form in _TEXTS:
        return _TEXTS[form](table).encode()
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


def markdown_text(table: Table) -> str:
    """Returns a table as Markdown, its caption below it."""
    text = table.mapped(lambda cell: cell.translate(_MARKDOWN)).to_markdown()
    return f"{text}\n{table.caption.translate(_MARKDOWN)}\n"


def latex_text(table: Table) -> str:
    """Returns a table for LaTeX: booktabs rules, numbers flush right, everything escaped.

    It is as wide as the text, however many columns it has, which ``DataFrame.to_latex`` cannot do.
    The reproduce lines, its last column and too long for a page, follow the table as comments.
    """
    *shown, _ = table.columns
    rows = [[column.heading for column in shown], *(row[:-1] for row in table.text_rows())]
    heads, *lines = [" & ".join(cell.translate(_LATEX) for cell in row) for row in rows]
    run = [column.key for column in shown].index("run")
    values = {
        "name": table.name,
        "caption": f"{table.title}. {table.caption}".translate(_LATEX),
        "sides": "".join("r" if column.numeric else "l" for column in shown),
        "heads": heads,
        "rows": lines,
        "again": dict.fromkeys(f"{row[run] or '-'}: {row[-1] or '-'}" for row in table.rows),
    }
    return rendered("table.tex", values, autoescape=False, **_MARKS)


_TEXTS = {"csv": safe_csv, "md": markdown_text, "tex": latex_text}
