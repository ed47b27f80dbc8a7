"""Rank 0's server: TrainingService (progress, checkpoints on demand), Info, and a heartbeat in the registry."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from tandem.protos import training_pb2, training_pb2_grpc
from tandem.protos.errors import DeadlineError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.service_info import ServiceEndpoint, ServiceInfo

_CHECKPOINT_SECONDS = 600.0


class TrainerState:
    """The loop's progress, read by the threads of the server and the watchdog. Only the loop writes it."""

    def __init__(self) -> None:
        self.started_at = psutil.Process().create_time()
        self.policy_version = -1
        self.optimizer_step = 0
        self.activity = "starts"
        self.waiting_since: float | None = None
        """Monotonic time at which the loop began to wait for scored groups; None while it works."""
        self.figures: dict[str, float] = {}
        """The last batch's numbers, by their names in metrics.jsonl."""

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        self.activity = activity
        yield
        self.activity = "trains"

    def heartbeat(self) -> dict[str, float]:
        since = self.waiting_since
        return {
            "policy_version": self.policy_version,
            "optimizer_step": self.optimizer_step,
            "waiting_seconds": 0.0 if since is None else time.monotonic() - since,
        }

    def note(self, line: Mapping[str, Any]) -> None:
        """Stores the numbers of a line of metrics.jsonl."""
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and value is not True}
        self.figures = {name: float(value) for name, value in numbers.items()}
        self.optimizer_step = int(line["optimizer_step"])


class CheckpointRequest:
    """Requests for a checkpoint from any number of callers. The loop writes one checkpoint after the current batch."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._asked = 0
        self._granted = 0
        self._version = -1
        self._path = ""

    @property
    def open(self) -> bool:
        return self._asked > self._granted

    def ask(self, timeout_seconds: float) -> tuple[int, str]:
        """Waits for the next checkpoint; returns its version and folder. Raises DeadlineError."""
        with self._condition:
            self._asked += 1
            mine = self._asked
            if not self._condition.wait_for(lambda: self._granted >= mine, timeout_seconds):
                raise DeadlineError(f"no checkpoint within {timeout_seconds:.0f} s")
            return self._version, self._path

    def grant(self, version: int, path: Path) -> None:
        """Answers all callers that have asked so far."""
        with self._condition:
            self._granted, self._version, self._path = self._asked, version, str(path)
            self._condition.notify_all()


class TrainingServicer(training_pb2_grpc.TrainingServiceServicer):
    def __init__(self, recipe: Recipe, state: TrainerState, request: CheckpointRequest) -> None:
        self._total_batches = recipe.run.total_batches
        self._state = state
        self._request = request

    async def SaveCheckpoint(
        self, request: training_pb2.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> training_pb2.SaveCheckpointReply:
        left = context.time_remaining()
        timeout = _CHECKPOINT_SECONDS if left is None else min(left, _CHECKPOINT_SECONDS)
        version, path = await asyncio.to_thread(self._request.ask, timeout)
        return training_pb2.SaveCheckpointReply(policy_version=version, path=path)

    async def GetProgress(
        self, request: training_pb2.GetProgressRequest, context: grpc.aio.ServicerContext
    ) -> training_pb2.GetProgressReply:
        return training_pb2.GetProgressReply(
            policy_version=self._state.policy_version,
            optimizer_step=self._state.optimizer_step,
            total_batches=self._total_batches,
            metrics=self._state.figures,
        )


def training_endpoint(
    recipe: Recipe, buffer: Buffer, state: TrainerState, request: CheckpointRequest
) -> ServiceEndpoint:
    """Listens on `trainer.port`, registers rank 0 as `trainer`, and sends its heartbeats."""
    servicer = TrainingServicer(recipe, state, request)
    info = ServiceInfo(
        "trainer", state.heartbeat, lambda: state.activity, buffer, policy_version=lambda: state.policy_version
    )
    return ServiceEndpoint(
        info,
        recipe.run.host,
        port=recipe.trainer.port,
        register=lambda server: training_pb2_grpc.add_TrainingServiceServicer_to_server(servicer, server),
        service_names=["tandem.v1.TrainingService"],
    )
