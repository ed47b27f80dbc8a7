"""The keys that a resumed run may change: those that its weights do not depend on."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import ConfigError, RunExistsError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe, dump_recipe
from tandem.services.run.folder import CONFIG_FILE
from tandem.services.run.ledger import create_ledger
from tandem.services.run.resume import FREE, check_resumable, forbidden_changes, with_automatic_values
from tests.support.run_inputs import Values, recipe_of

EVERY_TABLE: dict[str, Any] = {
    "advantage": "gae",
    "correction": {"rejections": [{"high": 2.0}]},
    "kl": {"reward": {"target": 0.1}, "loss": {}},
    "lora": {},
    "selection": {"overlong_penalty": {"buffer_tokens": 4}, "reward_clip": [0.0, 1.0], "filtration": {}},
}
"""A `[trainer]` that has every optional table."""


def begun(recipe: Recipe) -> Recipe:
    """Writes the recipe into its run folder, as a started run does."""
    recipe.folder.mkdir()
    (recipe.folder / CONFIG_FILE).write_text(dump_recipe(recipe))
    return recipe


def refusal(recipe: Recipe) -> str:
    with pytest.raises(ConfigError) as caught:
        check_resumable(recipe)
    (line,) = str(caught.value).splitlines()
    return line


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Every dotted key of a resolved recipe that is not a table."""
    for name, value in values.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from leaves(value, key)
        else:
            yield key


def changed(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The values with another value for the key, valid or not."""
    name, _, below = key.partition(".")
    return {**values, name: changed(values[name], below) if below else ["another value"]}


def test_every_key_is_fixed_unless_it_is_declared_free(values: Values) -> None:
    recipe = recipe_of(values, trainer=EVERY_TABLE, rollout={"max_response_tokens": 32})
    resolved = recipe.model_dump(mode="json")
    keys = list(leaves(resolved))
    assert {"trainer.learning_rate", "trainer.loss.clip_low", "trainer.kl.loss.coefficient", "model.path"} < set(keys)
    for key in keys:
        found = [change.key for change in forbidden_changes(resolved, changed(resolved, key))]
        free = key in FREE or key.partition(".")[0] in FREE
        assert found == ([] if free else [key])


def test_the_refusal_names_key_values_and_remedy(values: Values) -> None:
    recipe = begun(recipe_of(values))
    line = refusal(recipe_of(values, trainer={"learning_rate": 3e-6, "warmup_batches": 2}))
    assert "trainer.learning_rate was 1e-06" in line and "is 3e-06 now" in line and "nor trainer.warmup_batches" in line
    assert f"tandem run {recipe.folder}/{CONFIG_FILE} --resume" in line
    assert "trainer.export_every=1" in line, "there is no export to start from yet"
    (recipe.folder / "exports" / "000011.partial").mkdir(parents=True)
    for name in ("exports/000002", "exports/000010", "hf"):
        (recipe.folder / name).mkdir(parents=True)
        assert f"model.path={recipe.folder}/{name}" in refusal(recipe_of(values, trainer={"learning_rate": 3e-6}))


def test_a_changed_table_is_named_by_the_key_that_selects_it(values: Values) -> None:
    begun(recipe_of(values))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss": "gspo"}, 'trainer.loss.name was "clipped_surrogate"'),
        ({"loss": {"clip_low": 0.1}}, "trainer.loss.clip_low was 0.2"),
        ({"lora": {"rank": 4}}, "trainer.lora was none"),
        ({"advantage": "rloo"}, 'is "rloo" now'),
        ({"schedule": "cosine"}, "trainer.schedule"),
    ]
    for trainer, says in cases:
        line = refusal(recipe_of(values, trainer=trainer))
        assert says in line and "nor" not in line.partition("; ")[0]


def test_a_run_may_become_longer_unless_its_learning_rate_decays(values: Values, tmp_path: Path) -> None:
    begun(recipe_of(values))
    check_resumable(recipe_of(values, run={"total_batches": 9}))
    elsewhere, trainer = str(tmp_path / "falling"), {"schedule": "cosine"}
    assert "no run to resume" in refusal(recipe_of(values, run={"folder": elsewhere}))
    begun(recipe_of(values, run={"folder": elsewhere}, trainer=trainer))
    longer = recipe_of(values, run={"folder": elsewhere, "total_batches": 9}, trainer=trainer)
    assert "run.total_batches was 3" in refusal(longer)


def test_a_resumed_run_keeps_the_threads_that_it_began_with(
    values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    recipe = recipe_of(values)
    began = begun(with_automatic_values(recipe, resume=False))
    assert (began.trainer.num_threads, began.rollout.num_threads) == (3, 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    resumed = with_automatic_values(recipe, resume=True)
    check_resumable(resumed)
    assert resumed == began
    other = with_automatic_values(recipe_of(values, trainer={"num_threads": 2}), resume=True)
    assert "trainer.num_threads was 3" in refusal(other), "sums depend on it"
    elsewhere = {"folder": str(tmp_path / "older")}
    older = begun(recipe_of(values, run=elsewhere, trainer={"zero_stage": 0}))
    resumed = with_automatic_values(recipe_of(values, run=elsewhere), resume=True)
    assert resumed == older, "an earlier version recorded no number"


def test_a_narrow_model_trains_with_one_thread(values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = tmp_path / "narrow" / "config.json"
    config.parent.mkdir()
    chosen = {}
    for text in ('{"hidden_size": 128}', '{"hidden_size": 896}', "no JSON"):
        config.write_text(text)
        recipe = with_automatic_values(recipe_of(values, model={"path": str(config.parent)}), resume=False)
        assert recipe.rollout.num_threads == 4
        chosen[text] = recipe.trainer.num_threads
    assert list(chosen.values()) == [1, 4, 4]


def test_a_resumed_run_keeps_the_zero_stage_that_it_began_with(values: Values) -> None:
    recipe = recipe_of(values)
    began = with_automatic_values(recipe, resume=False)
    assert began.trainer.zero_stage == 0, "auto is replaced by what one rank in float32 uses"
    older = begun(recipe_of(values, trainer={"zero_stage": 3}))
    resumed = with_automatic_values(recipe, resume=True)
    check_resumable(resumed)
    assert resumed == older
    assert with_automatic_values(recipe, resume=False) == began, "a run that is started over does not"
    other = with_automatic_values(recipe_of(values, trainer={"zero_stage": 1}), resume=True)
    assert "trainer.zero_stage was 3" in refusal(other), "a stage that is given is not replaced"


def test_a_start_that_redis_refuses_leaves_the_folder_as_it_was(
    values: Values, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", redis_url)
    run_id = f"refused-{uuid.uuid4().hex[:12]}"
    began = recipe_of(values, run={"run_id": run_id})
    other = recipe_of(values, run={"run_id": run_id, "seed": 1})
    config = began.folder / CONFIG_FILE
    began.folder.mkdir()
    with closing(Buffer(redis_url, run_id)) as buffer:
        create_ledger(buffer, began, resume=False)
        text = config.read_text()
        with pytest.raises(RunExistsError):
            create_ledger(buffer, other, resume=False)
        assert config.read_text() == text
        config.unlink()
        with pytest.raises(RunExistsError):
            create_ledger(buffer, other, resume=False)
        assert not config.exists()
