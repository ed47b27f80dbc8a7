"""The trainer: its ranks, what it answers while it waits, batches without a finite gradient, and the watchdog."""

from __future__ import annotations

import ast
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.protos.errors import FencedError, SelectionError, TrainingError
from tandem.protos.types import TrajectoryGroup, WeightManifest
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.buffer.starvation import Observation, diagnose
from tandem.services.run.watchdog import Watchdog
from tandem.services.trainer import batch_source, rank_zero
from tandem.services.trainer.rank_zero import RankZero
from tandem.services.trainer.ranks import run_local_ranks
from tandem.trainer.backend.deepspeed.engine import DeepSpeedEngine
from tandem.trainer.batch.prepared import PreparedBatch
from tandem.trainer.batch.record import recorded_versions
from tandem.trainer.config import WeightsConfig
from tandem.trainer.learner import Learner
from tandem.trainer.weight_sender import WeightSender
from tandem.trainer.weight_snapshot import WeightSnapshot
from tests.support.service_wire import ask_info, check_what_it_says, token_of
from tests.support.trainer_ring import P, different_rewards, lines_of, make_recipe, make_run, put_scored, train
from tests.support.training_groups import make_group
from tests.support.waiting import eventually, looping


def test_a_waiting_trainer_answers_info_and_stops(tmp_path: Path, redis_url: str) -> None:
    recipe = make_recipe(tmp_path)
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(2 * P + 1))
    finished: list[bool] = []
    before = time.time()
    with looping(lambda stop: finished.append(train(recipe, redis_url, stop))):
        eventually(lambda: "trainer" in buffer.services(), 60.0)
        address = buffer.services()["trainer"]

        def is_waiting() -> bool:
            info = ask_info(address, token_of(buffer))
            return info.policy_version == 2 and info.activity.startswith("waits for scored groups")

        eventually(is_waiting)
        said = {"name": "trainer", "service_names": (), "started_after": before, "policy_version": 2}
        assert check_what_it_says(address, buffer, **said).figures["optimizer_step"] == 2
        eventually(lambda: buffer.figures().get("trainer", {}).get("waiting_seconds", 0.0) > 0.5)
    assert finished == [False], "stopped is not finished"
    assert not (recipe.folder / "summary.json").exists()
    assert Orders(buffer.connection).ended() == ""


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        (Buffer, "record", ["record", "step"] * 2),
        (WeightSender, "snapshot", ["snapshot", "step", "snapshot", "step", "snapshot"]),  # the first is of version 0
    ],
)
def test_no_weight_changes_before_the_ledger_has_the_batch_and_the_version_before_it_is_copied(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, expected: list[str]
) -> None:
    recipe = make_recipe(tmp_path, run={"total_batches": 2})
    put_scored(make_run(redis_url, recipe), different_rewards(2 * P))
    events: list[str] = []
    original, step = getattr(owner, name), DeepSpeedEngine.step

    def late(*arguments: Any) -> Any:
        time.sleep(0.3)  # longer than forward and backward of the tiny model
        result = original(*arguments)
        events.append(name)
        return result

    def noted_step(engine: DeepSpeedEngine, learning_rate: float) -> float | None:
        events.append("step")
        return step(engine, learning_rate)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, late)
        patched.setattr(DeepSpeedEngine, "step", noted_step)
        assert train(recipe, redis_url)
    assert events == expected


@pytest.mark.parametrize(("stage", "thread"), [("auto", "publish"), (3, "MainThread")])
def test_weights_are_copied_beside_the_next_batch_unless_ranks_share_them(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, stage: str | int, thread: str
) -> None:
    recipe = make_recipe(tmp_path, run={"total_batches": 2}, trainer={"zero_stage": stage})
    put_scored(make_run(redis_url, recipe), different_rewards(2 * P))
    original, threads = WeightSender.begin_snapshot, []

    def noted(self: WeightSender, manifest: WeightManifest) -> Callable[[], WeightSnapshot]:
        threads.append(threading.current_thread().name)
        return original(self, manifest)

    monkeypatch.setattr(WeightSender, "begin_snapshot", noted)
    assert train(recipe, redis_url)
    assert threads == [thread] * 3


