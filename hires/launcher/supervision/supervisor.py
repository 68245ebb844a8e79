"""Supervises one world of ranks from the first start to the last exit.

A rank that is left alone would wait for its dead neighbour for minutes, so the first failure, a
signal or a hang ends all ranks. "Stop" below is SIGTERM to every rank, and SIGKILL after GRACE_S
(at once if another signal arrives meanwhile):

    watch ─┬─ all ranks exit with 0 ──────────────────────────────────▶ done
           ├─ SIGINT, SIGTERM, SIGHUP ─ stop ──────────────────────────▶ cancelled ¹
           ├─ SIGUSR2 ─ SIGUSR2 to the ranks, which save their state and exit with
           │            PREEMPTED within patience_s ─ stop ───────────▶ failed, preempted | timeout
           ├─ a rank fails ─ wait SETTLE_S for other reports ─ stop ───▶ failed, first cause ¹
           ├─ no progress in comm.timeout_s ─ SIGUSR1, hang.txt ─ stop ▶ failed, hang
           └─ exit.json appears: another start closed this attempt ─ stop ▶ that end

¹ Schedulers end jobs by plain SIGTERM, too: ``places.termination()`` says whether this one did, and
the end is then ``preempted``, ``timeout`` or ``node``. Where ranks run elsewhere, they may receive
that SIGTERM up to SIGTERM_S before the supervisor does.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import PREEMPTED, RunError
from hires.core.store import file_names, provenance, records
from hires.core.store.attempts import Attempt
from hires.launcher.interface import OnLine
from hires.launcher.ranks import ports, spawn
from hires.launcher.ranks.agent_ranks import AgentRanks
from hires.launcher.ranks.places import Preemption, RankPlaces
from hires.launcher.ranks.processes import RankProcess
from hires.launcher.ranks.rank_group import AgentRank, GroupStart, RankGroup, SeparateRanks
from hires.launcher.status.run_progress import MetricsTail
from hires.launcher.supervision import blame, watchdog
from hires.launcher.supervision.interrupts import Interrupts
from hires.launcher.supervision.out_of_memory import OomCount

POLL_S = 0.05
"""How often the ranks are polled; it costs nothing that a measurement would show."""
SETTLE_S = 0.3
"""How long the other ranks may still report after one failed, so that the cause is among them."""
GRACE_S = 2.0
"""How long ranks may take to end after SIGTERM."""
SIGTERM_S = 5.0
"""How long after ranks elsewhere were ended by SIGTERM the same may reach the supervisor."""
STOPPED = (None, 0, -signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of ranks, if they have ended, whose job was stopped from outside."""
AFTER_SIGUSR2 = (None, 0, PREEMPTED, -signal.SIGUSR2)
"""Exit codes of ranks, if they have ended, that got SIGUSR2; some die of it while they start."""


@dataclass(frozen=True)
class Launch:
    """What is to be run."""

    run_dir: Path
    attempt: int
    config: RunConfig
    world: int
    module: str
    """Python module that every rank runs."""
    args: Sequence[str]
    """What follows the run folder on its command line."""
    on_line: OnLine | None
    """Called with every new line of ``metrics.jsonl``."""
    places: RankPlaces
    """Where the ranks run."""

    @property
    def folder(self) -> Path:
        """Folder of the attempt."""
        return file_names.attempt_dir(self.run_dir, self.attempt)


@dataclass
class WorldEnd:
    """How a world of ranks ended."""

    state: str
    cause: str | None = None
    reason: str | None = None
    """The cause in one word for programs, as ``preempted``; None where there is none."""
    failed_rank: int | None = None
    tail: list[str] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)
    port_taken: bool = False
    """Whether it failed because another process listens at the port."""


