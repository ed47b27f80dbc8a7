"""Where the ranks of a process group meet. Imports no torch."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Sequence
from typing import NamedTuple


class StoreSource(NamedTuple):
    """How a process opens the torch store of a process group: the function `module:name` and its arguments.

    It is plain text and numbers, so that other processes can get it, and so that only the process that opens a store
    needs to import what is behind it. Never take one from the network: opening it calls the function.
    """

    opener: str
    arguments: Sequence[str | int]

    def open(self) -> object:
        """Opens the store, a `torch.distributed.Store`. Raises what the function raises."""
        opened: object = pkgutil.resolve_name(self.opener)(*self.arguments)
        return opened

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> StoreSource:
        return cls(*json.loads(text))


def file_store(path: str, num_ranks: int) -> StoreSource:
    """A store in a file, for ranks on one machine. Whoever can write the file can change it."""
    return StoreSource("torch.distributed:FileStore", (path, num_ranks))
