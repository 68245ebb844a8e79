"""Writes the file of a quantised network: every tensor that its nodes read, by name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store.files import cannot_write
from hires.engine import tensorfile
from hires.engine.build import made_tensors, placement
from hires.engine.derived_tensors import DerivedTensors
from hires.engine.device import HOST
from hires.engine.loader import image_dtype
from hires.engine.weights_file import open_weights
from hires.parallel.context import Context
from hires.plan.plan import Plan


def write_quantised(config: RunConfig, plan: Plan, path: Path) -> dict[str, Any]:
    """Writes a file that is there as a whole or not at all; returns the bytes of its tensors.

    ``plan`` is of one process. RunError: the file cannot be written, or the weights not be read.
    """
    context = cast(Context, SimpleNamespace(plan=plan, stage=plan.stages[0], device=HOST))
    tensors, _ = made_tensors(config, [context])
    if config.weights is not None:
        open_weights(config.weights).fill_all({n: one.data for n, one in tensors.items()})
    before = sum(tensor.nbytes for tensor in tensors.values())
    place = placement(image_dtype(config), plan.graph)
    made = DerivedTensors([context], tensors, place).tensors
    params = plan.graph.params
    read = {n for node in plan.graph.nodes for n in node.params if not params[n].is_constant}
    held = {name: made[name] if name in made else tensors[name] for name in sorted(read)}
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        tensorfile.write(hidden, held)
        os.replace(hidden, path)  # noqa: PTH105, as it is atomic
    except OSError as error:
        raise RunError(str(cannot_write(path, error, "out=FILE"))) from None
    finally:
        hidden.unlink(missing_ok=True)
    return {"bytes": sum(tensor.nbytes for tensor in held.values()), "float_bytes": before}
