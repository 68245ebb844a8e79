"""Submits scripts with sbatch, and explains a refusal by the config keys that may have caused it.

A site may have put a command of its own in sbatch's place, that greets and advises; only the line
that names the job counts. For a refusal, the lines of the script that may have caused it are shown,
with the keys of the config that they follow from.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.launcher import commands
from hires.launcher.slurm import scheduler

RANKS = "the layout's ranks"
"""Where the number of ranks of a job comes from; that of a check follows from its nodes alone."""
_TIMEOUT_S = 120
_NUMBER = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?")
"""A line of sbatch that names a job, with ``--parsable`` and without."""


class RefusedError(ConfigError):
    """sbatch refuses a job because of an option of its script."""

    def __init__(self, why: str, keys: Sequence[str] = (), advice: str = "") -> None:
        """Takes why, and the keys to change, or else what to do."""
        self.why, self._keys, self._advice = why, keys, advice
        super().__init__(f"{why}; {self.remedy()}")

    def remedy(self, besides: str | None = None) -> str:
        """Returns what would help, without a key that this job does not have."""
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
    answer = _sbatch("--parsable", *options, str(path), *words, script=path)
    numbers = [
        match[1] for match in map(_NUMBER.fullmatch, map(str.strip, answer.splitlines())) if match
    ]
    if numbers:
        return str(numbers[-1])
    text = " ".join(answer.split()) or "nothing"
    raise RunError(
        f"sbatch took the job, but names no number; it said: {text}; `squeue --me` shows whether "
        f"the job is queued, and scancel removes it"
    )


def start_estimate(script: Path) -> str:
    """Returns when Slurm would start a job, in its own words, without submitting it.

    Raises:
        ConfigError: Slurm would refuse it.
        RunError: Slurm is not here, or does not answer.
    """
    lines = _sbatch("--test-only", str(script), script=script).splitlines()
    estimates = [line for line in lines if " to start at " in line] or lines
    return " ".join(estimates).removeprefix("sbatch: ").strip()


def after(config: RunConfig, *others: str | None) -> list[str]:
    """Returns sbatch's ``--dependency`` for all that a job has to wait for, as a list of words.

    An option on the command line hides that line of the script, so it repeats the site's.

    Args:
        config: whose ``cluster.options`` may have a ``dependency``.
        others: what else it waits for, in sbatch's words; None: nothing.
    """
    wanted = [text for text in others if text]
    site = config.cluster.options.get("dependency")
    return [f"--dependency={joined(str(site or ''), *wanted)}"] if wanted else []


def joined(*lists: str) -> str:
    """Returns the entries of sbatch's lists with commas, each once.

    >>> joined("n[1-2,4],n5", "n5,n6")
    'n[1-2,4],n5,n6'
    """
    parts = (part for text in lists for part in re.split(r",(?![^[]*\])", text) if part)
    return ",".join(dict.fromkeys(parts))


def _sbatch(*words: str, script: Path) -> str:
    """Returns what sbatch prints; of a refusal, the reason and the line that caused it."""
    try:
        done = commands.run("sbatch", *words, most_s=_TIMEOUT_S)
    except commands.MissingProgramError:
        raise RunError(
            "there is no sbatch here: start it on a machine of a Slurm cluster, or use "
            "launcher=local; --dry-run writes the script all the same"
        ) from None
    if done.returncode != 0:
        raise _refusal(done.stderr or done.stdout, script)
    return done.stderr + done.stdout  # of two lines that name a job the last one counts


_SIZES = "nodes|ntasks-per-node|cpus-per-task"
_OF_SITE = "exclude|nodelist|nodefile|constraint|gres|gpus[a-z-]*|mem[a-z-]*|reservation"
"""Options of ``cluster.options`` that leave fewer nodes to choose from."""
_KEYS = {
    "qos": ("launcher.qos",),
    "time": ("launcher.minutes",),
    "signal": ("launcher.signal_s",),
    "cpus-per-task|ntasks|ntasks-per-node": ("launcher.threads", RANKS),
    f"{_SIZES}|{_OF_SITE}": ("launcher.nodes", "launcher.threads", RANKS),
}
"""Keys of the config that options of the script follow from."""
_CAUSES = {
    "dependency": "after",
    "node name": "exclude",
    "account": "account",
    "qos": "qos",
    "array": "array",
    "partition": "partition",
    "time limit|--time|deadline": "time",
    "signal": "signal",
    "cpu count|processors|cpus-per-task|--ntasks": "cpus-per-task|ntasks|ntasks-per-node",
    "node count|node configuration|--nodes": f"{_SIZES}|{_OF_SITE}",
}
"""Words of sbatch's message, and the options that they may mean; the first match counts."""
_ADVICE = {
    "after": "change --after: give the number of a job that Slurm knows, or a campaign",
    "array": "change --max-parallel, or sweep fewer points at once",
    "exclude": "a node of that list does not exist (any more): change cluster.options.exclude, "
    "or if it is not from there run the points with `hires sweep`",
}


def _refusal(message: str, script: Path) -> ConfigError | RunError:
    why = "; ".join(line.removeprefix("sbatch: error: ") for line in message.splitlines() if line)
    option = next((o for words, o in _CAUSES.items() if re.search(words, message, re.I)), None)
    if option is None:
        return RunError(f"sbatch refused the job: {why or 'it gave no reason'}; see {script}")
    text, of_site = f"sbatch refused the job: {why}", []
    pattern = re.compile(rf"#SBATCH --({option})(=|$)")
    for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), start=1):
        match = pattern.match(line)
        if match is not None:
            text += f"; line {number} of {script} is: {line}"
            if re.fullmatch(_OF_SITE, match[1]):
                of_site.append(f"cluster.options.{match[1]}")
    if option in _KEYS:
        return RefusedError(text, (*of_site, *_KEYS[option]))
    advice = _ADVICE.get(option) or ""
    if option == "partition":
        advice = _choices("partition", "sinfo", "--noheader", "--format=%R (%a)")
    elif option == "account":
        words = ("show", "associations", f"users={getpass.getuser()}", "format=Account")
        advice = _choices("account", "sacctmgr", "-nP", *words)
    return RefusedError(text, advice=advice)


def _choices(key: str, *command: str) -> str:
    try:
        names = dict.fromkeys(line.strip() for line in scheduler.ask(*command).splitlines())
    except RunError:
        return f"choose another launcher.{key}"
    there = ", ".join(name.removesuffix(" (up)") for name in names if name)
    return f"launcher.{key} may be one of {there}" if there else f"leave launcher.{key} out"
