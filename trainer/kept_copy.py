"""The copy of the newest version in rank 0's memory, for late joiners, differences and exports."""

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
    """Keeps the newest version. The next one is written into its memory, unless the copy is lent, or somebody wanted to
    borrow one when there was none. One thread sends versions; other threads may borrow the copy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: WeightCopy | None = None
        self._wanted = False
        self._lent: list[tuple[torch.Tensor, ...]] = []

    @property
    def newest(self) -> WeightCopy | None:
        """None before the first version, and from `take_memory` until the next version is kept."""
        return self._newest

    def keep(self, copy: WeightCopy) -> None:
        """Replaces the newest version."""
        with self._lock:
            self._newest = copy

    def take_memory(self) -> tuple[torch.Tensor, ...]:
        """The buffers of the newest version, which is gone then; none if it stays."""
        with self._lock:
            copy, is_wanted, self._wanted = self._newest, self._wanted, False
            if copy is None or is_wanted or any(copy.buffers is buffers for buffers in self._lent):
                return ()
            self._newest = None
        return copy.buffers

    def rename(self, incarnation: int, policy_version: int) -> None:
        """Gives the newest version, if there is one, the number of a version with the same weights."""
        copy = self._newest
        if copy is not None:
            manifest = replace(copy.manifest, incarnation=incarnation, policy_version=policy_version)
            self.keep(WeightCopy(manifest, copy.buffers))

    def lend(self) -> WeightCopy:
        """The newest version, whose memory is not written to before `give_back`. Raises WeightTransferError if there is
        none.
        """
        with self._lock:
            copy = self._newest
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
