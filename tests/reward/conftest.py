"""Fixtures for the tests of scorers behind an endpoint."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once, and no proxy stands before the servers of the tests."""
    monkeypatch.setattr("tandem.reward.endpoints.http_client.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
