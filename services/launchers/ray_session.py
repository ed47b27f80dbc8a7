"""`tandem run --launcher ray`: the connection to a Ray cluster, of the user's or of this run alone."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

from tandem.protos.errors import ConfigError, EnvironmentLackError
from tandem.protos.extras import require_installed
from tandem.protos.scratch_folder import ScratchFolder
from tandem.services.launchers.machines import Machines

_CONNECT_SECONDS = 5.0
_END_SECONDS = 10.0
_LONGEST_FOLDER = 40  # Ray's sockets lie in it, whose paths have at most 107 bytes
_STORE_BYTES = 80 << 20  # Ray's least, because no data of a run passes through Ray
_OWN_CLUSTER = {
    "RAY_AUTH_MODE": "token",
    # The name is of its default: without a cluster of several machines, Ray listens on loopback only.
    # `ray.init(_node_ip_address="127.0.0.1")` does not: Ray 2.60 takes the machine's public address instead.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "AUTOSCALER_METRIC_PORT": "-1",  # no port: it would answer everybody
}
_EVERY_CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray prints how later versions will treat actors without GPUs
}


@contextmanager
def ray_session(report: Callable[[str], None]) -> Iterator[Machines]:
    """Connects to the cluster of RAY_ADDRESS, or starts one on this machine that ends with the block.

    Raises EnvironmentLackError if Ray is not installed, or the cluster cannot be reached or refuses.
    """
    require_installed("ray")
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        remedy = "start `tandem run` on a machine of the cluster, or with `ray job submit`"
        raise ConfigError(f"RAY_ADDRESS={address}: a run is not driven from outside its cluster; {remedy}")
    os.environ.update(_EVERY_CLUSTER)
    with ExitStack() as stack:
        options: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address in ("", "local"):
            os.environ.update(_OWN_CLUSTER, RAY_AUTH_TOKEN=secrets.token_hex(32))
            folder = stack.enter_context(ScratchFolder("ray", longest_path=_LONGEST_FOLDER))
            options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES, "_temp_dir": f"{folder}/ray"}
        else:
            _check_listening(address)
        import ray  # reads these variables

        from tandem.services.launchers.ray_cluster import RayCluster

        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address or "local", **options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
            raise EnvironmentLackError(f"{where} cannot be used: {' '.join(str(error).split()):.300}") from None
        finally:
            signal.signal(signal.SIGTERM, before)  # Ray replaces it
        stack.callback(_end, ray.shutdown)
        if os.environ.get("RAY_AUTH_MODE") != "token":
            report(
                f"the Ray cluster at {address} asks for no token: whoever reaches its ports can run code on its "
                "machines; set RAY_AUTH_MODE=token for the cluster and here"
            )
        yield RayCluster()


def _end(shutdown: Callable[[], None]) -> None:
    """Leaves the cluster. One of this run alone ends; this waits for its workers, too, for which Ray does not wait."""
    workers: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                workers += child.children(recursive=True)
    shutdown()
    _, alive = psutil.wait_procs(workers, timeout=_END_SECONDS)
    for worker in alive:
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def _check_listening(address: str) -> None:
    """Raises EnvironmentLackError if nothing listens at host:port: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise ConfigError(f"RAY_ADDRESS={address} is not host:port, `auto` or `local`")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        fault = f"the Ray cluster at {address} cannot be reached ({error.strerror or error})"
        raise EnvironmentLackError(f"{fault}; mend RAY_ADDRESS, or unset it for a cluster on this machine") from None
