#!/usr/bin/env bash
# Makes a base image of this machine's Debian release from its package mirror, where no image registry can be reached.
#
#   deploy/image/debian_base.sh [IMAGE]     default: localhost/tandem-debian; does nothing if the image exists
set -euo pipefail
IMAGE=${1:-localhost/tandem-debian}

die() { printf 'debian_base: %s\n' "$*" >&2; exit 2; }

[ "$(id -u)" = 0 ] || die "debootstrap needs root"
if podman image exists "$IMAGE"; then exit 0; fi
release=$(. /etc/os-release && printf %s "${VERSION_CODENAME:-}")
[ -n "$release" ] || die "/etc/os-release names no release; this script is for Debian"
# apt knows its sources in whatever form they are written. The release itself, neither its updates nor other archives.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Identifier: Packages' |
    awk -v release="$release" '$2 == release { print $1; exit }')
[ -n "$mirror" ] || die "apt has no package list of $release; run apt-get update"

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
debootstrap --variant=minbase "$release" "$tree/root" "$mirror" >"$tree/log" 2>&1 ||
    { tail -n 5 "$tree/log" >&2; die "debootstrap from $mirror failed"; }
rm -rf "$tree"/root/var/cache/apt/archives/*.deb "$tree"/root/var/lib/apt/lists/*
tar -C "$tree/root" -c . | podman import --quiet - "$IMAGE" >/dev/null
