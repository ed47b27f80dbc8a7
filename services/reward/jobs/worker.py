"""The lane of external jobs: threads that each claim a chunk, score it, store its results, and one that keeps the
leases.

A failure is not a score: items whose scorer is out of reach are scored again after a pause,
`reward.infrastructure_attempts` times in all, and keep that reason after that. Other reasons would only come again. If
holders of a chunk die one after the other, the next one scores what the last had under way in smaller and smaller
parts, until one item is left to blame; the others keep their scores.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from tandem.protos import reward_pb2
from tandem.protos.contracts import Scored, Unscored
from tandem.protos.errors import EnvironmentLackError, ScorerError, UnavailableError
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import CompiledRubric, ScoringCore
from tandem.services.reward.backoff import pause_after
from tandem.services.reward.jobs.chunk import Chunk
from tandem.services.reward.jobs.store import ChunkClaim, JobStore
from tandem.services.reward.wire import reply_of

_CLAIM_SECONDS = 0.5  # longest wait of one claim, and so of a stop
_JOIN_SECONDS = 5.0
_OUTAGE_PAUSE_SECONDS = 1.0
_MOST_THREADS = 8
_MOST_LOSSES = 5  # an item whose holder dies so often is what they die of
_PARTS = 16  # of what a dead holder had under way: 16 ** 4 > 8192, so one item is left after so many losses
_FIRST_SLICE_UNITS = 64
_SLICE_SECONDS = 1.0  # a slice is twice as long as the one before while that took less; between saves, too


@dataclass(slots=True)
class _Held:
    claim: ChunkClaim
    lost: threading.Event = field(default_factory=threading.Event)
    """Set when the lease is no longer ours, and on shutdown: scoring the rest is of no use."""


class JobWorker:
    """Context manager: scores chunks until it is left; what is not finished by then goes back with what is scored of
    it.

    A bug in one of its threads sets `stop`, and leaving raises it. Close the core before leaving, to end what hangs in
    it.

    Args:
        worker: name of this replica; what a predecessor of that name held is taken back at once.
        stop: set when the lane cannot go on.
    """

    def __init__(
        self,
        store: JobStore,
        core: ScoringCore,
        *,
        worker: str,
        reward: RewardConfig,
        stop: threading.Event,
    ) -> None:
        self._store = store
        self._core = core
        self._worker = worker
        self._lease_seconds = reward.lease_seconds
        self._attempts = reward.infrastructure_attempts
        self._stop = stop
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}  # by token
        self._figures: Counter[str] = Counter()
        self._failure: BaseException | None = None
        number = min(reward.num_workers + 1, _MOST_THREADS)  # one chunk's last items need not keep every worker busy
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._work,), name=f"jobs-{n}", daemon=True)
            for n in range(number)
        ]
        self._threads.append(
            threading.Thread(target=self._guarded, args=(self._keep_leases,), name="job-leases", daemon=True)
        )

    def __enter__(self) -> JobWorker:
        self._store.register(self._worker)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        with self._lock:
            for held in self._held.values():
                held.lost.set()
        deadline = time.monotonic() + _CLAIM_SECONDS + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._failure is not None and error is None:
            raise self._failure

    def figures(self) -> dict[str, float]:
        """Sums since the process's start."""
        with self._lock:
            return {**{f"jobs:{name}": number for name, number in self._figures.items()}, "jobs:held": len(self._held)}

    def activity(self) -> str:
        """What the lane does, in a line."""
        with self._lock:
            return f"scoring {len(self._held)} chunks of jobs" if self._held else "waiting for calls and jobs"

    @property
    def _ending(self) -> bool:
        """Whether what is out of reach is so because the service ends."""
        return self._closing.is_set() or self._core.closing

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # a bug ends the service: leaving the lane raises it
            self._failure = self._failure or error
            self._closing.set()
            self._stop.set()

    def _work(self) -> None:
        adrift: ChunkClaim | None = None  # in an outage; given back so that it does not count as a death of ours
        while not self._ending:
            with self._enduring():
                if adrift is not None:
                    self._store.give_back(adrift, attempts=adrift.attempts, partial=b"", pause_seconds=0.0)
                    adrift = None
                claim = self._store.claim(self._worker, self._lease_seconds, _CLAIM_SECONDS)
                if claim is None:
                    continue
                held = _Held(claim)
                with self._lock:
                    self._held[claim.token] = held
                try:
                    self._process(held)
                except (UnavailableError, EnvironmentLackError):
                    adrift = claim
                    raise
                finally:
                    with self._lock:
                        del self._held[claim.token]

    def _keep_leases(self) -> None:
        while not self._closing.wait(self._lease_seconds / 3):
            with self._enduring():
                with self._lock:
                    claims = [held.claim for held in self._held.values()]
                lost = self._store.renew(claims, self._lease_seconds) if claims else []
                with self._lock:
                    for token in lost:
                        if token in self._held:
                            self._held[token].lost.set()

    @contextmanager
    def _enduring(self) -> Iterator[None]:
        """A Redis that is away for long, or full, does not end the service: it scores for those who ask, and
        jobs wait.
        """
        try:
            yield
        except (UnavailableError, EnvironmentLackError) as error:
            print(f"jobs: they wait, {error}", flush=True)
            self._count("outages")
            self._closing.wait(_OUTAGE_PAUSE_SECONDS)

    def _process(self, held: _Held) -> None:
        claim = held.claim
        chunk = Chunk(claim)
        if self._ending:
            held.lost.set()
        grouped = self._score(chunk, held)
        if self._ending and chunk.forget_infrastructure(grouped):
            self._store.give_back(claim, attempts=claim.attempts, partial=chunk.partial(), pause_seconds=0.0)
            return
        if held.lost.is_set() and chunk.pending():
            return  # somebody else has it, or its job was cancelled
        attempts = claim.attempts + 1
        if attempts < self._attempts and chunk.forget_infrastructure(grouped):
            pause = pause_after(attempts)
            self._store.give_back(claim, attempts=attempts, partial=chunk.partial(), pause_seconds=pause)
            self._count("chunks_retried")
        else:
            self._complete(claim, chunk)

    def _score(self, chunk: Chunk, held: _Held) -> bool:
        """Scores what has no result yet, as far as the lease goes on. Whether the items of a group depend on one
        another.
        """
        claim = held.claim
        try:
            rubric = self._core.compile(claim.rubric)
        except ScorerError as error:
            # It was fine when the job was submitted. Another replica may still know it.
            chunk.enter_all(Unscored("infrastructure", f"{self._worker}: {error}"))
            return False
        if claim.digest and rubric.digest != claim.digest:
            what = "has another rubric of its own than the service this job was submitted to"
            chunk.enter_all(Unscored("infrastructure", f"{self._worker} {what}"))
            return False
        units = chunk.units(rubric.grouped)
        if claim.losses:
            units = self._score_suspects(chunk, held, rubric, units)
        self._score_rest(chunk, held, rubric, units)
        return rubric.grouped

    def _score_suspects(
        self, chunk: Chunk, held: _Held, rubric: CompiledRubric, units: list[list[int]]
    ) -> list[list[int]]:
        """Scores what the last holder died of, in parts, each of them announced before. What is left for the
        usual way.
        """
        claim = held.claim
        number = min(claim.under_way or len(units), len(units))
        suspects, rest = units[:number], units[number:]
        if number == 1 and claim.losses >= _MOST_LOSSES:
            reason = Unscored("crashed", f"{claim.losses} services in a row ended while they scored it")
            chunk.enter(suspects[0], [reason] * len(suspects[0]))
            suspects = []
        length = -(-number // _PARTS)
        while suspects and not held.lost.is_set():
            part, suspects = suspects[:length], suspects[length:]
            self._save(chunk, held, under_way=len(part), cleared=False)
            self._score_units(chunk, held, rubric, part)
        if not (held.lost.is_set() or self._ending):
            self._save(chunk, held, under_way=0, cleared=True)
        return rest

    def _score_rest(self, chunk: Chunk, held: _Held, rubric: CompiledRubric, units: list[list[int]]) -> None:
        compared = any(len(unit) > 1 for unit in units)
        length = len(units) if compared else _FIRST_SLICE_UNITS
        saved_at = time.monotonic()
        while units and not held.lost.is_set():
            started = time.monotonic()
            part, units = units[:length], units[length:]
            self._score_units(chunk, held, rubric, part)
            now = time.monotonic()
            if now - started < _SLICE_SECONDS:
                length *= 2
            if units and now - saved_at >= _SLICE_SECONDS and not self._ending:
                self._save(chunk, held, under_way=0, cleared=False)
                saved_at = now

    def _score_units(self, chunk: Chunk, held: _Held, rubric: CompiledRubric, units: list[list[int]]) -> None:
        """In one call, unless the lease is lost by now."""
        positions = sorted(position for unit in units for position in unit)
        if positions and not held.lost.is_set():
            chunk.enter(positions, self._core.score(rubric, [chunk.items[n] for n in positions], "jobs"))

    def _save(self, chunk: Chunk, held: _Held, *, under_way: int, cleared: bool) -> None:
        if not self._store.save(held.claim, partial=chunk.partial(), under_way=under_way, cleared=cleared):
            held.lost.set()

    def _complete(self, claim: ChunkClaim, chunk: Chunk) -> None:
        scores = chunk.results()
        values = [score.value for score in scores if isinstance(score, Scored)]
        reasons = Counter(score.reason for score in scores if isinstance(score, Unscored))
        results = reward_pb2.JobEvent.Results(first_item=claim.first_item, items=reply_of(scores).items)
        accepted = self._store.complete(
            claim,
            results.SerializeToString(),
            num_scored=len(values),
            sum_values=sum(values),
            num_unscored={str(reason): number for reason, number in reasons.items()},
        )
        if accepted:
            self._count("chunks_scored")
            self._count("items_scored", len(values))
            self._count("items_unscored", len(scores) - len(values))
        else:
            self._count("chunks_refused")

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._figures[name] += number
