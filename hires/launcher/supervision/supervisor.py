"""Supervises one world of ranks from the first start to the last exit.

A rank that is left alone would wait for its dead neighbour for minutes, so the first failure, a
signal or a hang ends all ranks. "Stop" below is SIGTERM to every rank, and SIGKILL after GRACE_S
(at once if another signal arrives meanwhile):

    watch ─┬─ all ranks exit with 0 ──────────────────────────────────▶ done
           ├─ SIGINT, SIGTERM, SIGHUP ─ stop ──────────────────────────▶ cancelled ¹
           ├─ SIGUSR2 ─ a file requests that the ranks save their state and exit
           │            with PREEMPTED within patience_s ─ stop ──────▶ failed, preempted | timeout
           ├─ a rank fails ─ wait SETTLE_S for other reports ─ stop ───▶ failed, first cause ¹
           ├─ no progress in comm.timeout_s ─ SIGUSR1, hang.txt ─ stop ▶ failed, hang
           ├─ a request file of ``hires cancel`` appears ─ stop ───────▶ cancelled
           └─ exit.json appears: another start closed this attempt ─ stop ▶ that end

¹ Schedulers end jobs by plain SIGTERM, too: ``places.termination()`` says whether this one did, and
the end is then ``preempted``, ``timeout`` or ``node``. Where ranks run elsewhere, they may receive
that SIGTERM up to SIGTERM_S before the supervisor does.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hires.core.errors import PREEMPTED
from hires.core.ranks import meeting
from hires.core.store import file_names, provenance
from hires.core.store.attempts import Attempt
from hires.core.store.ends import End, State
from hires.launcher.ranks import spawn
from hires.launcher.ranks.places import Preemption
from hires.launcher.ranks.rank_group import ChildRanks, CommandRanks, Launch, Rank, RankGroup
from hires.launcher.status.run_progress import LinesTail
from hires.launcher.supervision import blame, watchdog

POLL_S = 0.05
"""How often the ranks are polled; it costs nothing that a measurement would show."""
SETTLE_S = 0.3
"""How long the other ranks may still report after one failed, so that the cause is among them."""
GRACE_S = 2.0
"""How long ranks may take to end after SIGTERM."""
SIGTERM_S = 5.0
"""How long after ranks elsewhere were ended by SIGTERM the same may reach the supervisor."""
CONSEQUENCE_S = 5.0
"""How long the command that started the ranks may take to say which was killed, if the others only
report that they have lost it."""


class Interrupts:
    """Counts signals that end a run (SIGINT, SIGTERM, SIGHUP), and SIGUSR2, while it is entered.

    The supervisor handles them between its steps, not inside one. Only the main thread can set
    handlers: elsewhere nothing is counted and nothing changes. A signal that was ignored before
    (``nohup``) stays ignored. Afterwards the former handlers return.
    """

    def __init__(self) -> None:
        self.count = 0
        self.requests = 0
        """How often SIGUSR2 came, by which a scheduler asks a run to save its state and end."""
        self.received: list[signal.Signals] = []
        """All in order, SIGUSR2 at most once: what is to be passed on."""
        self.name = ""
        """The first signal, as it is shown."""
        self.number = signal.SIGINT
        """The last signal."""
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, lambda n, _: self.take(n))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # held since the start
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def take(self, number: int) -> None:
        """Counts a signal."""
        if number == signal.SIGUSR2:
            self.requests += 1
            self.received += [signal.SIGUSR2] if self.requests == 1 else []
        else:
            shown = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self.count_signal(signal.Signals(number), shown)

    def count_signal(self, number: signal.Signals, name: str) -> None:
        """Counts a signal that ends a run; ``name``: as it is shown."""
        self.name = self.name or name
        self.number = number
        self.received.append(number)
        self.count += 1


class Supervisor:
    """Runs one world of ranks to its end."""

    def __init__(self, job: Launch, port: int, interrupts: Interrupts) -> None:
        self.job, self.port, self.interrupts = job, port, interrupts
        starter = job.places.starter
        self._group: RankGroup = (
            ChildRanks(job, port) if starter is None else CommandRanks(job, port, starter)
        )
        self.ranks: Sequence[Rank] = self._group.ranks  # those that were started, in order
        self._metrics = LinesTail(job.folder, file_names.METRICS)
        self._events = LinesTail(job.folder, file_names.EVENTS)
        timeout_s, world = job.config.comm.timeout_s, job.places.num_ranks
        self._watchdog = watchdog.Watchdog(job.folder, timeout_s, world)
        self._oom = blame.OomCount(job.folder / file_names.LOGS / file_names.LAUNCHER_LOG)
        self._asked_s = 0.0

    def run(self) -> End:
        """Returns how the world ended, when no process of it is left; RunError: it never began."""
        myself = provenance.myself() | {"thread": threading.get_native_id()}
        self.job.note("launch_started", port=self.port, **myself)
        secret = self.job.folder / file_names.SECRET
        try:
            meeting.write_secret(secret)
            self._group.begin(self._is_interrupted)
            spawn.release()
            end = self._watch()
            self._feed()
        finally:
            self._group.kill()
            with contextlib.suppress(OSError):
                secret.unlink(missing_ok=True)
        return replace(end, exit_codes={r.rank: r.code for r in self.ranks if r.code is not None})

    def _watch(self) -> End:
        looked_s = 0.0
        while True:
            self._look()
            if self.interrupts.count:
                return self._cancel()
            codes = {rank.code for rank in self.ranks}
            # 0 and PREEMPTED together: some ranks did not get the request, and would wait for ever.
            if codes - {None, 0, PREEMPTED} or codes == {0, PREEMPTED}:
                return self._fail()
            if codes == {0}:
                return End(State.DONE)
            if codes == {PREEMPTED}:  # the scheduler signalled the ranks themselves
                return self._preempted(self.job.places.preemption())
            if self.interrupts.requests:
                return self._preempt()
            if time.monotonic() - looked_s >= watchdog.LOOK_S:
                looked_s = time.monotonic()
                if self._see_request():
                    return self._cancel()
                if (end := self._ended_elsewhere()) is not None:
                    return end
                if self._watchdog.look({rank.rank for rank in self.ranks if rank.code is not None}):
                    return self._hang()
            time.sleep(POLL_S)

    def _cancel(self) -> End:
        """Stops all ranks because of a signal; the second one makes it hurry."""
        self.job.note("stopping", why=self.interrupts.name)
        self._group.stop(GRACE_S, lambda: self.interrupts.count > 1)
        is_asked = self.interrupts.number == signal.SIGTERM  # by scancel, or the scheduler itself
        if is_asked and (preemption := self.job.places.termination()) is not None:
            return self._preempted(preemption)
        return End(State.CANCELLED, f"stopped by {self.interrupts.name}")

    def _preempt(self) -> End:
        """Makes the ranks save their state, and waits until they have ended."""
        self.job.note("preemption_requested")
        self._group.preempt()
        preemption = self.job.places.preemption()
        self._wait(preemption.patience_s, self._any_failed)
        if self.interrupts.count:
            return self._cancel()
        if self._any_failed():
            return self._fail()
        self._group.stop(GRACE_S, self._is_interrupted)
        if all(rank.code == 0 for rank in self.ranks):
            return End(State.DONE)
        return self._preempted(preemption)

    def _any_failed(self) -> bool:
        return any(rank.code not in (None, 0, PREEMPTED) for rank in self.ranks)

    def _preempted(self, preemption: Preemption) -> End:
        saved = [line for line in self._events.read() if line.get("event") == "preempted"]
        done = f" after {saved[-1]['step']} of {self.job.config.steps} steps" if saved else ""
        cause = f"{preemption.cause}{done}; {preemption.then}"
        return End(State.FAILED, cause, reason=preemption.reason)

    def _ended_elsewhere(self) -> End | None:
        """Stops all ranks if another process wrote the attempt's end, and returns that.

        Slurm gives up a node that does not answer and starts its job again elsewhere, though all
        ranks of the node may still run: two attempts at once would be in each other's way. The
        ranks look, too, and may end before this process has seen it.
        """
        end = Attempt(self.job.run_dir, self.job.attempt).exit
        if end is not None:
            self._stop("another process has ended this attempt")
        return end

    def _see_request(self) -> bool:
        """Counts a request of ``hires cancel`` as SIGTERM, once; returns whether there is one."""
        self._asked_s = time.monotonic()
        attempt = Attempt(self.job.run_dir, self.job.attempt)
        if not attempt.is_cancelled:
            return False
        if not self.interrupts.count:
            self.interrupts.count_signal(signal.SIGTERM, "hires cancel")
        return True

    def _hang(self) -> End:
        """Stops all ranks because nothing moves any more; ``hang.txt`` says where each stands."""
        job = self.job
        hang = watchdog.investigate(
            job.run_dir, job.attempt, self._group.pids(), self._is_interrupted
        )
        self._stop("hang", cause=hang.cause)
        cause = f"{hang.cause}; stopped after comm.timeout_s={job.config.comm.timeout_s:g} s"
        rank = hang.culprits[0] if len(hang.culprits) == 1 else None
        return End(State.FAILED, cause, failed_rank=rank, reason="hang")

    def _fail(self) -> End:
        """Stops all ranks because one failed, and finds the first cause."""
        # The first exit seen need not be the first cause: neighbours fail within milliseconds, and
        # each may still report why.
        self._wait(SETTLE_S)
        if (end := self._ended_elsewhere()) is not None:
            return end
        if (preemption := self.job.places.termination()) is not None:
            # The scheduler has ended the ranks, but not this process.
            self._stop(preemption.cause)
            return self._preempted(preemption)
        signalled = any(rank.code == -signal.SIGTERM for rank in self.ranks)
        if self.job.places.nodes and (self._group.broken or signalled):
            # A job is ended by SIGTERM to the ranks and to this process, in any order.
            self._wait(SIGTERM_S, ended=False)
        events = self._events.read()
        if self.job.places.starter is not None and not blame.has_cause(self.ranks, events):
            self._wait(CONSEQUENCE_S, lambda: self._group.broken is not None, ended=False)
            events += self._events.read()
        if self.interrupts.count and all(rank.code in blame.STOPPED for rank in self.ranks):
            return self._cancel()
        broken = self._group.broken
        if broken and not blame.has_cause(self.ranks, events):
            # The ranks did nothing wrong: one was killed, or the program that started them.
            self.job.note("stopping", why=broken)
            self._feed()
            proved = blame.proved_reason("", f"{broken}{self._oom.rose() or ''}")
            return End(State.FAILED, broken, reason=proved or self._launch_reason())
        # A preempted rank is reported as the cause only if no other rank failed.
        failed = [rank.rank for rank in self.ranks if rank.code not in (None, 0, PREEMPTED)]
        failed = failed or [rank.rank for rank in self.ranks if rank.code]
        self._stop("a rank failed", failed=failed)
        events += self._events.read()
        first = blame.first_failure(self.ranks, failed, events, self._oom.rose())
        self._feed()
        return replace(first, reason=first.reason or self._launch_reason())

    def _launch_reason(self) -> str | None:
        return None if self._metrics.seen else "launch"

    def _stop(self, why: str, **fields: Any) -> None:
        self.job.note("stopping", why=why, **fields)
        self._group.stop(GRACE_S, self._is_interrupted)

    def _is_interrupted(self) -> bool:
        return self.interrupts.count > 0

    def _wait(
        self, most_s: float, enough: Callable[[], bool] = lambda: False, ended: bool = True
    ) -> None:
        """Waits so long at most: for an interrupt, ``enough`` or, with ``ended``, the last rank."""
        until = time.monotonic() + most_s
        while time.monotonic() < until and not self.interrupts.count and not enough():
            if ended and not self._group.running:
                return
            time.sleep(POLL_S / 2)
            self._look()
            if time.monotonic() - self._asked_s >= watchdog.LOOK_S:
                self._see_request()

    def _look(self) -> None:
        """Notes which ranks have ended, and passes on what the ranks have recorded."""
        for rank in self._group.poll():
            self.job.note("rank_exited", rank=rank.rank, code=rank.code)
        self._feed()

    def _feed(self) -> None:
        for line in self._metrics.read():
            if self.job.on_line is not None:
                self.job.on_line(line)
