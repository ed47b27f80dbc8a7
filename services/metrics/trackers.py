"""Experiment trackers beside TensorBoard: Weights & Biases and MLflow (`run.trackers`).

Each has a thread of its own, so that a server that hangs does not hold up training. A tracker that fails does not end
the run: it warns once, and goes on with what it is given next.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from tandem.protos.extras import missing_extra_named
from tandem.services.config import Recipe, without_secrets
from tandem.services.process import in_thread
from tandem.trainer.checkpoints.durable import write_file

log = logging.getLogger(__name__)

PROJECT = "tandem"
"""The project of Weights & Biases, and the experiment of MLflow, unless their variables name others."""
_MAX_WAITING = 1000
_CLOSE_SECONDS = 30.0


class Tracker(ABC):
    """The run in one tracker. The constructor imports its package; all else happens in one thread."""

    name: str
    errors: tuple[type[Exception], ...]
    """What its methods raise if the tracker's server or files cannot be used."""

    @abstractmethod
    def start(self, run_id: str, known_as: str, config: Mapping[str, object]) -> str:
        """Begins the run, or goes on with the one that is `known_as` this id. Returns its id."""

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Sends the figures of one policy version."""

    @abstractmethod
    def close(self) -> None:
        """Sends what is left."""


class Wandb(Tracker):
    """Weights & Biases. Its own variables configure it: WANDB_MODE, WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, …"""

    name = "wandb"

    def __init__(self, folder: Path) -> None:
        with missing_extra_named():
            import wandb
        self._wandb = wandb
        self._folder = folder
        self.errors = (wandb.Error, OSError)

    def start(self, run_id: str, known_as: str, config: Mapping[str, object]) -> str:
        settings = self._wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_id,
            id=known_as or None,
            resume="allow" if known_as else None,
            dir=str(self._folder),
            config=dict(config),
            settings=settings,
        )
        self._run.define_metric("policy_version")
        self._run.define_metric("*", step_metric="policy_version")
        return str(self._run.id)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # Not as wandb's own step, which cannot go back when a resumed run trains recorded batches again.
        self._run.log({**figures, "policy_version": step})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # ends wandb-core, which removes the folder of its socket


class Mlflow(Tracker):
    """MLflow at MLFLOW_TRACKING_URI, else files in the run folder."""

    name = "mlflow"

    def __init__(self, folder: Path) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses its file store without it
        with missing_extra_named():
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        self._metric = Metric
        self._open = MlflowClient
        self._uri = uri or (folder / "mlflow").resolve().as_uri()
        self.errors = (MlflowException, OSError)

    def start(self, run_id: str, known_as: str, config: Mapping[str, object]) -> str:
        self._client = client = self._open(tracking_uri=self._uri)
        if known_as:
            client.update_run(known_as, status="RUNNING")
            self._id = known_as
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if found is None else found.experiment_id
            self._id = str(client.create_run(experiment, run_name=run_id).info.run_id)
        client.log_dict(self._id, dict(config), "config.json")
        return self._id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(_mlflow_name(name), value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and these signs. `pass@2` and `pass^2` get different names."""
    name = name.replace("@", "_at_").replace("^", "_hat_")
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)


class TrackerThread:
    """Hands figures to a tracker in a thread. A bug in it ends the trainer; its server's errors do not."""

    def __init__(self, tracker: Tracker, recipe: Recipe) -> None:
        self._tracker = tracker
        self._config = without_secrets(recipe).model_dump(mode="json")
        self._run_id = recipe.run.run_id
        self._id_file = recipe.folder / f"{tracker.name}.id"
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_MAX_WAITING)
        self._warned = False
        self._ended: Future[None] = in_thread(f"tracker-{tracker.name}", self._run)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Hands figures over. Raises the error of a bug in the tracker's thread."""
        if self._ended.done():
            self._ended.result()
            return
        try:
            self._waiting.put_nowait((step, figures))
        except queue.Full:
            self._warn("it does not keep up")

    def close(self) -> None:
        """Waits until all is sent, but not long."""
        try:
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
            self._ended.result(_CLOSE_SECONDS)
        except (queue.Full, TimeoutError):
            self._warn(f"it was not ready within {_CLOSE_SECONDS:.0f} s")

    def _run(self) -> None:
        try:
            known_as = self._id_file.read_text(encoding="utf-8") if self._id_file.is_file() else ""
            write_file(self._id_file, self._tracker.start(self._run_id, known_as, self._config).encode())
        except self._tracker.errors as error:
            self._warn(str(error))
            return
        while (given := self._waiting.get()) is not None:
            try:
                self._tracker.log(*given)
            except self._tracker.errors as error:
                self._warn(str(error))
        try:
            self._tracker.close()
        except self._tracker.errors as error:
            self._warn(str(error))

    def _warn(self, why: str) -> None:
        if not self._warned:
            log.warning("tracker %s: figures are missing there, the run goes on: %s", self._tracker.name, why)
        self._warned = True


TRACKERS: Mapping[str, type[Wandb] | type[Mlflow]] = {one.name: one for one in (Wandb, Mlflow)}


def open_trackers(recipe: Recipe) -> Sequence[TrackerThread]:
    """The trackers of a run. Raises EnvironmentLackError if the package of one is missing."""
    return [TrackerThread(TRACKERS[name](recipe.folder), recipe) for name in recipe.run.trackers]
