"""Host memory of received buckets, which is used again: the pages of new memory take as long as half a transfer."""

from __future__ import annotations

import weakref

import torch

from tandem.protos.bucket_digest import DIGEST_BYTES
from tandem.protos.types import BucketSpec
from tandem.protos.weight_group import empty_bucket

_CPU = torch.device("cpu")


class BucketMemory:
    """Lends memory for buckets, and again once no tensor refers to it. It releases what is free, but too small."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def lend(self, spec: BucketSpec) -> torch.Tensor:
        """A buffer as that of `empty_bucket` on the CPU. One thread at a time may call it."""
        size = spec.num_bytes + DIGEST_BYTES
        sizes = [(len(memory), number) for number, memory in enumerate(self._free) if len(memory) >= size]
        if sizes:
            memory = self._free.pop(min(sizes)[1])  # other threads only append
        else:
            self._free.clear()
            memory = empty_bucket(spec, _CPU)
        lent = memory.numpy()[:size]
        weakref.finalize(lent, self._free.append, memory).atexit = False  # a tensor's storage refers to `lent`
        return torch.from_numpy(lent)
