"""What does Slurm know about the jobs of a campaign? Its own tools are asked, without a shell.

``squeue`` tells of jobs that wait, run, or ended lately; ``sacct`` of those that ended long ago,
where the site keeps accounts; ``scontrol`` of those that neither lists. Arrays are asked about by
their number alone, so one call of ``squeue`` serves thousands of elements; those that wait come
back together, as ``5-9``. A tool that is missing or fails is no answer at all, and no answer is
never taken for "the job is gone".
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from hires.core.errors import RunError
from hires.launcher.interface import (
    ENDED,
    GONE,
    PENDING,
    RUNNING,
    UNKNOWN,
    Job,
    JobStatus,
    job_name,
)

_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_TIMEOUT_S = 30.0
_AT_ONCE = 8000
"""Numbers of jobs on one command line, a word of which Linux lets have 128 KiB."""
_SINGLE = 32
"""Jobs and arrays about which ``scontrol`` is asked, one by one, at most."""
_MISSING = ("Invalid job id", "not found")
"""Slurm's words for a job that it does not know, as an element of an array that was cancelled
while it waited."""
_NOTHING = ("", "(null)", "None", "N/A", "Unknown")


def job_states(jobs: Iterable[Job]) -> dict[str, JobStatus]:
    """Returns what Slurm says of each job, by its name."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        names.setdefault(str(job["job"]), []).append(job_name(job))
    numbers = list(names)
    answers: dict[str, JobStatus] = {}
    for first in range(0, len(numbers), _AT_ONCE):
        some = {number: names[number] for number in numbers[first : first + _AT_ONCE]}
        answers.update(_ask_some(some))
    return answers


def scripts_of_all() -> Iterator[tuple[str, str]]:
    """Yields this user's jobs that wait or run, by name, and the script of each.

    A script's path may hold blanks, and one word may stand behind it: each job is yielded with both
    readings. Nothing comes if squeue does not answer.
    """
    done = _run("squeue", "--noheader", f"--user={os.getuid()}", "--format=%F|%K|%o")
    if isinstance(done, str) or done.returncode:
        return
    for line in done.stdout.splitlines():
        parts = line.strip().split("|", 2)
        if len(parts) == 3:
            job, index, command = parts
            words = command.split(" ")
            for name in _names(job, index):
                # After the script may stand the number of an attempt, or of an element.
                yield from ((name, " ".join(words[: len(words) - cut])) for cut in (0, 1))


def exit_code(name: str) -> int | None:
    """Returns the exit code of a job that has just ended; None if Slurm does not say."""
    done = _run("scontrol", "show", "job", name)
    found = None if isinstance(done, str) else re.search(r"\bExitCode=(\d+):", done.stdout)
    return int(found[1]) if found else None


def is_unknown(name: str) -> bool:
    """Whether Slurm answers that it knows nothing of a job, an array or an element."""
    number, _, index = name.partition("_")
    found, why = _squeue([number])
    if why is None:
        found = found or _sacct([number])
        told = found or _scontrol(number)
        return not isinstance(told, str) and (name not in told if index else not told)
    return False


def cancel(jobs: Iterable[Job]) -> None:
    """Cancels jobs and elements of arrays, with as few calls as the command line allows.

    Raises:
        RunError: Slurm refused, or its tools are not here.
    """
    indices: dict[str, set[int | None]] = {}
    for job in jobs:
        indices.setdefault(str(job["job"]), set()).add(job.get("index"))
    words = [word for job, found in indices.items() for word in _words_of(job, found)]
    for first in range(0, len(words), _AT_ONCE):
        some = words[first : first + _AT_ONCE]
        done = _run("scancel", *some)
        told = f"job{'s' if len(some) > 1 else ''} {', '.join(some[:3])}"
        told += f" and {len(some) - 3} more" if len(some) > 3 else ""
        if isinstance(done, str):
            raise RunError(f"{told} cannot be cancelled: {done}")
        if done.returncode:
            raise RunError(f"{told} cannot be cancelled: {_said(done)}")


def _words_of(job: str, indices: set[int | None]) -> Iterator[str]:
    """Yields how scancel is told a job, or some elements of an array; ``123_[0-4,7]``."""
    if None in indices:
        yield job
        return
    ranges: list[list[int]] = []
    for index in sorted(index for index in indices if index is not None):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    for first in range(0, len(texts), _RANGES):
        text = ",".join(texts[first : first + _RANGES])
        yield f"{job}_{text}" if text.isdecimal() else f"{job}_[{text}]"


_RANGES = 500
"""Ranges of elements in one word for scancel."""


