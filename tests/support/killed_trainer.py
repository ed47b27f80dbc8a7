"""A trainer in a process of its own that ends by SIGKILL at a call of Redis, of the disk, or of a publication."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

from tandem.services.config import Recipe
from tandem.services.process import die_with_parent
from tests.support.fork_server import ForkServer
from tests.support.trainer_ring import train

# Also what a trainer imports only when it builds its model and its engine.
_PROCESSES = ForkServer(
    "tests.support.killed_trainer",
    "tandem.trainer.backend.deepspeed.engine",
    "transformers.models.qwen2.modeling_qwen2",
)
REDIS_AND_DISK = ("tandem.services.buffer.connection:Connection.run", "os:fsync", "os:rename", "os:replace")
"""Functions, as `pkgutil.resolve_name` finds them."""
PUBLICATION = (
    "tandem.trainer.weight_snapshot:encode_delta",  # of a bucket
    "tandem.protos.weight_group:WeightGroup.broadcast",  # of a bucket's size, or of the bucket
)


def train_until_killed(
    recipe: Recipe, url: str, num_calls: int, deadline_seconds: float, calls: Sequence[str] = REDIS_AND_DISK
) -> bool:
    """Trains in a process that is killed before the call after `num_calls` others. Whether the run has ended."""
    process = _PROCESSES.start(_train, recipe, url, num_calls, calls)
    process.join(deadline_seconds)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the trainer neither ended nor was killed within {deadline_seconds:g} s")
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode == 0


def _train(recipe: Recipe, url: str, num_calls: int, calls: Sequence[str]) -> None:
    die_with_parent()
    lock, left = threading.Lock(), num_calls

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            with lock:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **more)

        return call

    for path in calls:
        owner, _, name = path.replace(":", ".").rpartition(".")
        setattr(resolve_name(owner), name, counted(resolve_name(path)))
    assert train(recipe, url)
