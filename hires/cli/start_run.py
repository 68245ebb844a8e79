"""Starts planned runs, here or as jobs, shows their progress, waits for their end and explains it.

Progress is on standard error: bars on a terminal, elsewhere a plain line now and then.
"""

from __future__ import annotations

import collections
import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

from hires.cli.screen import print_activity
from hires.core import streams
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.store import campaign, file_names, records
from hires.core.store.attempts import Attempt
from hires.core.store.ends import End
from hires.core.store.reading import printable
from hires.core.store.rundir import RunDir
from hires.core.store.step_lines import line_text
from hires.core.streams import behind
from hires.core.units import seconds
from hires.launcher.attempt_queue import Ended
from hires.launcher.interface import FrozenRun, SubmitOptions, Submitted, launcher_of
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_progress import RunProgress
from hires.launcher.supervision.watchdog import hang_head

_SHOWN = 5  # jobs that are named one by one; of more only the arrays are
ENDS = {"failed": "failed", "cancelled": "was cancelled", "lost": "is lost"}


def submit(
    runs: Sequence[FrozenRun],
    options: SubmitOptions,
    freeze: Callable[[Path], object],
    seen: Mapping[Path, int | None] = MappingProxyType({}),
) -> list[Submitted]:
    """Submits runs of one launcher, each by itself, and prints their jobs.

    Those under way, or begun since their latest attempt was ``seen``, stay; others are frozen.
    """
    launcher = launcher_of(runs[0].config)
    folders = sorted({run.path.parent for run in runs})
    with campaign.starting(folders):
        held, refused = running_elsewhere.holders(run.path for run in runs), {}
        for path in (run.path for run in runs):
            try:
                if path in seen:
                    running_elsewhere.refuse_begun(path, seen[path])
                if path in held:
                    raise RunError(f"{path.name} is under way: {held[path]}")
                freeze(path)
            except HiresError as error:  # it does not stop the others
                refused[path] = str(error)
        submitted = [Submitted(path, None, why) for path, why in refused.items()]
        free = [run for run in runs if run.path not in refused]
        submitted += launcher.submit_many(
            free, options, lambda: any(map(campaign.is_stopped, folders))
        )
    _print_jobs(submitted)
    order = {run.path: number for number, run in enumerate(runs)}
    return sorted(submitted, key=lambda one: order[one.path])


def wait_for(
    config: RunConfig, run: RunDir, world: int, job: str | None = None, args: Sequence[str] = ()
) -> End:
    """Returns how an attempt ended; shows the steps meanwhile. Without a job it starts the ranks.

    Ctrl-C ends the waiting for a job only. ``args`` are further words for every rank.
    """
    try:
        with StepProgress(world, config.batch, config.steps) as progress:
            return launcher_of(config).wait(run, job, progress, args)
    except KeyboardInterrupt:
        if job is not None:
            stop = f"hires cancel {shlex.quote(str(run.path))}"
            print(f"hires: job {job} goes on; `{stop}` stops it", file=sys.stderr)
        raise


def print_failure(outcome: End, run: RunDir, keep: bool = True, *, head: bool = True) -> None:
    """Prints what went wrong with checkpoints, and why an attempt failed; names a kept folder.

    Without ``head`` the cause itself is left to an error of the caller's.
    """
    lines = []
    for event in Attempt(run, run.attempt).events if keep else ():
        if event.get("event") == "checkpoint_failed":
            lines.append(f"warning: no checkpoint of step {event['step']}: {event['text']}")
        elif event.get("event") in ("checkpoint_damaged", "resume_differs"):
            lines.append(f"warning: {event['text']}")
    lines = [*dict.fromkeys(lines)]  # ranks that read one file say the same of it
    if outcome.exit_code != 0:
        lines += [f"hires: the run {ENDS[outcome.state]}: {outcome.cause}"] if head else []
        page = hang_head(run.attempt_dir) if outcome.reason == "hang" else []
        lines += [f"  {line}" for line in page[2:]]  # it begins with the cause
        if page and keep:
            lines.append(f"the whole page: {run.attempt_dir / file_names.HANG}")
        if outcome.tail:
            lines.append(f"last lines of rank {outcome.failed_rank}:")
            lines += [f"  {line}" for line in outcome.tail]
        if keep:
            lines.append(f"all lines: {run.attempt_dir / file_names.LOGS}")
    for line in lines:
        print(line, file=sys.stderr)


def _print_jobs(submitted: Sequence[Submitted]) -> None:
    jobs = [one for one in submitted if one.job is not None]
    lines = [f"{one.path.name}: job {one.job}" for one in jobs]
    if len(jobs) > _SHOWN:
        arrays = collections.Counter(str(one.job).partition("_")[0] for one in jobs)
        lines = [f"job array {number}: {count} points" for number, count in arrays.items()]
    reasons = collections.defaultdict(list)
    for one in submitted:
        if one.why is not None:
            reasons[one.why].append(one.path.name)
    for why, names in reasons.items():
        others = f" and {len(names) - 1} more were" if len(names) > 1 else " was"
        lines.append(f"hires: {names[0]}{others} not submitted: {why}")
    for line in lines:
        print(line, file=sys.stderr)


