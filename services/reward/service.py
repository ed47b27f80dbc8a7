"""The reward service of a run: claims generated groups, scores them, completes them. The same core answers calls
(`RewardServicer`) and scores jobs (`JobWorker`).

A failure is not a score, unless the answer is at fault (`reward/answer_faults.py`): then it gets the worst one. Any
other row whose scorer hung or crashed is scored again, up to `reward.max_attempts` times; one whose scorer was
unreachable up to `reward.infrastructure_attempts` times, after growing pauses. Then it keeps its reason. A group is not
completed without a score for its `baseline` row.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field

import pyarrow as pa

from tandem.protos import reward_pb2_grpc
from tandem.protos.codec import EncodedGroups, encode_scored
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import DataError
from tandem.protos.row_headers import encode_headers, group_headers
from tandem.protos.types import Prompt, ScoredTrajectory, Trajectory, TrajectoryGroup, UnscoredReason
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Claim, FailureKind
from tandem.services.config import Recipe
from tandem.services.group_leases import GroupLeases, GroupResult
from tandem.services.leases import SHUTDOWN, Held, LeaseLoop, LeaseWorker, Release
from tandem.services.logging_setup import configure_logging
from tandem.services.metrics.tracing import group_span
from tandem.services.process import run_in_thread, stop_event
from tandem.services.reward import server as reward_server
from tandem.services.reward.jobs.store import JobStore
from tandem.services.reward.jobs.worker import JobWorker
from tandem.services.reward.pauses import pause_after
from tandem.services.reward.server import RewardServicer
from tandem.services.run.endpoint import run_buffer, service_endpoint
from tandem.services.run.replica import replica_name
from tandem.services.service_info import ServiceInfo

log = logging.getLogger(__name__)

Decoded = tuple[pa.RecordBatch, TrajectoryGroup]
"""A group as it was sent, and decoded."""
_IN_PROCESS_GROUPS = 32  # leased at once for scorers that take no time; what may hang is leased one a thread
_RETRIED_DATA: frozenset[UnscoredReason] = frozenset({"timeout", "crashed"})  # the other reasons are final
_NOT_AN_ANSWER = Unscored("invalid_input", "sampling ended in an error, there is no answer to judge")


@dataclass(slots=True)
class Progress:
    """The scores of a group so far. Saved with the lease, so that the next holder continues from there."""

    attempts: int = 0
    """Attempts in which a scorer hung or crashed."""
    infrastructure_attempts: int = 0
    """Attempts in which a scorer was unreachable."""
    scores: dict[int, Score] = field(default_factory=dict)
    """By trajectory id."""

    def open_rows(self, rows: Iterable[Trajectory], config: RewardConfig) -> list[Trajectory]:
        """The rows that have no score and may still get one."""
        retried: set[UnscoredReason] = set()
        if self.attempts < config.max_attempts:
            retried |= _RETRIED_DATA
        if self.infrastructure_attempts < config.infrastructure_attempts:
            retried.add("infrastructure")
        settled = {n for n, score in self.scores.items() if isinstance(score, Scored) or score.reason not in retried}
        return [row for row in rows if not _failed(row) and row.trajectory_id not in settled]

    def record(self, rows: Sequence[Trajectory], results: Sequence[Score]) -> None:
        reasons = {result.reason for result in results if isinstance(result, Unscored)}
        self.attempts += not _RETRIED_DATA.isdisjoint(reasons)
        self.infrastructure_attempts += "infrastructure" in reasons
        self.scores.update({row.trajectory_id: result for row, result in zip(rows, results, strict=True)})

    def score_of(self, row: Trajectory) -> Score:
        """The score of a row, or the latest reason why it has none."""
        if not _failed(row):
            return self.scores[row.trajectory_id]
        why = row.metadata.get("unscored")  # of an episode; see EpisodeFigures.unscored_episodes
        return _NOT_AN_ANSWER if why is None else Unscored("infrastructure", why)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Progress:
        """Reads what `to_bytes` wrote; None: no progress."""
        if data is None:
            return cls()
        saved = json.loads(data)
        scores = {int(n): Scored(**one) if "value" in one else Unscored(**one) for n, one in saved["scores"].items()}
        return cls(**{**saved, "scores": scores})


def _failed(row: Trajectory) -> bool:
    return row.finish_reason in ("error", "abort")


def score_item(prompt: Prompt, trajectory: Trajectory) -> ScoreItem:
    """With an environment, `extra_info` also has `messages`, the whole conversation."""
    sampled = sum(segment.num_loss_tokens for segment in trajectory.segments)
    info = dict(prompt.judged_info(sampled))
    if "messages" in trajectory.metadata:
        info["messages"] = trajectory.metadata["messages"]
    return ScoreItem(prompt.data_source, trajectory.text, prompt.ground_truth, info, prompt.group_id)


def scored_row(trajectory: Trajectory, score: Score, *, with_earned: bool = False) -> ScoredTrajectory:
    """The trajectory with its reward (what the agent earned plus the score), or with its reason for having none.

    `with_earned`: a row of the group earned something. Then that is a component of all its rows, beside those of the
    scorer or beside `scorer`. The rewards of tokens are left as they are.
    """
    if isinstance(score, Unscored):
        return ScoredTrajectory(trajectory, None, unscored_reason=score.reason, unscored_detail=score.detail)
    earned, breakdown = trajectory.earned_reward, score.breakdown
    if with_earned:
        breakdown = {**(breakdown or {"scorer": score.value}), "earned": earned}
    return ScoredTrajectory(trajectory, earned + score.value, breakdown)


def unscored_rows_required(rows: Sequence[ScoredTrajectory], min_scored_samples: int) -> list[ScoredTrajectory]:
    """The rows that need a reward before the group can be completed: the baseline, with which the others are compared,
    and all policy rows unless `min_scored_samples` (0: all) of them have one.
    """
    policy = [row for row in rows if row.trajectory.role == "policy"]
    enough = min_scored_samples > 0 and sum(row.reward is not None for row in policy) >= min_scored_samples
    return [row for row in rows if row.reward is None and not (enough and row.trajectory.role == "policy")]


def _failures(rows: Iterable[ScoredTrajectory]) -> list[Unscored]:
    return [Unscored(row.unscored_reason, row.unscored_detail) for row in rows if row.unscored_reason is not None]


def _release_for(failures: Sequence[Unscored]) -> Release:
    """With the reason that most rows share. It is the data's failure unless every scorer was unreachable."""
    reasons = Counter(failure.reason for failure in failures)
    (reason, _), *_ = reasons.most_common(1)
    kind: FailureKind = "infrastructure" if set(reasons) == {"infrastructure"} else "data"
    detail = next(failure.detail for failure in failures if failure.reason == reason)
    return Release(reason, kind, f"{len(failures)} rows unscored: {detail}")