def test_a_trainer_ends_with_its_run(tmp_path: Path, redis_url: str) -> None:
    """By an order, or when it has trained all batches; then the other services of the run end, too."""
    recipe = make_recipe(tmp_path)
    buffer = make_run(redis_url, recipe)
    orders = Orders(buffer.connection)
    put_scored(buffer, different_rewards(P))
    finished: list[bool] = []
    with looping(lambda stop: finished.append(train(recipe, redis_url, stop))):
        eventually(lambda: buffer.figures().get("trainer", {}).get("waiting_seconds", 0.0) > 0.0, 60.0)
        orders.end_run("stopped")
        eventually(lambda: finished)
    assert finished == [True] and not (recipe.folder / "summary.json").exists()

    buffer.connection.redis.hdel(buffer.connection.key("meta"), "ended")
    put_scored(buffer, different_rewards(3 * P, start=P))
    assert train(recipe, redis_url)
    assert orders.ended() == "finished" and (recipe.folder / "summary.json").exists()


def test_a_version_is_exported_and_published_while_the_next_one_trains_and_before_the_next_snapshot(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, trainer={"export_every": 2})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(4 * P))
    events: list[tuple[str, int]] = []
    trains, publish, snapshot, export = threading.Event(), Buffer.publish, WeightSender.snapshot, Learner.export

    def observed_train(self: Learner, prepared: PreparedBatch, *args: Any, **kwargs: Any) -> Any:
        events.append(("trains", prepared.batch.policy_version))
        if prepared.batch.policy_version == 3:
            trains.set()
        return train_batch(self, prepared, *args, **kwargs)

    def observed_export(self: Learner, folder: Path, *weights: Any) -> None:
        export(self, folder, *weights)
        events.append(("exported", int(folder.name) if folder.name.isdigit() else -1))

    def observed_publish(self: Buffer, incarnation: int, version: int, *more: Any) -> None:
        assert version != 2 or trains.wait(60.0), "version 3 trains before version 2 is published"
        publish(self, incarnation, version, *more)
        events.append(("published", version))

    def observed_snapshot(self: WeightSender, manifest: WeightManifest) -> Any:
        events.append(("snapshot", manifest.policy_version))
        return snapshot(self, manifest)

    train_batch = Learner.train
    monkeypatch.setattr(Learner, "train", observed_train)
    monkeypatch.setattr(Buffer, "publish", observed_publish)
    monkeypatch.setattr(WeightSender, "snapshot", observed_snapshot)
    monkeypatch.setattr(Learner, "export", observed_export)
    assert train(recipe, redis_url)
    for version in range(5):
        assert events.index(("snapshot", version)) < events.index(("published", version))
        if version:
            assert events.index(("published", version - 1)) < events.index(("snapshot", version))
    assert events.index(("exported", 2)) < events.index(("trains", 3)) < events.index(("published", 2))
    assert [line["step"] for line in lines_of(recipe)] == [1, 2, 3, 4]


def test_a_first_export_and_a_first_checkpoint_of_minutes_are_not_taken_for_a_hang_and_hide_none(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, run={"total_batches": 3}, trainer={"export_every": 2})
    put_scored(make_run(redis_url, recipe), different_rewards(3 * P))
    now, trainers, seen = 0.0, [], []
    begin = RankZero.__init__

    def begun(self: RankZero, *arguments: Any) -> None:
        trainers.append(self)
        begin(self, *arguments)

    def slow(name: str) -> None:
        original = getattr(Learner, name)

        def call(self: Learner, *arguments: Any, **options: Any) -> Any:
            nonlocal now
            now += 100.0 if name != "train" or arguments[0].batch.policy_version == 3 else 0.0
            found = diagnose(Observation(figures={"trainer": trainers[0]._figures()}))
            seen.append((name, trainers[0]._doing_now(), found.cause))
            return original(self, *arguments, **options)

        monkeypatch.setattr(Learner, name, call)

    for name in ("train", "export", "save"):
        slow(name)
    monkeypatch.setattr(RankZero, "__init__", begun)
    monkeypatch.setattr(rank_zero, "time", SimpleNamespace(monotonic=lambda: now, time=time.time, time_ns=time.time_ns))
    assert train(recipe, redis_url)
    assert seen == [
        ("train", "trains", "none"),
        ("train", "trains", "none"),
        ("export", "writes an export", "none"),
        ("train", "trains", "trainer_hangs"),
        ("save", "writes a checkpoint", "none"),
        ("export", "writes an export", "none"),
    ]


