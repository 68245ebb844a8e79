"""Finds the weights that a verb names as ``weights=`` does, or by the name or hash of a run.

default/RUN   RUN/best   RUN/ema   RUN/best/ema   RUN/checkpoints/step000012   net.safetensors
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import HiresError
from hires.core.store import file_names, records, run_names
from hires.core.store.file_names import StrPath
from hires.core.store.network_weights import BEST, EMA, PICKLES, SAFETENSORS
from hires.plan.search.candidates import written


def path_of_weights(source: str, results: StrPath) -> str:
    """Returns the path that ``weights=`` takes for what a user names; ConfigError: no such run."""
    if Path(source).exists() or Path(source).suffix in (*SAFETENSORS, *PICKLES):
        return source
    inside = f"/{file_names.CHECKPOINTS}/"
    run, _, step = source.rpartition(inside)
    if run:
        return f"{path_of_weights(run, results)}{inside}{step}"
    run, _, last = source.rstrip("/").rpartition("/")
    if run and last in (BEST, EMA):
        return f"{path_of_weights(run, results)}/{last}"
    return str(run_names.locate(source, results))


def run_of_weights(weights: str) -> Path | None:
    """Returns the run folder that has written some weights; None: they are a file or a copy."""
    path = Path(weights)
    folders = [path, *list(path.parents)[:3]]  # of RUN/checkpoints/step000012/ema and the like
    return next((one for one in folders if (one / file_names.CONFIG).is_file()), None)


def training_of(config: RunConfig) -> tuple[str, RunConfig] | None:
    """Returns the run that trained the parameters in a few words, and its config.

    None: no run did, or nothing is left of it but its weights.
    """
    source = config.weights or config.checkpoint.source
    run = None if source is None else run_of_weights(source)
    if run is None:
        return None
    try:
        trained = records.read_config(run)
    except HiresError:
        return None
    if trained.task.name != "train":
        return None
    return f"the run of {'weights=' if config.weights else ''}{source}", trained


def trained_network(config: RunConfig) -> str:
    """Returns in words the network of the run that has written ``weights``, if it is another one.

    Nothing if it is the same, or no run is known.
    """
    run = run_of_weights(config.weights or "")
    if run is None:
        return ""
    with contextlib.suppress(HiresError):
        own, held = (to_dict(one)["model"] for one in (config, records.read_config(run)))
        words = [f"model.{key}={written(held[key])}" for key in own if own[key] != held[key]]
        return f"its run trained the network of {' '.join(words)}" if words else ""
    return ""