class ScoringWorker(LeaseWorker[Claim, GroupResult]):
    """Scores leased groups, several at once where the scorers wait for other processes."""

    runs_in_threads = True

    def __init__(self, buffer: Buffer, core: ScoringCore, config: RewardConfig, name: str = "reward") -> None:
        """`name`: in the registry and as holder of leases. A service that restarts gets its predecessor's back."""
        self._core = core
        self._run_id = buffer.run_id
        self._rubric = core.default
        self._config = config
        self._threads = asyncio.Semaphore(self._rubric.num_callers)
        self._undecoded: list[tuple[Claim, asyncio.Future[Decoded | None]]] = []
        self.loop: LeaseLoop[Claim, GroupResult] = LeaseLoop(
            GroupLeases(buffer, "generated", name, config.lease_seconds),
            self,
            unit="groups",
            capacity=_IN_PROCESS_GROUPS if self._rubric.in_process else self._rubric.num_callers,
            lease_seconds=config.lease_seconds,
        )

    def run(self, stop: threading.Event) -> None:
        """Works until told to stop, then requeues unfinished groups. Raises the error that ended the work early."""
        asyncio.run(self.loop.run(stop))

    def interrupt(self) -> None:
        """Closes the core, which ends scorers that hang."""
        self._core.close()

    def figures(self) -> dict[str, float]:
        return {**self.loop.figures(), **self._core.figures()}

    def activity(self) -> str:
        return f"scoring {self.loop.held_in_words}" if self.loop.num_held else "waiting for generated groups"

    async def work(self, held: Held[Claim]) -> GroupResult | Release:
        """Scores the rows that may still get a score. A group whose scorer cannot be reached is kept for a pause."""
        decoded = await self._decoded_together(held.lease) if self._rubric.in_process else None
        async with self._threads:
            if held.cancelled.is_set():
                return SHUTDOWN
            with group_span("score", self._run_id, held.lease.group_id) as attributes:
                if self._rubric.in_process:  # a thread for each group would take longer than such a scorer
                    outcome, pause_seconds = self._score(held, decoded)
                else:
                    outcome, pause_seconds = await run_in_thread(self._score, held, decoded)
                if isinstance(outcome, Release):
                    attributes["tandem.reason"] = outcome.reason
            del decoded  # with the groups that were decoded together with it
            if pause_seconds and not await self.loop.pause(held, pause_seconds):
                return SHUTDOWN
            return outcome

    async def _decoded_together(self, lease: Claim) -> Decoded | None:
        """The group of a lease, decoded together with those that were claimed with it; None if one of them has a fault,
        and so each has to be decoded by itself.
        """
        running = asyncio.get_running_loop()
        if not self._undecoded:
            running.call_soon(self._decode_together)  # after the tasks of the other leases, which are queued already
        decoded: asyncio.Future[Decoded | None] = running.create_future()
        self._undecoded.append((lease, decoded))
        return await decoded

    def _decode_together(self) -> None:
        undecoded, self._undecoded = self._undecoded, []
        leases = [lease for lease, _ in undecoded]
        try:
            found: Sequence[Decoded | None] = _decode(leases)
        except Exception as error:  # raised again for the group that has the fault
            log.info("%d groups are decoded one by one: %s", len(leases), error)
            found = [None] * len(leases)
        for (_, future), decoded in zip(undecoded, found, strict=True):
            if not future.cancelled():
                future.set_result(decoded)

    def _score(self, held: Held[Claim], decoded: Decoded | None) -> tuple[GroupResult | Release, float]:
        """The outcome of one attempt, and how long to wait before it is told to the buffer."""
        try:
            batch, group = decoded or _decode([held.lease])[0]
        except DataError as error:
            return Release("undecodable", "data", str(error)), 0.0
        rows = [row for row in group.rows if isinstance(row, Trajectory)]
        progress = Progress.from_bytes(held.lease.partial)
        pending = progress.open_rows(rows, self._config)
        if pending:
            if self._rubric.grouped:  # rows are compared with one another, so all are scored again
                pending = [row for row in rows if not _failed(row)]
            scored_before = [row for row in rows if isinstance(progress.scores.get(row.trajectory_id), Scored)]
            items, settled = ([score_item(group.prompt, row) for row in some] for some in (pending, scored_before))
            results = self._core.score(self._rubric, items, "ring", settled=settled)
            if held.cancelled.is_set() and any(isinstance(result, Unscored) for result in results):
                return SHUTDOWN, 0.0
            progress.record(pending, results)
        with_earned = any(row.earned_reward for row in rows)
        scored = [scored_row(row, progress.score_of(row), with_earned=with_earned) for row in rows]
        still_open = {row.trajectory_id for row in progress.open_rows(rows, self._config)}
        failed = [row for row in scored if row.trajectory.trajectory_id in still_open] or unscored_rows_required(
            scored, self._config.min_scored_samples
        )
        if failed:
            held.unsaved = progress.to_bytes
            release = _release_for(_failures(failed))
            paused = still_open and release.kind == "infrastructure"
            return release, pause_after(progress.infrastructure_attempts) if paused else 0.0
        reasons = Counter(f"rows_unscored:{failure.reason}" for failure in _failures(scored))
        figures = {"rows_scored": len(scored) - reasons.total(), **reasons}
        headers = group_headers(TrajectoryGroup(group.prompt, tuple(scored)))
        return GroupResult(encode_scored(batch, scored), encode_headers(headers), figures), 0.0


