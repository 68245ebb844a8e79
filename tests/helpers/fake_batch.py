"""The supervisor of a Slurm job with ranks that need no torch, see fake_rank.py.

``python -m tests.helpers.fake_batch RUN_DIR [ATTEMPT]``
"""

import functools
import sys

from hires.launcher.local import local_launcher
from hires.launcher.slurm import job


def main(words):
    job.launch = functools.partial(local_launcher.launch, module="tests.helpers.fake_rank")
    return job.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
