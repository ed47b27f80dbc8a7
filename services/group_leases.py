"""Leases of groups: one stage of the buffer as a source of leases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Claim, Stage
from tandem.services.leases import Release

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Result of a stage for a group: the payload, and the headers if the group becomes scored."""

    payload: bytes
    headers: str = ""
    figures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupLeases:
    """Groups of one stage of the buffer. Before it saves work, it calls `report`, so that the registry's figures count
    all that others read from the buffer.
    """

    buffer: Buffer
    stage: Stage
    worker: str
    lease_seconds: float
    report: Callable[[], None] = lambda: None

    def claim(self, limit: int, timeout_seconds: float) -> Sequence[Claim]:
        return self.buffer.claim(self.stage, self.worker, limit, self.lease_seconds, timeout_seconds)

    def renew(self, leases: Sequence[Claim], partials: Mapping[int, bytes]) -> Collection[int]:
        if partials:
            self.report()
        return self.buffer.renew(leases, self.lease_seconds, partials)

    def complete(self, finished: Sequence[tuple[Claim, GroupResult]]) -> Collection[int]:
        self.report()
        return self.buffer.complete_all([(lease, result.payload, result.headers) for lease, result in finished])

    def release(self, lease: Claim, release: Release, partial: bytes | None) -> str:
        if partial is not None:
            self.renew([lease], {lease.token: partial})
        outcome = self.buffer.release(lease, release.reason, release.kind, release.detail)
        if release.detail:
            words = (lease.group_id, outcome, release.reason, release.detail)
            log.warning("group %s is %s (%s): %s", *words, extra={"group": lease.group_id})
        return outcome
