"""The plan of a batch: the optimizer step, rank and micro-batch of each row."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protos.types import Packing, PlannedRow, RowHeader, TrainBatch
from tandem.trainer.batch.balance import assign_to_ranks, workload
from tandem.trainer.batch.packing import SharedRow, pack, pack_flat, pack_shared, shared_tokens, shared_work

SHARED_TOKENS = 0.85
"""Prompts are shared if this fraction of the tokens is left to compute; gathering their keys and values has a cost."""


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
    packings: Sequence[Packing] = ("padded",),
) -> TrainBatch:
    """Splits `group_ids` into `optimizer_steps` runs of consecutive groups (at most one run per group), each run into
    micro-batches, and distributes these over the ranks.

    It is a pure function: the same headers give the same plan. Every rank gets the same number of micro-batches per
    step; a rank with fewer rows gets empty ones. The plan lists a micro-batch's rows in the order in which they are
    stacked. Of two `packings`, the second is used if it computes at most `SHARED_TOKENS` of the first one's tokens.
    Raises DataError if a row exceeds `tokens_per_micro_batch`.
    """

    def plan(packing: Packing) -> TrainBatch:
        return _plan(
            headers,
            group_ids,
            policy_version=policy_version,
            incarnation=incarnation,
            world_size=world_size,
            tokens_per_micro_batch=tokens_per_micro_batch,
            optimizer_steps=optimizer_steps,
            packing=packing,
        )

    last = plan(packings[-1])
    if len(packings) == 1 or computed_tokens(last) <= SHARED_TOKENS * _num_tokens(last):
        return last  # the first one would compute at least all tokens
    first = plan(packings[0])
    return last if computed_tokens(last) <= SHARED_TOKENS * computed_tokens(first) else first


def _plan(
    headers: Sequence[RowHeader],
    group_ids: Sequence[str],
    *,
    policy_version: int,
    incarnation: int,
    world_size: int,
    tokens_per_micro_batch: int,
    optimizer_steps: int,
    packing: Packing,
) -> TrainBatch:
    assert group_ids, "a batch has at least one group"
    num_steps = min(optimizer_steps, len(group_ids))
    plan: list[PlannedRow] = []
    num_micro_batches = []
    steps = group_steps(len(group_ids), num_steps)
    for step in range(num_steps):
        members = {group_id for group_id, of_group in zip(group_ids, steps, strict=True) if of_group == step}
        rows = [header for header in headers if header.group_id in members and header.is_trained]
        bins = _cut(rows, packing, tokens_per_micro_batch, world_size)
        costs = [_work([rows[row] for row in bin_rows], packing) for bin_rows in bins]
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


def packing_metrics(batch: TrainBatch) -> dict[str, float]:
    """How well the batch is packed."""
    return {
        "num_micro_batches": sum(batch.num_micro_batches),
        "padding_fraction": padding_fraction(batch),
        "shared_fraction": shared_fraction(batch),
    }


def padding_fraction(batch: TrainBatch) -> float:
    """The share of padding in all tokens that the forward passes of this batch compute, without empty micro-batches."""
    if batch.packing != "padded":
        return 0.0
    computed = computed_tokens(batch)
    return 1.0 - _num_tokens(batch) / computed if computed else 0.0


def shared_fraction(batch: TrainBatch) -> float:
    """The share of the trained rows' tokens that are not computed because another row's prompt is used."""
    return 1.0 - computed_tokens(batch) / _num_tokens(batch) if batch.packing == "shared" and batch.plan else 0.0


def computed_tokens(batch: TrainBatch) -> int:
    """The tokens that the forward passes of this batch compute, padding included, without empty micro-batches. With
    shared prompts each row's last token counts, too, although a line ends before it, and equal answers count each.
    """
    headers = {(header.group_id, header.trajectory_id, header.segment): header for header in batch.headers}
    cells: dict[tuple[int, int, int], list[RowHeader]] = {}
    for row in batch.plan:
        cell = cells.setdefault((row.optimizer_step, row.rank, row.micro_batch), [])
        cell.append(headers[row.group_id, row.trajectory_id, row.segment])
    if batch.packing == "shared":
        return sum(shared_tokens(_shared_rows(cell)) for cell in cells.values())
    return sum(sum(_computed(cell, batch.packing)) for cell in cells.values())


def _num_tokens(batch: TrainBatch) -> int:
    lengths = {(header.group_id, header.trajectory_id, header.segment): header.num_tokens for header in batch.headers}
    return sum(lengths[row.group_id, row.trajectory_id, row.segment] for row in batch.plan)


def _cut(rows: Sequence[RowHeader], packing: Packing, token_budget: int, world_size: int) -> list[list[int]]:
    if packing == "shared":
        return pack_shared(_shared_rows(rows), token_budget, multiple_of=world_size)
    cut = pack_flat if packing == "flat" else pack
    return cut([row.num_tokens for row in rows], token_budget, multiple_of=world_size)


def _work(rows: Sequence[RowHeader], packing: Packing) -> int:
    return shared_work(_shared_rows(rows)) if packing == "shared" else sum(map(workload, _computed(rows, packing)))


def _computed(rows: Sequence[RowHeader], packing: Packing) -> Sequence[int]:
    """The row lengths that a forward pass computes for one micro-batch without shared prompts, padding included."""
    lengths = [row.num_tokens for row in rows]
    return lengths if packing == "flat" else [max(lengths)] * len(lengths)


def _shared_rows(rows: Sequence[RowHeader]) -> list[SharedRow]:
    return [SharedRow(row.num_tokens, (row.num_prompt_tokens, row.prompt_digest)) for row in rows]
