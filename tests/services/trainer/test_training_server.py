"""The trainer's service while it waits: progress, a checkpoint on demand, Info, and the watchdog."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.protos import training_pb2, training_pb2_grpc
from tandem.services.buffer.buffer import Sampler
from tandem.services.rpc.client import connect, translated
from tandem.services.trainer.watchdog import Watchdog, diagnose
from tests.support.service_wire import check_what_it_says
from tests.support.trainer_ring import P, different_rewards, make_recipe, make_run, put_scored, train
from tests.support.waiting import eventually


def test_a_waiting_trainer_answers_info_saves_and_stops(tmp_path: Path, redis_url: str) -> None:
    recipe = make_recipe(tmp_path)
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(2 * P + 1))
    stop = threading.Event()
    finished: list[bool] = []
    thread = threading.Thread(target=lambda: finished.append(train(recipe, redis_url, stop)))
    before = time.time()
    thread.start()
    try:
        eventually(lambda: "trainer" in buffer.services(), 60.0)
        with connect(buffer.services()["trainer"]) as channel, translated():
            stub = training_pb2_grpc.TrainingServiceStub(channel)

            def progress() -> training_pb2.GetProgressReply:
                return stub.GetProgress(training_pb2.GetProgressRequest(), timeout=5.0)

            eventually(lambda: progress().metrics.get("step") == 2.0)
            assert (progress().policy_version, progress().optimizer_step, progress().total_batches) == (2, 2, 4)
            saved = stub.SaveCheckpoint(training_pb2.SaveCheckpointRequest(), timeout=60.0)
            assert saved.policy_version == 2
            assert (Path(saved.path) / "state.json").exists()
            assert buffer.counts()["committed"] == 2 * P
        info = check_what_it_says(
            buffer.services()["trainer"],
            buffer,
            name="trainer",
            service_names=("tandem.v1.TrainingService",),
            started_after=before,
            policy_version=2,
        )
        assert info.activity.startswith("waits for scored groups") and info.figures["optimizer_step"] == 2
        eventually(lambda: buffer.figures().get("trainer", {}).get("waiting_seconds", 0.0) > 0.5)
    finally:
        stop.set()
        thread.join(30.0)
    assert finished == [False], "stopped is not finished"
    assert not (recipe.folder / "summary.json").exists()


COUNTS = dict.fromkeys(
    [f"{stage}_{state}" for stage in ("prompts", "generated") for state in ("waiting", "leased")] + ["scored_claimed"],
    0,
)
SERVICES = {"reward": "127.0.0.1:1", "feed": "127.0.0.1:2"}


def sampler(state: Any = "LIVE", *, alive: bool = True, version: int = 7) -> Sampler:
    return Sampler("rollout-0", "127.0.0.1:3", state, version, 1, 1, alive, 1)


@pytest.mark.parametrize(
    ("counts", "samplers", "services", "named"),
    [
        (
            {"generated_waiting": 64},
            [sampler()],
            SERVICES,
            "64 groups wait in generated; reward has claimed none for 31 s",
        ),
        ({"generated_waiting": 64}, [sampler()], {}, "no reward service has registered"),
        ({"generated_leased": 3}, [sampler()], SERVICES, "reward has held 3 groups for 31 s without completing one"),
        ({"prompts_waiting": 8}, [sampler(alive=False)], SERVICES, "no sampler is alive (1 were registered)"),
        ({"prompts_waiting": 8}, [sampler("STALE", version=6)], SERVICES, "rollout-0 is STALE at version 6"),
        ({"prompts_waiting": 8}, [sampler()], SERVICES, "the samplers have claimed none for 40 s"),
        ({"prompts_leased": 8}, [sampler()], SERVICES, "samplers have held 8 groups for 40 s"),
        ({}, [sampler()], SERVICES, "no prompt is admitted; see the feed's log"),
        ({"scored_claimed": 5}, [sampler()], {}, "5 of 32 groups of the next batch are there; no prompt is admitted"),
    ],
)
def test_the_watchdog_names_the_stage_that_starves_the_trainer(
    counts: dict[str, int], samplers: list[Sampler], services: dict[str, str], named: str
) -> None:
    line = diagnose(
        {**COUNTS, "published_version": 7, **counts}, samplers, services, {"generated": 31.0, "prompts": 40.0}, 45.0, 32
    )
    assert line.startswith("trainer starved for 45 s: ")
    assert named in line


def test_the_watchdog_runs_without_work_in_flight(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.services.trainer.watchdog.STARVED_SECONDS", 0.2)
    monkeypatch.setattr("tandem.services.trainer.watchdog._POLL_SECONDS", 0.05)
    buffer = make_run(redis_url, make_recipe(tmp_path))
    since: float | None = None
    watchdog = Watchdog(buffer, lambda: since, 32)
    try:
        time.sleep(0.5)
        assert watchdog.line == "", "a trainer at work starves of nothing"
        since = time.monotonic()
        eventually(lambda: "the feed has not registered" in watchdog.line)
        time.sleep(0.5)
    finally:
        watchdog.stop()
    assert 1 <= caplog.text.count("trainer starved") <= 4, "said again only as the wait doubles"
