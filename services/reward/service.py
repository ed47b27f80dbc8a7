"""The reward service of a run: claims generated groups, scores them, completes them. Beside it the same core answers
`RewardService` (services/reward/server.py) and scores the jobs of its clients (services/reward/jobs/worker.py).

A failure is not a score: a row whose scorer hung or crashed is scored again, up to `reward.max_attempts`; one whose
scorer was out of reach up to `reward.infrastructure_attempts`, after growing pauses; then it keeps its reason. A
`baseline` row is scored like the others, and a group goes on with none but a scored one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Literal, cast

from tandem.protos import reward_pb2_grpc
from tandem.protos.codec import decode_group, encode_group, encode_headers, group_headers
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import DataError
from tandem.protos.types import Prompt, ScoredTrajectory, Trajectory, TrajectoryGroup, UnscoredReason
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore
from tandem.services.buffer.buffer import Buffer, Claim, Released
from tandem.services.config import Recipe
from tandem.services.process import stop_event
from tandem.services.reward import server as reward_server
from tandem.services.reward.backoff import pause_after
from tandem.services.reward.jobs.store import JobStore
from tandem.services.reward.jobs.worker import JobWorker
from tandem.services.reward.server import RewardServicer
from tandem.services.service_info import ServiceInfo

SERVICE_NAME = "reward"
"""In the registry, and as holder of leases: a service that starts anew takes back what its predecessor held."""

_CLAIM_SECONDS = 0.5  # longest wait of one claim, and so of a stop
_GROUPS_PER_CLAIM = 16  # for scorers that take no time; what may hang is claimed one by one
_RETRIED_DATA: frozenset[UnscoredReason] = frozenset({"timeout", "crashed"})  # the others would only come again
_NOT_AN_ANSWER = Unscored("invalid_input", "sampling ended in an error, there is no answer to judge")


@dataclass(slots=True)
class Progress:
    """How far the scoring of one group got; saved with the lease, so that the next holder goes on from there."""

    attempts: int = 0
    """Those at which a scorer hung or crashed."""
    infrastructure_attempts: int = 0
    """Those at which one was out of reach."""
    scores: dict[int, Score] = field(default_factory=dict)
    """By trajectory id."""

    def open_rows(self, rows: Iterable[Trajectory], config: RewardConfig) -> list[Trajectory]:
        """The rows that have no score and may still get one."""
        retried: set[UnscoredReason] = set()
        if self.attempts < config.max_attempts:
            retried |= _RETRIED_DATA
        if self.infrastructure_attempts < config.infrastructure_attempts:
            retried.add("infrastructure")
        return [row for row in rows if not _failed(row) and _may_change(self.scores.get(row.trajectory_id), retried)]

    def record(self, rows: Sequence[Trajectory], results: Sequence[Score]) -> None:
        """Enters the results of one attempt."""
        reasons = {result.reason for result in results if isinstance(result, Unscored)}
        self.attempts += not _RETRIED_DATA.isdisjoint(reasons)
        self.infrastructure_attempts += "infrastructure" in reasons
        self.scores.update({row.trajectory_id: result for row, result in zip(rows, results, strict=True)})

    def score_of(self, row: Trajectory) -> Score:
        """The row's score, or the last reason why it has none."""
        return _NOT_AN_ANSWER if _failed(row) else self.scores[row.trajectory_id]

    def to_bytes(self) -> bytes:
        """As JSON, for the buffer."""
        scores = {
            number: [score.value, dict(score.breakdown)] if isinstance(score, Scored) else [score.reason, score.detail]
            for number, score in self.scores.items()
        }
        attempts = {"attempts": self.attempts, "infrastructure_attempts": self.infrastructure_attempts}
        return json.dumps({**attempts, "scores": scores}).encode()

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Progress:
        """What `to_bytes` wrote; a fresh start for None."""
        if data is None:
            return cls()
        saved = json.loads(data)
        scores: dict[int, Score] = {
            int(number): Unscored(cast(UnscoredReason, first), second)
            if isinstance(first, str)
            else Scored(first, second)
            for number, (first, second) in saved["scores"].items()
        }
        return cls(saved["attempts"], saved["infrastructure_attempts"], scores)


def _may_change(score: Score | None, retried: Container[UnscoredReason]) -> bool:
    return score is None or (isinstance(score, Unscored) and score.reason in retried)


def _failed(row: Trajectory) -> bool:
    return row.finish_reason in ("error", "abort")


def score_item(prompt: Prompt, trajectory: Trajectory) -> ScoreItem:
    """What the scorer is asked about one trajectory."""
    sampled = sum(segment.num_loss_tokens for segment in trajectory.segments)
    return ScoreItem(
        prompt.data_source, trajectory.text, prompt.ground_truth, prompt.judged_info(sampled), prompt.group_id
    )


