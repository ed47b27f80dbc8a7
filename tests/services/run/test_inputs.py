"""A run that goes on, a service that joins it and a replay use the files that the run began with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe, dump_recipe
from tandem.services.run.folder import CONFIG_FILE
from tandem.services.run.inputs import INPUTS_FILE, check_replayed_model, input_paths, record_inputs, recorded_inputs
from tandem.services.run.ledger import join_run
from tandem.services.run.resume import check_resumable
from tests.support.run_inputs import Values, recipe_of, write_chat_model

FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"


@pytest.fixture
def recipe(tmp_path: Path, values: Values) -> Recipe:
    """Of a run whose folder does not exist, with every kind of input."""
    (tmp_path / "score.py").write_text(FUNCTION)
    (tmp_path / "more.py").write_text(FUNCTION)
    rubric = tmp_path / "rubric.toml"
    rubric.write_text(f"[[components]]\nscorer = '{tmp_path}/score.py:compute_score'\n")
    reward = {"rubric": str(rubric), "scorers": {"more": {"scorer": f"{tmp_path}/more.py:compute_score"}}}
    run = {"run_id": f"inputs-{tmp_path.name}"[:60]}
    return recipe_of(values, run=run, model={"path": str(write_chat_model(tmp_path / "chat"))}, reward=reward)


def begin(recipe: Recipe, buffer: Buffer) -> None:
    recipe.folder.mkdir()
    (recipe.folder / CONFIG_FILE).write_text(dump_recipe(recipe))
    record_inputs(recipe, buffer)


def append(file: Path) -> str:
    """Adds a space to a file. Returns its length before and after, as messages have them."""
    status = file.stat()
    file.write_bytes(file.read_bytes() + b" ")
    return f"was {status.st_size:,} bytes with SHA-256 .* is {status.st_size + 1:,} bytes with SHA-256 "


FILES: dict[str, Callable[[Recipe], Path]] = {
    "data.train_file": lambda recipe: Path(recipe.data.train_file),
    "model.path": lambda recipe: Path(recipe.model.path) / "config.json",
    "reward.rubric": lambda recipe: Path(recipe.reward.rubric),
    r"reward.rubric.components\[0\].scorer": lambda recipe: Path(recipe.reward.rubric).parent / "score.py",
    "reward.scorers.more.scorer": lambda recipe: Path(recipe.reward.rubric).parent / "more.py",
}


@pytest.mark.parametrize("key", FILES)
def test_a_changed_file_under_the_same_path_is_refused_with_both_values(
    recipe: Recipe, redis_url: str, key: str
) -> None:
    begin(recipe, Buffer(redis_url, recipe.run.run_id))
    check_resumable(recipe)
    said = append(FILES[key](recipe))
    with pytest.raises(ConfigError, match=f"^{key}: .* {said}.*; put back what the run began with, or ") as caught:
        check_resumable(recipe)
    assert "\n" not in str(caught.value)
    assert ("give the changed one another name" in str(caught.value)) == key.startswith("reward.")


def test_files_that_are_missing_or_new_in_a_model_folder_are_refused(recipe: Recipe, redis_url: str) -> None:
    begin(recipe, Buffer(redis_url, recipe.run.run_id))
    new = Path(recipe.model.path) / "generation_config.json"
    new.touch()
    with pytest.raises(ConfigError, match=r"generation_config\.json was not there in the run"):
        check_resumable(recipe)
    new.unlink()
    (Path(recipe.model.path) / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json was .* bytes .*, and is missing here"):
        check_resumable(recipe)


def test_another_scorer_is_a_change_that_a_resumed_run_may_make(recipe: Recipe, redis_url: str, tmp_path: Path) -> None:
    buffer = Buffer(redis_url, recipe.run.run_id)
    begin(recipe, buffer)
    (tmp_path / "other.py").write_text(f"{FUNCTION}\n")
    reward = recipe.reward.model_copy(update={"rubric": "", "scorer": f"{tmp_path}/other.py:compute_score"})
    changed = recipe.model_copy(update={"reward": reward})
    check_resumable(changed)
    record_inputs(changed, buffer)
    assert recorded_inputs(recipe.folder).keys() == input_paths(changed).keys()
    append(tmp_path / "other.py")
    with pytest.raises(ConfigError, match=r"^reward\.scorer: "):
        check_resumable(changed)


def test_a_file_with_its_length_and_time_is_read_again_only_by_a_replay(recipe: Recipe, redis_url: str) -> None:
    begin(recipe, Buffer(redis_url, recipe.run.run_id))
    file = Path(recipe.model.path) / "config.json"
    status = file.stat()
    file.write_bytes(bytes(reversed(file.read_bytes())))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    check_resumable(recipe)
    with pytest.raises(ConfigError, match=r"^model\.path: .*config\.json was "):
        check_replayed_model(recipe, recipe.folder)


def test_a_rubric_that_is_missing_or_unusable_is_left_to_the_reward_service(recipe: Recipe, redis_url: str) -> None:
    rubric = Path(recipe.reward.rubric)
    rubric.write_text("[[")
    assert "reward.rubric" in input_paths(recipe)
    rubric.unlink()
    join_run(recipe, redis_url, "feed")
    assert recorded_inputs(recipe.folder).keys() == {"data.train_file"}


def test_a_run_without_a_record_is_resumed(recipe: Recipe, redis_url: str) -> None:
    begin(recipe, Buffer(redis_url, recipe.run.run_id))
    (recipe.folder / INPUTS_FILE).unlink()
    append(Path(recipe.data.train_file))
    check_resumable(recipe)


@pytest.mark.parametrize(
    ("service", "key"),
    [("feed", "data.train_file"), ("trainer", "model.path"), ("rollout", "model.path"), ("reward", "reward.rubric")],
)
def test_a_service_that_joins_with_another_file_is_refused(
    recipe: Recipe, redis_url: str, service: str, key: str
) -> None:
    for one in ("feed", "trainer", "rollout", "reward"):
        join_run(recipe, redis_url, one)
    assert recorded_inputs(recipe.folder).keys() >= {"data.train_file", "model.path"}
    elsewhere = recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": f"{recipe.folder}-2"})})
    said = append(FILES[key](recipe))
    with pytest.raises(ConfigError, match=f"^{key}: .* {said}"):
        join_run(elsewhere, redis_url, service)
