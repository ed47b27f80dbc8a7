"""`tandem eval` until it has a sampler, with small programs in place of the services."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tandem.protos.errors import ConfigError, DeadlineError, EnvironmentLackError, ModelError, ScorerError, UserError
from tandem.services.commands import evaluate
from tandem.services.commands.evaluate import evaluate_recipe
from tandem.services.config import Recipe
from tandem.services.launchers.children import ChildSpec
from tests.services.commands.test_cli import web_server
from tests.support.processes import MARK, carriers
from tests.support.run_inputs import Values, recipe_of, small_values, write_chat_model

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def values(tmp_path: Path) -> Values:
    """The values of a recipe whose model folder passes the checks and tokenizes prompts; its weights are not loaded."""
    values = small_values(tmp_path)
    values["model"]["path"] = str(write_chat_model(tmp_path / "chat" / "model"))
    values["data"]["eval_file"] = values["data"]["train_file"]
    return values


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> str:
    """Services that never register; returns the mark that their processes carry."""

    def child_specs(recipe: Recipe, redis_url: str) -> list[ChildSpec]:
        names = ("rollout-0", "reward", "trainer")
        return [ChildSpec(name, (sys.executable, "-c", SLEEP), recipe.folder / f"{name}.log") for name in names]

    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setattr(evaluate, "child_specs", child_specs)
    return mark


def test_services_that_never_register_are_a_one_line_error(
    values: dict[str, Any], asleep: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(evaluate, "START_SECONDS", 0.5)
    with pytest.raises(DeadlineError, match=r"not ready within 0 s, so nothing was evaluated; is .*/model too large"):
        evaluate_recipe(recipe_of(values))
    assert list(carriers(asleep)) == []
    assert not (tmp_path / "run").exists(), "it writes nothing to the run folder"


def test_the_folder_of_a_run_and_a_file_are_no_output(values: dict[str, Any], asleep: str, tmp_path: Path) -> None:
    (tmp_path / "old" / "batches").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--output .*old is the folder of a run; name another one"):
        evaluate_recipe(recipe_of(values), tmp_path / "old")
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentLackError, match="file: a file stands where a folder is needed"):
        evaluate_recipe(recipe_of(values), tmp_path / "file")
    assert list(carriers(asleep)) == []


def test_a_bug_in_the_evaluation_keeps_its_traceback(
    values: dict[str, Any], asleep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> NoReturn:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(evaluate, "wait_for_endpoints", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        evaluate_recipe(recipe_of(values))
    assert list(carriers(asleep)) == []


def test_bad_input_is_found_before_anything_is_started(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "RedisChild", None)  # the first process it starts
    file = values["data"]["eval_file"]
    cases: list[tuple[dict[str, Any], type[UserError], str]] = [
        ({"data": {"eval_file": ""}}, ConfigError, "data.eval_file is empty"),
        ({"model": {"path": "models/gone"}}, ModelError, "models/gone: no such folder"),
        ({"reward": {"scorer": "exakt"}}, ScorerError, "did you mean exact"),
        ({"rollout": {"num_threads": 4096}}, ConfigError, "rollout.num_threads is 4096 and this machine has"),
        ({"rollout": {"num_threads": 2, "num_replicas": 4096}}, ConfigError, "is 2 for each of 4096 workers"),
        ({"environment": {"path": "missing.py:A"}}, ConfigError, r"environment\.path: missing\.py:A.* is no file"),
        ({"eval": {"sets": [{"name": "aime", "file": file, "scorer": "exakt"}]}}, ScorerError, "set aime: .*exact"),
        ({"eval": {"sets": [{"name": "x", "file": file, "scorer": "mine.py:f"}]}}, ScorerError, "set x: .*import path"),
    ]
    for changes, kind, says in cases:
        with pytest.raises(kind, match=says):
            evaluate_recipe(recipe_of(values, **changes))
    with web_server() as port, pytest.raises(EnvironmentLackError, match=f"rollout.port: cannot listen on .*{port}"):
        evaluate_recipe(recipe_of(values, rollout={"port": port}))
    weights = Path(values["model"]["path"]) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors .*cut short"):
        evaluate_recipe(recipe_of(values))
