"""A replay gives the run's weights bit for bit, and reports where it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import ConfigError, DataError, ModelError
from tandem.services.commands import replay
from tandem.services.config import Recipe
from tandem.services.run.folder import CONFIG_FILE
from tandem.services.run.inputs import record_inputs
from tandem.services.run.resume import FREE, forbidden_changes
from tandem.services.trainer.recovery import CHECKPOINTS_FOLDER
from tandem.services.trainer.service import make_learner
from tandem.trainer.batch.record import read_record, record_folder, recorded_versions
from tandem.trainer.batch.rejected import write_rejected
from tandem.trainer.checkpoints.state import list_checkpoints
from tests.support.redis_ring import running_redis
from tests.support.trainer_ring import P, different_rewards, make_recipe, make_run, put_scored, train
from tests.support.training_groups import with_sampling_masks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipe]:
    """A finished run of three batches, each of two epochs of two optimizer steps."""
    folder = tmp_path_factory.mktemp("replay")
    with running_redis(folder) as url:
        trainer = {"optimizer_steps_per_batch": 2, "epochs_per_batch": 2}
        recipe = make_recipe(folder, run={"total_batches": 3}, trainer=trainer)
        buffer = make_run(url, recipe)
        record_inputs(recipe, buffer)
        put_scored(buffer, different_rewards(3 * P))
        assert train(recipe, url)
    yield recipe


@pytest.fixture
def copied(trained: Recipe, tmp_path: Path) -> Path:
    """A copy of the run folder that the test may damage."""
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


@pytest.mark.parametrize("trainer", [{"packing": "flat"}, {"packing": "shared", "backend": "fsdp"}])
def test_runs_with_other_settings_and_top_k_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trainer: dict[str, str]
) -> None:
    with running_redis(tmp_path) as url:
        recipe = make_recipe(tmp_path, run={"total_batches": 2}, trainer=trainer)
        put_scored(make_run(url, recipe), map(with_sampling_masks, different_rewards(2 * P)))
        assert train(recipe, url)
    assert read_record(recipe.folder, 2)[0].packing == trainer["packing"]
    assert replay.main(recipe.folder) == 0
    assert "2 versions compared: equal bit for bit" in capsys.readouterr().out


def test_a_run_that_keeps_its_last_batches_is_replayed_from_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_redis(tmp_path) as url:
        recipe = make_recipe(tmp_path, run={"total_batches": 4, "keep_batches": 1}, trainer={"checkpoint_every": 1})
        put_scored(make_run(url, recipe), different_rewards(4 * P))
        for version in range(1, 5):
            write_rejected(recipe.folder, version, "9-9", "stale", b"payload")
        assert train(recipe, url)
    assert recorded_versions(recipe.folder) == [4], "the checkpoints are those of versions 3 and 4"
    assert [folder.name for folder in (recipe.folder / "rejected").iterdir()] == ["000004"]
    assert replay.main(recipe.folder) == 0
    said = capsys.readouterr().out
    assert "1 batches trained again" in said and "from the checkpoint of version 3" in said
    assert "1 versions compared: equal bit for bit" in said


def test_another_batch_gives_other_weights_at_its_version(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = record_folder(copied, 2) / "plan.json"
    values = json.loads(plan.read_text())
    header = next(row for row in values["headers"] if row[6] == 1.0)
    header[6] = 0.5
    plan.write_text(json.dumps(values))
    assert replay.main(copied) == 1
    assert "version 2 differs" in capsys.readouterr().out


def test_digests_of_an_earlier_release_are_refused_before_training(copied: Path) -> None:
    metrics = copied / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"3:', '"'))
    with pytest.raises(DataError, match=r"computed the digests of versions 1 to 3 .*: replay .* with that release"):
        replay.main(copied)


def test_a_run_that_another_release_began_is_compared_from_where_this_one_went_on(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = copied / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"3:', '"', 1))
    assert replay.main(copied) == 0
    said = capsys.readouterr().out
    assert "2 versions compared: equal bit for bit; 1 have the digest of another release and were not compared" in said


def test_every_version_is_compared_by_the_algorithm_of_its_digest(
    copied: Path, trained: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may go on with another backend of weights, and so with other digests."""
    learner, sender = make_learner(trained)
    with closing(learner):
        learner.load(list_checkpoints(copied / CHECKPOINTS_FOLDER)[-1][2])
        last, other = sender.digest("xxh3"), sender.digest("sums")
    metrics = copied / "metrics.jsonl"
    written = metrics.read_text()
    assert last in written
    metrics.write_text(written.replace(last, other))
    assert replay.main(copied) == 0
    assert "3 versions compared: equal bit for bit" in capsys.readouterr().out
    metrics.write_text(written.replace(last, other[:-1] + "x"))
    assert replay.main(copied) == 1
    assert "version 3 differs" in capsys.readouterr().out


