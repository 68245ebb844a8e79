"""Fills in the templates of the page and of files, with every value escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def rendered(name: str, values: dict[str, Any], **options: Any) -> str:
    """Returns a template of this folder filled in; a value that is missing raises.

    ``options`` are those of Jinja's environment; by default it escapes HTML.
    """
    import jinja2

    environment = jinja2.Environment(
        keep_trailing_newline=True,
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **{"autoescape": True, **options},
    )
    return environment.get_template(name).render(values)