def test_what_is_sent_from_the_memory_of_a_gpu_is_published_before_the_next_batch_trains(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightsConfig, "sends_snapshots", False)
    monkeypatch.setattr(WeightSender, "snapshot", None)
    recipe = make_recipe(tmp_path)
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(4 * P))
    original, found = Learner.train, []
    orders, checkpoints = Orders(buffer.connection), []
    assert orders.hold("operator", 600.0)

    def observed_train(self: Learner, prepared: PreparedBatch, *args: Any, **kwargs: Any) -> Any:
        found.append((prepared.batch.policy_version, buffer.published_version()))
        checkpoints.append(sorted(one.name for one in (recipe.folder / "checkpoints").glob("*")))
        if prepared.batch.policy_version == 2:
            orders.order_checkpoint("operator")
        return original(self, prepared, *args, **kwargs)

    monkeypatch.setattr(Learner, "train", observed_train)
    assert train(recipe, redis_url)
    assert found == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert len({line["weights_digest"] for line in lines_of(recipe)}) == 4
    assert checkpoints == [[], [], ["000002-2"], ["000002-2"]], (
        "an ordered checkpoint comes after the batch at hand, once"
    )
    assert not orders.checkpoint_wanted()


def test_no_batch_is_recorded_beyond_the_last_one(tmp_path: Path, redis_url: str) -> None:
    buffer = make_run(redis_url, make_recipe(tmp_path))
    put_scored(buffer, different_rewards(4 * P))
    recipe = make_recipe(tmp_path, run={"total_batches": 2})
    assert train(recipe, redis_url)
    assert recorded_versions(recipe.folder) == [1, 2]
    counts = buffer.counts()
    assert (counts["committed"], counts["dropped:run_ended"]) == (2 * P, 2 * P)


def test_groups_that_carry_no_signal_end_the_trainer_after_the_batch_at_hand(tmp_path: Path, redis_url: str) -> None:
    selective = {"selection": {"drop_zero_variance": True}, "max_consecutive_rejections": 4}
    recipe = make_recipe(tmp_path, trainer=selective)
    buffer = make_run(redis_url, recipe)
    dull = [make_group(index, rewards=(1.0,) * 4) for index in range(P, P + 4)]
    put_scored(buffer, [*different_rewards(P), *dull])
    with pytest.raises(SelectionError, match="4 groups in a row"):
        train(recipe, redis_url)
    assert buffer.published_version() == 1 == len(lines_of(recipe))


@pytest.mark.parametrize("num_batches", [1, 4], ids=["while it waits for groups", "while it trains"])
def test_a_trainer_that_is_replaced_while_it_publishes_ends(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, num_batches: int
) -> None:
    recipe = make_recipe(tmp_path)
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(num_batches * P))
    original = Buffer.publish

    def publish(self: Buffer, incarnation: int, version: int, *more: Any) -> None:
        if version == 1:
            buffer.begin_incarnation()
        original(self, incarnation, version, *more)

    monkeypatch.setattr(Buffer, "publish", publish)
    with pytest.raises(FencedError):
        train(recipe, redis_url)
    assert buffer.published_version() == 0 and not (recipe.folder / "metrics.jsonl").exists()


GOOD, BAD = (0.0, 1.0, 1.0, 0.0), (1e200, 0.0, 1.0, 0.0)  # beyond float32


def groups(*bad: bool) -> list[TrajectoryGroup]:
    """Groups of one batch per entry; in a bad batch the second group's reward makes its step's gradient overflow."""
    rewards = [BAD if of_bad and place == P - 1 else GOOD for of_bad in bad for place in range(P)]
    return [make_group(index, rewards=those) for index, those in enumerate(rewards)]


def skipping_run(folder: Path, url: str, bad: tuple[bool, ...], **trainer: Any) -> list[dict[str, Any]]:
    """Trains the batches, with two bad ones in a row as the limit; returns the metrics of those that did not end the
    run.
    """
    recipe = make_recipe(
        folder,
        run={"total_batches": len(bad)},
        trainer={"max_skipped_batches": 2, "optimizer_steps_per_batch": P, **trainer},
    )
    put_scored(make_run(url, recipe), groups(*bad))
    try:
        assert train(recipe, url)
    finally:
        lines = lines_of(recipe)
    return lines