class Supervisor:
    """Runs one world of ranks to its end."""

    def __init__(self, job: Launch, port: int, interrupts: Interrupts) -> None:
        """Takes the job, the port to meet at, and where interrupts are counted."""
        self.job = job
        self.port = port
        self.interrupts = interrupts
        where = (job.run_dir, job.attempt, job.folder, job.config)
        start = GroupStart(*where, job.module, job.args, job.places, port, self._note)
        starter = job.places.starter
        self._group: RankGroup = (
            SeparateRanks(start) if starter is None else AgentRanks(start, starter)
        )
        self._tail = MetricsTail(job.folder / file_names.METRICS)
        self._watchdog = watchdog.Watchdog(job.folder, job.config.comm.timeout_s)
        self._oom = OomCount()
        self._events_before = len(records.read_lines(job.folder / file_names.EVENTS))
        self._looks_for_exit = not (job.folder / file_names.EXIT).exists()
        self._looked_s = 0.0
        self._complete = False

    @property
    def ranks(self) -> Sequence[AgentRank | RankProcess]:
        """What is known of each rank."""
        return self._group.ranks

    def run(self) -> WorldEnd:
        """Returns how the world ended, when no process of it is left.

        Raises:
            RunError: the ranks cannot be started.
        """
        self._note("launch_started", port=self.port, **provenance.myself())
        try:
            self._group.begin(self._is_interrupted)
            spawn.release()
            end = self._watch()
            self._feed()
        finally:
            self._group.kill()
        end.exit_codes = {r.rank: r.code for r in self.ranks if r.code is not None}
        return end

    def _watch(self) -> WorldEnd:
        while True:
            self._poll()
            self._feed()
            if self.interrupts.count:
                return self._cancel()
            codes = {rank.code for rank in self.ranks}
            if codes - {None, 0, PREEMPTED} or codes == {0, PREEMPTED}:
                return self._fail()
            if codes == {0}:
                return self._all_ended()
            if codes == {PREEMPTED}:
                return self._preempted(self.job.places.preemption())
            if self.interrupts.requests:
                return self._preempt()
            closed = self._closed_by_another()
            if closed is not None:
                return closed
            if self._watchdog.look({rank.rank for rank in self.ranks if rank.code is not None}):
                return self._hang()
            time.sleep(POLL_S)

    def _all_ended(self) -> WorldEnd:
        """Returns the end of a world whose ranks all exited with 0."""
        self._feed()
        # An srun that stands for a rank exits with 0, too, when Slurm has given its node up.
        if self.job.places.relayed and not self._complete:
            preemption = self.job.places.termination()
            if preemption is not None:
                return self._preempted(preemption)
        return WorldEnd("done")

    def _cancel(self) -> WorldEnd:
        self._note("stopping", why=self.interrupts.name)
        self._group.stop(GRACE_S, lambda: self.interrupts.count > 1)
        if self.interrupts.number == signal.SIGTERM:
            preemption = self.job.places.termination()
            if preemption is not None:
                return self._preempted(preemption)
        return WorldEnd("cancelled", f"stopped by {self.interrupts.name}")

    def _preempt(self) -> WorldEnd:
        """Passes SIGUSR2 on to the ranks, and waits until they have saved their state."""
        self._note("asked_to_make_way")
        self._group.preempt()
        preemption = self.job.places.preemption()
        self._wait(preemption.patience_s, self._any_failed)
        if self.interrupts.count:
            return self._cancel()
        if self._any_failed():
            self._wait(SETTLE_S)  # a neighbour of one that died of the signal has failed, too
            if not any(rank.code == -signal.SIGUSR2 for rank in self.ranks):
                return self._fail()
        self._group.stop(GRACE_S, self._is_interrupted)
        if all(rank.code == 0 for rank in self.ranks):
            return WorldEnd("done")
        return self._preempted(preemption)

    def _any_failed(self) -> bool:
        """Whether a rank ended as none does that got SIGUSR2."""
        return any(rank.code not in AFTER_SIGUSR2 for rank in self.ranks)

    def _preempted(self, preemption: Preemption) -> WorldEnd:
        saved = [line for line in self._events() if line.get("event") == "made_way"]
        done = f" after {saved[-1]['step']} of {self.job.config.steps} steps" if saved else ""
        cause = f"{preemption.cause}{done}; {preemption.then}"
        return WorldEnd("failed", cause, preemption.reason)

    def _closed_by_another(self) -> WorldEnd | None:
        """Stops all ranks if another process has written the end of this attempt.

        Slurm gives up a node that does not answer and starts its job again elsewhere, though all
        ranks of the node may still run: two attempts at once would be in each other's way.
        """
        now_s = time.monotonic()
        if not self._looks_for_exit or now_s - self._looked_s < watchdog.LOOK_S:
            return None
        self._looked_s = now_s
        end = Attempt(self.job.run_dir, self.job.attempt).exit
        if not end:
            return None
        self._note("stopping", why="another process has ended this attempt")
        self._group.stop(GRACE_S, self._is_interrupted)
        return WorldEnd(str(end.get("state")), end.get("cause"), end.get("reason"))

    def _hang(self) -> WorldEnd:
        """Finds out where the ranks stand, then stops them, because nothing moves any more."""
        job = self.job
        hang = watchdog.investigate(
            job.run_dir, job.attempt, self._group.pids(), self._is_interrupted
        )
        self._note("stopping", why="hang", cause=hang.cause)
        self._group.stop(GRACE_S, self._is_interrupted)
        cause = f"{hang.cause}; stopped after comm.timeout_s={job.config.comm.timeout_s:g} s"
        return WorldEnd("failed", cause, "hang", hang.rank)

    def _fail(self) -> WorldEnd:
        """Stops all ranks because one failed, and finds the first cause."""
        self._wait(SETTLE_S)
        relayed = self.job.places.relayed
        preemption = self.job.places.termination() if relayed else None
        if preemption is not None:  # the scheduler has ended the ranks, but not this process
            self._note("stopping", why=preemption.cause)
            self._group.stop(GRACE_S, self._is_interrupted)
            return self._preempted(preemption)
        signalled = any(rank.code == -signal.SIGTERM for rank in self.ranks)
        if relayed and (self._group.broken or signalled):
            # A job is ended by SIGTERM to the ranks and to this process, in any order.
            self._wait(SIGTERM_S, ended=False)
        if all(rank.code in STOPPED for rank in self.ranks):
            if self.interrupts.count:
                return self._cancel()
            broken = self._group.broken
            if broken:  # the ranks did nothing wrong: the program that started them did
                self._note("stopping", why=broken)
                self._feed()
                return WorldEnd("failed", broken, None if self._tail.seen else "launch")
        # A preempted rank is reported as the cause only if no other rank failed.
        failed = [rank.rank for rank in self.ranks if rank.code not in (None, 0, PREEMPTED)]
        failed = failed or [rank.rank for rank in self.ranks if rank.code]
        self._note("stopping", why="a rank failed", failed=failed)
        self._group.stop(GRACE_S, self._is_interrupted)
        first = blame.first_failure(self.ranks, failed, self._events(), self._oom.rose())
        self._feed()
        reason = first.reason or (None if self._tail.seen else "launch")
        port_taken = ports.was_taken(self.ranks[0].log) and not self._tail.seen
        return WorldEnd(
            "failed", first.cause, reason, first.rank, first.tail, port_taken=port_taken
        )

    def _is_interrupted(self) -> bool:
        return self.interrupts.count > 0

    def _events(self) -> list[dict[str, Any]]:
        """Returns the events since this start."""
        return records.read_lines(self.job.folder / file_names.EVENTS)[self._events_before :]

    def _wait(
        self, most_s: float, enough: Callable[[], bool] = lambda: False, ended: bool = True
    ) -> None:
        """Waits for an interrupt, at most so long.

        Args:
            most_s: the longest wait.
            enough: called again and again; True ends the wait, too.
            ended: whether the wait also ends with the last rank.
        """
        until = time.monotonic() + most_s
        while time.monotonic() < until and not self.interrupts.count and not enough():
            if ended and all(rank.code is not None for rank in self.ranks):
                return
            time.sleep(POLL_S / 2)
            self._poll()
            self._feed()

    def _poll(self) -> None:
        for rank in self._group.poll():
            self._note("rank_exited", rank=rank.rank, code=rank.code)

    def _feed(self) -> None:
        """Passes on what the ranks have recorded meanwhile."""
        for line in self._tail.read():
            self._complete = self._complete or line.get("kind") == "done"
            if self.job.on_line is not None:
                self.job.on_line(line)

    def _note(self, event: str, **fields: Any) -> None:
        """Writes an event; on a full disk it matters more that the ranks are stopped."""
        with contextlib.suppress(RunError):
            records.event(self.job.run_dir, self.job.attempt, event, **fields)
