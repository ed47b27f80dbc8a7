"""Keys that users write but a recipe does not have: the error names the key to write instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import ConfigError
from tandem.reward.options.tree import known_keys
from tandem.services.config import Recipe, other_names, parse_recipe
from tandem.services.config.other_names import ABSENT_KEYS, OLD_KEYS, TRL_KEYS, VERL_KEYS
from tandem.services.config.overrides import apply_overrides

PAGE = 'docs/algorithms.md, section "Names elsewhere"'


def values() -> dict[str, Any]:
    return {"run": {"run_id": "r"}, "model": {"path": "m"}, "data": {"train_file": "d.parquet"}}


def complaint(*overrides: str, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        given = values() | sections
        apply_overrides(given, overrides, Recipe)
        parse_recipe(given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def recipe(*overrides: str) -> Recipe:
    given = values()
    apply_overrides(given, overrides, Recipe)
    return parse_recipe(given)


def test_recommended_keys_exist_and_replaced_keys_do_not() -> None:
    known = set(known_keys(Recipe))
    for table in (OLD_KEYS, VERL_KEYS, TRL_KEYS):
        recommended = {key for text in table.values() for key in text.split(" and ")}
        assert recommended <= known
    assert not (OLD_KEYS.keys() | ABSENT_KEYS.keys() | TRL_KEYS.keys()) & known
    assert VERL_KEYS.keys() & known <= set()


def test_the_section_that_the_errors_name_is_in_the_page(pytestconfig: pytest.Config) -> None:
    page = (Path(pytestconfig.rootpath) / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert re.search("^## Names elsewhere$", page, re.MULTILINE)


def test_a_renamed_key_names_its_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(other_names.OLD_KEYS, "run.slack", "run.staleness_budget")
    told = "unknown key run.slack: its name is now run.staleness_budget"
    assert complaint("run.slack=2") == f"recipe: {told}"
    assert complaint(run={"run_id": "r", "slack": 2}) == f"recipe: {told}"


def test_a_key_of_verl_names_ours_and_the_page_of_names() -> None:
    for override, key in (
        ("actor_rollout_ref.actor.optim.lr=1e-6", "trainer.learning_rate"),
        ("algorithm.adv_estimator=grpo", "trainer.advantage"),
        ("data.train_batch_size=64", "run.groups_per_batch"),
        ("actor_rollout_ref.rollout.n=8", "rollout.samples_per_prompt"),
        ("trainer.total_epochs=2", "data.max_epochs"),
    ):
        name = override.partition("=")[0]
        assert complaint(override) == f"recipe: unknown key {name}: verl's name; write {key} ({PAGE}, has more names)"
    line = complaint("actor_rollout_ref.hybrid_engine=true")
    assert line == f"recipe: unknown key actor_rollout_ref: verl's name; see {PAGE}"


def test_an_argument_of_trl_names_our_key_and_the_page_of_names() -> None:
    for name in ("num_generations", "beta", "max_completion_length", "per_device_train_batch_size", "learning_rate"):
        told = f"unknown key {name}: TRL's name; write {TRL_KEYS[name]} ({PAGE}, has more names)"
        assert complaint(**{name: 1}) == f"recipe: {told}"
        assert told in complaint(f"{name}=1")


def test_a_key_that_is_left_out_on_purpose_is_an_error_with_the_reason() -> None:
    assert "find one another in the run's Redis" in complaint("trainer.rendezvous=10.0.0.1:29400")


def test_one_text_in_place_of_a_list_is_an_error_with_an_example() -> None:
    line = complaint("rollout.stop=abc")
    assert line == "recipe: rollout.stop: should be a list of text (got 'abc'); write stop = [\"abc\"]"


def test_none_removes_an_optional_text() -> None:
    assert recipe("data.eval_file=eval.parquet", "data.eval_file=none").data.eval_file == ""
    assert recipe("run.folder=none").run.folder == "runs/r"
    assert recipe("trainer.correction.weights.level=none").trainer.correction.weights.level == "none"


def test_none_is_refused_for_a_required_text() -> None:
    for key in ("model.path", "run.run_id", "run.host", "reward.scorer"):
        assert complaint(f"{key}=none") == f"override '{key}=none': {key} needs a value and cannot be none"
