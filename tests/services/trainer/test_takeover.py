"""A trainer takes a run over only once nothing can keep it from training; until then an earlier one goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import ConfigError, DataError, FencedError, RunExistsError, RunFolderError
from tandem.services.buffer.buffer import Buffer
from tandem.services.commands import serve
from tandem.services.config import Recipe
from tandem.services.process import in_thread
from tandem.services.run.endpoint import service_endpoint
from tandem.services.run.folder import RunAddress, RunLock
from tandem.services.service_info import ServiceInfo
from tandem.services.trainer.rank_zero import RankZero
from tandem.services.trainer.recovery import CHECKPOINTS_FOLDER, trainer_lock
from tandem.services.trainer.service import Trainer, run_rank
from tandem.services.trainer.takeover import TAKEOVER_VARIABLE, Takeover
from tandem.trainer.batch.prepared import PreparedBatch
from tandem.trainer.checkpoints.state import list_checkpoints, prune_checkpoints
from tests.support.figures_page import unnamed, unwritten
from tests.support.trainer_ring import P, Predecessor, lines_of, make_recipe, train
from tests.support.training_groups import write_states
from tests.support.waiting import eventually


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.mark.parametrize("hands_over", [False, True])
def test_a_trainer_with_another_run_folder_is_refused_and_fences_nobody(
    tmp_path: Path, recipe: Recipe, redis_url: str, hands_over: bool
) -> None:
    earlier = Predecessor(recipe, redis_url)
    elsewhere = make_recipe(tmp_path, run={"folder": str(tmp_path / "elsewhere")})
    with (
        Takeover(elsewhere, earlier.buffer, 1, hands_over=hands_over) as takeover,
        pytest.raises(RunFolderError, match=r"elsewhere: the run folder ends with version 0, .* has version 1 as rec"),
    ):
        takeover.prepare()
    assert earlier.is_current()


def test_a_trainer_with_too_few_ranks_is_refused_and_fences_nobody(recipe: Recipe, redis_url: str) -> None:
    earlier = Predecessor(recipe, redis_url)
    earlier.train(2, world_size=2)
    takeover = Takeover(recipe, earlier.buffer, 1, hands_over=False)
    with takeover, pytest.raises(ConfigError, match=r"trainer\.num_ranks=2"):
        takeover.prepare()
    assert earlier.is_current()


def test_a_trainer_that_cannot_load_its_checkpoint_fences_nobody(recipe: Recipe, redis_url: str) -> None:
    earlier = Predecessor(recipe, redis_url)
    broken = recipe.folder / "checkpoints" / "000001"
    broken.mkdir(parents=True)
    (broken / "state.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        train(recipe, redis_url)
    assert earlier.is_current()


def test_a_second_trainer_is_refused_while_one_answers(recipe: Recipe, redis_url: str) -> None:
    earlier = Predecessor(recipe, redis_url)
    info = ServiceInfo("trainer", dict, lambda: "trains", earlier.buffer)
    with (
        service_endpoint(info, recipe, threading.Event()),
        Takeover(recipe, earlier.buffer, 1, hands_over=False) as takeover,
        pytest.raises(RunExistsError, match=r"has a trainer at .* `tandem takeover .*run`"),
    ):
        takeover.prepare()
    with Takeover(recipe, earlier.buffer, 1, hands_over=False) as takeover:
        assert takeover.prepare().recorded == [1]
    assert earlier.is_current()


def test_a_takeover_ends_the_trainer_that_runs_and_goes_on_from_what_it_leaves(recipe: Recipe, redis_url: str) -> None:
    earlier = Predecessor(recipe, redis_url)
    prepared, has_trained = threading.Event(), threading.Event()

    def goes_on() -> None:
        with trainer_lock(recipe.folder):
            assert prepared.wait(20)
            earlier.train(2)
            has_trained.set()
            with pytest.raises(FencedError):
                while not threading.Event().wait(0.01):
                    earlier.is_current()

    running = in_thread("earlier", goes_on)
    buffer = Buffer(redis_url, recipe.run.run_id)
    with Takeover(recipe, buffer, 1, hands_over=True) as takeover:
        assert takeover.prepare().recorded == [1]
        assert earlier.is_current()
        prepared.set()
        assert has_trained.wait(20)
        assert takeover.fence().recorded == [1, 2]
        running.result(20)
        assert takeover.begin() == buffer.counts()["incarnation"]
        assert buffer.counts()["trained"] == 2 * P and buffer.verify() == []
    buffer.close()


def test_a_takeover_that_is_stopped_while_it_loads_fences_nobody(recipe: Recipe, redis_url: str) -> None:
    earlier, stop = Predecessor(recipe, redis_url), threading.Event()
    stop.set()
    assert not run_rank(recipe, redis_url, stop, hands_over=True)
    assert earlier.is_current()


def test_a_stop_ends_the_training_of_recorded_batches(
    recipe: Recipe, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, stop, learned = Predecessor(recipe, redis_url), threading.Event(), list[int]()
    earlier.train(2)
    learn = Trainer.learn

    def stopped(trainer: Trainer, prepared: PreparedBatch) -> object:
        learned.append(prepared.batch.policy_version)
        stop.set()
        return learn(trainer, prepared)

    monkeypatch.setattr(Trainer, "learn", stopped)
    assert not run_rank(recipe, redis_url, stop)
    assert learned == [1]


def test_a_trainer_that_cannot_start_leaves_no_thread(
    recipe: Recipe, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: RankZero) -> None:
        raise OSError("no space left on device")

    Predecessor(recipe, redis_url)
    monkeypatch.setattr(RankZero, "_judge_evaluations", fails)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no space left"):
        run_rank(recipe, redis_url, threading.Event())
    eventually(
        lambda: not {"prefetch", "record", "publish"} & {one.name for one in set(threading.enumerate()) - before}
    )


def test_the_checkpoint_that_a_takeover_loads_is_not_deleted_by_the_trainer_that_still_trains(
    recipe: Recipe, redis_url: str
) -> None:
    earlier, checkpoints = Predecessor(recipe, redis_url), recipe.folder / CHECKPOINTS_FOLDER
    write_states(checkpoints, [(1, earlier.incarnation)])
    with Takeover(recipe, earlier.buffer, 1, hands_over=True) as takeover:
        loaded = Path(takeover.prepare().checkpoint)
        write_states(checkpoints, [(2, earlier.incarnation)])
        prune_checkpoints(checkpoints, 1)
        assert loaded.is_dir() and len(list_checkpoints(checkpoints)) == 2
        earlier.train(2)
        newest = Path(takeover.fence().checkpoint)
        prune_checkpoints(checkpoints, 1)
        assert newest.is_dir() and not loaded.exists()


def test_a_trainer_that_takes_over_trains_the_rest_of_the_run(recipe: Recipe, redis_url: str) -> None:
    earlier = Predecessor(recipe, redis_url)

    def goes_on() -> None:
        with trainer_lock(recipe.folder), pytest.raises(FencedError):
            while not threading.Event().wait(0.01):
                earlier.is_current()

    running = in_thread("earlier", goes_on)
    shorter = make_recipe(recipe.folder.parent, run={"total_batches": 3})
    assert run_rank(shorter, redis_url, threading.Event(), hands_over=True)
    running.result(20)
    lines = lines_of(recipe)
    assert [bool(line.get("replayed")) for line in lines] == [True, False, False]
    figures = {name for line in lines for name in line}
    assert (unnamed(figures), unwritten(figures)) == (set(), set()), "docs/metrics.md names all, and none that is gone"
    counts = earlier.buffer.counts()
    assert (counts["committed"], counts["outstanding"]) == (3 * P, 0) and earlier.buffer.verify() == []


def test_the_command_runs_the_trainer_of_a_run_without_a_supervisor(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(serve, "serve_one", lambda *arguments: served.append(arguments))
    monkeypatch.setenv(TAKEOVER_VARIABLE, "")
    with RunLock(recipe.folder) as lock:
        lock.publish(RunAddress(7, "", "", ""))
        with pytest.raises(RunExistsError, match=r"\(pid 7\) starts its own trainer"):
            serve.take_over(recipe.folder, [])
    serve.take_over(recipe.folder, ["trainer.port=0"])
    assert served == [("trainer", recipe.folder / "config.json", ["trainer.port=0"], None, "none")]
    assert serve.os.environ[TAKEOVER_VARIABLE] == "1"
