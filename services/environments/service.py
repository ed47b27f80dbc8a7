"""The environment service of a run: it runs the recipe's environment for the samplers, in processes of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial

from tandem.protos import environments_pb2_grpc
from tandem.protos.errors import TandemError
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.config import Recipe
from tandem.services.environments.server import RPC_LIMITS, SERVICE_NAME, EnvironmentServicer
from tandem.services.logging_setup import configure_logging
from tandem.services.process import stop_event
from tandem.services.rpc.server import start_server
from tandem.services.run.endpoint import metrics_endpoint, run_buffer, server_security
from tandem.services.service_info import Heartbeat, ServiceInfo

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""How long its episodes may go on after SIGTERM, while the run goes on."""
_POLL_SECONDS = 0.2


def main(recipe: Recipe, redis_url: str, replica: int = 0, *, drains: bool = False) -> None:
    """Runs one environment service until SIGTERM, or until the run ends. With `drains` it takes no new episodes after
    SIGTERM and ends with its last one; a second SIGTERM ends it at once.

    Raises ConfigError if the class cannot be used, EpisodeError if its processes do not start, UnavailableError if
    Redis is unreachable.
    """
    configure_logging("environments", run=recipe.run.run_id, replica=replica)
    asyncio.run(_serve(recipe, redis_url, f"environments-{replica}", stop_event(), drains))


async def _serve(recipe: Recipe, redis_url: str, name: str, told: threading.Event, drains: bool) -> None:
    started_at, ended = time.time(), threading.Event()
    async with AsyncExitStack() as stack:
        pool = EnvironmentPool(recipe.environment)
        stack.push_async_callback(pool.close)
        await pool.start()
        buffer = run_buffer(recipe, redis_url, told)
        servicer = EnvironmentServicer(pool, leave=partial(buffer.unregister_service, name))
        info = ServiceInfo(
            name,
            lambda: {**asdict(servicer.figures), "open": servicer.num_open},
            lambda: f"{servicer.num_open} environments are open{', takes no more' * servicer.is_draining}",
            buffer,
            started_at=started_at,
        )
        security = await asyncio.to_thread(server_security, recipe, buffer)
        server = await start_server(
            recipe.run.host,
            0,
            info=info.reply,
            register=lambda one: environments_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer, one),
            service_names=[SERVICE_NAME],
            limits=RPC_LIMITS,
            **security,
        )
        stack.push_async_callback(server.stop, grace_seconds=0.5)
        await asyncio.to_thread(buffer.register_service, name, server.address)
        log.info("ready after %.1f s, listens on %s", time.time() - started_at, server.address)
        closing = asyncio.create_task(servicer.close_orphans())
        stack.callback(closing.cancel)
        with Heartbeat(info, ended), metrics_endpoint(info, recipe):
            await _until(lambda: told.is_set() or ended.is_set(), closing)
            if drains and not ended.is_set():
                log.info("takes no new episodes; %d are being played", servicer.num_open)
                draining = asyncio.create_task(servicer.drained(DRAIN_SECONDS))
                stack.callback(draining.cancel)
                await _until(lambda: draining.done() or ended.is_set(), closing)
                if draining.done() and isinstance(error := draining.exception(), TandemError):
                    log.warning("ends without draining: %s", error)


async def _until(condition: Callable[[], bool], closing: asyncio.Task[None]) -> None:
    while not condition():
        await asyncio.wait({closing}, timeout=_POLL_SECONDS)
        if closing.done():
            closing.result()  # a bug ends the service
