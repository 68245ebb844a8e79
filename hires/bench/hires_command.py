"""Runs commands of ``hires`` for benchmarks, which have no front end of their own."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

import yaml

from hires.bench.ranks import run_program
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.python_command import module_command
from hires.plan.route_choice import resolve


def hires_output(words: Sequence[str], timeout_s: float) -> str:
    """Returns what `hires` prints; HiresError: it failed, of the kind of its exit code.

    LateError: the time was over.
    """
    command = module_command("hires", *words)
    try:
        return run_program(f"`{shlex.join(['hires', *words])}`", command, timeout_s)
    except RunError as error:
        failed = error.__cause__
        for kind in (ConfigError, PlanError):
            if getattr(failed, "returncode", None) == kind.exit_code:
                raise kind(str(error)) from None
        raise


def composed(words: Sequence[str], timeout_s: float) -> RunConfig:
    """Returns the config that overrides describe; errors as in :func:`hires_output`.

    A network whose classes are unset has those of made-up data.
    """
    printed = hires_output(["plan", *words, "--cfg", "job"], timeout_s)
    config = resolve(from_dict(yaml.safe_load(printed)))
    if config.model.classes is None:
        model = dataclasses.replace(config.model, classes=config.data.classes)
        config = dataclasses.replace(config, model=model)
    return config
