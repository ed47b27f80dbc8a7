"""Services started one by one with `tandem serve`, as in containers: no supervisor, and one shared Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.protos.errors import ConfigError, RunExistsError, UnavailableError
from tandem.services import logging_setup
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.cli import app
from tandem.services.commands import serve as serve_command
from tandem.services.config import Recipe, dump_recipe, load_resolved
from tandem.services.config.recipe import DataConfig, TrainFile
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.launcher import StartedByHand
from tandem.services.data.tiny_model import build_tiny_model
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run import ledger as run_ledger
from tandem.services.run import placement, preflight
from tandem.services.run.folder import CONFIG_FILE
from tandem.services.run.ledger import create_ledger, join_run
from tandem.services.run.resume import with_automatic_values
from tandem.services.service_info import Heartbeat, ServiceInfo
from tests.support.paths import ROOT
from tests.support.run_inputs import Values, recipe_of, write_chat_model
from tests.support.waiting import CountingLock, eventually

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
def serve(recipe: Recipe, redis_url: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a service by hand; its output goes to `<service>.log`."""
    (tmp_path / "recipe.json").write_text(dump_recipe(recipe))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": redis_url, "HF_HUB_OFFLINE": "1"}
    with ExitStack() as stack:

        def start(service: str, *options: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "tandem.services.cli", "serve", service, "recipe.json", *options]
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
    recipe: Recipe, redis_url: str, serve: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    buffer = Buffer(redis_url, recipe.run.run_id)
    reward = serve("reward")
    until(lambda: "reward" in buffer.services(), reward, folder=tmp_path)
    assert not buffer.exists()
    feed = serve("feed")
    until(lambda: buffer.counts()["prompts_waiting"] == (S + 1) * P, feed, reward, folder=tmp_path)
    written = load_resolved(recipe.folder / CONFIG_FILE)
    assert written.trainer.num_threads == "auto", "the trainer may have another machine"
    assert written == with_automatic_values(recipe, resume=True), "`tandem ledger`, `tandem eval` find it there"
    later = [serve("feed"), serve("reward", "--replica", "0")]
    assert [process.wait(timeout=DEADLINE_SECONDS) for process in (feed, reward)] == [0, 0], "two of one name: one ends"
    for process in later:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_SECONDS) == 0
    assert buffer.admission().cursor == (S + 1) * P and buffer.verify() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["finished", "stopped"])
def test_services_of_a_run_that_ends_exit_with_code_0(
    recipe: Recipe, redis_url: str, serve: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, how: Any
) -> None:
    buffer = Buffer(redis_url, recipe.run.run_id)
    processes = [serve("feed"), serve("reward")]
    until(lambda: buffer.figures().keys() == {"feed", "reward"}, *processes, folder=tmp_path)
    Orders(buffer.connection).end_run(how)
    assert [process.wait(timeout=DEADLINE_SECONDS) for process in processes] == [0, 0]
    assert f"the run is {how}; this service ends" in (tmp_path / "reward.log").read_text()


@pytest.mark.parametrize("shares_the_folder", [True, False])
def test_a_feed_resumes_a_run_that_was_stopped(recipe: Recipe, redis_url: str, shares_the_folder: bool) -> None:
    join_run(recipe, redis_url, "feed")
    orders = Orders(Buffer(redis_url, recipe.run.run_id).connection)
    orders.end_run("stopped")
    assert orders.ended() == "stopped"
    if not shares_the_folder:
        (recipe.folder / CONFIG_FILE).unlink()
    join_run(recipe, redis_url, "feed")
    assert orders.ended() == ""


def test_a_trainer_that_waited_for_the_run_has_the_threads_that_the_run_began_with(
    recipe: Recipe, redis_url: str
) -> None:
    assert recipe.trainer.num_threads == "auto"
    recipe.folder.mkdir()
    began = with_automatic_values(recipe, resume=False)
    create_ledger(Buffer(redis_url, recipe.run.run_id), began, resume=False)
    assert join_run(recipe, redis_url, "trainer").trainer == began.trainer


