"""A store for weight groups whose ranks are threads of one process."""

from __future__ import annotations

from torch.distributed import HashStore

from tandem.protos.store_source import StoreSource

_STORE = HashStore()
IN_MEMORY = StoreSource(f"{__name__}:shared_store", ())


def shared_store() -> HashStore:
    return _STORE
