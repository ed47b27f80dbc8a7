# Sourced from the repository's root: a compose project with a workspace of its own, all of which is removed at the end.
#
# smoke.sh lists the variables that it reads. It builds an image unless TANDEM_IMAGE names one.
. deploy/image/engine.sh
say() { printf '%s: %4d s: %s\n' "$(basename "$0" .sh)" "$SECONDS" "$*"; }
die() { say "$*" >&2; exit 1; }

if [ -z "${COMPOSE:-}" ]; then
    COMPOSE="docker compose"
    if [ "$ENGINE" = podman ]; then
        COMPOSE=$(PATH=$PWD/.venv/bin:$PATH command -v podman-compose) || die "podman-compose is not installed"
    fi
fi

export TANDEM_RECIPE=recipe.toml TANDEM_USER=1000:1000
scratch=$(mktemp -d)
export TANDEM_WORKSPACE=$scratch/workspace COMPOSE_PROFILES=cpu COMPOSE_PROJECT_NAME=tandem-$(basename "$0" .sh)-$$
export DASHBOARD_PORT=${DASHBOARD_PORT:-18479}
if [ "$ENGINE" = podman ]; then
    # runc, for Debian's crun may be absent; limits that are not above those of the host's root.
    printf '[engine]\nruntime="runc"\n[containers]\ndefault_ulimits=["nofile=4096:4096","nproc=4000:4000"]\n' \
        >"$scratch/containers.conf"
    export CONTAINERS_CONF=${CONTAINERS_CONF:-$scratch/containers.conf}
fi
if [ -z "${TANDEM_IMAGE:-}" ]; then
    export TANDEM_IMAGE=localhost/tandem:smoke
    if [ "$ENGINE" = podman ] && [ -z "${BASE_IMAGE:-}" ]; then
        export BASE_IMAGE=localhost/tandem-debian
        deploy/image/debian_base.sh "$BASE_IMAGE"
    fi
    EXTRAS=${EXTRAS:-train,dashboard} deploy/image/build.sh "$TANDEM_IMAGE" >"$scratch/build.log" 2>&1 ||
        { tail -n 20 "$scratch/build.log" >&2; die "the image cannot be built"; }
    say "the image is built"
fi

compose() { $COMPOSE -f deploy/compose/compose.yaml "$@"; }
# The ids of the containers of a service, or of all.
containers() {
    "$ENGINE" ps --all --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
        ${1:+--filter "label=com.docker.compose.service=$1"}
}

clean() {
    local code=$?
    if [ $code -ne 0 ]; then compose logs --tail 30 2>&1 | tail -n 150 || true; fi
    containers | xargs --no-run-if-empty "$ENGINE" rm --force --time 0 >"$scratch/rm.log" 2>&1 ||  # also scaled ones
        cat "$scratch/rm.log"  # `down` removes the rest
    compose down --volumes --timeout 20 >"$scratch/down.log" 2>&1 || cat "$scratch/down.log"
    rm -rf "$scratch"
    exit $code
}
trap clean EXIT

# Waits until the rest of the line succeeds, at most this many seconds.
within() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        [ $SECONDS -lt $deadline ] || die "not within the time: $what"
        sleep 1
    done
    say "$what"
}

# Makes certificates and secrets, once.
init() {
    compose --profile init run --rm init >"$scratch/init.log" 2>&1 ||
        { cat "$scratch/init.log" >&2; die "init failed"; }
}
up() { compose up -d "$@" >"$scratch/up.log" 2>&1 || { cat "$scratch/up.log" >&2; die "compose up failed"; }; }
