#!/bin/sh
# Installs Chromium and the program that drives it, where one of them is missing.
# usage: sh scripts/install_browser.sh
set -eu

fail() {
    echo "install_browser: $*" >&2
    exit 1
}

command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
command -v apt-get >/dev/null ||
    fail "chromium and chromedriver are missing; this script installs them on Debian only"
[ "$(id -u)" = 0 ] ||
    fail "chromium is missing; run: sudo apt-get install chromium chromium-driver fonts-dejavu-core"

install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        chromium chromium-driver fonts-dejavu-core
}

echo "install_browser: installing chromium and chromium-driver"
# An index that lacks the packages, as on a fresh machine, is fetched first.
install || { apt-get update -q && install; } || fail "apt-get could not install chromium"
