"""``python -m hires`` is the same as ``hires``."""

import sys

from hires.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
