"""Names every file of a folder of results, and the size up to which readers open it.

    results/
      <campaign>/                  campaign.json
        <slug>-<hash8>/            config.yaml plan.json launch.sh planned.json record.json
                                   frozen.json choice.json job.sbatch job.log (Slurm)
          checkpoints/step000012/  checkpoint.json stage00.safetensors ...
          a<attempt>/              env.json job.json events.jsonl exit.json record.json cancel
            alive/rank0000         heartbeat of a rank
            messages/              rank0000.messages (comm.log=full)
            logs/                  rank0000.log stacks-rank0000.txt launcher.log
                                   rank0000.events.jsonl .metrics.jsonl .timeline.jsonl

No other module spells one of these names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

StrPath = str | os.PathLike[str]

# Unlike those of Path they raise nothing: a path may be too long, a loop, or in a closed folder.
exists, is_file, is_dir = os.path.exists, os.path.isfile, os.path.isdir

# In the folder of all results, and in that of a campaign.
CAMPAIGN = "campaign.json"
SWEEP_LOCK = ".sweep.lock"
SUBMIT_LOCK = ".submit.lock"
STOP_SWEEP = ".cancel"
CALIBRATION = "calibration.json"
"""What a machine's operators and links take; in the user's cache."""

NODES = "nodes.json"
"""What the nodes of a job of ``hires doctor`` have; in a folder that looks like that of a run."""

# In a run folder.
CONFIG = "config.yaml"
PLAN = "plan.json"
LAUNCH_SCRIPT = "launch.sh"
FROZEN = "frozen.json"
"""Digests of what the run was planned from."""
PLANNED = "planned.json"
"""What ``env.json`` of an attempt holds, of the command that planned the run."""
CHOICE = "choice.json"
"""The layouts that ``parallel=auto`` chose from."""
JOB_SCRIPT = "job.sbatch"
JOB_LOG = "job.log"
BEGIN_LOCK = ".begin.lock"
CHECKPOINTS = "checkpoints"
CHECKPOINT = "checkpoint.json"
"""Manifest of one checkpoint."""
BEST = "best.json"
"""Among the checkpoints: which of them had the best evaluation."""
RECORD = "record.json"
"""In a run folder that of the run; in the folder of an attempt its own."""

# In the folder of an attempt.
ENV = "env.json"
JOB = "job.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
TIMELINE = "timeline.jsonl"
EXIT = "exit.json"
EVALUATION = "evaluation.json"
"""Accuracies of an evaluation, and what it predicted for every image."""
PREDICTION = "prediction.json"
"""Of what, how many, and where they are."""
PREDICTION_TABLES = {"csv": "predictions.csv", "parquet": "predictions.parquet"}
"""What was predicted for every image, or in which file that is."""
PREDICTIONS = "predictions"
"""Folder of these files."""
SCALES = "scales.json"
"""What a calibration has found."""
CANCEL = "cancel"
"""A request to end this attempt, which its supervisor reads."""
PREEMPT = "preempt"
"""A request to save the state and end, which every rank reads."""
SECRET = "secret"
"""What only the ranks have, of mode 600, while they run."""
VERIFY = "verify.json"
VERIFY_LINES = "verify.jsonl"
ALIVE = "alive"
LOGS = "logs"
MESSAGES = "messages"
LAUNCHER_LOG = "launcher.log"
HANG = "hang.txt"

MIB = 2**20
MAX_BYTES = {
    PLAN: 128 * MIB,
    FROZEN: 16 * MIB,
    RECORD: 64 * MIB,
    METRICS: 2048 * MIB,
    TIMELINE: 128 * MIB,
    EVALUATION: 1024 * MIB,
    CHECKPOINT: 128 * MIB,
    EVENTS: 128 * MIB,
    CAMPAIGN: 64 * MIB,
    JOB_SCRIPT: 64 * MIB,
    CALIBRATION: 64 * MIB,
    f".{MESSAGES}": 64 * MIB,
}
"""By name, or by ending. Larger files are not read; others hold at most 1 MiB."""


def attempt_dir(run_dir: StrPath, attempt: int) -> Path:
    """Returns the folder of one attempt of a run."""
    return Path(run_dir) / f"a{attempt}"


def attempt_numbers(run_dir: StrPath) -> list[int]:
    """Returns the numbers of a run's attempts, in order; none if the folder cannot be read."""
    return sorted(_numbered(run_dir, r"a(0|[1-9]\d{0,8})"))


def last_number(run_dir: StrPath) -> int | None:
    """Returns the number of a run's latest attempt; None if it has none."""
    return max(attempt_numbers(run_dir), default=None)


def rank_log(attempt: StrPath, rank: int) -> Path:
    """Returns the log of a rank; ``attempt`` is the folder of an attempt."""
    return Path(attempt) / LOGS / f"rank{rank:04d}.log"


def rank_logs(attempt: StrPath) -> dict[int, Path]:
    """Returns the logs that are there, by rank; ``attempt`` is the folder of an attempt."""
    return dict(sorted(_numbered(Path(attempt) / LOGS, r"rank(\d{4,9})\.log").items()))


def rank_lines(attempt: StrPath, name: str, rank: int) -> Path:
    """Returns the file of JSON lines to which a rank alone appends, as its ``METRICS``.

    Appends from several machines to one file of a network file system would lose lines.
    """
    return Path(attempt) / LOGS / f"rank{rank:04d}.{name}"


def line_files(attempt: StrPath, name: str) -> list[Path]:
    """Returns the files of an attempt with lines of one kind: the launcher's, then each rank's."""
    ranks = _numbered(Path(attempt) / LOGS, rf"rank(\d{{4,9}})\.{re.escape(name)}")
    return [Path(attempt) / name, *(path for _, path in sorted(ranks.items()))]


def rank_messages(attempt: StrPath, rank: int) -> Path:
    """Returns the file of a rank's single messages; ``attempt`` is the folder of an attempt."""
    return Path(attempt) / MESSAGES / f"rank{rank:04d}.{MESSAGES}"


def message_files(attempt: StrPath) -> dict[int, Path]:
    """Returns the files of single messages that are there, by rank."""
    pattern = rf"rank(\d{{4,9}})\.{MESSAGES}"
    return dict(sorted(_numbered(Path(attempt) / MESSAGES, pattern).items()))


def entries_of(folder: StrPath) -> list[Path]:
    """Returns the visible entries of a folder, in order; none if it cannot be read."""
    try:
        return sorted(path for path in Path(folder).iterdir() if not path.name.startswith("."))
    except (OSError, ValueError):
        return []


def _numbered(folder: StrPath, pattern: str) -> dict[int, Path]:
    """Returns the entries of a folder by the number in their names; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            matches = [(re.fullmatch(pattern, entry.name), Path(entry)) for entry in entries]
    except (OSError, ValueError):
        return {}
    return {int(match[1]): path for match, path in matches if match}
