"""Communication between ranks other than gradients."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import distributed


class Rank:
    """One process of a process group, on its device. All ranks call the same methods."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()

    def all_agree(self, ok: bool) -> bool:
        """True on every rank if `ok` is True on all ranks."""
        if self.world_size == 1:
            return ok
        votes = torch.tensor([int(ok)], device=self.device)
        distributed.all_reduce(votes, distributed.ReduceOp.MIN)
        return bool(votes.item())

    def broadcast_object(self, value: object) -> Any:
        """Rank 0's value on every rank. It must be JSON, because nothing is pickled."""
        if self.world_size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(data)], device=self.device)
        distributed.broadcast(size, 0)
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        distributed.broadcast(content, 0)
        return json.loads(bytes(content.cpu().numpy()))

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.all_agree(True)
