"""Distributed deep learning on high-resolution images: layouts, proofs, runs and records."""

import sys

__version__ = "0.1.0"

# After `python -m hires...` the current folder stands first on the path of modules, where a file
# named as a library would be imported in its place (see hires.core.python_command). While Python
# looks for the module to run, and only then, argv[0] is "-m".
if (
    sys.argv[:1] == ["-m"]
    and any(word.split(".")[0] == "hires" for word in sys.orig_argv)
    and not getattr(sys.flags, "safe_path", False)
):
    del sys.path[0]
