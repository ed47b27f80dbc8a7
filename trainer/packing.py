"""Cutting rows into micro-batches within a token budget, padding included."""

from __future__ import annotations

from collections.abc import Sequence

from protos.errors import DataError


def pack(lengths: Sequence[int], token_budget: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Bins of row numbers; a bin of B rows, the longest T tokens long, takes B·T ≤ `token_budget` tokens.

    Rows are sorted by length, so that little is padding. There are as few bins as the budget allows, rounded up to `multiple_of`
    (ranks) where the rows suffice, and among cuts with that number the one whose largest bin is smallest. Deterministic.

    Raises:
        DataError: a row alone exceeds the budget.
    """
    if not lengths:
        return []
    longest = max(lengths)
    if longest > token_budget:
        raise DataError(f"a row of {longest} tokens exceeds trainer.tokens_per_micro_batch ({token_budget}): raise it")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    fewest = len(_cut(order, lengths, token_budget))
    wanted = -(-fewest // multiple_of) * multiple_of
    low, high = longest, token_budget  # the smallest budget that still gives at most `wanted` bins
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, lengths, middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    return _cut(order, lengths, high)


def _cut(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    # Rows come longest first, so a bin's first row is its longest: greedy filling is optimal for bins of neighbours.
    bins: list[list[int]] = []
    for row in order:
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Bin numbers of each rank: dealt there and back, largest first, so that ranks get like sums and counts one apart at most."""
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    largest_first = sorted(range(len(costs)), key=lambda number: (-costs[number], number))
    for turn, number in enumerate(largest_first):
        lap, seat = divmod(turn, num_ranks)
        hands[seat if lap % 2 == 0 else num_ranks - 1 - seat].append(number)
    return hands
