"""Hands the numbers of a training to Weights & Biases."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from hires.core.trackers import DONE, TRACKERS, TrackedRun, Tracker

_MOST_LETTERS = 128
"""Of a project's name."""
_FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1"
"""Seconds whose numbers a rank that is killed may lose."""


@TRACKERS.register("wandb")
class WeightsAndBiases(Tracker):
    """Weights & Biases: online with WANDB_API_KEY, or else `wandb` of the run folder."""

    package = extra = "wandb"
    remedy = "check WANDB_API_KEY and WANDB_BASE_URL, or set WANDB_MODE=offline"

    def open(self, run: TrackedRun) -> None:
        """Resumes the run of an earlier attempt, or starts one; it never asks for a login."""
        os.environ.setdefault(*_FLUSH)
        import wandb

        usual = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        mode: Any = os.environ.get("WANDB_MODE") or usual
        project = re.sub(r"[/\\#?%:]", "_", run.campaign)[:_MOST_LETTERS]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.keys),
            mode=mode,
            settings=wandb.Settings(console="off"),  # the log of the rank stays as it is
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds numbers to the row of a step; online, a row that is there already stays."""
        self._run.log(dict(numbers), step=step)

    def close(self, status: str) -> None:
        """Sends what is left."""
        self._run.finish(exit_code=0 if status == DONE else 1)
