"""A scripted service and a client of it. Clients pause shortly between attempts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.services.clients import RewardClient
from tandem.services.clients import streams as reward_streams
from tests.support.scripted_reward import ScriptedReward, serving


@pytest.fixture
def service() -> ScriptedReward:
    return ScriptedReward()


@pytest.fixture
def address(service: ScriptedReward) -> Iterator[str]:
    with serving(service) as bound:
        yield bound


@pytest.fixture
def client(address: str) -> Iterator[RewardClient]:
    with RewardClient(address, timeout_seconds=20.0, retry_seconds=10.0) as made:
        yield made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_streams, "_FIRST_PAUSE_SECONDS", 0.001)
