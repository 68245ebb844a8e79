"""Evaluates a training as it goes on, keeps its best checkpoint, and says when to end it.

    step               1      2      3      4      5      6
    top1                    0.81          0.93          0.92     validate.every=2
    checkpoint            best          best            .        validate.patience=1: it ends

The evaluations have a plan of their own (:mod:`hires.plan.planner`) and compute on the tensors
of the training, which they leave as they are. A run that goes on reads the lines of those before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import Any

from hires import comm
from hires.core.config.data_config import EPOCH
from hires.core.config.run_config import RunConfig
from hires.core.ranks.world import World
from hires.core.store import checkpoints
from hires.core.store.attempts import Attempt
from hires.core.store.checkpoints import Best
from hires.core.store.step_lines import VALIDATED_LINE, ended_text, evaluation_text, pass_lines
from hires.data.opening import open_data
from hires.data.start_check import require_readable
from hires.engine.build import assemble, contexts_of
from hires.engine.checkpoint import Saver
from hires.engine.epochs import Epochs
from hires.engine.evaluate import evaluate_pass
from hires.engine.rank_engine import RankEngine
from hires.plan.plan import Plan
from hires.plan.planner import evaluation_of, is_better, metric_of

_LEFT_OUT = ("kind", "classes", "confusion")
"""Of a summary: what is long; `hires run task=evaluate weights=RUN` writes it."""

log = logging.getLogger(__name__)


class Validation:
    """The evaluations of a training, on one rank; all ranks make it together."""

    def __init__(
        self, config: RunConfig, plan: Plan, engine: RankEngine, saver: Saver, world: World
    ) -> None:
        assert plan.validation is not None
        self._training, self._engine, self._saver = config, engine, saver
        self._config = evaluation_of(config)
        self._rank = world.rank
        self._source = open_data(self._config)
        steps = range(-(-len(self._source) // config.batch))
        require_readable(self._config, self._source, steps, world.rank, world.size)
        self._contexts = contexts_of(plan.validation, world.rank, engine.device.torch)
        self.metric = metric_of(config, plan.graph)
        self.best: Best | None = None
        self._worse = 0  # evaluations since the best one
        run_dir, text = saver.run_dir, "[]"
        if world.rank == 0:  # it reads the lines for all: a file server may show another rank fewer
            before = Attempt(run_dir, saver.attempt, strict=True)
            text = json.dumps(pass_lines(before, VALIDATED_LINE))
        for line in json.loads(comm.broadcast_text(text)):
            self._take(line["step"] + 1, line.get(self.metric))
        # A run that was killed between the two parts of keep_best.
        differs = world.rank == 0 and self.best and checkpoints.read_best(run_dir) != self.best
        if differs and self.best and checkpoints.place(run_dir, self.best.step).is_dir():
            checkpoints.write_best(run_dir, self.best)

    @property
    def ends(self) -> bool:
        """Whether the training ends here (``validate.patience``)."""
        patience = self._training.validate.patience
        return patience is not None and self._worse >= patience

    def is_due(self, step: int, epochs: Epochs) -> bool:
        """Whether the training is evaluated after a step."""
        every = self._training.validate.every
        if step + 1 == self._training.steps:
            return True
        return epochs.ends_in(step) if every == EPOCH else (step + 1) % every == 0

    def evaluate(self, step: int) -> tuple[dict[str, Any], bool]:
        """Evaluates the network after a step; returns what to note, and whether it is the best."""
        began_s, recorder = time.perf_counter(), comm.activity.recorder
        weights: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        optimizer = self._engine.optimizer
        if self._training.validate.weights == "ema" and optimizer is not None:
            weights = optimizer.ema_in_place()
        try:
            with comm.logged(None):
                own = self._contexts, self._engine.tensors
                beside = assemble(self._config, *own, [], self._engine.device)
                comm.activity.recorder = beside.recorder
                with weights:
                    facts = evaluate_pass(beside, self._config, self._source)
        finally:
            comm.activity.recorder = recorder
        kept = {key: value for key, value in facts.items() if key not in _LEFT_OUT}
        better = self._take(step + 1, kept.get(self.metric))
        taken_s = time.perf_counter() - began_s
        made = {**kept, "metric": self.metric, "better": better, "validate_s": taken_s}
        if self._rank == 0:
            log.info("%s", evaluation_text({"step": step, **made}))
        return made, better

    def end_early(self, done: int) -> dict[str, Any]:
        """Logs that the training ends after so many steps; returns why."""
        facts = {"metric": self.metric, "patience": self._training.validate.patience}
        if self._rank == 0:
            log.info("%s", ended_text({"step": done, **facts}))
        return facts

    def keep_best(self) -> None:
        """Saves the network after the best evaluation, the last one, and notes that it is that."""
        assert self.best is not None
        saved = self._saver.last == self.best.step or self._saver.save(self.best.step)
        if saved and self._rank == 0:
            checkpoints.write_best(self._saver.run_dir, self.best)
            self._saver.tidy()  # the best one before
        comm.max_all(0, patient=True)  # to remove files may take as long as to write them

    def _take(self, done: int, value: float | None) -> bool:
        best = None if self.best is None else self.best.value
        better = is_better(self._training, self.metric, value, best)
        if better and value is not None:
            self.best, self._worse = Best(done, self.metric, value), 0
        else:
            self._worse += 1
        return better
