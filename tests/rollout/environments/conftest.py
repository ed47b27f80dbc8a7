"""For the tests of episodes: an encoder of their model, and no waiting between attempts."""

from __future__ import annotations

import pytest

from tandem.rollout.environments import episode
from tandem.services.data.chat import ChatEncoder
from tests.support.episodes import chat_encoder


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "_FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return chat_encoder(tmp_path_factory.mktemp("model"))
