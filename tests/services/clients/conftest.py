"""A scripted service and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.services.clients import RewardClient
from tandem.services.rpc import client as rpc_client
from tests.support.scripted_reward import ScriptedReward, scripted, service

__all__ = ["scripted", "service"]


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC does not repeat a call by itself, for which it takes two seconds."""
    monkeypatch.setattr(rpc_client, "_CLIENT_OPTIONS", [*rpc_client._CLIENT_OPTIONS, ("grpc.enable_retries", 0)])


@pytest.fixture
def client(service: ScriptedReward) -> Iterator[RewardClient]:
    with RewardClient(timeout_seconds=20.0, retry_seconds=10.0) as made:
        yield made
