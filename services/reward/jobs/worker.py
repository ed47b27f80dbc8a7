"""The worker for reward jobs: leases chunks, scores several at once, and stores their results.

A failure is not a score. Items whose scorer is unreachable are scored again after a pause, up to
`reward.infrastructure_attempts` times, and then keep that reason. Other reasons are final. If holders of a chunk die in
a row, the next one scores what the last one was scoring in smaller and smaller parts, until one item is the cause.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tandem.protos import reward_pb2
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import CompiledRubric, ScoringCore
from tandem.services.leases import SHUTDOWN, Held, LeaseLoop, LeaseWorker, Release
from tandem.services.process import run_in_thread
from tandem.services.reward.jobs.store import ChunkClaim, ChunkResult, JobStore
from tandem.services.reward.pauses import pause_after
from tandem.services.reward.undecoded_text import chunk_of
from tandem.services.reward.wire import read_items, reply_of, score_of

_JOIN_SECONDS = 7.0
_MOST_THREADS = 8
_MOST_LOSSES = 5  # consecutive losses at one item, after which it is the cause
_PARTS = 16  # of what a dead holder was scoring: 16 ** 4 > 8192, so four losses lead to one item
_FIRST_SLICE_UNITS = 64
_SLICE_SECONDS = 1.0  # slices double while they take less; also the time between two saves


class JobWorker(LeaseWorker[ChunkClaim, ChunkResult]):
    """Source and worker of chunks. A context manager: it scores chunks until its exit, which requeues unfinished ones
    with their partial results. `worker` names this replica, which takes back the leases of its predecessor.

    A bug in its thread sets `stop` and is raised at the exit. Close the core before, to end scorers that hang.
    """

    runs_in_threads = True

    def __init__(
        self, store: JobStore, core: ScoringCore, *, worker: str, reward: RewardConfig, stop: threading.Event
    ) -> None:
        self._store = store
        self._core = core
        self.worker = worker
        self._lease_seconds = reward.lease_seconds
        self._attempts = reward.infrastructure_attempts
        self._stop = stop
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self.loop: LeaseLoop[ChunkClaim, ChunkResult] = LeaseLoop(
            self,
            self,
            unit="chunks",
            capacity=min(reward.num_workers + 1, _MOST_THREADS),  # a chunk's last items need not keep every worker busy
            lease_seconds=reward.lease_seconds,
            tolerates_outages=True,  # the service keeps scoring calls
        )
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def __enter__(self) -> JobWorker:
        self._store.register(self.worker)
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._closing.set()
        self._thread.join(timeout=_JOIN_SECONDS)
        if self._failure is not None and error is None:
            raise self._failure

    def figures(self) -> dict[str, float]:
        return {f"jobs:{name}": number for name, number in self.loop.figures().items()}

    def activity(self) -> str:
        return f"scoring {self.loop.held_in_words} of jobs" if self.loop.num_held else "waiting for calls and jobs"

    def check(self) -> bool:
        """Returns False once the core is closed, because its scorers are then unreachable."""
        return not self._core.closing

    def claim(self, limit: int, timeout_seconds: float) -> Sequence[ChunkClaim]:
        """Claims at most one chunk, because another replica may have free threads."""
        claim = self._store.claim(self.worker, self._lease_seconds, timeout_seconds)
        return [] if claim is None else [claim]

    def renew(self, leases: Sequence[ChunkClaim], partials: Mapping[int, bytes]) -> Collection[int]:
        """Extends leases. Returns the tokens of lost leases. There are partial results only of a chunk that its thread
        has given back, and that is not released yet.
        """
        lost = set(self._store.renew(leases, self._lease_seconds))
        for lease in leases:
            if lease.token in partials and lease.token not in lost:
                partial = partials[lease.token]
                if not self._store.save(lease, partial=partial, under_way=0, cleared=False):
                    lost.add(lease.token)
        return lost

    def complete(self, finished: Sequence[tuple[ChunkClaim, ChunkResult]]) -> Collection[int]:
        return [lease.token for lease, result in finished if not self._store.complete(lease, result)]

    def release(self, lease: ChunkClaim, release: Release, partial: bytes | None) -> str:
        """Requeues the chunk. After an infrastructure failure there is a pause, and the attempt is counted."""
        failed = release.kind == "infrastructure"
        attempts = lease.attempts + failed
        pause_seconds = pause_after(attempts) if failed else 0.0
        current = self._store.give_back(lease, attempts=attempts, partial=partial or b"", pause_seconds=pause_seconds)
        return "requeued" if current else "refused"

    async def work(self, held: Held[ChunkClaim]) -> ChunkResult | Release | None:
        """Scores the items for which earlier holders saved no result."""
        return await run_in_thread(self._process, held)

    def _run(self) -> None:
        try:
            asyncio.run(self.loop.run(self._closing))
        except BaseException as error:  # a bug ends the service: leaving this raises it
            self._failure = error
            self._stop.set()

    @property
    def _ending(self) -> bool:
        return self._closing.is_set() or self._core.closing

    def _process(self, held: Held[ChunkClaim]) -> ChunkResult | Release | None:
        claim = held.lease
        chunk = Chunk(claim)
        if self._ending:
            held.cancelled.set()
        grouped = self._score(chunk, held)
        if self._ending and chunk.forget_infrastructure(grouped):
            held.unsaved = chunk.partial
            return SHUTDOWN
        if held.cancelled.is_set() and chunk.pending():
            return None  # another worker has it, or its job was cancelled
        if claim.attempts + 1 < self._attempts and chunk.forget_infrastructure(grouped):
            held.unsaved = chunk.partial
            return Release("infrastructure", "infrastructure")
        return chunk.finished()

    def _score(self, chunk: Chunk, held: Held[ChunkClaim]) -> bool:
        """Scores the items without a result until the lease is cancelled. Returns whether the rubric compares items."""
        claim = held.lease
        try:
            rubric = self._core.compile(claim.rubric)
            if claim.digest and rubric.digest != claim.digest:
                raise ScorerError("it has another rubric than the service this job was submitted to")
        except ScorerError as error:  # the service accepted the job, so another replica may know its rubric
            chunk.enter_all(Unscored("infrastructure", f"{self.worker}: {error}"))
            return False
        units = chunk.units(rubric.grouped)
        if claim.losses:
            units = self._score_suspects(chunk, held, rubric, units)
        self._score_rest(chunk, held, rubric, units)
        return rubric.grouped

    def _score_suspects(
        self, chunk: Chunk, held: Held[ChunkClaim], rubric: CompiledRubric, units: list[list[int]]
    ) -> list[list[int]]:
        """Scores what the last holder was scoring when it died, in parts, each saved as `under_way` first. Returns the
        other units.
        """
        claim = held.lease
        number = min(claim.under_way or len(units), len(units))
        suspects, rest = units[:number], units[number:]
        if number == 1 and claim.losses >= _MOST_LOSSES:
            reason = Unscored("crashed", f"{claim.losses} services in a row ended while they scored it")
            chunk.enter(suspects[0], [reason] * len(suspects[0]))
            suspects = []
        length = -(-number // _PARTS)
        while suspects and not held.cancelled.is_set():
            part, suspects = suspects[:length], suspects[length:]
            self._save(chunk, held, under_way=len(part), cleared=False)
            self._score_units(chunk, held, rubric, part)
        if not (held.cancelled.is_set() or self._ending):
            self._save(chunk, held, under_way=0, cleared=True)
        return rest

    def _score_rest(self, chunk: Chunk, held: Held[ChunkClaim], rubric: CompiledRubric, units: list[list[int]]) -> None:
        compared = any(len(unit) > 1 for unit in units)
        length = len(units) if compared else _FIRST_SLICE_UNITS
        saved_at = time.monotonic()
        while units and not held.cancelled.is_set():
            started = time.monotonic()
            part, units = units[:length], units[length:]
            self._score_units(chunk, held, rubric, part)
            now = time.monotonic()
            if now - started < _SLICE_SECONDS:
                length *= 2
            if units and now - saved_at >= _SLICE_SECONDS and not self._ending:
                self._save(chunk, held, under_way=0, cleared=False)
                saved_at = now

    def _score_units(
        self, chunk: Chunk, held: Held[ChunkClaim], rubric: CompiledRubric, units: list[list[int]]
    ) -> None:
        """Scores units in one call, unless the lease is cancelled."""
        positions = sorted(position for unit in units for position in unit)
        if positions and not held.cancelled.is_set():
            chunk.enter(positions, self._core.score(rubric, [chunk.items[n] for n in positions], "jobs"))

    def _save(self, chunk: Chunk, held: Held[ChunkClaim], *, under_way: int, cleared: bool) -> None:
        if not self._store.save(held.lease, partial=chunk.partial(), under_way=under_way, cleared=cleared):
            held.cancelled.set()


class Chunk:
    """The items of a claimed chunk, and the results they have so far."""

    def __init__(self, claim: ChunkClaim) -> None:
        self._first_item = claim.first_item
        messages = chunk_of(claim.items).items
        items, faults = read_items(messages, claim.first_item)
        readable = iter(items)
        self.items: dict[int, ScoreItem] = {n: next(readable) for n in range(len(messages)) if n not in faults}
        self._results: list[Score | None] = [faults.get(n) for n in range(len(messages))]
        if claim.partial:
            for n, message in enumerate(reward_pb2.ScoreReply.FromString(claim.partial).items):
                self._results[n] = self._results[n] or score_of(message)

    def pending(self) -> list[int]:
        """Positions without a result, in order."""
        return [n for n, result in enumerate(self._results) if result is None]

    def units(self, grouped: bool) -> list[list[int]]:
        """Positions without a result, in lists that are scored in one call: the items of a group, if the rubric
        compares them, else one each.
        """
        units: dict[str | int, list[int]] = {}
        for n in self.pending():
            units.setdefault((grouped and self.items[n].group) or n, []).append(n)
        return list(units.values())

    def enter(self, positions: Sequence[int], scores: Sequence[Score]) -> None:
        for n, score in zip(positions, scores, strict=True):
            self._results[n] = score

    def enter_all(self, reason: Unscored) -> None:
        self._results = [result or reason for result in self._results]

    def forget_infrastructure(self, grouped: bool) -> bool:
        """Removes the results of items whose scorer was unreachable, and of their groups if the rubric compares items.

        Returns whether any item is now without a result.
        """
        failed = {
            n for n, one in enumerate(self._results) if isinstance(one, Unscored) and one.reason == "infrastructure"
        }
        groups = {self.items[n].group for n in failed} - {""} if grouped else set()
        for n, item in self.items.items():
            if n in failed or item.group in groups:
                self._results[n] = None
        return bool(self.pending())

    def finished(self) -> ChunkResult:
        """The results of all items."""
        scores = [result for result in self._results if result is not None]
        assert len(scores) == len(self._results), "an item of a finished chunk has no result"
        values = [score.value for score in scores if isinstance(score, Scored)]
        reasons = Counter(str(score.reason) for score in scores if isinstance(score, Unscored))
        results = reward_pb2.JobEvent.Results(first_item=self._first_item, items=reply_of(scores).items)
        return ChunkResult(results.SerializeToString(), len(values), sum(values), reasons)

    def partial(self) -> bytes:
        """The results so far; an item without a result is an empty message."""
        items = [
            reward_pb2.ScoreReply.Item() if result is None else reply_of([result]).items[0] for result in self._results
        ]
        return reward_pb2.ScoreReply(items=items).SerializeToString()
