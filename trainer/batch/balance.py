"""Balanced partitions: the largest differencing method of Karmarkar and Karp (1982) for k parts.

Every item starts as a tuple of k sums, its cost and k − 1 zeros. The two tuples with the largest spread are merged
until one is left, pairing the heaviest part of one with the lightest part of the other. Ties between spreads can be
broken in two orders and neither is always better, so both are tried and the smaller maximum wins. Deterministic.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

HIDDEN_SIZE = 4096
"""Hidden size assumed for every model, so that plans do not depend on the model. Small models get nearly as even plans.
"""


def workload(num_tokens: int) -> int:
    """The work of a row of n tokens in a transformer, up to a factor 2·hidden: 6·hidden·n for the matrix products and
    n² for the attention.
    """
    return 6 * HIDDEN_SIZE * num_tokens + num_tokens * num_tokens


def partition(costs: Sequence[int], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """The indices of the items in each part, chosen so that the largest sum is small. Costs are not negative.

    With `equal_size`, the parts' counts are equal, or differ by one if `num_parts` does not divide the number of items.
    No part is empty if there are at least as many items (of positive cost) as parts.
    """
    assert num_parts >= 1, num_parts
    assert all(cost >= 0 for cost in costs), "costs are not negative"
    both = [_difference(costs, num_parts, order, equal_size=equal_size) for order in (_SMALLEST_FIRST, _LARGEST_FIRST)]
    return min(both, key=lambda parts: max(sum(costs[item] for item in part) for part in parts))


def _difference(costs: Sequence[int], num_parts: int, order: int, *, equal_size: bool) -> list[list[int]]:
    items = sorted(range(len(costs)), key=lambda item: (costs[item], item))
    width = num_parts if equal_size else 1
    # With equal sizes each initial tuple holds k items adjacent in cost, the smallest tuple fewer. A merge then adds at
    # most one item to each part.
    first = len(items) % width or width
    cuts = [0, *range(first, len(items), width), len(items)] if items else []
    heap: list[_Entry] = []
    for start, end in itertools.pairwise(cuts):
        parts = [_Part(costs[item], [item]) for item in reversed(items[start:end])]
        heap.append(_entry(parts, min(items[start:end]), num_parts, order))
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap), heapq.heappop(heap)
        merged = _merge(one.parts, other.parts, num_parts, order)
        heapq.heappush(heap, _entry(merged, min(one.first_item, other.first_item), num_parts, order))
    filled = [sorted(part.items) for part in heap[0].parts] if heap else []
    parts_of_items = filled + [[] for _ in range(num_parts - len(filled))]
    return sorted(parts_of_items, key=lambda part: part[:1] or [len(costs)])


def assign_to_ranks(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Item indices of each rank, costliest first, so that ranks that synchronise after every item wait little. Sums are
    similar and counts differ by at most one.
    """
    parts = partition(costs, num_ranks, equal_size=True)
    return [sorted(part, key=lambda item: (-costs[item], item)) for part in parts]


class _Part(NamedTuple):
    total: int
    items: list[int]


_Parts = list[_Part]
"""The non-empty parts, heaviest first."""
_SMALLEST_FIRST, _LARGEST_FIRST = 1, -1
"""Tie-breaking: between entries by the smallest item or by the heaviest part; between parts by the smallest or the
largest first item.
"""


class _Entry(NamedTuple):
    """A tuple of sums in the heap. `rank` is unique and decides the order."""

    rank: tuple[int, ...]
    first_item: int
    parts: _Parts


def _entry(parts: _Parts, first_item: int, num_parts: int, order: int) -> _Entry:
    lightest, heaviest = parts[-1].total if len(parts) == num_parts else 0, parts[0]
    spread = lightest - heaviest.total
    tie = (first_item,) if order == _SMALLEST_FIRST else _rank(heaviest, order)
    return _Entry((spread, *tie), first_item, parts)


def _rank(part: _Part, order: int) -> tuple[int, int, int]:
    return -part.total, -len(part.items), order * part.items[0]


def _merge(one: _Parts, other: _Parts, num_parts: int, order: int) -> _Parts:
    def rank(part: _Part) -> tuple[int, int, int]:
        return _rank(part, order)

    alone = num_parts - len(other)  # number of heaviest parts of `one` that pair with an empty part
    if alone >= len(one):
        if len(other) > 1:
            return sorted(one + other, key=rank)
        bisect.insort(one, other[0], key=rank)
        return one
    shared = len(one) - alone
    mixed = [
        _Part(heavy.total + light.total, heavy.items + light.items)
        for heavy, light in zip(one[alone:], reversed(other[-shared:]), strict=True)
    ]
    return sorted(one[:alone] + mixed + other[:-shared], key=rank)
