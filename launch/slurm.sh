#!/bin/sh
# Submits this run to Slurm again, as a new attempt beside the earlier ones: sh launch.sh
# It was made by: @COMMAND@
# Options of sbatch may follow, as: sh launch.sh --partition=NAME
set -eu

run_dir=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
cd -- @FOLDER@
exec sbatch "$@" "$run_dir/job.sbatch"
