"""Fills in the templates of the page and of files, with every value escaped."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def rendered(name: str, **values: object) -> str:
    """Returns a template of this folder filled in; a value that is missing raises."""
    import jinja2

    environment = jinja2.Environment(
        keep_trailing_newline=True,
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(values)