def scored_row(trajectory: Trajectory, score: Score, *, with_earned: bool | None = None) -> ScoredTrajectory:
    """The trajectory with its reward (what it earned on its way plus the score) or its reason. Rewards of its tokens
    stay as they are.

    What was earned is a component of its own, beside the scorer's components, or beside `scorer` if it has none;
    `with_earned` says so of a group where another row earned something, so that all its rows have the same components.
    """
    if isinstance(score, Unscored):
        return ScoredTrajectory(trajectory, None, unscored_reason=score.reason, unscored_detail=score.detail)
    earned = trajectory.earned_reward
    breakdown = score.breakdown
    if with_earned if with_earned is not None else earned:
        breakdown = {**(breakdown or {"scorer": score.value}), "earned": earned}
    return ScoredTrajectory(trajectory, earned + score.value, breakdown)


def scored_rows(rows: Sequence[Trajectory], progress: Progress) -> list[ScoredTrajectory]:
    """The rows of a group as they stand."""
    with_earned = any(row.earned_reward for row in rows)
    return [scored_row(row, progress.score_of(row), with_earned=with_earned) for row in rows]


def lacking_rows(rows: Sequence[ScoredTrajectory], min_scored_samples: int) -> list[ScoredTrajectory]:
    """The rows without a reward for which a group cannot go on; none: it may.

    Of policy rows, `min_scored_samples` with a reward are enough (0: all of them). A baseline has no substitute:
    without its reward the estimator can make nothing of the others.
    """
    policy = [row for row in rows if row.trajectory.role == "policy"]
    enough = min_scored_samples > 0 and sum(row.reward is not None for row in policy) >= min_scored_samples
    return [row for row in rows if row.reward is None and not (enough and row.trajectory.role == "policy")]


def _failures(rows: Iterable[ScoredTrajectory]) -> list[Unscored]:
    return [Unscored(row.unscored_reason, row.unscored_detail) for row in rows if row.unscored_reason is not None]


def verdict(failures: Iterable[Unscored]) -> tuple[UnscoredReason, Literal["infrastructure", "data"]]:
    """The reason that most rows share, and whose failure it is."""
    reasons = Counter(failure.reason for failure in failures)
    (reason, _), *_ = reasons.most_common(1)
    return reason, "infrastructure" if set(reasons) == {"infrastructure"} else "data"


