"""The gRPC server of a sampler of a run: a real engine on a tiny model, which claims no prompts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tandem.protos import rollout_pb2_grpc
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, find_engine
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.rollout.server import RPC_LIMITS, SERVICE_NAME, RolloutServicer
from tandem.services.rollout.service import SamplingWorker
from tandem.services.run.endpoint import service_endpoint
from tandem.services.service_info import ServiceInfo
from tests.support.memory_store import IN_MEMORY

MAX_RESPONSE_TOKENS = 8


@contextmanager
def serving_sampler(buffer: Buffer, recipe: Recipe, model: Path) -> Iterator[str]:
    """Yields the address. The model is one of `build_tiny_model`."""
    config = RolloutConfig(engine="transformers", kv_cache_bytes=1 << 22, max_response_tokens=MAX_RESPONSE_TOKENS)
    arguments = SamplerArguments(config, str(model), "float32", max_model_tokens=24, seed=0, group_store=IN_MEMORY)
    with closing(asyncio.run(find_engine("transformers").start(arguments))) as engine:
        claims = SamplingWorker(buffer, engine, config, "rollout-0").loop
        servicer = RolloutServicer("rollout-0", engine, claims, MAX_RESPONSE_TOKENS, recipe.weights_folder)
        with service_endpoint(
            ServiceInfo("rollout-0", dict, lambda: "waits", buffer),
            recipe,
            threading.Event(),
            register=lambda one: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, one),
            service_names=[SERVICE_NAME],
            limits=RPC_LIMITS,
        ) as address:
            yield address
