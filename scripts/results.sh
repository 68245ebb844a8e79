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
python=$(dirname "$hires")/python
"$python" -m pip install --quiet --editable '.[peers]' --constraint constraints.txt
table=build/comm-tuning/table.json
failed=

# measure WORD...: one of them; where it fails, or a row is wrong, the others are measured all the same
measure() {
    "$hires" "$@" || failed="$failed
results.sh: failed: hires $*"
}

measure bench layouts model=resnet101 image=512 task=train --rounds 9 --out results/layouts
measure bench precision model=resnet101 image=256 batch=8 --out results/precision
measure tune comm --out build/comm-tuning
if [ -f "$table" ]; then
    measure bench comm --table "$table" --out results/comm
else
    measure bench comm --out results/comm
fi
measure bench choose --rounds 9 --out results/choose
"$python" scripts/results_table.py
[ -z "$failed" ] || {
    echo "$failed" >&2
    exit 1
}
