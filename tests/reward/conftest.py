"""Fixtures for the tests of scorers behind an endpoint, and of the scoring core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.reward.config import RewardConfig
from tandem.reward.registry import SCORERS
from tandem.reward.scoring import ScoringCore
from tests.support.scoring_stand_ins import Far, Make, Rank


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy stands before the servers of the tests."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once."""
    monkeypatch.setattr("tandem.reward.endpoints.http_client.FIRST_PAUSE_SECONDS", 0.01)


FUNCTIONS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, log=""):
    if log:
        open(log, "a").write(solution_str + "\\n")
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "die":
        os._exit(9)
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}
"""


@pytest.fixture
def make_core() -> Iterator[Make]:
    cores: list[ScoringCore] = []

    def make(**config: Any) -> ScoringCore:
        cores.append(ScoringCore(RewardConfig(**config)))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture
def mixed(tmp_path: Path, functions: Path) -> Path:
    """A gate in a worker, a cheap scorer for one source, a user's function for others, and a reported component."""
    log = tmp_path / "judged"
    log.touch()
    file = tmp_path / "rubric.toml"
    file.write_text(f"""
[[components]]
name = "format"
scorer = "regex"
arguments = {{ pattern = "^[0-9a-z]+$", compare = false }}
gate = true
weight = 0.5
[[components]]
scorer = "numeric"
data_sources = ["numbers*"]
[[components]]
scorer = "{functions}:compute_score"
arguments = {{ log = "{log}" }}
data_sources = ["words*"]
weight = 2.0
[[components]]
name = "same"
scorer = "exact"
weight = 0
""")
    return file


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers `far` and `rank` as scorers that a rubric may name."""
    monkeypatch.setitem(SCORERS.loaders, "far", lambda: Far)
    monkeypatch.setitem(SCORERS.loaders, "rank", lambda: Rank)
    monkeypatch.setattr(Far, "seen", [])
    monkeypatch.setattr(Far, "meeting", None)
