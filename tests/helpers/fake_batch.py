"""The supervisors of a Slurm job with ranks that need no torch, see fake_rank.py.

``python -m tests.helpers.fake_batch element ARRAY_DIR`` is an element of an array, anything else
the supervisor of one run.
"""

import functools
import sys

from hires.launcher.local import local_launcher
from hires.launcher.slurm import array_task, batch


def main(words):
    batch.launch = functools.partial(local_launcher.launch, module="fake_rank")
    if words[0] == "element":
        return array_task.main(words[1:], module="tests.helpers.fake_batch")
    return batch.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
