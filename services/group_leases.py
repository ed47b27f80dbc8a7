"""Groups of the experience buffer as leases, and the result of working on one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.services.buffer.buffer import Buffer, Claim, Stage
from tandem.services.leases import Release

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Result of a stage for a group: the payload, and the headers if the group becomes scored."""

    payload: bytes
    headers: str = ""
    figures: Mapping[str, int] = field(default_factory=dict)


class GroupLeases:
    """Groups of one stage of the buffer as a `LeaseSource`.

    Args:
        report: called before finished work is saved, so that the worker's figures in the registry already count the
            results that other services read from the buffer.
    """

    def __init__(
        self,
        buffer: Buffer,
        stage: Stage,
        worker: str,
        lease_seconds: float,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self._buffer = buffer
        self._stage = stage
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._report = report

    def claim(self, limit: int, timeout_seconds: float) -> Sequence[Claim]:
        """Claims groups. Raises NotAdmittedError and FencedError as `Buffer.claim`."""
        return self._buffer.claim(self._stage, self._worker, limit, self._lease_seconds, timeout_seconds)

    def renew(self, leases: Sequence[Claim], partials: Mapping[int, bytes]) -> Collection[int]:
        """Extends leases and saves partial results. Returns the tokens of lost leases."""
        if partials:
            self._report()
        return self._buffer.renew(leases, self._lease_seconds, partials)

    def complete(self, lease: Claim, result: GroupResult) -> bool:
        """Moves the group to the next stage."""
        self._report()
        return self._buffer.complete(lease, result.payload, result.headers)

    def release(self, lease: Claim, release: Release, partial: bytes | None) -> str:
        """Requeues the group, or drops it once its budget is spent."""
        if partial is not None:
            self.renew([lease], {lease.token: partial})
        outcome = self._buffer.release(lease, release.reason, release.kind, release.detail)
        if release.detail:
            words = (lease.group_id, outcome, release.reason, release.detail)
            log.warning("group %s is %s (%s): %s", *words, extra={"group": lease.group_id})
        return outcome
