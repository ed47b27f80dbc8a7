"""Services started one by one with `tandem serve`, as in containers: no supervisor, and one shared Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError, RunExistsError, UnavailableError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe, dump_recipe, load_resolved
from tandem.services.run import ledger as run_ledger
from tandem.services.run.folder import CONFIG_FILE
from tandem.services.run.ledger import join_run
from tests.support.paths import ROOT
from tests.support.run_inputs import Values, recipe_of, write_chat_model

DEADLINE_SECONDS = 60.0
P, S = 2, 1


@pytest.fixture
def recipe(tmp_path: Path, values: Values) -> Recipe:
    """The recipe of a run that is not in Redis; its model folder tokenizes prompts, but its weights are not loaded."""
    run = {"run_id": f"alone-{tmp_path.name}"[:60], "groups_per_batch": P, "staleness_budget": S}
    return recipe_of(values, run=run, model={"path": str(write_chat_model(tmp_path / "chat"))})


def changed(recipe: Recipe, **run: object) -> Recipe:
    return recipe.model_copy(update={"run": recipe.run.model_copy(update=run)})


@pytest.fixture
def serve(recipe: Recipe, redis_url: str, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a service by hand; its output goes to `<service>.log`."""
    (tmp_path / "recipe.json").write_text(dump_recipe(recipe))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": redis_url, "HF_HUB_OFFLINE": "1"}
    with ExitStack() as stack:

        def start(service: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "tandem.services.cli", "serve", service, "recipe.json"]
            log = stack.enter_context(open(tmp_path / f"{service}.log", "ab"))
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def until(what: Callable[[], bool], *processes: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not what():
        said = "".join(log.read_text() for log in folder.glob("*.log"))
        assert all(process.poll() is None for process in processes), said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


@pytest.mark.slow
def test_in_any_order_the_feed_creates_the_run(
    recipe: Recipe, redis_url: str, serve: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    buffer = Buffer(redis_url, recipe.run.run_id)
    reward = serve("reward")
    until(lambda: "reward" in buffer.services(), reward, folder=tmp_path)
    assert not buffer.exists()
    feed = serve("feed")
    until(lambda: buffer.counts()["prompts_waiting"] == (S + 1) * P, feed, reward, folder=tmp_path)
    assert load_resolved(recipe.folder / CONFIG_FILE) == recipe, "`tandem ledger`, `tandem eval` find it there"
    for process in (feed, reward):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_SECONDS) == 0
    assert buffer.admission().cursor == (S + 1) * P and buffer.verify() == []


def test_a_restarted_feed_finds_its_run(recipe: Recipe, redis_url: str) -> None:
    for _ in range(2):
        join_run(recipe, redis_url, "feed")
    buffer = Buffer(redis_url, recipe.run.run_id)
    assert buffer.admission().wanted == 3 * P and buffer.admission().free == (S + 1) * P
    (recipe.folder / CONFIG_FILE).unlink()  # the feed was killed before it wrote the file
    join_run(recipe, redis_url, "feed")
    assert (recipe.folder / CONFIG_FILE).is_file()
    join_run(recipe, redis_url, "trainer")


def test_a_feed_of_another_recipe_is_refused(recipe: Recipe, redis_url: str) -> None:
    join_run(recipe, redis_url, "feed")
    with pytest.raises(ConfigError, match=r"run\.seed was 0 .* is 1 now"):
        join_run(changed(recipe, seed=1), redis_url, "feed")
    longer = changed(recipe, total_batches=4)
    join_run(longer, redis_url, "feed")
    wanted = Buffer(redis_url, recipe.run.run_id).admission().wanted
    assert wanted == 4 * P, "what a resumed run may change is taken over"
    assert load_resolved(recipe.folder / CONFIG_FILE) == longer


def test_a_run_that_redis_has_lost_is_not_created_again(recipe: Recipe, redis_url: str) -> None:
    recipe.folder.mkdir()
    (recipe.folder / CONFIG_FILE).write_text(dump_recipe(recipe))
    with pytest.raises(RunExistsError, match=r"knows nothing of; go on with it by `tandem run .* --resume`"):
        join_run(recipe, redis_url, "feed")
    assert not Buffer(redis_url, recipe.run.run_id).exists()


def test_a_trainer_waits_for_the_feed(recipe: Recipe, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            join_run(recipe, redis_url, "feed")

    monkeypatch.setattr("tandem.services.run.ledger.time.sleep", sleep)
    join_run(recipe, redis_url, "trainer")
    assert len(slept) == 2


def test_waiting_for_a_feed_has_a_deadline(
    recipe: Recipe, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(run_ledger, "JOIN_SECONDS", 0.5)
    with pytest.raises(UnavailableError, match=r"nobody has created it .* start `tandem serve feed`"):
        join_run(recipe, redis_url, "trainer")
    assert caplog.messages[0].startswith("waits for run alone-")
