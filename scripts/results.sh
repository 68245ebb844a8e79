#!/bin/sh
# Measures the table of results/README.md anew: one commit, one machine, nothing beside it; hours.
# Each folder has its command, machine, commit, load, number of samples and spread. What is stopped
# by Ctrl-C, or failed, goes on with the same command on the same commit.
# `make results`, or: sh scripts/results.sh .venv/bin/hires
set -eu
cd "$(dirname "$0")/.."
hires=${1:-.venv/bin/hires}
python=$(dirname "$hires")/python
commit=$("$python" -c 'from hires.core.store import provenance; print(provenance.collect()["git"])')
case $commit in
None | *-dirty-*)
    echo "results.sh: commit your changes first: numbers belong to a commit" >&2
    exit 2
    ;;
esac
"$python" -m pip install --quiet --editable '.[peers]' --constraint constraints.txt
done=build/results-done # a line for each command that is done on a commit
mkdir -p build
touch "$done"
failed=

is_done() {
    grep -qxF "$commit $*" "$done"
}

# measure WORD...: one of them; where it fails, or a row is wrong, the others are measured all the same
measure() {
    is_done "$@" && return
    code=0
    "$hires" "$@" || code=$?
    case $code in
    0) echo "$commit $*" >>"$done" ;;
    130) exit 130 ;;
    *) failed="$failed
results.sh: failed: hires $*" ;;
    esac
}

measure bench layouts model=resnet101 image=512 task=train --rounds 9 --out results/layouts
measure bench precision model=resnet101 image=256 batch=8 --rounds 9 --out results/precision
measure tune comm --out build/comm-tuning
if is_done tune comm --out build/comm-tuning; then # else the table there is of another commit
    measure bench comm --table build/comm-tuning/table.json --out results/comm
else
    measure bench comm --out results/comm
fi
measure bench choose --rounds 9 --out results/choose
"$python" scripts/results_table.py
[ -z "$failed" ] || {
    echo "$failed" >&2
    exit 1
}
rm "$done"