def _decode(leases: Sequence[Claim]) -> list[Decoded]:
    """The groups of these leases, decoded together. Raises DataError if one has a fault."""
    encoded = EncodedGroups.of({lease.group_id: lease.payload for lease in leases})
    groups = encoded.decode()
    if not all(group.rows for group in groups.values()):
        raise DataError("it has no trajectories")
    return [(encoded.batches[lease.group_id], groups[lease.group_id]) for lease in leases]


def main(recipe: Recipe, redis_url: str, replica: int = 0) -> None:
    """Runs the reward service until SIGTERM, or until the run ends. Raises UserError if the scorer cannot be built, or
    the port is in use, and TandemError if Redis is gone.
    """
    name = replica_name("reward", replica)
    configure_logging("reward", run=recipe.run.run_id, replica=replica or None)
    with ExitStack() as stack:
        core = stack.enter_context(closing(ScoringCore(recipe.reward)))  # SIGTERM ends the process while scorers load
        stop = stop_event()
        buffer = run_buffer(recipe, redis_url, stop)
        store = stack.enter_context(closing(JobStore(redis_url, recipe.jobs.in_namespace(recipe.run.run_id), stop)))
        servicer = stack.enter_context(closing(RewardServicer(core, store, recipe.reward)))
        scorer = ScoringWorker(buffer, core, recipe.reward, name)
        jobs = JobWorker(store, core, worker=name, reward=recipe.reward, stop=stop)
        endpoint = service_endpoint(
            ServiceInfo(name, lambda: {**scorer.figures(), **jobs.figures()}, scorer.activity, buffer),
            recipe,
            stop,
            port=recipe.reward.port,
            register=lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server),
            service_names=[reward_server.SERVICE_NAME],
            on_stop=servicer.end_streams,
            limits=reward_server.RPC_LIMITS,
        )
        with endpoint, jobs:
            scorer.run(stop)
