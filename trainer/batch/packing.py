"""Packs rows into micro-batches within a token budget, as padded rectangles or as concatenated rows, which may share
prompts.

trainer/models/flat_rows.py decides which of these a run uses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tandem.protos.errors import DataError
from tandem.trainer.batch.balance import assign_to_ranks, partition, workload

MAX_PADDING = 1 / 20
"""A larger share of padding justifies another micro-batch, except as MAX_PADDING_OF_BUDGET says."""
MAX_PADDING_OF_BUDGET = 1 / 8
"""Padding below this share of the budget justifies no further micro-batch in a batch below SMALL_BATCH, because every
forward pass has a fixed cost.
"""
SMALL_BATCH = 1 / 2
"""In budgets; a batch of at least this size always keeps padding within MAX_PADDING."""
_PRICE_STEP = 0.7


def pack(lengths: Sequence[int], token_budget: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Bins of row indices; a bin of B rows, the longest T tokens long, takes B·T ≤ `token_budget` tokens.

    Rows are sorted by length to reduce padding. The number of bins is the smallest that the budget and `MAX_PADDING`
    allow, rounded up to `multiple_of` (ranks) if there are enough rows. Deterministic. Raises DataError if a single row
    exceeds the budget.
    """
    if not lengths:
        return []
    _check_longest(lengths, token_budget)
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    bins = _even_cut(order, lengths, token_budget, 1)
    if _too_padded(bins, lengths, token_budget):
        bins = _little_padded_cut(order, lengths, token_budget)
    elif len(bins) % multiple_of:
        evener = _even_cut(order, lengths, token_budget, multiple_of)
        bins = bins if _too_padded(evener, lengths, token_budget) else evener
    return _halve_to_multiple(bins, lengths, multiple_of)


