"""Sharing work out evenly: the largest differencing method of Karmarkar and Karp (1982) for k parts.

Every item starts as a tuple of k sums, its cost and k − 1 zeros. The two tuples with the largest spread are merged, the
heaviest part of the one with the lightest of the other, until one tuple is left. Deterministic: ties are broken by the
items' numbers.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

HIDDEN_SIZE = 4096
"""Of the model that work is reckoned for, whichever is trained: plans are the same for all, and even a small one's are
hardly less even.
"""


def workload(num_tokens: int) -> int:
    """6·hidden·n + n² = 24576·n + n²: the work of a row of n tokens in a transformer, up to a factor: what grows with n
    (a layer's matrix products, 12·hidden²·n multiplications) and with n² (attention, 2·hidden·n²), both divided by
    2·hidden.
    """
    return 6 * HIDDEN_SIZE * num_tokens + num_tokens * num_tokens


def partition(costs: Sequence[int], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """The numbers of the items in each part, so that the largest sum is small. Costs are not negative.

    With `equal_size` the parts' counts are equal, or one apart where `num_parts` does not divide the number of items.
    No part is empty if there are as many items (of positive cost) as parts.
    """
    assert num_parts >= 1, num_parts
    assert all(cost >= 0 for cost in costs), "costs are not negative"
    items = sorted(range(len(costs)), key=lambda item: (costs[item], item))
    width = num_parts if equal_size else 1
    # Of equal sizes: neighbours in tuples of k, the smallest tuple filled up with nothing. A merge adds one item (or
    # nothing) to each part.
    first = len(items) % width or width
    cuts = [0, *range(first, len(items), width), len(items)] if items else []
    heap: list[_Entry] = []
    for start, end in itertools.pairwise(cuts):
        parts = [_Part(costs[item], [item]) for item in reversed(items[start:end])]
        heap.append(_entry(parts, min(items[start:end]), num_parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first_one, one), (_, first_other, other) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, _entry(_merge(one, other, num_parts), min(first_one, first_other), num_parts))
    filled = [sorted(part.items) for part in heap[0][-1]] if heap else []
    parts_of_items = filled + [[] for _ in range(num_parts - len(filled))]
    return sorted(parts_of_items, key=lambda part: part[:1] or [len(costs)])


def partition_groups(costs: Sequence[int], groups: Sequence[int], num_parts: int) -> list[list[int]]:
    """As `partition`, but items of one group stay together, and every part has equally many groups (or one apart)."""
    assert len(costs) == len(groups), (len(costs), len(groups))
    members: dict[int, list[int]] = {}
    for item, group in enumerate(groups):
        members.setdefault(group, []).append(item)
    whole = list(members.values())
    parts = partition([sum(costs[item] for item in items) for items in whole], num_parts, equal_size=True)
    return [sorted(item for number in part for item in whole[number]) for part in parts]


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Item numbers of each rank, costliest first: like sums, counts one apart at most, and items of like cost at the
    same place of every rank's list, so that ranks that wait for one another after every item wait little.
    """
    hands = partition(costs, num_ranks, equal_size=True)
    return [sorted(hand, key=lambda item: (-costs[item], item)) for hand in hands]


class _Part(NamedTuple):
    total: int
    items: list[int]


_Parts = list[_Part]
"""Those that have an item, heaviest first."""
_Entry = tuple[int, int, _Parts]


def _entry(parts: _Parts, first_item: int, num_parts: int) -> _Entry:
    # The largest spread comes out of the heap first, of equal ones that with the smallest item: no two entries share
    # one.
    lightest = parts[-1].total if len(parts) == num_parts else 0
    return lightest - parts[0].total, first_item, parts


def _order(part: _Part) -> tuple[int, int, int]:
    return -part.total, -len(part.items), part.items[0]


def _merge(one: _Parts, other: _Parts, num_parts: int) -> _Parts:
    alone = num_parts - len(other)  # so many of the heaviest of `one` meet an empty part
    if alone >= len(one):
        if len(other) > 1:
            return sorted(one + other, key=_order)
        bisect.insort(one, other[0], key=_order)
        return one
    shared = len(one) - alone
    mixed = [
        _Part(heavy.total + light.total, heavy.items + light.items)
        for heavy, light in zip(one[alone:], reversed(other[-shared:]), strict=True)
    ]
    return sorted(one[:alone] + mixed + other[:-shared], key=_order)
