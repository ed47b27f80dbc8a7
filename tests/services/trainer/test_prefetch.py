"""The thread that records the next batch, on a real Redis."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.protos.errors import DataError, LedgerError
from tandem.protos.types import TrainBatch
from tandem.services.trainer.batch_source import BatchSource
from tandem.services.trainer.prefetch import Prefetch
from tandem.trainer.batch.record import read_plan
from tests.support.trainer_ring import different_rewards, make_recipe, make_run, put_scored


def test_a_group_that_redis_hands_out_again_is_not_recorded_twice(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path)
    buffer = make_run(redis_url, recipe, credits=100)
    put_scored(buffer, different_rewards(4))
    incarnation = buffer.begin_incarnation()
    source = BatchSource(buffer, recipe, incarnation, 1, threading.Event(), ("padded",))
    poll, handed_out = source.poll, list[TrainBatch]()

    def poll_a_redis_that_forgets(version: int, seconds: float) -> TrainBatch | None:
        if handed_out:
            return replace(handed_out[0], policy_version=version + 1)
        batch = poll(version, seconds)
        handed_out.extend([batch] if batch else [])
        return batch

    monkeypatch.setattr(source, "poll", poll_a_redis_that_forgets)
    prefetch = Prefetch(source, buffer, recipe, incarnation)
    first = prefetch.next_batch(0, 10.0)
    assert first is not None and read_plan(recipe.folder, 1).group_ids == first.batch.group_ids
    with pytest.raises(LedgerError, match="handed out again"):
        prefetch.next_batch(1, 10.0)
    with pytest.raises(DataError):
        read_plan(recipe.folder, 2)
    prefetch.close()
    buffer.close()