class RewardStage:
    """Scores the ring's groups: threads that each claim, score, complete, and one that keeps the leases."""

    def __init__(self, buffer: Buffer, core: ScoringCore, config: RewardConfig) -> None:
        self._buffer = buffer
        self._core = core
        self._rubric = core.default
        self._config = config
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._held: dict[
            int, Claim
        ] = {}  # by token: a group given back may be claimed again before its first claim is forgotten
        self._figures: Counter[str] = Counter()
        self._seconds = {"waiting": 0.0, "scoring": 0.0}
        self._failure: BaseException | None = None

    def run(self, stop: threading.Event) -> None:
        """Works until told to stop; groups not finished by then go back to the buffer. Raises what a thread of it
        raised.
        """
        threads = [
            threading.Thread(target=self._work, name=f"reward-{n}", daemon=True)
            for n in range(self._rubric.num_callers)
        ]
        for thread in threads:
            thread.start()
        renew_every = self._config.lease_seconds / 3
        renew_at = time.monotonic() + renew_every
        while not stop.wait(0.1) and not self._stop.is_set():
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + renew_every
                self._renew_leases()
        self._stop.set()
        self._core.close()  # ends what hangs
        for thread in threads:
            thread.join(timeout=_CLAIM_SECONDS + 5.0)
        if self._failure is not None:
            raise self._failure

    def figures(self) -> dict[str, float]:
        """Sums since the process's start, for heartbeat and Info."""
        with self._lock:
            return {
                **dict(self._figures),
                **{f"{name}_seconds": seconds for name, seconds in self._seconds.items()},
                "groups_held": len(self._held),
                **self._core.figures(),
            }

    def activity(self) -> str:
        """What the stage does, in a line."""
        with self._lock:
            return f"scoring {len(self._held)} groups" if self._held else "waiting for generated groups"

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                number = _GROUPS_PER_CLAIM if self._rubric.in_process else 1
                claims = self._buffer.claim(
                    "generated", SERVICE_NAME, number, self._config.lease_seconds, _CLAIM_SECONDS
                )
                claimed = time.monotonic()
                with self._lock:
                    self._held.update({claim.token: claim for claim in claims})
                    self._seconds["waiting"] += claimed - started
                for claim in claims:
                    self._process(claim)
                    with self._lock:
                        del self._held[claim.token]
                with self._lock:
                    self._seconds["scoring"] += time.monotonic() - claimed
        except BaseException as error:  # a bug ends the service: `run` raises it
            self._failure = error
            self._stop.set()

    def _renew_leases(self) -> None:
        with self._lock:
            claims = list(self._held.values())
        if claims:
            self._buffer.renew(claims, self._config.lease_seconds)

    def _process(self, claim: Claim) -> None:
        try:
            group = decode_group(claim.payload)
            if not group.rows:
                raise DataError("it has no trajectories")
        except DataError as error:
            print(f"reward: group {claim.group_id} cannot be scored: {error}", flush=True)
            self._release(claim, "undecodable", "data")
            return
        rows = [row for row in group.rows if isinstance(row, Trajectory)]
        progress = Progress.from_bytes(claim.partial)
        pending = progress.open_rows(rows, self._config)
        if pending:
            if self._rubric.grouped:  # rows are compared with one another, so all of them again
                pending = [row for row in rows if not _failed(row)]
            results = self._core.score(self._rubric, [score_item(group.prompt, row) for row in pending], "ring")
            if self._stop.is_set() and any(isinstance(result, Unscored) for result in results):
                self._release(claim, "shutdown", "voluntary")
                return
            progress.record(pending, results)
        rows_now = scored_rows(rows, progress)
        lacking = lacking_rows(rows_now, self._config.min_scored_samples)
        if still_open := progress.open_rows(rows, self._config):
            numbers = {row.trajectory_id for row in still_open}
            failed = [row for row in rows_now if row.trajectory.trajectory_id in numbers]
            self._give_back(claim, progress, _failures(failed), pause=True)
        elif lacking:
            self._give_back(claim, progress, _failures(lacking), pause=False)
        else:
            group = TrajectoryGroup(group.prompt, tuple(rows_now))
            self._complete(claim, group, Counter(failure.reason for failure in _failures(rows_now)))

    def _give_back(self, claim: Claim, progress: Progress, failures: Sequence[Unscored], *, pause: bool) -> None:
        """Returns the group with what is scored of it: behind the others, which need not wait for its next time-out, or
        dropped.

        A group without attempts left comes back without being scored until its budget is spent in the buffer.
        """
        reason, kind = verdict(failures)
        self._buffer.renew([claim], self._config.lease_seconds, {claim.group_id: progress.to_bytes()})
        if kind == "infrastructure" and pause:
            self._stop.wait(pause_after(progress.infrastructure_attempts))
            if self._stop.is_set():
                self._release(claim, "shutdown", "voluntary")
                return
        if self._release(claim, reason, kind) == "dropped":
            detail = next(failure.detail for failure in failures if failure.reason == reason)
            print(
                f"reward: group {claim.group_id} is dropped: {len(failures)} rows unscored ({reason}: {detail})",
                flush=True,
            )

    def _complete(self, claim: Claim, group: TrajectoryGroup, unscored: Mapping[UnscoredReason, int]) -> None:
        accepted = self._buffer.complete(claim, encode_group(group), encode_headers(group_headers(group)))
        with self._lock:
            if not accepted:
                self._figures["groups_refused"] += 1
                return
            self._figures["groups_scored"] += 1
            self._figures["rows_scored"] += len(group.rows) - sum(unscored.values())
            self._figures.update({f"rows_unscored:{reason}": number for reason, number in unscored.items()})

    def _release(self, claim: Claim, reason: str, kind: Literal["infrastructure", "data", "voluntary"]) -> Released:
        outcome = self._buffer.release(claim, reason, kind)
        with self._lock:
            self._figures[f"groups_{outcome}"] += 1
        return outcome


def main(recipe: Recipe, redis_url: str) -> None:
    """Runs the reward service until SIGTERM.

    Raises:
        UserError: the scorer cannot be built; the port is in use.
        TandemError: Redis is gone.
    """
    stop = stop_event()
    buffer = Buffer(redis_url, recipe.run.run_id)
    jobs = recipe.jobs.in_namespace(recipe.run.run_id)
    with ExitStack() as stack:
        core = stack.enter_context(closing(ScoringCore(recipe.reward)))
        store = stack.enter_context(closing(JobStore(redis_url, jobs)))
        servicer = stack.enter_context(closing(RewardServicer(core, store, recipe.reward, jobs)))
        stage = RewardStage(buffer, core, recipe.reward)
        lane = JobWorker(store, core, worker=SERVICE_NAME, reward=recipe.reward, stop=stop)
        front = ServiceInfo(
            SERVICE_NAME,
            recipe,
            buffer,
            figures=lambda: {**stage.figures(), **lane.figures()},
            activity=stage.activity,
            port=recipe.reward.port,
            register=lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server),
            service_names=[reward_server.SERVICE_NAME],
            on_stop=servicer.end_streams,
            intake=reward_server.INTAKE,
        )
        with front, lane:
            stage.run(stop)
