"""A torch store in a run's Redis, so that the ranks of a process group meet where strangers can neither read nor write.

torch's own TCPStore answers everybody who reaches its port.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

from torch.distributed import DistStoreError, Store

from tandem.services.buffer.connection import RUNS, Connection

_KEPT_SECONDS = 24 * 3600  # keys are read while a group is formed
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05


class RedisStore(Store):
    """The part of torch's interface that gloo and NCCL use. Keys vanish a day after they were written.

    torch calls it from C++, also from threads of its own, and does not keep the Python object alive: whoever creates a
    process group must hold the store for as long. The names in camel case are those that C++ calls.
    """

    def __init__(self, redis_url: str, run_id: str, group: str) -> None:
        super().__init__()
        self._connection = Connection(redis_url, run_id, RUNS)
        self._redis = self._connection.redis
        self._prefix = self._connection.key(f"store:{group}:")

    def set(self, key: str, value: bytes | str) -> None:
        self._connection.retried(lambda: self._redis.set(self._prefix + key, value, ex=_KEPT_SECONDS))

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        self.wait([key])
        value = self._connection.retried(lambda: self._redis.get(self._prefix + key))
        if value is None:
            raise DistStoreError(f"key {key} was deleted while it was read")
        return cast("bytes", value)

    def add(self, key: str, value: int) -> int:
        name = self._prefix + key
        self._connection.retried(lambda: self._redis.set(name, 0, ex=_KEPT_SECONDS, nx=True))
        # Not repeated during an outage: it may have been executed although the answer was lost.
        return int(self._connection.retried(lambda: self._redis.incrby(name, value), 0.0))

    def check(self, keys: Sequence[str]) -> bool:
        names = {self._prefix + key for key in keys}
        return self._connection.retried(lambda: self._redis.exists(*names)) == len(names)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set. Raises DistStoreError at the timeout, by default that of the store."""
        own: timedelta = self.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        deadline = time.monotonic() + (timeout or own).total_seconds()
        pause = _FIRST_PAUSE_SECONDS
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise DistStoreError(f"timed out while waiting for the keys {', '.join(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def deleteKey(self, key: str) -> bool:
        return bool(self._connection.retried(lambda: self._redis.delete(self._prefix + key)))

    def clone(self) -> RedisStore:
        """The store itself, because it is safe to use from several threads."""
        return self
