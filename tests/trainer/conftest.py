"""Fixtures of the trainer's tests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

from tandem.protos.errors import TandemError
from tandem.trainer.backend.registry import load_backend
from tandem.trainer.config import TrainerConfig
from tests.support.paths import ROOT
from tests.support.tiny_model import build_tiny_model

if TYPE_CHECKING:
    from tandem.trainer.learner import Learner


Settings = dict[str, Any]
ENGINES: dict[str, Settings] = {
    **{f"stage{stage}": {"zero_stage": stage} for stage in range(4)},
    "fsdp": {"backend": "fsdp"},
}
"""Settings of every way to shard a model over the ranks, by name."""
every_engine = pytest.mark.parametrize("engine_settings", ENGINES.values(), ids=ENGINES)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model. No test changes it."""
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an output head of its own."""
    return build_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture
def make_learner(model: Path) -> Iterator[Callable[..., Learner]]:
    """Creates one learner at a time and closes the previous one."""
    from tandem.trainer.learner import Learner  # takes seconds and few tests need it

    made: list[Learner] = []

    def make(path: Path = model, **settings: object) -> Learner:
        if made:
            made.pop().close()
        config = TrainerConfig(**{"learning_rate": 1e-3, **settings})
        try:
            made.append(Learner(config, model_path=str(path), total_batches=10, seed=0, max_response_tokens=16))
        except TandemError:
            load_backend(config).leave_process_group()
            raise
        return made[-1]

    yield make
    if made:
        made.pop().close()


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of one rank, in which engines of either backend can be built."""
    from tandem.trainer.backend.deepspeed.engine import join_process_group, leave_process_group

    join_process_group(60)
    yield
    leave_process_group()


@dataclass(frozen=True)
class Ranks:
    """What the ranks of tests/support/trainer_ranks.py wrote: a folder for each backend, and each rank's report."""

    folder: Path
    reports: list[Any]


@pytest.fixture(scope="session", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(
    request: pytest.FixtureRequest, model: Path, untied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Ranks:
    """All scenarios of two or of four ranks. Workers of pytest-xdist share one run, because its start takes long."""
    from tandem.services.trainer.ranks import run_local_ranks

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"ranks{request.param}"
    with FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
        if not (folder / "ended").exists():
            folder.mkdir(exist_ok=True)
            patch.chdir(ROOT)
            command = [sys.executable, "-m", "tests.support.trainer_ranks", *map(str, (model, untied_model, folder))]
            assert run_local_ranks(command, request.param) == 0
            (folder / "ended").touch()
    return Ranks(folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(request.param)])
