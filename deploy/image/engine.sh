# Sourced: sets ENGINE to podman or docker, unless it is set.
if [ -z "${ENGINE:-}" ]; then
    for ENGINE in podman docker ""; do
        if [ -n "$ENGINE" ] && "$ENGINE" info >/dev/null 2>&1; then break; fi
    done
fi
[ -n "$ENGINE" ] || { echo "found neither a podman nor a docker that works; install one, or set ENGINE" >&2; exit 2; }
