"""Evaluation sets in a recipe: what is derived, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.config import Recipe, dump_recipe, parse_recipe
from tandem.services.config.recipe import load_resolved


def recipe(*sets: dict[str, Any], eval_file: str = "data/gsm8k/test.parquet", **sections: Any) -> Recipe:
    data = {"train_file": "train.jsonl", "eval_file": eval_file}
    values = {"run": {"run_id": "r"}, "model": {"path": "m"}, "data": data, "eval": {"sets": sets}, **sections}
    return parse_recipe(values)


def test_the_evaluation_file_is_the_first_set_with_one_greedy_answer() -> None:
    first, second = recipe(
        {"file": "AIME 24.jsonl", "samples_per_prompt": 4, "every": 7},
        trainer={"evaluate_every": 5},
        rollout={"temperature": 0.8, "max_response_tokens": 64},
    ).eval_sets
    assert (first.name, first.file, first.every, first.samples_per_prompt) == ("test", "data/gsm8k/test.parquet", 5, 1)
    assert (first.temperature, first.top_p, first.max_response_tokens) == (0.0, 1.0, 64)
    assert (second.name, second.every, second.temperature, second.max_response_tokens) == ("AIME_24", 7, 0.8, 64)
    assert recipe(eval_file="").eval_sets == ()


def test_the_best_version_is_chosen_by_a_metric_that_exists() -> None:
    for metric in ("eval/test/pass@1", "eval/many/maj@4", "eval/many/best@2", "eval/test/mean_reward"):
        data = {"train_file": "t", "eval_file": "data/test.parquet"}
        section = {"sets": [{"name": "many", "file": "a", "samples_per_prompt": 4}], "keep_best": metric, "patience": 2}
        one = parse_recipe({"run": {"run_id": "r"}, "model": {"path": "m"}, "data": data, "eval": section})
        assert one.eval.best_set == metric.split("/")[1]
    cases = {
        "eval/many/pas@4": "there is no metric eval/many/pas@4; did you mean eval/many/pass@4?; there are ",
        "eval/test/pass@4": "there is no metric eval/test/pass@4",
        "accuracy": "there is no metric accuracy",
    }
    for metric, says in cases.items():
        with pytest.raises(ConfigError, match=re.escape(f"eval.keep_best: {says}")):
            parse_recipe({**one.model_dump(), "eval": {**section, "keep_best": metric}})
    with pytest.raises(ConfigError, match="stop_at, patience and num_best need a metric; set keep_best"):
        parse_recipe({**one.model_dump(), "eval": {"num_best": 2}})


def test_greedy_samples_of_a_prompt_differ_with_an_environment() -> None:
    one = {"file": "a", "samples_per_prompt": 4, "temperature": 0.0}
    assert recipe(one, environment={"path": "a:B"}).eval_sets[1].temperature == 0.0


def test_a_set_changes_the_recipes_environment(tmp_path: Any) -> None:
    environments = ["none", "b.py:C", {"arguments": {"turns": 8}}, {"path": "b.py:C", "arguments": {"n": 1}}, {}]
    sets = [{"name": f"s{n}", "file": "a", "environment": one} for n, one in enumerate(environments)]
    own = {"path": "a:B", "arguments": {"turns": 4, "deep": True}, "max_turns": 5}
    one = recipe(*sets, environment=own, reward={"scorer": "exact"})
    played = [found.environment.over(one.environment) for found in one.eval_sets]
    assert [(found.path, found.arguments) for found in played] == [
        ("a:B", {"turns": 4, "deep": True}),  # of data.eval_file
        ("", {}),
        ("b.py:C", {}),
        ("a:B", {"turns": 8, "deep": True}),
        ("b.py:C", {"n": 1}),
        ("a:B", {"turns": 4, "deep": True}),
    ]
    assert {found.max_turns for found in played if found.path} == {5}, "the limits are the recipe's"
    assert [found.environment.key(one.environment) for found in one.eval_sets] == [
        "",
        "none",
        '{"arguments": {}, "path": "b.py:C"}',
        '{"arguments": {"deep": true, "turns": 8}, "path": "a:B"}',
        '{"arguments": {"n": 1}, "path": "b.py:C"}',
        "",
    ]
    (tmp_path / "config.json").write_text(dump_recipe(one))
    assert load_resolved(tmp_path / "config.json") == one


def test_a_class_takes_the_place_of_the_recipes_tools() -> None:
    one = recipe({"file": "a", "environment": "b:C"}, environment={"tools": ["t.py:f"], "arguments": {"max_calls": 2}})
    played = one.eval_sets[1].environment.over(one.environment)
    assert (played.path, played.tools, played.arguments) == ("b:C", (), {})


_PLAYED = {"environment": {"path": "a:B"}}


@pytest.mark.parametrize(
    ("environment", "sections", "says"),
    [
        ({"argumnts": {}}, _PLAYED, "environment.argumnts; did you mean eval.sets[0].environment.arguments?"),
        (
            "nonne",
            _PLAYED,
            "environment.path: it names no class; write module.path:Class, path/to/file.py:Class, or none",
        ),
        (8, _PLAYED, "eval.sets[0].environment: should be path or table (got 8)"),
        ({"path": "none", "arguments": {"a": 1}}, _PLAYED, "environment: arguments: without an environment, nothing"),
        ("none", {}, "set a: environment: the recipe has no environment; set environment.path"),
        ({"arguments": {"a": 1}}, {}, "set a: environment: the recipe has no environment; set environment.path"),
        ("none", {**_PLAYED, "reward": {"scorer": "earned"}}, "the scorer earned gives single answers nothing"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_with_one_line(
    environment: Any, sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe({"file": "a", "environment": environment}, **sections)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_single_answers_beside_an_environment_need_a_temperature() -> None:
    one = {"file": "a", "samples_per_prompt": 4, "temperature": 0.0, "environment": "none"}
    with pytest.raises(ConfigError, match="set a: samples_per_prompt 4 with temperature 0"):
        recipe(one, **_PLAYED)
    single = recipe({**one, "temperature": 1.0}, **_PLAYED)
    assert single.eval_sets[1].environment.key(single.environment) == "none"


@pytest.mark.parametrize(
    ("environment", "in_services"),
    [({}, True), ({"arguments": {"size": 3}}, True), ({"arguments": {"size": 4}}, False), ("b:C", False)],
)
def test_environment_services_run_what_is_the_recipes_own(environment: Any, in_services: bool) -> None:
    served = {"path": "a:B", "service": True, "arguments": {"size": 3}}
    one = recipe({"file": "a", "environment": environment}, environment=served)
    played = one.eval_sets[-1].environment.over(one.environment)
    assert played.service is in_services and (one.eval_sets[-1].environment.key(one.environment) == "") is in_services


def test_a_resolved_recipe_has_the_same_sets(tmp_path: Any) -> None:
    one = recipe({"file": "aime.jsonl", "scorer": "exact"}, {"name": "long", "file": "aime.jsonl", "limit": 3})
    (tmp_path / "config.json").write_text(dump_recipe(one))
    assert load_resolved(tmp_path / "config.json") == one


@pytest.mark.parametrize(
    ("one", "says"),
    [
        ({"file": "other/test.jsonl"}, "2 evaluation sets have the name test; give each its own `name`"),
        ({"limit": 3}, "eval.sets[0].file is missing"),
        ({"file": "a", "temperature": 0, "samples_per_prompt": 2}, "set a: samples_per_prompt 2 with temperature 0"),
        ({"file": "a", "max_response_tokens": 10_000}, "set a: max_response_tokens 10000 is more than"),
        ({"file": "a", "name": "../up"}, "eval.sets[0].name"),
        ({"file": "a", "evry": 3}, "unknown key eval.sets[0].evry; did you mean eval.sets[0].every?"),
    ],
)
def test_a_set_that_cannot_be_used_is_refused_with_one_line(one: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(one)
    assert says in str(caught.value) and "\n" not in str(caught.value)
