"""The supervisor of a Slurm job with ranks that need no torch, see fake_rank.py.

``python -m tests.helpers.fake_batch ARRAY_DIR`` runs a task of an array, ``RUN_DIR`` one run.
"""

import functools
import sys

from hires.launcher.local import local_launcher
from hires.launcher.slurm import batch, job_attempts


def main(words):
    job_attempts.launch = functools.partial(local_launcher.launch, module="tests.helpers.fake_rank")
    return batch.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
