"""Prepares a run: fills in what its keys leave open, and names and plans it before it starts.

keys -> data, layout, scales -> inputs and folder -> earlier runs -> plan
prepare                 name                 begin

A run whose network's source or images have changed is a new run, beside the old one; a run with
more steps can go on where one with fewer was saved.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hires.cli.calibration import with_scales
from hires.cli.choosing import LayoutSearch, choice_note, explicit, plain_choice
from hires.cli.data_keys import resolve_data, training_overlap
from hires.cli.overrides import idle_keys
from hires.cli.planning import Planner
from hires.core.config import parallel_config
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.store import checkpoints, file_names, frozen, rundir
from hires.core.store.checkpoints import Checkpoint
from hires.core.store.files import write_atomically
from hires.core.store.frozen import Frozen, RunInputs
from hires.core.store.records import done_attempt
from hires.core.units import size
from hires.plan.memory import needed_bytes
from hires.plan.plan import Finding, Plan
from hires.plan.search.choice import Choice


@dataclass
class Prepared:
    """A run before it starts."""

    config: RunConfig
    argv: Sequence[str]
    """The command that makes it again, with the keys of a layout that was chosen."""
    choice: Choice | None = None
    """What its layout was chosen from; None: it was given."""
    findings: list[Finding] = field(default_factory=list)
    inputs: RunInputs = field(default_factory=RunInputs)
    path: Path = Path()
    """Its run folder, there or not, once it is named."""
    done: list[int] = field(default_factory=list)
    """Attempts that completed it earlier."""
    notes: list[str] = field(default_factory=list)
    """About earlier runs that it resembles."""

    def name(self, planner: Planner) -> None:
        """Finds the inputs, the folder, and which attempts are complete; errors of ``inputs``.

        RunError: a complete run of this name has another config.
        """
        self.inputs = planner.inputs(self.config)
        self.path = rundir.run_path(self.config, self.inputs)
        self.done = rundir.done_attempts(self.path)
        if self.done:  # 8 digits of a hash are a name, and no proof
            rundir.require_same_config(self.path, self.config)

    def begin(self, earlier: EarlierRuns, go_on: bool) -> None:
        """Compares it with earlier runs; with ``go_on`` it begins where a shorter one was saved.

        ConfigError: its config says that it begins at step 0.
        """
        saving, changed = self.config.checkpoint, self._changes(earlier)
        self.notes = [] if changed is None else [changed]
        if go_on and saving.resume == "never":
            raise ConfigError(
                "--continue contradicts checkpoint.resume=never, with which a run begins at step "
                "0; leave one of them out"
            )
        if (step := checkpoints.saved_step(self.path)) or saving.resume == "never":
            if step and saving.resume != "never" and done_attempt(self.path) is None:
                self.notes.append(f"this run continues after its step {step}")
            return
        saved, damaged = self._continued(earlier)
        self.notes += damaged
        if saved is None and go_on:
            self.notes.append(
                "nothing to continue: no run that differs in its steps only has a checkpoint "
                "(checkpoint.every=N or checkpoint.at_end=always saves them)"
            )
        elif saved is not None and go_on:
            saving = replace(saving, continues=str(saved.path))
            self.config = replace(self.config, checkpoint=saving)
            self.notes.append(f"continues {saved.run.name} after step {saved.step}")
        elif saved is not None:
            self.notes.append(
                f"{saved.run.name} was saved after step {saved.step}: --continue resumes there; "
                f"this run begins at step 0"
            )

    def _changes(self, earlier: EarlierRuns) -> str | None:
        """Returns how a run that is not there yet differs from the latest one of the same config.

        As ``network changed since NAME (done): this is a new run``; None if there is none.
        """
        if not self.inputs.digests or self.path.exists():
            return None
        own, like = frozen.frozen_of(self.config, {}, self.inputs), earlier.like(self.path)
        twins = {other: one for other, one in like.items() if one.config == own.config}
        if not twins:
            return None
        last = max(twins, key=lambda p: (p / file_names.FROZEN).stat().st_mtime_ns)
        before, now = twins[last].inputs.digests, self.inputs.digests
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        state = "" if done_attempt(last) is None else " (complete)"
        words = " and ".join(changed) or "its inputs"
        return f"{words} changed since {last.name}{state}: this is a new run"

    def _continued(self, earlier: EarlierRuns) -> tuple[Checkpoint | None, list[str]]:
        """Returns the checkpoint with the most steps of a run that differs in its length only.

        Beside it, what is wrong with damaged ones of such runs.
        """
        own = frozen.frozen_of(self.config, {}, self.inputs)
        like = earlier.like(self.path).items()
        found = [checkpoints.whole_checkpoints(other) for other, one in like if own.continues(one)]
        steps = self.config.steps
        there = [one for whole, _ in found for one in whole if one.step < steps]
        damaged = [text for _, texts in found for text in texts]
        return max(there, key=lambda checkpoint: checkpoint.step, default=None), damaged

    def assumes(self, folder: str) -> bool:
        """Whether its scales stand in a folder for those of a calibration that was not run."""
        return Path(self.config.quant.scales or ".").parent == Path(folder)

    def freeze(self, plan: Plan) -> None:
        """Makes its folder as it is planned, with what its layout was chosen from."""
        rundir.freeze(self.config, plan.to_dict(), self.argv, self.inputs)
        if self.choice is not None:
            text = json.dumps(plain_choice(self.choice), indent=1) + "\n"
            write_atomically(self.path / file_names.CHOICE, text)


def prepare(
    config: RunConfig,
    words: Iterable[str],
    planner: Planner,
    argv: Sequence[str],
    assumed: str | None = None,
) -> Prepared:
    """Returns a run whose data, layout and scales are known, with findings about its keys.

    Args:
        config: as the keys compose it.
        words: the overrides that the user typed.
        planner: traces and plans.
        argv: the whole command.
        assumed: folder for scales that stand for those of a calibration, which is then not run.

    Raises:
        ConfigError: the keys do not fit the data, the network or each other.
        PlanError: no layout fits.
        RunError: the calibration failed.
    """
    words = tuple(words)
    config = resolve_data(config, planner.sizes)
    findings = [*idle_keys(config, words)]
    config, choice = LayoutSearch(planner, words).chosen(config)
    if choice is not None:
        argv = explicit(argv, config, choice)
        findings.append(choice_note(choice))
    config, finding = with_scales(config, planner, words, argv, assumed)
    findings += [] if finding is None else [finding]
    if config.task.name == "predict":
        config, finding = _in_bands(config, planner)
        findings += [] if finding is None else [finding]
    return Prepared(config, argv, choice, [*findings, *training_overlap(config)])


def _in_bands(config: RunConfig, planner: Planner) -> tuple[RunConfig, Finding | None]:
    """Returns a prediction in bands of rows, if that fits and the whole image does not."""
    parallel = config.parallel
    alone = parallel.num_ranks == parallel.replicas and parallel.band_rows is None
    if not alone or not (plan := planner.plan(config)).errors:
        return config, None
    errors = [finding for finding in plan.findings if finding.severity == "error"]
    in_bands = replace(parallel, band_rows=parallel_config.AUTO)
    other = replace(config, parallel=replace(in_bands, name=in_bands.label))
    if {one.key for one in errors} != {"memory.limit"} or not planner.plan(other).ok:
        return config, None
    needed = size(max(map(needed_bytes, plan.memory)))
    text = f"whole images need {needed}, predicted, more than there is, so they are computed in "
    text += f"bands of rows, as by parallel={other.parallel.name}"
    return other, Finding("note", "parallel.band_rows", text)


class EarlierRuns:
    """The runs beside those of a command, as they are when the first one is looked for."""

    def __init__(self) -> None:
        self._by_slug: dict[Path, dict[Path, Frozen]] = {}

    def like(self, path: Path) -> dict[Path, Frozen]:
        """Returns the other runs whose network, image, layout and precision are those of a path."""
        slug = path.with_name(path.name.rpartition("-")[0])
        if slug not in self._by_slug:
            pattern = f"{glob.escape(slug.name)}-*/{file_names.FROZEN}"
            held = {f.parent: frozen.read(f.parent) for f in sorted(slug.parent.glob(pattern))}
            self._by_slug[slug] = {path: one for path, one in held.items() if one is not None}
        return {other: one for other, one in self._by_slug[slug].items() if other != path}
