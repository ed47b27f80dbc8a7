"""The store of a run for process groups (`torch_store.py`), without loading torch."""

from __future__ import annotations

from tandem.protos.store_source import StoreSource


def redis_store(redis_url: str, run_id: str, group: str) -> StoreSource:
    """The store of one group of a run, or of several whose keys differ, as those of weight groups do."""
    return StoreSource("tandem.services.buffer.torch_store:RedisStore", (redis_url, run_id, group))
