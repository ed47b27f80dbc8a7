#!/usr/bin/env bash
# Regenerates the stubs of protos/*.proto; with --check, says whether the ones in the repository are fresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=.venv/bin/python
if [ ! -x "$PY" ]; then echo "protos: $PWD/.venv is missing; run make setup" >&2; exit 2; fi

deploy/source_links.sh
generate() {
    (cd build/links &&
        "../../$PY" -m grpc_tools.protoc -I . \
            --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" tandem/protos/*.proto)
}

case ${1:-} in
--check)
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh"
    stale=()
    # Both ways: a stub that differs or is missing, and one whose .proto has gone.
    names=$({ ls "$fresh/tandem/protos"; compgen -G 'protos/*_pb2*' | xargs -rn1 basename; } | sort -u)
    for name in $(grep -E '_pb2(_grpc)?\.pyi?$' <<<"$names"); do
        cmp -s "$fresh/tandem/protos/$name" "protos/$name" || stale+=("protos/$name")
    done
    if [ ${#stale[@]} -gt 0 ]; then
        echo "protos: not generated from the present .proto files: ${stale[*]}; run make protos" >&2
        exit 1
    fi
    echo "protos: stubs are fresh"
    ;;
"")
    rm -f protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py
    generate .
    echo "protos: generated $(compgen -G 'protos/*_pb2*' | grep -cE '\.pyi?$') files"
    ;;
*)
    echo "protos: unknown option $1; usage: deploy/protos.sh [--check]" >&2
    exit 2
    ;;
esac
