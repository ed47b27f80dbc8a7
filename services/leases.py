"""The loop of every service that works on leases: claim, work on many at once, renew, then complete or release.

The sampler, the scorer and the worker for reward jobs differ in the source of their leases (`LeaseSource`) and in the
work on a lease (`LeaseWorker`). Leases are kept by fencing token, because a released group may be claimed again soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tandem.protos.errors import EnvironmentLackError, FencedError, NotAdmittedError, UnavailableError
from tandem.services.buffer.types import FailureKind

log = logging.getLogger(__name__)

OUTAGE_PAUSE_SECONDS = 1.0  # between two attempts to reach a Redis that is away or full, if the loop tolerates this
_CLAIM_SECONDS = 0.5  # longest wait of one claim, and thus the longest delay of a stop
_POLL_SECONDS = 0.2  # between two checks for a stop while no lease can be claimed
_REFUSED_SECONDS = 0.1  # after a refused claim: an update is under way, or nothing is published yet
_EARLY_SAVE_PAUSES = 50.0  # times the duration of the save before: early saves take at most 2 % of the time
_GRACE_SECONDS = 5.0  # for work in threads, which must notice the cancellation by itself
_OUTAGES = (UnavailableError, EnvironmentLackError)


class Lease(Protocol):
    """A claim with a unique fencing token."""

    @property
    def token(self) -> int: ...


class Result(Protocol):
    """Result of the work on a lease. The loop adds `figures` to its own when the result is accepted."""

    @property
    def figures(self) -> Mapping[str, int]: ...


LeaseT = TypeVar("LeaseT", bound=Lease)
ResultT = TypeVar("ResultT", bound=Result)
ResultT_contra = TypeVar("ResultT_contra", bound=Result, contravariant=True)
ResultT_co = TypeVar("ResultT_co", bound=Result, covariant=True)


@dataclass(frozen=True, slots=True)
class Release:
    """Ends a lease without a result. A `voluntary` release spends no retry budget."""

    reason: str
    kind: FailureKind
    detail: str = ""  # cause of the failure, for the log


SHUTDOWN = Release("shutdown", "voluntary")


@dataclass(slots=True, eq=False)
class Held(Generic[LeaseT]):
    """A lease that is being worked on."""

    lease: LeaseT
    cancelled: threading.Event = field(default_factory=threading.Event)  # set if it is lost or given back, or at a stop
    unsaved: Callable[[], bytes] | None = None
    """Set by the worker when it has new results to save. The loop calls it at the next renewal or release."""
    task: asyncio.Task[None] | None = None
    settling: bool = False  # while the loop completes or releases the lease, which cannot be cancelled
    given_back: Release | None = None  # by the worker: how the loop ends the lease, whose work it cancels

    def take_unsaved(self) -> bytes | None:
        """Returns the unsaved results, if any, and marks them as saved."""
        make, self.unsaved = self.unsaved, None
        return None if make is None else make()


class LeaseSource(Protocol[LeaseT, ResultT_contra]):
    """Source of leases. The methods block; the loop calls them in threads."""

    def claim(self, limit: int, timeout_seconds: float) -> Sequence[LeaseT]:
        """Returns up to `limit` leases. Waits for the first one."""

    def renew(self, leases: Sequence[LeaseT], partials: Mapping[int, bytes]) -> Collection[int]:
        """Extends leases and saves partial results by token. Returns the tokens of leases that are lost."""

    def complete(self, finished: Sequence[tuple[LeaseT, ResultT_contra]]) -> Collection[int]:
        """Completes leases. Returns the tokens of those that are no longer current and whose results were refused."""

    def release(self, lease: LeaseT, release: Release, partial: bytes | None) -> str:
        """Saves the partial result, if any, and ends the lease. Returns `requeued`, `dropped` or `refused`."""


class LeaseWorker(Protocol[LeaseT, ResultT_co]):
    """The work of a service on its leases."""

    runs_in_threads: bool
    """True: `work` waits for a thread, which checks `Held.cancelled`. False: cancelling its task ends it."""

    async def work(self, held: Held[LeaseT]) -> ResultT_co | Release | None:
        """Returns the result, or the reason for a release. None: the lease was lost."""

    async def collect_unsaved(self, held: Sequence[Held[LeaseT]]) -> None:
        """Called before unsaved results are taken: at every renewal, and once when the loop ends. May set `unsaved`."""
        return

    def num_waiting(self) -> int:
        """How many leases more than `capacity` may be held, because the work on some waits for other services."""
        return 0

    def check(self) -> bool:
        """Called before every claim. False ends the loop. Raises if the worker cannot continue."""
        return True

    def interrupt(self) -> None:
        """Called once when the loop ends. Makes work that hangs in a thread return soon."""
        return


class LeaseLoop(Generic[LeaseT, ResultT]):
    """Runs a worker on up to `capacity` leases at once, and on as many others while the results of these are stored.

    A lease is renewed after a third of `lease_seconds`. Names of figures begin with `unit`, a plural noun. An
    unreachable or full Redis ends the loop, unless it `tolerates_outages`: then it waits.
    """

    def __init__(
        self,
        source: LeaseSource[LeaseT, ResultT],
        worker: LeaseWorker[LeaseT, ResultT],
        *,
        unit: str,
        capacity: int,
        lease_seconds: float,
        tolerates_outages: bool = False,
    ) -> None:
        self.paused = False
        self.refusal = ""  # why the last claim was refused; empty if it was accepted
        self._source = source
        self._worker = worker
        self._unit = unit
        self._capacity = capacity
        self._lease_seconds = lease_seconds
        self._tolerates_outages = tolerates_outages
        self._held: dict[int, Held[LeaseT]] = {}
        self._free = 0  # places for further leases; negative if more work at once than `capacity`
        self._busy_seconds = 0.0
        self._busy_since = 0.0
        self._waiting_since = time.monotonic()  # while nothing is held
        self._claiming = self._stopping = False
        self._failure: BaseException | None = None
        self._finished: list[tuple[LeaseT, ResultT]] = []
        self._completion: asyncio.Task[Collection[int]] | None = None  # of what is in `_finished`
        self._completing = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._changed = asyncio.Event()
        self._save_soon = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._result_figures: Counter[str] = Counter()

    @property
    def is_stopping(self) -> bool:
        """Whether the leases that are held are about to be released."""
        return self._stopping

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def is_overloaded(self) -> bool:
        """Whether more leases are worked on at once than `capacity`: the work on some has waited for other services."""
        return self._free < 0

    @property
    def held_in_words(self) -> str:
        """`1 group`, `2 groups`, …"""
        return f"{self.num_held} {self._unit.removesuffix('s')}" + ("s" if self.num_held != 1 else "")

    def figures(self) -> dict[str, float]:
        """Returns sums since the loop was created, the number of current leases, and how long there has been none."""
        own = {name: float(self._counts[name]) for name in ("completed", "requeued", "dropped", "refused", "lost")}
        own["held"], own["free"] = len(self._held), max(0, self._free)
        own["busy_seconds"] = self._busy_seconds + (time.monotonic() - self._busy_since if self._held else 0.0)
        own["waiting_seconds"] = 0.0 if self._held else time.monotonic() - self._waiting_since
        of_unit = {f"{self._unit}_{name}": number for name, number in own.items()}
        return {**of_unit, "outages": self._counts["outages"], **self._result_figures}

    async def run(self, stop: threading.Event) -> None:
        """Works until told to stop, then releases unfinished leases. Raises the error that ended the work early."""
        renewals = asyncio.create_task(self._renew_forever())
        try:
            while not stop.is_set() and self._failure is None and self._worker.check():
                self._free = 0 if self.paused else self._count_free()
                if self._free <= 0:
                    await self._wait_for_change(_POLL_SECONDS)
                else:
                    for lease in await self._claim(self._free):
                        self._start(lease)
        finally:
            await self._shut_down()
            renewals.cancel()
        if self._failure is not None:
            raise self._failure

    def _count_free(self) -> int:
        working = sum(not one.settling for one in self._held.values())  # the others only wait for Redis
        return min(self._capacity - working, 2 * self._capacity - len(self._held)) + self._worker.num_waiting()

    def fail(self, error: BaseException) -> None:
        """Ends the loop; `run` raises the error. Called on the loop's thread."""
        self._failure = self._failure or error
        self._changed.set()

    async def drained(self, timeout_seconds: float) -> bool:
        """Waits until no lease is held or being claimed. Returns False at the deadline. Pause first."""
        deadline = time.monotonic() + timeout_seconds
        while (is_busy := bool(self._held) or self._claiming) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not is_busy

    def save_soon(self) -> None:
        """For workers: renews the leases, and so saves unsaved results, before this is due."""
        self._save_soon.set()

    async def save(self, held: Sequence[Held[LeaseT]]) -> Collection[int]:
        """For workers: extends leases and saves unsaved results now. Returns the tokens of leases that are lost."""
        return await asyncio.shield(self._save(held))  # else a call that goes on in its thread could save last

    async def _save(self, held: Sequence[Held[LeaseT]]) -> Collection[int]:
        async with self._saving:  # one after another: an older result may not replace a newer one
            made = [one.unsaved for one in held]
            partials = {one.lease.token: data for one in held if (data := one.take_unsaved()) is not None}
            try:
                return await asyncio.to_thread(self._source.renew, [one.lease for one in held], partials)
            except _OUTAGES:  # nothing is known to be saved
                for one, unsaved in zip(held, made, strict=True):
                    one.unsaved = one.unsaved or unsaved
                raise

    def give_back(self, held: Held[LeaseT], release: Release) -> None:
        """For workers: ends the work on a lease and releases it with its unsaved results."""
        held.given_back = release
        self._cancel(held)

    async def pause(self, held: Held[LeaseT], seconds: float) -> bool:
        """For workers: saves unsaved results, then waits. Returns False if the lease was cancelled meanwhile."""
        await self._renew([held])
        deadline = time.monotonic() + seconds
        while not held.cancelled.is_set() and (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _POLL_SECONDS))
        return not held.cancelled.is_set()

    async def _claim(self, free: int) -> Sequence[LeaseT]:
        self._claiming = True
        try:
            leases = await asyncio.to_thread(self._source.claim, free, _CLAIM_SECONDS)
            self.refusal = ""
            if not self.paused:
                return leases
            for lease in leases:  # paused while the claim waited
                await self._release(lease, Release("paused", "voluntary"), None)
        except (NotAdmittedError, FencedError) as error:  # the next heartbeat tells a service that it was replaced
            self.refusal = str(error)
            await asyncio.sleep(_REFUSED_SECONDS)
        except _OUTAGES as error:
            await self._wait_out(error)
        finally:
            self._claiming = False
        return ()

    def _start(self, lease: LeaseT) -> None:
        self._busy_since = self._busy_since if self._held else time.monotonic()
        held = self._held[lease.token] = Held(lease)
        held.task = asyncio.create_task(self._process(held))
        held.task.add_done_callback(lambda task: self._forget(held, task))

    def _forget(self, held: Held[LeaseT], task: asyncio.Task[None]) -> None:
        del self._held[held.lease.token]
        if not self._held:
            self._waiting_since = time.monotonic()
            self._busy_seconds += self._waiting_since - self._busy_since
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)  # a bug, or Redis is gone
        self._changed.set()

    async def _process(self, held: Held[LeaseT]) -> None:
        try:
            try:
                outcome: ResultT | Release | None = await self._worker.work(held)
            except asyncio.CancelledError:
                outcome = SHUTDOWN if self._stopping else held.given_back  # None: another worker has the lease
            held.settling = True
            self._changed.set()
            if isinstance(outcome, Release):
                async with self._saving:  # else what is being saved could replace what is taken here
                    partial = held.take_unsaved()
                await self._release(held.lease, outcome, partial)
            elif outcome is not None:
                accepted = await self._complete(held.lease, outcome)
                self._counts["completed" if accepted else "refused"] += 1
                if accepted:
                    self._result_figures.update(outcome.figures)
        except _OUTAGES as error:
            await self._release_after(held, error)

    async def _complete(self, lease: LeaseT, result: ResultT) -> bool:
        """Completes the lease in one call with those that finish while the call before is under way."""
        self._finished.append((lease, result))
        self._completion = self._completion or asyncio.create_task(self._complete_finished())
        return lease.token not in await asyncio.shield(self._completion)

    async def _complete_finished(self) -> Collection[int]:
        async with self._completing:
            self._completion = None
            finished, self._finished = self._finished, []
            return await asyncio.to_thread(self._source.complete, finished)

    async def _release(self, lease: LeaseT, release: Release, partial: bytes | None) -> None:
        self._counts[await asyncio.to_thread(self._source.release, lease, release, partial)] += 1

    async def _release_after(self, held: Held[LeaseT], error: Exception) -> None:
        """Releases a lease once Redis answers again, so that its work is not blamed for a dead holder."""
        if not self._tolerates_outages:
            raise error
        while not self._stopping:
            await self._wait_out(error)
            try:
                await self._release(held.lease, Release("outage", "voluntary"), None)
                return
            except _OUTAGES as again:
                error = again

    async def _wait_out(self, error: Exception) -> None:
        if not self._tolerates_outages:
            raise error
        log.warning("%s wait: %s", self._unit, error)
        self._counts["outages"] += 1
        await self._wait_for_change(OUTAGE_PAUSE_SECONDS)

    async def _renew_forever(self) -> None:
        interval, took = self._lease_seconds / 3, 0.0
        try:
            while True:
                pause = min(_EARLY_SAVE_PAUSES * took, interval)
                await asyncio.sleep(pause)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._save_soon.wait(), interval - pause)
                self._save_soon.clear()
                started = time.monotonic()
                await self._renew(list(self._held.values()))
                took = time.monotonic() - started
        except Exception as error:
            self.fail(error)

    async def _renew(self, held: Sequence[Held[LeaseT]]) -> None:
        """Extends leases, saves unsaved results, and cancels the work on lost leases."""
        current = [one for one in held if not one.cancelled.is_set()]
        if not current:
            return
        await self._worker.collect_unsaved(current)
        try:
            lost = await self.save(current)
        except _OUTAGES as error:
            await self._wait_out(error)
            return
        for one in current:
            if one.lease.token in lost and one.lease.token in self._held and not one.settling:
                self._counts["lost"] += 1
                self._cancel(one)

    def _cancel(self, held: Held[LeaseT]) -> None:
        held.cancelled.set()
        if held.task is not None and not self._worker.runs_in_threads and not held.settling:
            held.task.cancel()

    async def _wait_for_change(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _shut_down(self) -> None:
        """Ends the work. Each task then releases its lease with its partial results, and another worker continues."""
        await asyncio.sleep(0)  # a task that is cancelled before its first step would never release its lease
        self._stopping = True
        self._changed.set()
        held = list(self._held.values())
        try:
            await self._worker.collect_unsaved([one for one in held if not one.cancelled.is_set()])
        finally:
            for one in held:
                self._cancel(one)
            self._worker.interrupt()
            if tasks := [one.task for one in held if one.task is not None]:
                await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
