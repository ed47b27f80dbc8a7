"""A replay gives the weights of the run bit for bit, and says where it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.errors import DataError
from services import replay
from services.config import Recipe
from tests.redis_ring import running_redis
from tests.trainer_ring import P, different_rewards, make_recipe, make_run, put_scored, same_environment, train
from trainer.batch_record import read_record, record_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipe]:
    """A finished run of three batches, each of two optimizer steps."""
    folder = tmp_path_factory.mktemp("replay")
    with running_redis(folder) as url:
        recipe = make_recipe(folder, run={"total_batches": 3}, trainer={"optimizer_steps_per_batch": 2})
        put_scored(make_run(url, recipe), different_rewards(3 * P))
        assert train(recipe, url)
    yield recipe


@pytest.fixture
def copied(trained: Recipe, tmp_path: Path) -> Path:
    """Its run folder, to be spoilt."""
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with same_environment():
        yield


def test_a_replay_ends_with_the_same_weights(trained: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(trained.folder) == 0
    assert "3 versions compared: equal bit for bit" in capsys.readouterr().out


def test_rows_end_to_end_are_planned_recorded_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_redis(tmp_path) as url:
        recipe = make_recipe(tmp_path, run={"total_batches": 2}, trainer={"packing": "flat"})
        put_scored(make_run(url, recipe), different_rewards(2 * P))
        assert train(recipe, url)
    assert read_record(recipe.folder, 2)[0].packing == "flat"
    assert replay.main(recipe.folder) == 0
    assert "2 versions compared: equal bit for bit" in capsys.readouterr().out


def test_another_batch_gives_other_weights_at_its_version(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = record_folder(copied, 2) / "plan.json"
    values = json.loads(plan.read_text())
    header = next(row for row in values["headers"] if row[6] == 1.0)
    header[6] = 0.5
    plan.write_text(json.dumps(values))
    assert replay.main(copied) == 1
    assert "version 2 differs" in capsys.readouterr().out


def test_an_export_that_is_not_the_last_version_is_found_out(
    copied: Path, trained: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(trained.model.path) / "model.safetensors", copied / "hf" / "model.safetensors")
    assert replay.main(copied) == 1
    assert "the final weights differ" in capsys.readouterr().out


def test_a_run_with_a_hole_is_refused(copied: Path) -> None:
    shutil.rmtree(record_folder(copied, 1))
    with pytest.raises(DataError, match="every batch from 1 on"):
        replay.main(copied)
