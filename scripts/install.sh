#!/bin/sh
# Makes a virtual environment with hires: TORCH=cpu or cuda says which torch; unset, the machine does.
# usage: sh scripts/install.sh PYTHON VENV [EXTRA,EXTRA ...]
set -eu
python=$1
venv=$2
extras=${3:-}

fail() {
    echo "install: $*" >&2
    exit 1
}

[ -f constraints.txt ] || fail "start it in the checkout of hires, as sh scripts/install.sh python3 .venv"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "hires needs Python 3.11 or newer and $python is not; name one: make PYTHON=/path/to/python3"

# Debian keeps the part of Python that makes virtual environments in a package of its own.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "install: $python cannot make virtual environments yet; installing $package"
        apt-get update -q && apt-get install -y -q --no-install-recommends "$package" ||
            fail "apt-get could not install $package"
    else
        fail "$python cannot make virtual environments; run: sudo apt-get install $package"
    fi
fi

# A folder that an earlier try left half-made is made anew.
[ -x "$venv/bin/pip" ] || "$python" -m venv --clear "$venv"

# PyPI's torch for Linux brings CUDA; the build for CPUs has an index of its own. The sizes are those
# of the torch that constraints.txt pins, with all that it needs.
torch=$(sed -n 's/^torch==//p' constraints.txt)
there=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' \
    2>/dev/null || true)
build=${TORCH:-}
case $build,$there in
cpu,* | cuda,*) ;;
,"$torch" | ,"$torch"+*) ;; # it stays
,*) if nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then build=cuda; else build=cpu; fi ;;
*) fail "TORCH=$build is neither cpu nor cuda" ;;
esac
if [ "$build" = cpu ] && [ "$there" != "$torch+cpu" ] && [ "$(uname -s)" = Linux ]; then
    echo "install: torch $torch for CPUs, 0.2 GB to download, 0.9 GB on the disk; TORCH=cuda takes" \
        "the one for NVIDIA GPUs"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --retries 1 --no-deps \
        "torch==$torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
        fail "no torch $torch for CPUs, see above; TORCH=cuda takes PyPI's, which brings CUDA"
elif [ "$build" = cuda ] && [ "${there%+cu[0-9]*}" != "$torch" ]; then
    echo "install: torch $torch with CUDA, 2.7 GB to download, 4.7 GB on the disk; TORCH=cpu takes" \
        "the one for CPUs"
    [ -z "$there" ] || "$venv/bin/python" -m pip uninstall --quiet --yes torch
fi

# Its wheels bring no MPI, and other libraries end where they find mpi4py without one.
if command -v mpirun || command -v mpiexec || (PATH=$PATH:/sbin ldconfig -p | grep libmpi); then
    extras=${extras:+$extras,}mpi
fi >/dev/null 2>&1
echo "install: installing hires${extras:+ with $extras} into $venv; the first time takes some minutes"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
    --editable ".${extras:+[$extras]}" --constraint constraints.txt ||
    fail "pip failed; the reason stands above. Repeat with the same command."