T = TypeVar("T")
_PLAIN_EVERY_S = 2.0
_PLAIN_SHARE = 0.05
"""Plain lines come at most every 2 s, and every twentieth of the time so far, so that the log of a
long run stays short; the first and the last step always have theirs."""


class Bars(contextlib.AbstractContextManager[Any]):
    """Progress bars of rich, drawn on a terminal only."""

    def __init__(self, stream: TextIO | None = None, remaining: bool = False) -> None:
        from rich import console, progress

        stream = stream or behind(sys.stderr)  # rich draws with escape sequences
        columns = [
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            *([progress.TimeRemainingColumn()] if remaining else []),
            progress.TextColumn("{task.fields[facts]}", markup=False),
        ]
        plain = console.Console(
            file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True
        )
        # Elsewhere than on a terminal whose cursor moves come plain lines.
        self.bars = progress.Progress(*columns, console=plain, disable=not streams.moves(stream))

    def __enter__(self) -> Any:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.bars.disable:  # bars that are not drawn would leave an empty line
            self.bars.stop()

    def print(self, text: str) -> None:
        """Prints a line, above the bars if there are any."""
        self.bars.console.print(printable(text))


class StepProgress(Bars):
    """Shows the steps of one run; call it with every line of the ranks."""

    def __init__(self, world: int, batch: int, steps: int, stream: TextIO | None = None) -> None:
        super().__init__(stream, remaining=True)
        self.progress = RunProgress(world, batch, steps)
        self._bar = self.bars.add_task("steps", total=steps, facts="starting the ranks")
        self._began = time.monotonic()
        self._printed_at = 0.0

    def __call__(self, line: dict[str, Any]) -> None:
        """Takes one line of the ranks into account; epochs and evaluations have a line."""
        step = self.progress.feed(line)
        if step is None:
            text = line_text(line)
            if text is not None:
                self.print(text)
            return
        facts = f"{step.img_per_s:.4g} img/s{step.loss_text}"
        self.bars.update(self._bar, completed=step.index + 1, facts=facts)
        now = time.monotonic()
        wait_s = max(_PLAIN_EVERY_S, _PLAIN_SHARE * (now - self._began))
        due = step.index in (0, self.progress.steps - 1) or now - self._printed_at >= wait_s
        if due and self.bars.disable:
            self.print(self.progress.text(step))
            self._printed_at = time.monotonic()


def show_planning(points: Sequence[T], name: Callable[[T], str]) -> Iterator[T]:
    """Yields the points of a sweep, and shows which of them is planned, by its name."""
    for number, point in enumerate(points, start=1):
        print_activity(f"planning point {number} of {len(points)}: {name(point)} ...")
        yield point
    print_activity("")


class SweepProgress(Bars):
    """Shows the attempts of a sweep: a bar for all, and one for each that runs."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self.count = 0
        self._running: dict[Path, tuple[Any, RunProgress]] = {}
        """Run folder -> bar, steps."""
        self._all = self.bars.add_task("attempts", total=total, facts="")

    def started(self, task: FrozenRun, attempt: int) -> None:
        """An attempt was started."""
        config, name = task.config, task.path.name
        bar = self.bars.add_task(printable(name), total=config.steps, facts="starting the ranks")
        self._running[task.path] = bar, RunProgress(task.ranks, config.batch, config.steps)
        if self.bars.disable:
            self.print(f"{name} a{attempt}: started")

    def line(self, task: FrozenRun, line: dict[str, Any]) -> None:
        """A rank of a running attempt recorded something."""
        if task.path in self._running:
            bar, progress = self._running[task.path]
            step = progress.feed(line)
            if step is not None:
                facts = f"{step.img_per_s:.4g} img/s"
                self.bars.update(bar, completed=step.index + 1, facts=facts)

    def ended(self, end: Ended) -> None:
        """An attempt ended, or could not be made."""
        path, folder = end.task.path, None
        text = path.name
        if end.attempt is not None:
            text += f" a{end.attempt}"
            folder = file_names.attempt_dir(path, end.attempt)
        text += f": {end.state}"
        if end.state == "done":
            record = None
            with contextlib.suppress(RunError):
                record = records.read_record(folder or path)
            rates = record["throughput"]["img_per_s"] if record else None
            text += f", {rates['median']:.4g} img/s" if rates else ", no throughput"
        text += f", {seconds(end.wall_s)}" + (f": {end.end.cause}" if end.end.cause else "")
        self._count(end.task, text)
        if end.state in ("failed", "lost") and folder is not None:
            self.print(f"    logs: {folder / file_names.LOGS}")

    def left(self, task: FrozenRun, why: str) -> None:
        """A task is left to another process, or was completed by one."""
        self._count(task, f"{task.path.name} is left out: {why}")

    def _count(self, task: FrozenRun, text: str) -> None:
        self.count += 1
        if task.path in self._running:
            self.bars.remove_task(self._running.pop(task.path)[0])
        self.bars.update(self._all, completed=self.count)
        self.print(f"[{self.count}/{self.total}] {text}")
