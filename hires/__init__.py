"""Distributed deep learning on high-resolution images: layouts, proofs, runs and records.

hires.shard(model, mesh, example=x)     a module of one's own on tiles (docs/library.md)
hires.window(shape, mesh)               the pixels that a rank should read
"""

from typing import TYPE_CHECKING, Any

from hires.core.python_path import remove_current_folder

if TYPE_CHECKING:
    from hires.engine.sharding import ShardedModule as ShardedModule
    from hires.engine.sharding import shard as shard
    from hires.engine.sharding import window as window

__version__ = "0.1.0"

remove_current_folder()  # before anything else is imported

_LIBRARY = ("ShardedModule", "shard", "window")


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line starts without torch.
    if name not in _LIBRARY:
        raise AttributeError(f"module 'hires' has no attribute {name!r}")
    from hires.engine import sharding

    return getattr(sharding, name)
