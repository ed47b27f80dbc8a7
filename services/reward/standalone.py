"""`tandem reward serve`: the reward service without a ring. Several of them on one Redis and namespace are replicas of
one service.
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import ExitStack, closing
from pathlib import Path

from tandem.protos import reward_pb2_grpc
from tandem.protos.errors import EnvironmentLackError
from tandem.reward.scoring import ScoringCore
from tandem.services.buffer.durability import check_room, check_settings
from tandem.services.config.jobs import ServiceConfig
from tandem.services.logging_setup import configure_logging
from tandem.services.process import starting, stop_event
from tandem.services.reward.jobs.store import JobStore
from tandem.services.reward.jobs.worker import JobWorker
from tandem.services.reward.server import RPC_LIMITS, SERVICE_NAME, RewardServicer
from tandem.services.rpc.server import ServerThread
from tandem.services.run.preflight import check_job_room
from tandem.services.run.redis_child import RedisChild
from tandem.services.service_info import ServiceInfo

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.0  # for calls under way when the service is told to stop


def main(config: ServiceConfig, *, host: str, redis_url: str, folder: Path, name: str = "") -> None:
    """Serves until SIGTERM, then ends with its streams UNAVAILABLE. Logs `reward: listens on HOST:PORT` once it is
    ready.

    Args:
        config: `config.reward.port` 0 picks a free port.
        host: address to listen on.
        redis_url: where the jobs are kept; empty: an embedded Redis with its data in `folder`. What one that is named
            may lose is printed.
        folder: for the embedded Redis and its log; not used otherwise.
        name: of this replica among those of the namespace: one that starts anew under the name takes back at once what
            its
            predecessor held. Default: the machine's name and the port.

    Raises:
        UserError: the scorers cannot be built, the port is in use, there is no redis-server, or none with room for the
            jobs.
        TandemError: Redis is gone.
    """
    configure_logging("reward")
    stop = stop_event()
    with ExitStack() as stack:
        with starting():
            core = stack.enter_context(closing(ScoringCore(config.reward)))
        jobs = config.jobs.in_namespace("reward")
        redis: RedisChild | None = None
        if not redis_url:
            check_job_room(jobs, folder)
            redis = _own_redis(stack, folder)
        store = stack.enter_context(closing(JobStore(redis.url if redis is not None else redis_url, jobs)))
        if redis is None:
            for line in check_settings(store.connection):
                log.warning(line)
            check_room(store.connection, jobs.redis_bytes)
        servicer = stack.enter_context(closing(RewardServicer(core, store, config.reward, jobs)))
        jobs_worker: JobWorker | None = None  # named after the server's port, so it comes after the server

        def figures() -> dict[str, float]:
            return {**core.figures(), **(jobs_worker.figures() if jobs_worker is not None else {}), **store.counts()}

        def activity() -> str:
            return jobs_worker.activity() if jobs_worker is not None else "starting"

        server = ServerThread(
            host,
            config.reward.port,
            info=ServiceInfo("reward", figures, activity).reply,
            register=lambda one: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, one),
            service_names=[SERVICE_NAME],
            on_stop=servicer.end_streams,
            limits=RPC_LIMITS,
        )
        name = name or f"{socket.gethostname()}:{server.address.rpartition(':')[2]}"
        jobs_worker = JobWorker(store, core, worker=name, reward=config.reward, stop=stop)
        with jobs_worker:
            try:
                log.info("listens on %s", server.address)
                while not stop.wait(_POLL_SECONDS):
                    if redis is not None:
                        redis.restart_if_dead()
            finally:
                server.stop(_GRACE_SECONDS)
                core.close()  # ends what hangs, so that its chunks are given back


def _own_redis(stack: ExitStack, folder: Path) -> RedisChild:
    """Raises EnvironmentLackError for a folder that cannot be one, or be written."""
    try:
        return stack.enter_context(RedisChild(folder, report=log.info))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the command says so
        raise EnvironmentLackError(
            f"--folder {folder}: {error.strerror or error}; name a folder that can be written"
        ) from None
