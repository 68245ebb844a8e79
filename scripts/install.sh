#!/bin/sh
# Makes a virtual environment with hires and everything that its development needs.
# usage: sh scripts/install.sh PYTHON VENV
set -eu
python=$1
venv=$2

fail() {
    echo "install: $*" >&2
    exit 1
}

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
echo "install: installing hires and torch into $venv; the first time takes some minutes"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
    --editable '.[dev]' --constraint constraints.txt ||
    fail "pip failed; the reason stands above. Repeat with the same make command."
