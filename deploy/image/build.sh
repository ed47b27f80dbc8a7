#!/usr/bin/env bash
# Builds the image with podman or docker, from the package sources that this machine's pip uses.
#
#   deploy/image/build.sh [IMAGE]           default: localhost/tandem:FLAVOUR
#
#   FLAVOUR=cpu|gpu-rollout|gpu-trainer     default: cpu
#   EXTRAS=train,dashboard                  the project's extras instead of the flavour's
#   BASE_IMAGE=...                          default: that of the Dockerfile; deploy/image/debian_base.sh makes one
#   ENGINE=podman|docker                    default: the first that works
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
FLAVOUR=${FLAVOUR:-cpu}
IMAGE=${1:-localhost/tandem:$FLAVOUR}
. deploy/image/engine.sh

base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' deploy/image/Dockerfile)}
if ! "$ENGINE" image inspect "$base" >/dev/null 2>&1 && ! said=$("$ENGINE" pull --quiet "$base" 2>&1); then
    echo "build: cannot pull the base image: $(tail -n 1 <<<"$said"); set BASE_IMAGE to one that is here or can be" \
        "pulled; deploy/image/debian_base.sh makes one" >&2
    exit 2
fi

# pip's settings, from whatever files and variables they come, in one file that exists during the build only.
given=$(mktemp -d)
trap 'rm -rf "$given"' EXIT
for python in python3 .venv/bin/python; do
    if "$python" -m pip --version >/dev/null 2>&1; then break; fi
done
"$python" deploy/image/pip_settings.py "$given"
options=(--secret "id=pip,src=$given/pip.conf")
if [ -e "$given/ca" ]; then options+=(--secret "id=ca,src=$given/ca"); fi
while read -r folder; do
    if [ "$ENGINE" = podman ]; then
        options+=(--volume "$folder:$folder:ro")
    else
        echo "build: docker cannot read $folder during a build; packages there are not found" >&2
    fi
done <"$given/folders"
for name in FLAVOUR EXTRAS BASE_IMAGE; do
    if [ -n "${!name:-}" ]; then options+=(--build-arg "$name=${!name}"); fi
done
"$ENGINE" build --network host --file deploy/image/Dockerfile --tag "$IMAGE" "${options[@]}" .
