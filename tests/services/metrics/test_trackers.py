"""Weights & Biases (offline) and MLflow (file store) get the figures of runs and resumed runs, and never end one."""

from __future__ import annotations

import json
import logging
import os
import struct
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from tandem.protos.errors import ConfigError
from tandem.protos.secret_values import MASK
from tandem.services.config import Recipe
from tandem.services.metrics import trackers
from tandem.services.metrics.trackers import Tracker, TrackerThread, open_trackers
from tandem.services.run.metrics import MetricsLog
from tests.support.made_up_run import evaluation_line
from tests.support.run_inputs import recipe_of, small_values

PASSWORD = "open-sesame"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_ALLOW_FILE_STORE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def recipe_in(folder: Path, *names: str) -> Recipe:
    run = {"folder": str(folder), "trackers": names, "redis_url": f"redis://:{PASSWORD}@127.0.0.1/0"}
    return recipe_of(small_values(folder), run=run)


def write_lines(recipe: Recipe, steps: range, *, after: int = 0) -> None:
    log = MetricsLog(recipe.folder, open_trackers(recipe))
    log.rewind(after, after)
    for step in steps:
        log.add({"step": step, "time": 1.0, "reward_mean": step / 10, "weights_digest": "text", "replayed": True})
    log.add_evaluation(evaluation_line(steps[-1], 0.5, **{"pass@2": 0.75, "pass^2": 0.25}))
    log.close()


def wandb_records(file: Path) -> list[wandb_internal_pb2.Record]:
    """The records of a file in the format of LevelDB's log: blocks of 32 KiB, in which long records are cut."""
    data, place, joined, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        joined += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            records.append(wandb_internal_pb2.Record.FromString(joined))
            joined = b""
    return records


def wandb_history(records: list[wandb_internal_pb2.Record]) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.mark.timeout(180)
def test_wandb_offline_has_the_figures_and_a_resumed_run_goes_on_with_the_same_id(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, "wandb")
    write_lines(recipe, range(1, 4))
    write_lines(recipe, range(3, 6), after=2)  # from a checkpoint of version 2: version 3 is trained again
    assert list(Path(tempfile.gettempdir()).glob(f"wandb-{os.getpid()}-*")) == [], "its process has ended"
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name, "both have the same id"
    rows = [row for file in (first, second) for row in wandb_history(wandb_records(file))]
    rewards = [(row["policy_version"], row["reward_mean"]) for row in rows if "reward_mean" in row]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 0.3), (4, 0.4), (5, 0.5)]
    assert [row["policy_version"] for row in rows if row.get("eval/test/mean@1") == 0.5] == [3, 5]
    assert all("weights_digest" not in row and "replayed" not in row for row in rows)
    text = b"".join(record.SerializeToString() for record in wandb_records(first))
    assert MASK.encode() in text and PASSWORD.encode() not in text


def test_mlflow_has_the_figures_in_files_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    recipe = recipe_in(tmp_path, "mlflow")
    write_lines(recipe, range(1, 4))
    write_lines(recipe, range(3, 6), after=2)
    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("tandem")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (recipe.run.run_id, "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward_mean")
    assert sorted((one.step, one.value) for one in history) == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (3, 0.3),
        (4, 0.4),
        (5, 0.5),
    ]
    names = ("mean_at_1", "pass_at_2", "pass_hat_2")
    assert [run.data.metrics[f"eval/test/{name}"] for name in names] == [0.5, 0.75, 0.25]
    saved = "".join(file.read_text() for file in tmp_path.rglob("config.json"))
    assert MASK in saved and PASSWORD not in saved


class Failing(Tracker):
    name = "failing"
    errors = (ConnectionError,)

    def __init__(self, error: Exception, *, at_start: bool = False) -> None:
        self.error, self.at_start, self.logged = error, at_start, 0

    def start(self, run_id: str, known_as: str, config: Mapping[str, object]) -> str:
        if self.at_start:
            raise self.error
        return "id"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.logged += 1
        raise self.error

    def close(self) -> None:
        raise self.error


@pytest.mark.parametrize("at_start", [False, True])
def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_start: bool
) -> None:
    tracker = Failing(ConnectionError("no route"), at_start=at_start)
    log = MetricsLog(tmp_path, [TrackerThread(tracker, recipe_in(tmp_path))])
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            log.add({"step": step})
        log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "tracker failing: figures are missing there, the run goes on: no route"
    ]
    assert tracker.logged == (0 if at_start else 3)
    assert len(log.lines.read()) == 3


def test_a_bug_in_a_tracker_is_not_hidden(tmp_path: Path) -> None:
    thread = TrackerThread(Failing(KeyError("bug")), recipe_in(tmp_path))
    thread.add(1, {})
    with pytest.raises(KeyError):
        thread.close()
    with pytest.raises(KeyError):
        thread.add(2, {})


def test_a_tracker_that_hangs_does_not_hold_the_end_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.2)
    goes_on = threading.Event()

    class Hanging(Failing):
        def start(self, run_id: str, known_as: str, config: Mapping[str, object]) -> str:
            goes_on.wait(60)
            return "id"

    thread = TrackerThread(Hanging(ConnectionError("x")), recipe_in(tmp_path))
    with caplog.at_level(logging.WARNING):
        thread.close()
    goes_on.set()
    assert "was not ready within" in caplog.text


def test_another_tracker_is_refused_and_the_old_key_says_what_replaced_it(tmp_path: Path) -> None:
    values = small_values(tmp_path)
    with pytest.raises(ConfigError, match="wandb"):
        recipe_of(values, run={"trackers": ["neptune"]})
    with pytest.raises(ConfigError, match=r"always written; run\.trackers"):
        recipe_of(values, run={"metrics_to_tensorboard": True})
