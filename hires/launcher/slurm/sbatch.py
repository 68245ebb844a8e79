"""Submits scripts with sbatch, and explains a refusal by the config keys that may have caused it.

A site may have put a command of its own in sbatch's place, that greets and advises; only the line
that names the job counts. For a refusal, the lines of the script that may have caused it are shown,
with the keys of the config that they follow from.
"""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hires.core.errors import ConfigError, RunError
from hires.launcher.slurm import allocation

RANKS = "the layout's ranks"
"""Where the number of ranks of a job comes from; that of a check follows from its nodes alone."""
_TIMEOUT_S = 120


class RefusedError(ConfigError):
    """sbatch refuses a job because of an option of its script."""

    def __init__(self, why: str, keys: Sequence[str] = (), advice: str = "") -> None:
        """Takes why, and the keys to change, or else what to do."""
        self.why = why
        self._keys = keys
        self._advice = advice
        super().__init__(f"{why}; {self.remedy()}")

    def remedy(self, besides: str | None = None) -> str:
        """Returns what would help.

        Args:
            besides: a key that this job does not have.
        """
        *others, last = [key for key in self._keys if key != besides] or [self._advice]
        named = f"{', '.join(others)} or {last}" if others else last
        return f"change {named}" if self._keys else named


def submit(path: Path, options: Sequence[str] = (), *words: str) -> str:
    """Submits a script and returns the number of the job or array.

    Args:
        path: the script.
        options: more options for sbatch.
        words: arguments of the script.

    Raises:
        ConfigError: Slurm refuses an option, whose line is shown.
        RunError: Slurm is not here, does not answer, or names no job.
    """
    return _number_in(_sbatch("--parsable", *options, str(path), *words, script=path))


def start_estimate(script: Path) -> str:
    """Returns when Slurm would start a job, in its own words, without submitting it.

    Raises:
        ConfigError: Slurm would refuse it.
        RunError: Slurm is not here, or does not answer.
    """
    lines = _sbatch("--test-only", str(script), script=script).splitlines()
    estimates = [line for line in lines if " to start at " in line] or lines
    return " ".join(estimates).removeprefix("sbatch: ").strip()


def _number_in(answer: str) -> str:
    r"""Returns the number of the job that sbatch names, whatever a site's wrapper prints besides.

    Raises:
        RunError: it names none.

    >>> _number_in("Welcome to our site\n41;cluster\n"), _number_in("Submitted batch job 42\n")
    ('41', '42')
    """
    lines = map(str.strip, answer.splitlines())
    numbers = [match[1] for match in map(_NUMBER.fullmatch, lines) if match]
    if numbers:
        return str(numbers[-1])
    said = " ".join(answer.split()) or "nothing"
    raise RunError(
        f"sbatch took the job, but names no number; it said: {said}; `squeue --me` shows whether "
        f"the job is queued, and scancel removes it"
    )


_NUMBER = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?")
"""A line of sbatch that names a job, with ``--parsable`` and without."""


def _sbatch(*words: str, script: Path) -> str:
    """Returns what sbatch prints; of a refusal, the reason and the line that caused it."""
    try:
        done = subprocess.run(
            ["sbatch", *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise RunError(
            "there is no sbatch here: start it on a machine of a Slurm cluster, or use "
            "launcher=local; --dry-run writes the script all the same"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"sbatch did not answer within {_TIMEOUT_S} s; try again later") from None
    if done.returncode != 0:
        raise _refusal(done.stderr or done.stdout, script)
    return done.stderr + done.stdout  # of two lines that name a job the last one counts


def _refusal(message: str, script: Path) -> ConfigError | RunError:
    """Returns the error for a script that sbatch refuses with a message."""
    said = "; ".join(line.removeprefix("sbatch: error: ") for line in message.splitlines() if line)
    option = next((o for pattern, o in _CAUSES if re.search(pattern, message, re.IGNORECASE)), None)
    if option is None:
        return RunError(f"sbatch refused the job: {said or 'it gave no reason'}; see {script}")
    text, of_site = f"sbatch refused the job: {said}", []
    pattern = re.compile(rf"#SBATCH --({option}{f'|{_OF_SITE}' if option == _NODES else ''})(=|$)")
    for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), start=1):
        match = pattern.match(line)
        if match is not None:
            text += f"; line {number} of {script} is: {line}"
            if not re.fullmatch(option, match[1]):
                of_site.append(f"cluster.options.{match[1]}")
    if option in _KEYS:
        return RefusedError(text, (*of_site, *_KEYS[option]))
    return RefusedError(text, advice=_advice(option))


_NODES = "nodes|ntasks-per-node|cpus-per-task"
_OF_SITE = "exclude|nodelist|nodefile|constraint|gres|gpus[a-z-]*|mem[a-z-]*|reservation"
"""Options of ``cluster.options`` that leave fewer nodes to choose from."""

# Words of sbatch's message, and the options that they may mean; the first match counts.
_CAUSES = (
    ("dependency", "after"),
    ("node name", "exclude"),
    ("account", "account"),
    ("qos", "qos"),
    ("array", "array"),
    ("partition", "partition"),
    ("time limit|--time|deadline", "time"),
    ("signal", "signal"),
    ("cpu count|processors|cpus-per-task|--ntasks", "cpus-per-task|ntasks|ntasks-per-node"),
    ("node count|node configuration|--nodes", _NODES),
)
_KEYS = {
    "time": ("launcher.minutes",),
    "signal": ("launcher.signal_s",),
    "qos": ("launcher.qos",),
    "cpus-per-task|ntasks|ntasks-per-node": ("launcher.threads", RANKS),
    _NODES: ("launcher.nodes", "launcher.threads", RANKS),
}
_ADVICE = {
    "after": "change --after: give the number of a job that Slurm knows, or a campaign",
    "array": "change --max-parallel, or sweep fewer points at once",
    "exclude": "a node of that list does not exist (any more): change cluster.options.exclude, "
    "or if it is not from there run the points with `hires sweep`",
}


def _advice(option: str) -> str:
    if option == "partition":
        return _choices("partition", "sinfo", "--noheader", "--format=%R (%a)")
    if option == "account":
        users = f"users={getpass.getuser()}"
        command = ("sacctmgr", "-nP", "show", "associations", users, "format=Account")
        return _choices("account", *command)
    return _ADVICE[option]


def _choices(key: str, *command: str) -> str:
    """Returns the names that a command lists, as a remedy."""
    try:
        names = dict.fromkeys(line.strip() for line in allocation.ask(*command).splitlines())
    except RunError:
        return f"choose another launcher.{key}"
    there = ", ".join(name.removesuffix(" (up)") for name in names if name)
    return f"launcher.{key} may be one of {there}" if there else f"leave launcher.{key} out"
