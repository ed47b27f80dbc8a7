#!/usr/bin/env bash
# Brings the profile cpu up on a tiny recipe and checks that it trains, scales, survives kills and loses nothing.
#
#   deploy/compose/smoke.sh                 builds an image of its own first
#
#   TANDEM_IMAGE=...                        an image that is there, instead
#   ENGINE=podman|docker                    default: the first that works
#   COMPOSE="docker compose"                default: the one of the engine
#   BASE_IMAGE=...                          default: made by debootstrap if the engine is podman, else Debian's
#   EXTRAS=train,dashboard                  what the image has; the default samples with transformers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. deploy/compose/project.sh
metrics=$TANDEM_WORKSPACE/runs/smoke/metrics.jsonl
steps() { if [ -e "$metrics" ]; then wc -l <"$metrics"; else echo 0; fi; }

# A task and a tiny model, made by the image itself.
mkdir -p "$TANDEM_WORKSPACE"
cp deploy/compose/smoke/* "$TANDEM_WORKSPACE/"
chown -R "$TANDEM_USER" "$TANDEM_WORKSPACE"
in_image() {
    "$ENGINE" run --rm --network none --user "$TANDEM_USER" --env HOME=/tmp --env TANDEM_LOG=text \
        --env TANDEM_REDIS_URL=redis://127.0.0.1:6379/0 \
        --volume "$TANDEM_WORKSPACE:/workspace" --workdir /workspace "$TANDEM_IMAGE" "$@"
}
in_image python -c '
from pathlib import Path
from tandem.services.data.arithmetic import write_task
from tandem.services.data.tiny_model import build_tiny_model
write_task(Path("data"), seed=0)
build_tiny_model(Path("model"), ends=False)' 2>"$scratch/data.log" || { cat "$scratch/data.log" >&2; die "no data"; }
say "data and model are made"

code=0
in_image tandem serve trainer recipe.toml weights.backend=nccl >"$scratch/refused.log" 2>&1 || code=$?
if [ $code -ne 2 ] || ! grep -q "nccl needs a GPU" "$scratch/refused.log"; then
    cat "$scratch/refused.log" >&2
    die "a recipe for GPUs ends with exit code $code"
fi
say "a recipe for GPUs is refused"

trained() { [ "$(steps)" -ge "$1" ]; }
acknowledged() { tail -n 1 "$metrics" | grep -qE "\"samplers_acknowledged\":$1[,}]"; }

init
up
within 240 "5 optimizer steps" trained 5

if [ "$ENGINE" = podman ]; then
    up --scale rollout=2  # podman-compose takes one --scale at a time, and leaves the replicas of others alone
    up --scale reward=2
else
    up --scale rollout=2 --scale reward=2
fi
within 120 "a second sampler carries the newest version" acknowledged 2

page() { python3 -c 'import ssl, sys, urllib.request as request
request.urlopen(f"https://127.0.0.1:{sys.argv[1]}/", context=ssl._create_unverified_context(), timeout=5)' \
    "$DASHBOARD_PORT" 2>/dev/null; }
steered() { "$ENGINE" exec "$(containers controller)" tandem status runs/smoke >"$scratch/status" 2>&1; }
within 60 "the dashboard answers at its published port" page
within 60 "the controller tells the status of the run" steered

# Whoever kills a container by the engine's command means it: it stays down. A crash is a process that dies.
crash() {
    local id pid
    id=$(containers "$1" | sed -n 1p)  # head would end the pipe early
    pid=$("$ENGINE" inspect --format '{{.State.Pid}}' "$id")
    kill -9 "$pid"
    within 60 "$1 has crashed and is started again" started_again "$id" "$pid"
}
started_again() {
    local pid
    pid=$("$ENGINE" inspect --format '{{.State.Pid}}' "$1")
    [ "$pid" != 0 ] && [ "$pid" != "$2" ]
}
healthy() {
    local id
    for id in $(containers "$1"); do
        "$ENGINE" exec "$id" tandem health --server-name localhost >/dev/null 2>&1 || return 1
    done
}
for service in reward trainer; do
    crash "$service"
    within 120 "$service is healthy" healthy "$service"
    more=$(($(steps) + 5))
    within 120 "5 further steps" trained "$more"
done

# All of it, stopped and started again: the run goes on from its checkpoint.
ids=$(containers)
"$ENGINE" stop --time 20 $ids >"$scratch/stop.log" 2>&1 || { cat "$scratch/stop.log" >&2; die "they do not stop"; }
more=$(($(steps) + 5))
"$ENGINE" start $ids >"$scratch/start.log" 2>&1 || { cat "$scratch/start.log" >&2; die "they do not start"; }
within 180 "5 further steps after all was stopped and started" trained "$more"

"$ENGINE" exec "$(containers trainer)" tandem ledger runs/smoke >"$scratch/ledger" || die "$(cat "$scratch/ledger")"
say "the ledger adds up"

services=(redis feed reward rollout trainer controller dashboard)
for service in "${services[@]}"; do
    for id in $(containers "$service"); do "$ENGINE" logs "$id" 2>&1; done >"$scratch/$service.log"
    python3 -c 'import json, sys; [json.loads(line)["message"] for line in sys.stdin]' <"$scratch/$service.log" ||
        die "a line of $service is no JSON"
done
if grep -m 1 CRITICAL "$scratch/redis.log"; then die "Redis could not read all of its append-only file"; fi
say "all lines of the logs are JSON: $(for service in "${services[@]}"; do
    printf '%s of %s, ' "$(wc -l <"$scratch/$service.log")" "$service"; done)"
say "passed"
