"""Distributed deep learning on high-resolution images: layouts, proofs, runs and records.

hires.shard(model, mesh, example=x)     a module of one's own on tiles (docs/own-loop.md)
hires.Engine(model, config)             stages, GEMS and replicas in one's own loop
hires.window(shape, mesh)               the pixels that a rank should read
hires.run("parallel=sp", image=512)     what `hires run` does, and the DataFrames of the run
hires.load("results/fig2*")             runs as pandas DataFrames (docs/reports.md)
"""

from hires.core.python_path import remove_current_folder

remove_current_folder()  # before anything else is imported

from typing import Any  # noqa: E402

__version__ = "0.1.0"

_LIBRARY = {
    "shard": "hires.engine.sharding",
    "ShardedModule": "hires.engine.sharding",
    "window": "hires.engine.sharding",
    "Engine": "hires.engine.stepping",
    "load": "hires.report",
    "run": "hires.report",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line starts without torch.
    import importlib

    if name not in _LIBRARY:
        raise AttributeError(f"module 'hires' has no attribute {name!r}")
    return getattr(importlib.import_module(_LIBRARY[name]), name)
