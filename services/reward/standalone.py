"""`tandem reward serve`: the reward service without a run. Processes on one Redis and namespace are replicas."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
from contextlib import ExitStack, closing
from pathlib import Path

from tandem.protos import reward_pb2_grpc
from tandem.protos.errors import EnvironmentLackError
from tandem.reward.scoring import ScoringCore
from tandem.services.buffer.durability import check_room, check_settings
from tandem.services.config.recipe import JobsConfig, ServiceConfig
from tandem.services.logging_setup import configure_logging
from tandem.services.metrics.page import Sources, page_of
from tandem.services.metrics.server import MetricsServer
from tandem.services.process import starting, stop_event
from tandem.services.reward.jobs.store import JobStore
from tandem.services.reward.jobs.worker import JobWorker
from tandem.services.reward.server import RPC_LIMITS, SERVICE_NAME, RewardServicer
from tandem.services.rpc.server import Security, ServerThread
from tandem.services.run.preflight import check_job_room
from tandem.services.run.redis_child import RedisChild
from tandem.services.service_info import ServiceInfo

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.0  # for calls under way when the service is told to stop


def main(
    config: ServiceConfig,
    *,
    host: str,
    redis_url: str,
    folder: Path,
    name: str = "",
    security: Security | None = None,
    metrics_port: int = 0,
    http_tls: ssl.SSLContext | None = None,
) -> None:
    """Serves until SIGTERM, then ends its streams as UNAVAILABLE. Logs `reward: listens on HOST:PORT` once it is ready.

    Args:
        config: `config.reward.port` 0 picks a free port.
        redis_url: where the jobs are stored. Empty: an embedded Redis with its data and log in `folder`.
        name: of this replica, under which it gets the chunks of its predecessor back. Default: machine and port.
        security: what callers must have: tokens, TLS. None: whoever can connect may call everything.
        metrics_port: where it answers Prometheus; 0: nowhere.
        http_tls: TLS of that port. The tokens are those of `security`.

    Raises:
        UserError: the scorers cannot be built, the port is in use, or there is no Redis with room for the jobs.
        TandemError: Redis is gone.
    """
    configure_logging("reward")
    with ExitStack() as stack:
        with starting():
            core = stack.enter_context(closing(ScoringCore(config.reward)))  # SIGTERM ends the process meanwhile
        stop = stop_event()
        store, redis = _open_store(stack, config.jobs.in_namespace("reward"), redis_url, folder, stop)
        servicer = stack.enter_context(closing(RewardServicer(core, store, config.reward)))
        jobs = JobWorker(store, core, worker=name, reward=config.reward, stop=stop)
        info = ServiceInfo("reward", lambda: {**core.figures(), **jobs.figures(), **store.counts()}, jobs.activity)
        server = ServerThread(
            host,
            config.reward.port,
            info=info.reply,
            register=lambda one: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, one),
            service_names=[SERVICE_NAME],
            on_stop=servicer.end_streams,
            limits=RPC_LIMITS,
            **(security or {}),
        )
        jobs.worker = name or f"{socket.gethostname()}:{server.address.rpartition(':')[2]}"
        with jobs:
            try:
                if metrics_port:
                    tokens = (security or {}).get("tokens")
                    page = page_of("", "reward", _sources(info))
                    stack.enter_context(MetricsServer(host, metrics_port, page, tokens=tokens, tls=http_tls))
                log.info("listens on %s", server.address)
                while not stop.wait(_POLL_SECONDS):
                    if redis is not None:
                        redis.restart_if_dead()
            finally:
                server.stop(_GRACE_SECONDS)
                core.close()  # ends scorers that hang, so that their chunks are requeued


def _sources(info: ServiceInfo) -> Sources:
    return {"service": lambda: {"started_at": info.started_at}, "reward": info.figures, "jobs": info.figures}


def _open_store(
    stack: ExitStack, jobs: JobsConfig, redis_url: str, folder: Path, stop: threading.Event
) -> tuple[JobStore, RedisChild | None]:
    """The store, and the embedded Redis if none is named. Raises UserError if there is no room for the jobs."""
    if not redis_url:
        check_job_room(jobs, folder)
        try:
            redis = stack.enter_context(RedisChild(folder, report=log.info))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the command says so
            said = f"--folder {folder}: {error.strerror or error}; name a folder that can be written"
            raise EnvironmentLackError(said) from None
        return stack.enter_context(closing(JobStore(redis.url, jobs, stop))), redis
    store = stack.enter_context(closing(JobStore(redis_url, jobs, stop)))
    for line in check_settings(store.connection):
        log.warning(line)
    check_room(store.connection, jobs.redis_bytes)
    return store, None
