"""The plan of a batch: the optimizer step, rank and micro-batch of each row."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protos.types import Packing, PlannedRow, RowHeader, TrainBatch
from tandem.trainer.batch.balance import assign_to_ranks, workload
from tandem.trainer.batch.packing import pack, pack_flat


def group_steps(num_groups: int, num_steps: int) -> list[int]:
    """The optimizer step of each group of a batch: consecutive groups per step, similar numbers of groups."""
    edges = [step * num_groups // num_steps for step in range(num_steps + 1)]
    return [step for step in range(num_steps) for _ in range(edges[step], edges[step + 1])]


def plan_batch(
    headers: Sequence[RowHeader],
    group_ids: Sequence[str],
    *,
    policy_version: int,
    incarnation: int,
    world_size: int,
    tokens_per_micro_batch: int,
    optimizer_steps: int,
    packing: Packing = "padded",
) -> TrainBatch:
    """Splits `group_ids` into `optimizer_steps` runs of consecutive groups (at most one run per group), each run into
    micro-batches, and distributes these over the ranks.

    It is a pure function: the same headers give the same plan. Every rank gets the same number of micro-batches per
    step; a rank with fewer rows gets empty ones. The plan lists a micro-batch's rows in the order in which they are
    stacked. Raises DataError if a row exceeds `tokens_per_micro_batch`.
    """
    assert group_ids, "a batch has at least one group"
    num_steps = min(optimizer_steps, len(group_ids))
    plan: list[PlannedRow] = []
    num_micro_batches = []
    steps = group_steps(len(group_ids), num_steps)
    for step in range(num_steps):
        members = {group_id for group_id, of_group in zip(group_ids, steps, strict=True) if of_group == step}
        rows = [header for header in headers if header.group_id in members and header.is_trained]
        lengths = [row.num_tokens for row in rows]
        cut = pack_flat if packing == "flat" else pack
        bins = cut(lengths, tokens_per_micro_batch, multiple_of=world_size)
        costs = [sum(map(workload, _computed([lengths[row] for row in bin_rows], packing))) for bin_rows in bins]
        of_ranks = assign_to_ranks(costs, world_size)
        num_micro_batches.append(max(1, *map(len, of_ranks)))
        plan += [
            PlannedRow(rows[row].group_id, rows[row].trajectory_id, rows[row].segment, step, rank, micro_batch)
            for rank, bin_numbers in enumerate(of_ranks)
            for micro_batch, number in enumerate(bin_numbers)
            for row in bins[number]
        ]
    return TrainBatch(
        policy_version=policy_version,
        incarnation=incarnation,
        group_ids=tuple(group_ids),
        headers=tuple(headers),
        plan=tuple(plan),
        num_micro_batches=tuple(num_micro_batches),
        packing=packing,
    )


def padding_fraction(batch: TrainBatch) -> float:
    """The share of padding in all tokens that the forward passes of this batch compute, without empty micro-batches."""
    lengths = {(h.group_id, h.trajectory_id, h.segment): h.num_tokens for h in batch.headers}
    cells: dict[tuple[int, int, int], list[int]] = {}
    for row in batch.plan:
        cell = cells.setdefault((row.optimizer_step, row.rank, row.micro_batch), [])
        cell.append(lengths[row.group_id, row.trajectory_id, row.segment])
    area = sum(sum(_computed(cell, batch.packing)) for cell in cells.values())
    return 1.0 - sum(map(sum, cells.values())) / area if area else 0.0


def _computed(lengths: Sequence[int], packing: Packing) -> Sequence[int]:
    """The row lengths that a forward pass computes for one micro-batch, padding included."""
    return lengths if packing == "flat" else [max(lengths)] * len(lengths)
