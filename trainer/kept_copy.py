"""The copy of the newest version in rank 0's memory, from which late joiners are updated."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import torch

from tandem.protos.errors import WeightTransferError
from tandem.protos.types import WeightManifest


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """All buckets of one version in host memory, with digests."""

    manifest: WeightManifest
    buffers: tuple[torch.Tensor, ...]

    @property
    def version(self) -> tuple[int, int]:
        """Incarnation and policy version."""
        return self.manifest.incarnation, self.manifest.policy_version


class KeptCopy:
    """Keeps the newest version. The next one is written into its memory, unless a late joiner reads it, or one asked in
    vain during the version before. Several threads may use it.
    """

    def __init__(self) -> None:
        self.newest: WeightCopy | None = None
        """None before the first version, and while a version is written into the memory of the one before it."""
        self._lock = threading.Lock()
        self._wanted = False  # by someone who found none: the next one stays beside the version after it
        self._lent: list[tuple[torch.Tensor, ...]] = []

    def take_memory(self) -> tuple[torch.Tensor, ...]:
        """The buffers of the newest version, which is gone then; none if it stays."""
        with self._lock:
            copy, is_wanted, self._wanted = self.newest, self._wanted, False
            if copy is None or is_wanted or any(copy.buffers is buffers for buffers in self._lent):
                return ()
            self.newest = None
        return copy.buffers

    def rename(self, incarnation: int, policy_version: int) -> None:
        """Gives the newest version, if there is one, the number of a version with the same weights."""
        if self.newest is not None:
            manifest = replace(self.newest.manifest, incarnation=incarnation, policy_version=policy_version)
            self.newest = WeightCopy(manifest, self.newest.buffers)

    def lend(self) -> WeightCopy:
        """The newest version, whose memory is not written to before `give_back`. Raises WeightTransferError if there is
        none.
        """
        with self._lock:
            copy = self.newest
            if copy is None:
                self._wanted = True
                raise WeightTransferError("a new version is being copied and sent")
            self._lent.append(copy.buffers)
        return copy

    def give_back(self, copy: WeightCopy) -> None:
        """Ends the loan of a copy."""
        with self._lock:
            place = next(place for place, buffers in enumerate(self._lent) if buffers is copy.buffers)
            del self._lent[place]
