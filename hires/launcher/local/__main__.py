"""``python -m hires.launcher.local RUN_DIR``, as the scripts of a run folder call it."""

import sys

from hires.launcher.local.local_launcher import main

if __name__ == "__main__":
    sys.exit(main())