def test_a_service_that_starts_before_the_feed_waits_for_it_to_resume_the_run(
    recipe: Recipe, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_run(recipe, redis_url, "feed")
    buffer = Buffer(redis_url, recipe.run.run_id)
    Orders(buffer.connection).end_run("stopped")
    info, stop = ServiceInfo("reward", dict, lambda: "waits", buffer), threading.Event()
    early = Heartbeat(info, stop)
    early.send()
    assert not stop.is_set(), "the feed may be starting"
    join_run(recipe, redis_url, "feed")
    early.send()
    Orders(buffer.connection).end_run("finished")
    early.send()
    assert stop.is_set(), "the run went on, and ended again"

    monkeypatch.setattr("tandem.services.service_info.RESUME_SECONDS", 0.0)
    late = threading.Event()
    Heartbeat(info, late).send()
    assert late.is_set(), "nobody has resumed it"


def test_a_service_whose_name_a_later_start_took_ends(
    recipe: Recipe, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    stops = [threading.Event(), threading.Event()]
    heartbeats = []
    for stop in stops:
        buffer = Buffer(redis_url, recipe.run.run_id)
        buffer.register_service("feed", "127.0.0.1:1")
        heartbeats.append(Heartbeat(ServiceInfo("feed", dict, lambda: "waits", buffer), stop))
    for heartbeat in heartbeats:
        heartbeat.send()
    assert [stop.is_set() for stop in stops] == [True, False]
    assert "another process has started as feed; this one ends" in caplog.text


def test_a_sampler_that_is_started_alone_gets_the_core_that_a_supervisor_would_give_it(
    recipe: Recipe, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"num_replicas": 2})})
    (tmp_path / "two.json").write_text(dump_recipe(two))
    names = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    monkeypatch.setattr(os, "environ", {**environment, "TANDEM_REDIS_URL": redis_url})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 7})
    monkeypatch.setattr(placement, "gpu_ids", lambda: ())
    monkeypatch.setattr(preflight, "check_service", lambda *_: None)
    monkeypatch.setattr(logging_setup, "configure_logging", lambda *_, **__: None)
    seen: dict[str, str] = {}
    set_for: list[str] = []
    monkeypatch.setattr(placement, "set_allocator", set_for.append)
    monkeypatch.setattr(serve_command, "_serve", lambda *_: seen.update(os.environ))
    serve_command.serve_one("rollout", tmp_path / "two.json", [], 1, "none")
    assert set_for == ["rollout"], "before anything is allocated in threads"
    assert [seen[name] for name in names] == ["1", "7"]