def test_batches_that_lose_some_of_their_steps_end_the_run(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(TrainingError, match=r"2 batches in a row .* the last for version 4"):
        skipping_run(tmp_path, redis_url, (True, False, True, True, False), advantage="dr_grpo")


def test_a_good_batch_resets_the_count(tmp_path: Path, redis_url: str) -> None:
    lines = skipping_run(tmp_path, redis_url, (True, False, True), advantage="dr_grpo")
    assert [(line["skipped_steps"], line["optimizer_step"]) for line in lines] == [(1, 1), (0, 3), (1, 4)]


def test_a_critic_that_always_skips_ends_the_run_during_its_warm_up(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(TrainingError, match=r"2 batches in a row .* the last for version 2"):
        skipping_run(tmp_path, redis_url, (True, True, True), advantage="gae", critic={"warmup_batches": 3})


def test_the_watchdog_says_what_starves_the_trainer_and_says_it_again_as_the_wait_doubles(
    tmp_path: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = make_recipe(tmp_path)
    buffer = make_run(redis_url, recipe)
    buffer.register_service("trainer", "")
    watchdog = Watchdog(buffer, recipe)
    for seconds in (0.0, 29.0, 31.0, 33.0, 59.0, 63.0, 0.0, 31.0):
        buffer.heartbeat("trainer", {"starved_seconds": seconds})
        watchdog._check()
    assert [line.removeprefix("no feed has registered; ") for line in caplog.messages] == ["no prompt is admitted"] * 3
    buffer.close()


# ---- the ranks of one machine ----

RANK = """
import os, psutil, sys, torch
from torch import distributed
from tandem.trainer.backend.process_group import join_process_group

join_process_group(60.0)
rank = torch.tensor([float(os.environ["RANK"]) + 1])
distributed.all_reduce(rank)
listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(repr((rank.item(), listening)))
distributed.destroy_process_group()
"""


def test_ranks_meet_without_a_port_that_another_host_could_reach(tmp_path: Path) -> None:
    assert run_local_ranks([sys.executable, "-c", RANK, str(tmp_path)], 2) == 0
    for rank in range(2):
        total, listening = ast.literal_eval((tmp_path / str(rank)).read_text())
        assert total == 3.0 and set(listening) <= {"127.0.0.1"}
    assert not list(tmp_path.glob("*store*"))


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)])
def test_the_exit_code_is_that_of_the_first_rank_that_failed(tmp_path: Path, ends: str, code: int) -> None:
    rank = f"import os, sys, time; os.environ['RANK'] == '1' and {ends}; time.sleep(100)"
    assert run_local_ranks([sys.executable, "-c", rank], 3) == code


def test_stopping_lets_the_ranks_end_by_themselves(tmp_path: Path) -> None:
    rank = (
        "import os, signal, sys, time, pathlib\n"
        "def stopped(*_):\n"
        "    pathlib.Path(sys.argv[1], 'stopped' + os.environ['RANK']).touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stopped)\n"
        "pathlib.Path(sys.argv[1], 'ready' + os.environ['RANK']).touch()\n"
        "time.sleep(100)\n"
    )
    stop = threading.Event()
    codes: list[int] = []
    command = [sys.executable, "-c", rank, str(tmp_path)]
    ranks = threading.Thread(target=lambda: codes.append(run_local_ranks(command, 2, stop=stop)))
    ranks.start()
    eventually(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    stop.set()
    ranks.join(60)
    assert codes == [0]
    assert len(list(tmp_path.glob("stopped*"))) == 2


def test_a_batch_that_was_recorded_with_versions_that_do_not_exist_ends_no_run(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = make_recipe(tmp_path, run={"total_batches": 1})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, [*different_rewards(1, versions=(9,)), *different_rewards(1, start=1)])
    monkeypatch.setattr(batch_source, "rejection", lambda *_: None)  # as before such groups were rejected
    assert train(recipe, redis_url)
    (line,) = lines_of(recipe)
    assert (line["unknown_version_rows"], line["staleness_counts"]) == (4, [8])
    assert "batch 1 was recorded with 4 rows of versions that no trainer published" in caplog.text
