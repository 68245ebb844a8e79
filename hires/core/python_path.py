"""Takes the current folder off the path of modules, before any library is imported.

It imports only what Python itself has imported before, for it stands first in ``hires``.
"""

import os
import sys


def without_empty_entries(python_path: str) -> str:
    """Returns a PYTHONPATH without its empty entries, which Python takes for the current folder."""
    return os.pathsep.join(filter(None, python_path.split(os.pathsep)))


def remove_current_folder() -> None:
    """Takes the current folder off the path of modules, unless the user wrote it out.

    A file named as a library would be imported from there in its place (see
    :mod:`hires.core.programs`). ``python -m hires...`` puts it first: while Python looks for
    the module to run, and only then, argv[0] is "-m". An empty entry of PYTHONPATH means it, too.
    """
    scripts_folder = 0 if sys.flags.safe_path else 1  # entries before PYTHONPATH
    is_hires = any(word.split(".")[0] == "hires" for word in sys.orig_argv)
    if scripts_folder and sys.argv[:1] == ["-m"] and is_hires:
        del sys.path[0]
        scripts_folder = 0
    written = os.environ.get("PYTHONPATH", "")
    kept = without_empty_entries(written)
    if kept == written:
        return
    os.environ["PYTHONPATH"] = kept  # of all processes that this one starts
    try:
        here = os.getcwd()  # noqa: PTH109, pathlib is not imported yet
    except FileNotFoundError:  # it was removed, and holds no files
        return
    if here not in map(os.path.abspath, kept.split(os.pathsep) if kept else ()):
        rest = [entry for entry in sys.path[scripts_folder:] if entry != here]
        if __file__ == os.path.join(here, "hires", "core", "python_path.py"):  # noqa: PTH118
            rest.append(here)  # a checkout: hires itself is found there
        sys.path[scripts_folder:] = rest