def _ask_some(names: dict[str, list[str]]) -> dict[str, JobStatus]:
    """Returns what Slurm says of a handful of jobs, whose names are given by their numbers."""
    found, why = _squeue(list(names))
    wanted = [name for some in names.values() for name in some]
    if why is not None:
        return {name: JobStatus(UNKNOWN, why) for name in wanted}
    missing = _missing(names, found)
    if missing:
        found = {**_sacct(missing), **found}
    for number in _missing(names, found)[:_SINGLE]:
        told = _scontrol(number)
        if isinstance(told, str):
            told = dict.fromkeys(names[number], JobStatus(UNKNOWN, told))
        found = {**told, **found}
    return {name: _told(name, found) for name in wanted}


def _told(name: str, found: dict[str, JobStatus]) -> JobStatus:
    """Returns what Slurm says of a job or an element.

    If an array is cancelled, what waits of it is listed under its number alone from then on.
    """
    cancelled = JobStatus(ENDED, "CANCELLED")
    whole = found.get(name.partition("_")[0])
    return found.get(name, cancelled if whole == cancelled else JobStatus(GONE))


def _missing(names: dict[str, list[str]], found: dict[str, JobStatus]) -> list[str]:
    """Returns the numbers of jobs and arrays of which some name was not found."""
    return [number for number, some in names.items() if any(name not in found for name in some)]


def _squeue(numbers: Sequence[str]) -> tuple[dict[str, JobStatus], str | None]:
    """Returns the jobs that squeue lists, and why it did not answer if it did not."""
    done = _run(
        "squeue",
        "--noheader",
        "--states=all",
        f"--jobs={','.join(numbers)}",
        "--format=%F|%K|%T|%S|%r",
    )
    if isinstance(done, str):
        return {}, done
    if done.returncode and not _is_missing(done):
        return {}, _said(done)
    found: dict[str, JobStatus] = {}
    for line in done.stdout.splitlines():
        parts = line.strip().split("|", 4)
        if len(parts) == 5:
            job, index, state, start, reason = parts
            answer = _answer(state, reason, start)
            found.update((name, answer) for name in _names(job, index))
    return found, None


def _names(job: str, index: str) -> Iterator[str]:
    """Yields the names of a job, or of all elements that ``4`` or ``5-9,12-20:2%3`` means."""
    text = index.strip("[]").partition("%")[0]
    if text in _NOTHING:
        yield job
        return
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if found is not None:
            first, last, step = found.groups()
            for number in range(int(first), int(last or first) + 1, int(step or 1)):
                yield f"{job}_{number}"


def _sacct(numbers: Sequence[str]) -> dict[str, JobStatus]:
    """Returns the jobs that the accounts list; none where there are no accounts."""
    done = _run(
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={','.join(numbers)}",
        "--format=JobID,State,Reason",
    )
    if isinstance(done, str) or done.returncode:
        return {}
    found: dict[str, JobStatus] = {}
    for line in done.stdout.splitlines():
        parts = line.strip().split("|", 2)
        if len(parts) == 3:
            answer = _answer(parts[1], parts[2], "")
            job, _, index = parts[0].partition("_")
            found.update((name, answer) for name in _names(job, index))
    return found


def _scontrol(number: str) -> dict[str, JobStatus] | str:
    """Returns what scontrol says of a job or an array, or in words why it says nothing."""
    done = _run("scontrol", "--oneliner", "show", "job", number)
    if isinstance(done, str):
        return done
    if done.returncode:
        return {} if _is_missing(done) else _said(done)
    found: dict[str, JobStatus] = {}
    for line in done.stdout.splitlines():
        words = (word.partition("=") for word in line.split())
        fields = {key: value for key, equals, value in words if equals}
        reason, start = fields.get("Reason", ""), fields.get("StartTime", "")
        answer = _answer(fields.get("JobState", ""), reason, start)
        found.update((name, answer) for name in _names(number, fields.get("ArrayTaskId", "")))
    return found


def _answer(state: str, reason: str, start: str) -> JobStatus:
    """Returns the answer that Slurm's words mean; ``CANCELLED by 0`` is ``CANCELLED``."""
    word = state.split()[0].rstrip("+") if state.split() else ""
    why = None if reason in _NOTHING else reason
    if word in _PENDING:
        return JobStatus(PENDING, why, None if start in _NOTHING else start)
    if word in _RUNNING:
        return JobStatus(RUNNING, why)
    return JobStatus(ENDED, word) if word else JobStatus(UNKNOWN, f"no state in {state!r}")


def _run(*command: str) -> subprocess.CompletedProcess[str] | str:
    """Returns what a tool answered, or in words why it could not be asked."""
    environ = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    environ["SLURM_BITSTR_LEN"] = "0"  # or lists of elements would be cut after 64 characters
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return f"{command[0]} is not installed here; ask on a machine of the cluster"
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"


def _is_missing(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a tool answered that there is no such job."""
    return any(words in done.stdout + done.stderr for words in _MISSING)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the last line that a tool said, or else its exit code."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"{done.args[0]} exited with code {done.returncode}"
