"""What evaluations change in the life of a trainer: the best version, an early end, an interrupted evaluation."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.run.json_files import EVALUATIONS_FILE, JsonLines
from tandem.services.trainer import evaluation
from tandem.services.trainer.evaluation import Evaluation
from tandem.services.trainer.generations import EvaluationSet, SetResult
from tandem.services.trainer.service import Trainer
from tandem.trainer.batch.prepared import PreparedBatch
from tandem.trainer.batch.record import recorded_versions
from tests.support.made_up_run import evaluation_line
from tests.support.trainer_ring import P, different_rewards, lines_of, make_recipe, make_run, put_scored, train


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Accuracies of the set `test` by version, 0.4 for others, in place of samplers and a reward service."""
    accuracies: dict[int, float] = {}

    def evaluate(version: int, *_: object) -> Evaluation:
        line = evaluation_line(version, accuracies.get(version, 0.4))
        return Evaluation(version, line["accuracy"], None, 8, 8, {}, 0.1, {"test": SetResult(**line["sets"]["test"])})

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    monkeypatch.setattr(evaluation, "load_set", lambda one, _: EvaluationSet(one.name, ()))
    monkeypatch.setattr(evaluation, "wait_for_endpoints", lambda *_: object())
    return accuracies


EVALUATED = {"train_file": "none.parquet", "eval_file": "test.parquet", "max_prompt_tokens": 16}


def evaluated_versions(recipe: Recipe) -> list[int]:
    return [line["version"] for line in JsonLines(recipe.folder / EVALUATIONS_FILE).read()]


def test_a_run_that_improves_no_more_ends_and_keeps_its_best_version(
    tmp_path: Path, redis_url: str, scripted: dict[int, float]
) -> None:
    scripted |= {0: 0.9, 1: 0.5}
    more = {"learning_rate": 1e-2, "evaluate_every": 1}
    best = {"keep_best": "eval/test/pass@1", "patience": 2}
    recipe = make_recipe(tmp_path, run={"total_batches": 9}, data=EVALUATED, trainer=more, eval=best)
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(9 * P))
    assert train(recipe, redis_url)
    trained = len(lines_of(recipe))
    assert 3 <= trained <= 5, "version 3 is the second without an improvement; batches 4 and 5 may be recorded by then"
    assert recorded_versions(recipe.folder) == list(range(1, trained + 1)), "each recorded batch is trained"
    assert [export.name for export in (recipe.folder / "best").iterdir()] == ["000001"]
    assert (recipe.folder / "hf").is_dir() and not buffer.verify()
    assert evaluated_versions(recipe) == list(range(trained + 1)), "the last version is evaluated once"


def test_a_run_ends_once_it_is_good_enough_and_keeps_its_two_best_versions(
    tmp_path: Path, redis_url: str, scripted: dict[int, float]
) -> None:
    scripted |= {0: 0.95, 1: 0.6, 2: 0.5, 3: 0.9}
    best = {"keep_best": "eval/test/pass@1", "num_best": 2, "stop_at": 0.9}
    more = {"learning_rate": 1e-2, "evaluate_every": 1}
    recipe = make_recipe(tmp_path, run={"total_batches": 9}, data=EVALUATED, trainer=more, eval=best)
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(9 * P))
    assert train(recipe, redis_url)
    trained = len(lines_of(recipe))
    assert 3 <= trained <= 5, "batches 4 and 5 may be recorded by then; version 0 is not trained, and ends nothing"
    assert {export.name for export in (recipe.folder / "best").iterdir()} == {"000001", "000003"}
    assert evaluated_versions(recipe) == list(range(trained + 1)) and not buffer.verify()


def test_an_evaluation_that_was_interrupted_is_done_by_the_next_trainer(
    tmp_path: Path, redis_url: str, scripted: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()

    def interrupted(buffer: Buffer, recipe: Recipe, version: int, *_: object) -> object | None:
        if version == 0 or stop.is_set():
            return object()
        return stop.set()

    monkeypatch.setattr(evaluation, "wait_for_endpoints", interrupted)
    recipe = make_recipe(tmp_path, run={"total_batches": 3}, data=EVALUATED, trainer={"evaluate_every": 2})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(2 * P))
    assert not train(recipe, redis_url, stop)
    assert evaluated_versions(recipe) == [0]
    put_scored(buffer, different_rewards(P, start=2 * P))
    assert train(recipe, redis_url)
    assert evaluated_versions(recipe) == [0, 2, 3]


def test_a_stop_during_an_evaluation_publishes_no_version_over_it(
    tmp_path: Path, redis_url: str, scripted: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, is_over = threading.Event(), threading.Event()
    learn = Trainer.learn

    def stopped_after_version_2(trainer: Trainer, prepared: PreparedBatch) -> object:
        result = learn(trainer, prepared)
        if trainer.version == 2:
            stop.set()
        return result

    def lasting(buffer: Buffer, recipe: Recipe, version: int, *_: object) -> object | None:
        if version == 1 and not stop.is_set():
            assert is_over.wait(60)
            return None
        return object()

    monkeypatch.setattr(Trainer, "learn", stopped_after_version_2)
    monkeypatch.setattr(evaluation, "wait_for_endpoints", lasting)
    recipe = make_recipe(tmp_path, run={"total_batches": 2}, data=EVALUATED, trainer={"evaluate_every": 1})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(2 * P))
    assert not train(recipe, redis_url, stop)
    assert buffer.published_version() == 1 and recorded_versions(recipe.folder) == [1, 2]
    is_over.set()
    monkeypatch.setattr(Trainer, "learn", learn)
    assert train(recipe, redis_url)
    assert evaluated_versions(recipe) == [0, 2], "version 2 is trained again and published at once"
    assert not buffer.verify()


def test_a_run_that_is_stopped_before_its_last_evaluation_is_not_finished(
    tmp_path: Path, redis_url: str, scripted: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    finish = Trainer.finish

    def stopped(trainer: Trainer) -> bool:
        stop.set()
        return finish(trainer)

    monkeypatch.setattr(Trainer, "finish", stopped)
    recipe = make_recipe(tmp_path, run={"total_batches": 2}, data=EVALUATED)
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(2 * P))
    assert not train(recipe, redis_url, stop)
    assert evaluated_versions(recipe) == [0] and not (recipe.folder / "summary.json").exists()
    monkeypatch.setattr(Trainer, "finish", finish)
    assert train(recipe, redis_url)
    assert evaluated_versions(recipe) == [0, 2] and not buffer.verify()