def test_an_export_of_another_version_is_detected(
    copied: Path, trained: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(trained.model.path) / "model.safetensors", copied / "hf" / "model.safetensors")
    assert replay.main(copied) == 1
    assert "the final weights differ" in capsys.readouterr().out


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def test_truncated_weights_are_named(copied: Path, trained: Recipe, tmp_path: Path) -> None:
    export = copied / "hf" / "model.safetensors"
    whole = export.read_bytes()
    cut(export)
    with pytest.raises(ModelError, match=f"the run's export {export} cannot be read"):
        replay.main(copied)
    export.write_bytes(whole)

    model = Path(shutil.copytree(trained.model.path, tmp_path / "model"))
    cut(model / "model.safetensors")
    config = copied / "config.json"
    config.write_text(config.read_text().replace(trained.model.path, str(model)))
    with pytest.raises(
        ModelError, match=rf"model.path {model}: model.safetensors .*cut short.*; copy or save it again"
    ):
        replay.main(copied)


def test_another_model_than_the_runs_is_refused(copied: Path, trained: Recipe, tmp_path: Path) -> None:
    model = Path(shutil.copytree(trained.model.path, tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    config = copied / "config.json"
    config.write_text(config.read_text().replace(trained.model.path, str(model)))
    size = f"{weights.stat().st_size:,} bytes with SHA-256"
    with pytest.raises(ConfigError, match=f"^model.path: {weights} was {size} .* in the run of .*, and is {size} "):
        replay.main(copied)


def test_samples_of_a_run_in_bfloat16_are_not_compared(copied: Path) -> None:
    config = copied / CONFIG_FILE
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    with pytest.raises(ConfigError, match=r"^--generation: in bfloat16, a log-prob depends on what is sampled at the "):
        replay.main(copied, generation=True)


def test_a_run_with_a_missing_batch_is_refused(copied: Path) -> None:
    shutil.rmtree(record_folder(copied, 1))
    with pytest.raises(DataError, match=r"every batch from 1 .*\(batches: 2 to 3, 2 in number; checkpoints: 3\)"):
        replay.main(copied)


CHOICES: dict[str, Any] = {
    "rollout.engine": "transformers",
    "rollout.min_p": 0.1,
    "rollout.num_threads": 7,
    "weights.backend": "disk",
    "run.trackers": ["mlflow"],
}


def another(key: str, value: Any) -> Any:
    """Another value for the key: of a choice another one, else any of the same type."""
    if key in CHOICES:
        return CHOICES[key]
    if isinstance(value, bool):
        return not value
    return value / 2 if isinstance(value, float) else value + {int: 1, str: "x", list: ["."]}[type(value)]


def test_a_replay_gives_the_same_weights_whichever_free_keys_changed_at_a_resume(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sections that are free as a whole stay as they are: the trainer does not read them."""
    before = json.loads((copied / CONFIG_FILE).read_text())
    now = json.loads((copied / CONFIG_FILE).read_text())
    assert {key for key in FREE if "." not in key} < set(now)
    for section, _, name in (key.partition(".") for key in FREE if "." in key):
        now[section][name] = another(f"{section}.{name}", before[section][name])
        assert now[section][name] != before[section][name]
    assert not list(forbidden_changes(before, now))
    (copied / CONFIG_FILE).write_text(json.dumps(now))
    assert replay.main(copied) == 0
    assert "3 versions compared: equal bit for bit" in capsys.readouterr().out
