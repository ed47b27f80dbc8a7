#!/usr/bin/env bash
# Installs what `make test-deploy` wants from the distribution (Debian or Ubuntu, as root). Without it those tests are
# skipped; with TANDEM_REQUIRE_PROGRAMS=1, as .ci/run sets it, they fail instead.
set -euo pipefail

PACKAGES=(podman runc netavark aardvark-dns iptables debootstrap chromium prometheus iproute2 nftables)

missing=()
for package in "${PACKAGES[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
    printf 'test_packages: as root, run: apt-get install %s\n' "${missing[*]}" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install -y --no-install-recommends "${missing[@]}"
