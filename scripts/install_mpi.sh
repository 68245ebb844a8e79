#!/usr/bin/env bash
# Installs Debian's Open MPI and MPICH where they are missing, which the tests marked mpi start, and
# mpi4py for a Python.
# usage: scripts/install_mpi.sh PYTHON
set -euo pipefail
"$1" -m pip install --disable-pip-version-check --quiet mpi4py --constraint constraints.txt
missing=()
command -v mpirun.openmpi >/dev/null || missing+=(openmpi-bin)
command -v mpiexec.hydra >/dev/null || missing+=(mpich)
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install_mpi: missing: ${missing[*]}; the tests that need them are skipped" >&2
    exit 0
fi
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >&2
}
echo "install_mpi: installing ${missing[*]}" >&2
# An index that lacks the packages, as on a fresh machine, is fetched first.
install || { apt-get update -q >&2 && install; }
