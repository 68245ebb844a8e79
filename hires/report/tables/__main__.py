"""``python -m hires.report.tables RUN_DIR``, as the scripts of a run folder call it."""

import sys

from hires.report.tables.run_tables import main

if __name__ == "__main__":
    sys.exit(main())