def pack_flat(lengths: Sequence[int], token_budget: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Bins of row indices for variable-length attention over concatenated rows (no padding): a bin's lengths sum to at
    most `token_budget`.

    The number of bins is the smallest for which the largest differencing method finds parts of similar work
    (`tandem.trainer.batch.balance.workload`) within the budget, rounded up to `multiple_of` if there are enough rows.
    Deterministic. Raises DataError if a single row exceeds the budget.
    """
    if not lengths:
        return []
    _check_longest(lengths, token_budget)
    works = [workload(length) for length in lengths]
    count = _round_up(-(-sum(lengths) // token_budget), multiple_of)
    while True:
        bins = partition(works, min(count, len(lengths)))
        if max(sum(lengths[row] for row in rows) for rows in bins) <= token_budget:
            return bins  # reached at the latest when every bin has one row
        count += multiple_of


class SharedRow(NamedTuple):
    """A row and its prompt. Rows with equal prompts, of more than 0 tokens, share them."""

    length: int
    prompt: tuple[int, int]
    """(number of tokens, digest)."""


def pack_shared(rows: Sequence[SharedRow], token_budget: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Bins of row indices for attention over shared prompts, each within the budget (`shared_budget`).

    Rows with the same prompt are in one bin if they fit into it, else in as few bins of similar size as possible. If
    the most loaded of `multiple_of` ranks then has less to do, they are divided further. Deterministic. Raises
    DataError if a single row exceeds the budget.
    """
    if not rows:
        return []
    _check_longest([row.length for row in rows], token_budget)
    by_prompt: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        by_prompt.setdefault(row.prompt if row.prompt[0] else number, []).append(number)
    most = max(map(len, by_prompt.values())) if multiple_of > 1 else 1
    tries = [1 << power for power in range(most.bit_length())]
    found = [_pack_units(rows, list(by_prompt.values()), parts, token_budget, multiple_of) for parts in tries]

    def load(bins: list[list[int]]) -> int:
        works = [shared_work([rows[number] for number in one]) for one in bins]
        return max(sum(works[number] for number in part) for part in assign_to_ranks(works, multiple_of))

    return min(found, key=load)


def _pack_units(
    rows: Sequence[SharedRow], groups: Iterable[list[int]], parts: int, token_budget: int, multiple_of: int
) -> list[list[int]]:
    units = [unit for group in groups for unit in _divide(rows, group, parts, token_budget)]
    works = [shared_work([rows[number] for number in unit]) for unit in units]
    total = sum(shared_budget([rows[number] for number in unit]) for unit in units)
    count = _round_up(-(-total // token_budget), multiple_of)
    while True:
        chosen = partition(works, min(count, len(units)))
        bins = [sorted(number for unit in one for number in units[unit]) for one in chosen]
        if max(shared_budget([rows[number] for number in one]) for one in bins) <= token_budget:
            return bins  # reached at the latest when every bin has one unit
        count += multiple_of


def _divide(rows: Sequence[SharedRow], group: list[int], parts: int, token_budget: int) -> list[list[int]]:
    """Consecutive rows of one prompt in at least `parts` units within the budget, of similar numbers of rows."""
    for count in range(min(parts, len(group)), len(group) + 1):
        edges = [part * len(group) // count for part in range(count + 1)]
        units = [group[first:last] for first, last in pairwise(edges)]
        if max(shared_budget([rows[number] for number in unit]) for unit in units) <= token_budget:
            break
    return units


def shared_tokens(rows: Sequence[SharedRow]) -> int:
    """The tokens that one forward pass of these rows computes."""
    return _without_repeats(rows, int)


def shared_work(rows: Sequence[SharedRow]) -> int:
    """The work of one forward pass of these rows (`tandem.trainer.batch.balance.workload`)."""
    return _without_repeats(rows, workload)


def shared_budget(rows: Sequence[SharedRow]) -> int:
    """What these rows take of a token budget: the tokens computed, and an eighth of a prompt for each answer, because
    attention keeps a copy of the prompt's keys and values for it.
    """
    counts = Counter(row.prompt for row in rows)
    return shared_tokens(rows) + sum(count * size // 8 for (size, _), count in counts.items() if count > 1)


def _without_repeats(rows: Sequence[SharedRow], cost: Callable[[int], int]) -> int:
    counts = Counter(row.prompt for row in rows)
    repeated = sum((count - 1) * cost(size) for (size, _), count in counts.items())
    return sum(cost(row.length) for row in rows) - repeated


def _too_padded(bins: Sequence[Sequence[int]], lengths: Sequence[int], token_budget: int) -> bool:
    num_tokens = sum(lengths)
    padding = sum(len(rows) * lengths[rows[0]] for rows in bins) - num_tokens
    small = num_tokens < token_budget * SMALL_BATCH
    return padding > max(num_tokens * MAX_PADDING, token_budget * MAX_PADDING_OF_BUDGET * small)


def _check_longest(lengths: Sequence[int], token_budget: int) -> None:
    assert min(lengths) >= 1, "a row has a token"
    longest = max(lengths)
    if longest > token_budget:
        raise DataError(f"a row of {longest} tokens exceeds trainer.tokens_per_micro_batch ({token_budget}): raise it")


def _round_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def _even_cut(order: Sequence[int], lengths: Sequence[int], token_budget: int, multiple_of: int) -> list[list[int]]:
    """Among the cuts with the fewest bins (rounded up), the one whose largest bin is smallest."""
    wanted = _round_up(len(_cut(order, lengths, token_budget)), multiple_of)
    budgets = range(lengths[order[0]], token_budget)
    enough = bisect_left(budgets, True, key=lambda budget: len(_cut(order, lengths, budget)) <= wanted)
    return _cut(order, lengths, lengths[order[0]] + enough)


def _cut(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    # Rows come longest first, so a bin's first row is its longest, and greedy filling is optimal for bins of adjacent
    # rows.
    bins: list[list[int]] = []
    for row in order:
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _little_padded_cut(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    price = token_budget * _PRICE_STEP  # price of one more bin, in tokens of padding
    while True:
        bins = _cheapest_cut(order, lengths, token_budget, price)
        if not _too_padded(bins, lengths, token_budget):
            return bins
        price = max(price * _PRICE_STEP, 0.5)  # at half a token, every length gets its own bins and there is no padding


def _cheapest_cut(order: Sequence[int], lengths: Sequence[int], budget: int, price: float) -> list[list[int]]:
    # The cut into bins of adjacent rows with the least area + price·bins: a shortest path over the possible starts of
    # bins.
    num_rows = len(order)
    costs = np.zeros(num_rows + 1)
    ends = np.zeros(num_rows, np.int64)
    sizes = np.arange(1, num_rows + 1)
    for first in range(num_rows - 1, -1, -1):
        longest = lengths[order[first]]
        most = min(budget // longest, num_rows - first)
        choices = sizes[:most] * longest + costs[first + 1 : first + most + 1]
        best = int(choices.argmin())
        costs[first], ends[first] = choices[best] + price, first + best + 1
    bins: list[list[int]] = []
    first = 0
    while first < num_rows:
        bins.append(list(order[first : ends[first]]))
        first = int(ends[first])
    return bins


def _halve_to_multiple(bins: list[list[int]], lengths: Sequence[int], multiple_of: int) -> list[list[int]]:
    # Splitting a bin never breaks a limit.
    num_rows = sum(map(len, bins))
    bins = list(bins)
    while len(bins) % multiple_of and len(bins) < num_rows:
        divisible = [number for number, rows in enumerate(bins) if len(rows) > 1]
        number = max(divisible, key=lambda number: (sum(lengths[row] for row in bins[number]), -number))
        middle = len(bins[number]) // 2
        bins[number : number + 1] = [bins[number][:middle], bins[number][middle:]]
    return bins
