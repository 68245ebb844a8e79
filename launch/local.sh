#!/bin/sh
# Starts this run again on this machine, as a new attempt beside the earlier ones: sh launch.sh
# It was made by: @COMMAND@
set -eu

run_dir=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
pythonpath=@PYTHONPATH@

# Relative paths of the config (data.path, a network of your own) count from this folder.
cd -- @FOLDER@
# Without empty entries: Python would import from the current folder for them.
PYTHONPATH=$(printf %s "$pythonpath:${PYTHONPATH-}" | tr -s : | sed 's/^://; s/:$//')
export PYTHONPATH

# One process per rank; Ctrl-C stops them all. Logs, metrics and record are in $run_dir. The options
# of a command that starts all ranks, behind --, may be changed here.
@MODULE@ hires.launcher "$run_dir"@STARTER@
# The tables on screen, and as CSV and Markdown in $run_dir.
@MODULE@ hires.report.tables "$run_dir"
