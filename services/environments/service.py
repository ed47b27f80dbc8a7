"""The environment service of a run: it runs the recipe's environment for the samplers, in processes of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import asdict

from tandem.protos import environments_pb2_grpc
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.config import Recipe
from tandem.services.environments.server import RPC_LIMITS, SERVICE_NAME, EnvironmentServicer
from tandem.services.logging_setup import configure_logging
from tandem.services.process import stop_event
from tandem.services.rpc.server import start_server
from tandem.services.run.endpoint import metrics_endpoint, run_buffer, server_security
from tandem.services.service_info import Heartbeat, ServiceInfo

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


def main(recipe: Recipe, redis_url: str, replica: int = 0) -> None:
    """Runs one environment service until SIGTERM, or until the run ends.

    Raises ConfigError if the class cannot be used, EpisodeError if its processes do not start, UnavailableError if
    Redis is unreachable.
    """
    configure_logging("environments", run=recipe.run.run_id, replica=replica)
    asyncio.run(_serve(recipe, redis_url, replica, stop_event()))


async def _serve(recipe: Recipe, redis_url: str, replica: int, stop: threading.Event) -> None:
    started_at = time.time()
    async with AsyncExitStack() as stack:
        pool = EnvironmentPool(recipe.environment)
        stack.push_async_callback(pool.close)
        await pool.start()
        servicer = EnvironmentServicer(pool)
        buffer = run_buffer(recipe, redis_url, stop)
        info = ServiceInfo(
            f"environments-{replica}",
            lambda: {**asdict(servicer.figures), "open": servicer.num_open},
            lambda: f"{servicer.num_open} environments are open",
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
        await asyncio.to_thread(buffer.register_service, info.name, server.address)
        log.info("ready after %.1f s, listens on %s", time.time() - started_at, server.address)
        closing = asyncio.create_task(servicer.close_orphans())
        stack.callback(closing.cancel)
        with Heartbeat(info, stop), metrics_endpoint(info, recipe):
            while not stop.is_set():
                await asyncio.wait({closing}, timeout=_POLL_SECONDS)
                if closing.done():
                    closing.result()  # a bug ends the service
