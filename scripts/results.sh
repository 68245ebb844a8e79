#!/bin/sh
# Measures the table of results/README.md anew: one commit, one machine, nothing beside it; hours.
# Each folder has its command, machine, commit, load, number of samples and spread.
# `make results`, or: sh scripts/results.sh .venv/bin/hires
set -eu
cd "$(dirname "$0")/.."
hires=${1:-.venv/bin/hires}
[ -z "$(git status --porcelain --untracked-files=no -- hires conf launch)" ] || {
    echo "results.sh: commit your changes first: numbers belong to a commit" >&2
    exit 2
}
"$hires" bench layouts model=resnet101 image=512 --out results/layouts
"$hires" bench precision model=resnet101 image=256 batch=8 --out results/precision
table=build/comm-tuning/table.json
"$hires" tune comm --out build/comm-tuning || echo "results.sh: no tuning table: see above" >&2
if [ -f "$table" ]; then
    "$hires" bench comm --table "$table" --out results/comm
else
    "$hires" bench comm --out results/comm
fi
"$hires" bench choose --out results/choose
"$(dirname "$hires")/python" scripts/results_table.py
