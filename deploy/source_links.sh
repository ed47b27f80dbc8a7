#!/usr/bin/env bash
# Makes build/links/tandem, a folder of links that looks like the installed package, for tools that read sources by path
# (mypy, import-linter, protoc). Prints nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p build/links/tandem
for name in tandem/*.py tandem/py.typed protos reward rollout services trainer; do
    ln -sfn "../../../$name" "build/links/tandem/$(basename "$name")"
done
