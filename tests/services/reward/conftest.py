"""A service with the real core, shared by tests that leave nothing behind, and short pauses between attempts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.reward_server import Service, serving


@pytest.fixture(scope="module")
def service(redis_url: str) -> Iterator[Service]:
    with serving(redis_url) as one:
        yield one


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.leases.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("tandem.services.leases.LONGEST_PAUSE_SECONDS", 0.01)
