"""How the reward clients split items into batches: every item once, within the limits, no group split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import ScoreItem
from tandem.protos.errors import DataError
from tandem.services.clients.messages import Batcher, Limits, encode, order_by_group, split

WIDE = Limits(1000, 1 << 20, 1000, 1 << 20)

rows = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.integers(0, 40)), max_size=60)


@settings(deadline=None)
@given(rows, st.integers(5, 12), st.integers(600, 3000), st.integers(1, 12), st.integers(1, 3000))
def test_batches_hold_every_item_once_within_limits_and_no_group_is_split(
    found: list[tuple[str, int]], max_items: int, max_bytes: int, target_items: int, target_bytes: int
) -> None:
    limits = Limits(max_items, max_bytes, min(target_items, max_items), min(target_bytes, max_bytes))
    packed = [encode(i, ScoreItem("", "x" * size, None, group=group), limits) for i, (group, size) in enumerate(found)]
    try:
        messages = split(order_by_group(packed), limits)
    except DataError as error:
        sizes = [[p for p in packed if p.message.group == group] for group in {p.message.group for p in packed} - {""}]
        assert any(len(one) > max_items or sum(p.num_bytes for p in one) > max_bytes for one in sizes), error
        return
    assert sorted(item.index for message in messages for item in message) == list(range(len(found)))
    for message in messages:
        assert 0 < len(message) <= max_items and sum(item.num_bytes for item in message) <= max_bytes
    homes = [{item.message.group for item in message} - {""} for message in messages]
    assert sum(map(len, homes)) == len(set().union(*homes)) if homes else True


@settings(deadline=None)
@given(rows, st.integers(1, 12))
def test_a_prefix_of_the_items_is_split_at_the_same_places(found: list[tuple[str, int]], aim: int) -> None:
    limits = Limits(1000, 1 << 20, aim, 1 << 20)
    packed = order_by_group(
        [encode(i, ScoreItem("", "x", None, group=group), limits) for i, (group, _) in enumerate(found)]
    )
    whole = split(packed, limits)
    for stop in range(len(packed)):
        assert split(packed[:stop], limits)[:-1] == whole[: max(0, len(split(packed[:stop], limits)) - 1)]


def test_a_group_whose_items_are_not_adjacent_is_refused() -> None:
    batcher = Batcher(WIDE)
    with pytest.raises(DataError, match="item 2: group 'g' comes back"):
        for index, group in enumerate(["g", "", "g"]):
            batcher.add(encode(index, ScoreItem("", "", None, group=group), WIDE))


def test_flush_keeps_a_group_that_may_grow() -> None:
    batcher = Batcher(WIDE)
    packed = [encode(index, ScoreItem("", "", None, group=group), WIDE) for index, group in enumerate(["", "g", "g"])]
    for item in packed:
        assert batcher.add(item) == []
    assert batcher.flush() == packed[:1] and batcher.flush() == []
    assert batcher.finish() == [packed[1:]]
