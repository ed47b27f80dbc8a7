"""A scripted service and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.services.clients import RewardClient
from tests.support.scripted_reward import ScriptedReward, scripted, service

__all__ = ["scripted", "service"]


@pytest.fixture
def client(service: ScriptedReward) -> Iterator[RewardClient]:
    with RewardClient(timeout_seconds=20.0, retry_seconds=10.0) as made:
        yield made
