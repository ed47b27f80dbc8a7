"""Claims, selects and plans a batch of scored groups on rank 0, and reads each rank's payloads."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from tandem.protos.codec import decode_group
from tandem.protos.errors import LedgerError, ScorerError, SelectionError, TandemError, UnavailableError
from tandem.protos.types import Packing, RowHeader, TrainBatch, TrajectoryGroup, scored_trajectories
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.run.metrics import baseline_rewards, has_unknown_version, oldest_version
from tandem.trainer.batch.planning import plan_batch
from tandem.trainer.batch.rejected import Rejection, write_rejected
from tandem.trainer.batch.selection import zero_variance
from tandem.trainer.rank import Rank

log = logging.getLogger(__name__)

_CLAIM_SECONDS = 1.0
_RETRY_SECONDS = 1.0


def rejection(recipe: Recipe, headers: Sequence[RowHeader], start_version: int, incarnation: int) -> Rejection | None:
    """The reason why a scored group cannot be part of a batch that this incarnation trains from this version, or None
    if it can.

    An estimator that compares answers needs at least two scored ones. Rewards are also compared with the greedy
    answer's if the estimator needs it. A row whose version cannot exist was stamped wrongly: nobody knows which weights
    sampled it.
    """
    trainer, cap = recipe.trainer, recipe.run.hard_staleness_cap
    rows = list(scored_trajectories(headers).values())
    if len(rows) < max(2 if trainer.advantage.compares_answers else 1, trainer.advantage.min_group_size):
        return "too_few_scored_rows"
    compared = baseline_rewards(headers) if trainer.needs_baselines else []
    if trainer.needs_baselines and not compared:
        return "no_scored_baseline"
    if any(has_unknown_version(segments, start_version, incarnation) for segments in rows):
        return "unknown_version"
    if cap and start_version - min(map(oldest_version, rows)) > cap:
        return "stale"
    rewards = [*(segments[0].reward or 0.0 for segments in rows), *compared]
    return "zero_variance" if trainer.selection.drop_zero_variance and zero_variance(rewards) else None


class BatchSource:
    """Claims scored groups in order of completion until P pass selection, and plans them as the next batch.

    A rejected group is dropped at once, so its credit returns before the batch is full; for each batch, as many of them
    as it has groups are kept in the run folder. Claims belong to the trainer's incarnation; the next incarnation's
    rollback returns those of an unfinished batch.
    """

    def __init__(
        self,
        buffer: Buffer,
        recipe: Recipe,
        incarnation: int,
        world_size: int,
        stop: threading.Event,
        packings: Sequence[Packing],
    ) -> None:
        self._buffer = buffer
        self._recipe = recipe
        self._incarnation = incarnation
        self._world_size = world_size
        self._stop = stop
        self._packings = packings
        self.survivors: dict[str, tuple[RowHeader, ...]] = {}
        """The groups claimed so far for the next batch."""
        self._consecutive_rejections = 0
        self._rejected: Counter[str] = Counter()
        self._rejected_lengths: list[int] = []
        self._num_kept: Counter[int] = Counter()
        self.exhausted = False
        self.last_claim = time.monotonic()

    def poll(self, version: int, seconds: float) -> TrainBatch | None:
        """The batch that follows `version`; None if it did not fill in time, on stop, or because no group is left.

        Once the feed is exhausted and every outstanding group is claimed, it returns a smaller batch; if no group is
        left, None, and `exhausted` is set.

        Raises:
            ScorerError: too many consecutive groups were dropped because they could not be sampled or scored.
            SelectionError: too many consecutive groups were rejected.
            FencedError: another incarnation took over.
        """
        deadline = time.monotonic() + seconds
        wanted = self._recipe.run.groups_per_batch
        while len(self.survivors) < wanted and not self.exhausted:
            patience = min(_CLAIM_SECONDS, deadline - time.monotonic())
            if patience <= 0 or self._stop.is_set():
                return None
            self._check_drops()
            if not self._claim(version, patience) and self._buffer.exhausted():
                # Claims once more: groups completed between the two checks are still there, and no more will follow.
                self.exhausted = not self._claim(version, 0.0)
        if not self.survivors:
            return None
        return self._plan(version + 1)

    @property
    def ended(self) -> bool:
        """Whether the last `poll` found no group left, or was stopped."""
        return self.exhausted or self._stop.is_set()

    def take_rejections(self) -> dict[str, float]:
        """Counts of groups rejected since the last call, and the mean number of sampled tokens of their trajectories,
        which shows a bias against long ones.
        """
        figures: dict[str, float] = {"rejected_groups": self._rejected.total()}
        figures |= {f"rejected_{reason}": number for reason, number in self._rejected.items()}
        if self._rejected_lengths:
            figures["rejected_response_length_mean"] = fmean(self._rejected_lengths)
        self._rejected.clear()
        self._rejected_lengths.clear()
        return figures

    def _claim(self, version: int, timeout_seconds: float) -> bool:
        wanted = self._recipe.run.groups_per_batch - len(self.survivors)
        claims = self._buffer.claim_scored(self._incarnation, wanted, timeout_seconds)
        if not claims:
            return False
        self.last_claim = time.monotonic()
        rejected: dict[Rejection, list[str]] = {}
        for claim in claims:
            reason = rejection(self._recipe, claim.headers, version, self._incarnation)
            if reason == "unknown_version":
                words = "group %s is dropped: a row has no version, or one above version %d of incarnation %d"
                log.warning(words, claim.group_id, version, self._incarnation, extra={"group": claim.group_id})
            if reason is None:
                self.survivors[claim.group_id] = claim.headers
                self._consecutive_rejections = 0
            else:
                rejected.setdefault(reason, []).append(claim.group_id)
                self._consecutive_rejections += 1
                self._rejected[reason] += 1
                rows = scored_trajectories(claim.headers).values()
                self._rejected_lengths += [sum(segment.num_loss_tokens for segment in row) for row in rows]
        for reason, group_ids in rejected.items():
            self._keep(version + 1, reason, group_ids)
            self._buffer.drop_claimed(self._incarnation, group_ids, reason)
        self._check_rejections()
        return True

    def _keep(self, version: int, reason: Rejection, group_ids: Sequence[str]) -> None:
        """Writes the first rejected groups of each batch to the run folder, at most as many as are trained."""
        kept = group_ids[: self._recipe.run.groups_per_batch - self._num_kept[version]]
        self._num_kept[version] += len(kept)
        try:
            payloads = self._buffer.read(kept)
        except LedgerError:
            return  # another trainer has these groups now: dropping them raises FencedError
        for group_id, payload in zip(kept, payloads, strict=True):
            write_rejected(self._recipe.folder, version, group_id, reason, payload)

    def _check_drops(self) -> None:
        limit = self._recipe.run.max_consecutive_drops
        if not limit or self._buffer.counts()["consecutive_drops"] < limit:
            return
        errors = self._buffer.drop_errors()
        causes = "; ".join(f"{reason}: {text}" if text else reason for reason, text in errors.items())
        scorer = self._recipe.reward.rubric or self._recipe.reward.scorer
        raise ScorerError(
            f"{limit} groups in a row were dropped ({causes}); mend the scorer ({scorer}) or what the error names and "
            "start again, or raise run.max_consecutive_drops"
        )

    def _check_rejections(self) -> None:
        if self._consecutive_rejections >= self._recipe.trainer.max_consecutive_rejections:
            counts = {name: n for name, n in self._buffer.counts().items() if name.startswith("dropped") and n}
            cause = (
                "the rewards carry no signal, or the rules leave nothing; see trainer.selection.drop_zero_variance and "
                "run.hard_staleness_cap"
            )
            if self._rejected["unknown_version"]:
                cause = "samplers stamp versions that were never published; restart them"
            raise SelectionError(
                f"{self._consecutive_rejections} groups in a row were rejected ({dict(self._rejected)}; in all "
                f"{counts}): {cause}"
            )

    def _plan(self, policy_version: int) -> TrainBatch:
        group_ids = tuple(self.survivors)
        headers = tuple(header for group in self.survivors.values() for header in group)
        self.survivors = {}
        return plan_batch(
            headers,
            group_ids,
            policy_version=policy_version,
            incarnation=self._incarnation,
            world_size=self._world_size,
            tokens_per_micro_batch=self._recipe.trainer.tokens_per_micro_batch,
            optimizer_steps=self._recipe.trainer.optimizer_steps_per_batch,
            packings=self._packings,
        )


def groups_of_rank(batch: TrainBatch, rank: int) -> list[str]:
    """The groups whose rows this rank trains, in the batch's order; all on rank 0, because it writes the record."""
    if rank == 0:
        return list(batch.group_ids)
    own = {row.group_id for row in batch.plan if row.rank == rank}
    return [group_id for group_id in batch.group_ids if group_id in own]


def read_groups(
    buffer: Buffer, batch: TrainBatch, ranks: Rank, recorded: Mapping[str, TrajectoryGroup] | None = None
) -> Mapping[str, TrajectoryGroup]:
    """This rank's groups of the batch. Rank 0 has them already, because it recorded them. If any rank fails to read its
    own, all ranks retry once and then all raise UnavailableError.
    """
    group_ids = groups_of_rank(batch, ranks.rank)
    groups: Mapping[str, TrajectoryGroup] = recorded or {}
    failure: TandemError | None = None
    for _ in range(2):
        try:
            if not groups:
                groups = dict(zip(group_ids, map(decode_group, buffer.read(group_ids)), strict=True))
        except TandemError as error:
            failure = error
        if ranks.all_agree(len(groups) == len(group_ids)):
            return groups
        time.sleep(_RETRY_SECONDS)
    raise UnavailableError(
        f"batch {batch.policy_version}: not every rank could read its payloads ({failure or 'another rank failed'})"
    )
