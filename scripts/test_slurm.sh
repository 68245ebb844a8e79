#!/usr/bin/env bash
# Starts a Slurm of two nodes, runs the tests that need one, and stops it however they end.
# usage: scripts/test_slurm.sh PYTHON --accounting|"" [ARGUMENTS OF PYTEST]
set -euo pipefail
python=$1
option=$2
shift 2
cluster=$(dirname "${BASH_SOURCE[0]}")/slurm_cluster.sh
folder=$(mktemp --directory --dry-run "${TMPDIR:-/tmp}/hires-slurm-XXXXXX")
trap 'bash "$cluster" stop "$folder"' EXIT
use=$(bash "$cluster" start ${option:+"$option"} "$folder")
export "${use#export }"
"$python" -m pytest -m slurm tests/launcher "$@"