def test_reports_that_wait_for_one_another_are_one_and_have_the_newest_figures(
    recipe: Recipe, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_run(recipe, redis_url, "feed")
    buffer = Buffer(redis_url, recipe.run.run_id)
    figures, sent, may_send = {"done": 1.0}, [], threading.Event()
    heartbeat = Heartbeat(ServiceInfo("reward", lambda: figures, lambda: "works", buffer), threading.Event())
    lock = CountingLock()
    monkeypatch.setattr(heartbeat, "_lock", lock)

    def send(name: str, figures: Mapping[str, float], activity: str) -> str:
        sent.append(figures["done"])
        assert may_send.wait(DEADLINE_SECONDS)
        return ""

    monkeypatch.setattr(buffer, "heartbeat", send)
    threads = [threading.Thread(target=heartbeat.send) for _ in range(4)]
    threads[0].start()
    eventually(lambda: sent == [1.0])
    figures["done"] = 2.0
    for thread in threads[1:]:
        thread.start()
    eventually(lambda: lock.num_asked == 4)
    may_send.set()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert sent == [1.0, 2.0]
    heartbeat.send()
    assert sent == [1.0, 2.0, 2.0]


def test_a_restarted_feed_finds_its_run(recipe: Recipe, redis_url: str) -> None:
    for _ in range(2):
        join_run(recipe, redis_url, "feed")
    buffer = Buffer(redis_url, recipe.run.run_id)
    assert buffer.admission().wanted == 3 * P and buffer.admission().free == (S + 1) * P
    (recipe.folder / CONFIG_FILE).unlink()  # the feed was killed before it wrote the file
    join_run(recipe, redis_url, "feed")
    assert (recipe.folder / CONFIG_FILE).is_file()
    join_run(recipe, redis_url, "trainer")


def test_a_trainer_that_does_not_share_the_feeds_folder_saves_the_recipe(recipe: Recipe, redis_url: str) -> None:
    join_run(recipe, redis_url, "feed")
    (recipe.folder / CONFIG_FILE).unlink()
    join_run(recipe, redis_url, "trainer")
    written = with_automatic_values(recipe, resume=True)
    assert load_resolved(recipe.folder / CONFIG_FILE) == written, "`tandem ledger`, `tandem report` find it there"
    assert (recipe.folder / CONFIG_FILE).stat().st_mode & 0o077 == 0


def test_a_feed_of_another_recipe_is_refused(recipe: Recipe, redis_url: str) -> None:
    join_run(recipe, redis_url, "feed")
    with pytest.raises(ConfigError, match=r"run\.seed was 0 .* is 1 now"):
        join_run(changed(recipe, seed=1), redis_url, "feed")
    longer = changed(recipe, total_batches=4)
    join_run(longer, redis_url, "feed")
    wanted = Buffer(redis_url, recipe.run.run_id).admission().wanted
    assert wanted == 4 * P, "what a resumed run may change is taken over"
    assert load_resolved(recipe.folder / CONFIG_FILE) == with_automatic_values(longer, resume=True)


@pytest.mark.parametrize("service", ["feed", "trainer"])
def test_a_service_of_another_recipe_and_an_empty_folder_does_not_join_the_run(
    recipe: Recipe, redis_url: str, tmp_path: Path, service: str
) -> None:
    join_run(recipe, redis_url, "feed")
    elsewhere = changed(recipe, folder=str(tmp_path / "elsewhere"), groups_per_batch=P + 1)
    buffer = Buffer(redis_url, recipe.run.run_id)
    before = buffer.connection.hash("meta")
    refused = rf"^run\.groups_per_batch was {P} in run {recipe.run.run_id} at .* and is {P + 1} here: .*run\.run_id$"
    with pytest.raises(ConfigError, match=refused):
        join_run(elsewhere, redis_url, service)
    assert buffer.connection.hash("meta") == before and not elsewhere.folder.exists()
    join_run(changed(elsewhere, groups_per_batch=P, total_batches=4), redis_url, service)
    assert (elsewhere.folder / CONFIG_FILE).exists(), "it joins with what a resumed run may change"


@pytest.mark.parametrize("is_list", [False, True])
def test_a_feed_joins_from_a_machine_with_other_paths_and_processors(
    recipe: Recipe, redis_url: str, tmp_path: Path, is_list: bool
) -> None:
    if is_list:
        data = DataConfig(train=(TrainFile(path=recipe.data.train_file),), max_prompt_tokens=32)
        recipe = recipe.model_copy(update={"data": data})
    began = with_automatic_values(recipe, resume=False)
    recipe.folder.mkdir()
    create_ledger(Buffer(redis_url, recipe.run.run_id), began, resume=False)
    copied = tmp_path / "elsewhere.jsonl"
    copied.write_bytes(Path(recipe.data.train_files[0].path).read_bytes())
    moved = changed(recipe, folder=str(tmp_path / "elsewhere"))
    there = {"train": (TrainFile(path=str(copied)),)} if is_list else {"train_file": str(copied)}
    moved = moved.model_copy(update={"data": moved.data.model_copy(update=there)})
    join_run(moved, redis_url, "feed")
    assert load_resolved(moved.folder / CONFIG_FILE).data.train_files[0].path == str(copied)


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


@pytest.mark.slow
def test_a_controller_restarts_without_losing_orders_and_is_steered_from_anywhere(
    recipe: Recipe, redis_url: str, serve: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: Any
) -> None:
    """With the launcher `none`: samplers exist in the registry only."""
    monkeypatch.setenv("TANDEM_REDIS_URL", redis_url)

    def tandem(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == code, done.output
        return done.output

    folder = str(recipe.folder)
    first = serve("controller")  # it waits for the feed
    join_run(recipe, redis_url, "feed")
    buffer = Buffer(redis_url, recipe.run.run_id)
    for name in ("rollout-0", "rollout-1"):
        buffer.register_sampler(name, "127.0.0.1:1", 1)
    until(lambda: "controller" in buffer.services(), first, folder=tmp_path)
    assert "rollout: 1 ordered" in tandem("scale", folder, "rollout=1")
    assert "paused: rollout-0" in tandem("pause", folder, "rollout-0")
    first.kill()
    first.wait()

    second = serve("controller")
    address = buffer.services()["controller"]
    until(lambda: buffer.services()["controller"] != address, second, folder=tmp_path)
    said = tandem("status", folder)
    assert "ordered: rollout=1" in said and "running, launcher none" in said
    third = serve("controller")
    assert third.wait(timeout=DEADLINE_SECONDS) == 2
    assert "has a controller already, at 127.0.0.1:" in (tmp_path / "controller.log").read_text()

    place = ("--address", buffer.services()["controller"])
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    assert "set TANDEM_TOKEN" in tandem("status", *place, code=2)
    monkeypatch.setenv("TANDEM_TOKEN", run_token(buffer.secret(), Role.read))
    assert "paused" in tandem("status", *place)
    assert "needs a token with the role operate" in tandem("resume", *place, "rollout-0", code=2)
    monkeypatch.setenv("TANDEM_TOKEN", run_token(buffer.secret(), Role.operate))
    assert "resumed: rollout-0" in tandem("resume", *place, "rollout-0")
    assert "name the sampler that is to leave" in tandem("drain", *place, code=2)
    assert "writes a checkpoint after the batch at hand" in tandem("checkpoint", *place)
    assert "the run stops" in tandem("stop", *place)
    assert second.wait(timeout=DEADLINE_SECONDS) == 0, "the controller ends with its run"


@pytest.mark.slow
def test_replicas_that_are_started_alike_have_names_and_addresses_of_their_own(
    recipe: Recipe, redis_url: str, serve: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    buffer = Buffer(redis_url, recipe.run.run_id)
    processes = [serve("feed"), serve("reward"), serve("reward")]
    until(lambda: {"reward", "reward-1"} <= buffer.services().keys(), *processes, folder=tmp_path)
    assert len(set(buffer.services().values())) == 3
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_SECONDS) == 0


@pytest.mark.slow
def test_a_sampler_that_is_to_leave_ends_with_exit_code_0(
    recipe: Recipe, redis_url: str, serve: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    model = {"path": str(build_tiny_model(tmp_path / "tiny"))}
    rollout = {"engine": "transformers", "kv_cache_bytes": 1 << 22, "max_response_tokens": 8}
    own = recipe_of(recipe.model_dump(mode="json"), model=model, rollout=rollout)
    (tmp_path / "recipe.json").write_text(dump_recipe(own))
    join_run(own, redis_url, "feed")
    buffer = Buffer(redis_url, own.run.run_id)
    sampler = serve("rollout")
    until(lambda: bool(buffer.figures().get("rollout-0")), sampler, folder=tmp_path)
    with Lease(buffer, "test") as lease:
        Controller(own, buffer, StartedByHand(buffer), lease).drain("rollout-0")
    assert sampler.wait(timeout=DEADLINE_SECONDS) == 0
    assert "leaves the run for good" in (tmp_path / "rollout.log").read_text()
