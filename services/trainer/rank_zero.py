"""Rank 0's work besides learning: it claims, records, publishes, measures, evaluates and serves gRPC."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, Literal

import psutil

from tandem.protos.types import Packing, StepResult, TrainBatch
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.metrics.page import Sources
from tandem.services.metrics.tracing import add_spans
from tandem.services.metrics.trackers import open_trackers
from tandem.services.run.endpoint import service_endpoint
from tandem.services.run.json_files import Line
from tandem.services.run.metrics import (
    SAMPLER_FIGURES,
    SCORER_FIGURES,
    MetricsLog,
    ServiceTotals,
    batch_figures,
    payload_figures,
    write_summary,
)
from tandem.services.service_info import ServiceInfo, cpu_seconds
from tandem.services.trainer.batch_source import BatchSource
from tandem.services.trainer.evaluation import BackgroundEvaluation, Evaluation
from tandem.services.trainer.publisher import Publication, Publisher
from tandem.services.trainer.recovery import take_over, trainer_lock
from tandem.services.trainer.watchdog import Watchdog
from tandem.trainer.batch.record import batch_to_json, write_advantages, write_record
from tandem.trainer.weight_sender import WeightSender

log = logging.getLogger(__name__)

Order = dict[str, Any]
"""The next action of every rank: `{"do": "train", "batch": …}`, `wait`, `end` or `stop`."""

_FIRST_PATIENCE_SECONDS = 600.0  # engines of large models take minutes to start
_PATIENCE_SECONDS = 30.0
_RANKS_WAIT_SECONDS = 15.0  # meanwhile the other ranks wait in a collective, whose deadline is minutes


class RankZero:
    """Connects the trainer to the ledger and the samplers. Only the loop's thread calls its public methods.

    The constructor begins a new incarnation, which fences every earlier trainer of the run.
    """

    def __init__(
        self, recipe: Recipe, buffer: Buffer, world_size: int, packings: Sequence[Packing], stop: threading.Event
    ) -> None:
        self._recipe = recipe
        self._buffer = buffer
        self._stop = stop
        self._stack = ExitStack()
        self._stack.enter_context(trainer_lock(recipe.folder))
        self.incarnation, self.resume_point = take_over(buffer, recipe.folder)
        self._started_at = psutil.Process().create_time()
        self._version = -1
        self._optimizer_step = 0
        self._activity = "starts"
        self._waiting_since: float | None = None
        """Monotonic time at which the loop began to wait for scored groups; None while it works."""
        self._metrics = MetricsLog(recipe.folder, open_trackers(recipe))
        self._stack.callback(self._metrics.close)
        self._metrics.rewind(self.resume_point.checkpoint_version, self.resume_point.last_version)
        self._earlier_seconds = sum(line["seconds_total"] for line in self._metrics.lines.read())
        samplers, scorers = self._service_figures()
        self._samplers = ServiceTotals(SAMPLER_FIGURES, samplers, self._metrics.last)
        self._scorers = ServiceTotals(SCORER_FIGURES, scorers, self._metrics.last)
        self._source = BatchSource(buffer, recipe, self.incarnation, world_size, stop, packings)
        self._evaluation = BackgroundEvaluation(buffer, recipe, stop, self._note_evaluation)
        self._publisher: Publisher | None = None
        self._recorded: tuple[TrainBatch, int] | None = None
        """The batch that is being trained and published, and when its current step began (ns since 1970)."""
        info = ServiceInfo("trainer", self._figures, lambda: self._activity, buffer, lambda: self._version)
        more: Sources = {"batch": lambda: self._metrics.last, "evaluation": lambda: self._metrics.last_evaluation}
        self._stack.enter_context(service_endpoint(info, recipe, stop, port=recipe.trainer.port, more=more))
        self._stack.enter_context(Watchdog(buffer, self._starved_since, recipe.run.groups_per_batch))

    def next_order(self, version: int) -> Order:
        """The next action of all ranks; `wait` if there is none, so that no rank stays in a collective for long."""
        if self._stop.is_set():
            return {"do": "stop"}
        if version >= self._recipe.run.total_batches:
            return {"do": "end"}
        wanted = self._recipe.run.groups_per_batch
        with self._doing(f"waits for scored groups ({len(self._source.survivors)} of {wanted} are there)"):
            self._waiting_since = self._waiting_since or time.monotonic()
            batch = self._source.poll(version, _RANKS_WAIT_SECONDS)
        if batch is not None:
            self._waiting_since = None
            return {"do": "train", "batch": batch_to_json(batch)}
        return {"do": "end" if self._source.exhausted else "wait"}

    def check(self) -> None:
        """Raises FencedError if another trainer took over. Called before every optimizer step."""
        self._buffer.check_incarnation(self.incarnation)

    def record(self, batch: TrainBatch, payloads: Mapping[str, bytes]) -> None:
        """Writes the batch to disk, then removes its payloads from the ledger."""
        self.check()
        write_record(self._recipe.folder, batch, payloads)
        self._buffer.record(self.incarnation, batch.policy_version, batch.group_ids)
        self._recorded = batch, time.time_ns()

    def publish(self, sender: WeightSender, version: int, *, changed: bool) -> Publication:
        """Sends the version to the samplers and retires the credits of what was trained for it."""
        if self._publisher is None:
            self._publisher = Publisher(self._buffer, sender, self._recipe, self.incarnation)
            self._stack.callback(self._publisher.close)
        self._trace("train")
        with self._doing(f"publishes version {version}"):
            publication = self._publisher.publish(version, changed=changed)
        self._trace("publish")
        self._version = version
        return publication

    def write_line(
        self,
        batch: TrainBatch,
        payloads: Mapping[str, bytes],
        result: StepResult,
        seconds: Mapping[str, float],
        publication: Publication | None,
    ) -> None:
        """Writes the batch's line to metrics.jsonl. Without a publication, the batch was retrained from its record."""
        samplers, scorers = self._service_figures()
        line: Line = {
            "step": result.policy_version,
            "optimizer_step": result.optimizer_step,
            "time": time.time(),
            **batch_figures(batch),
            **payload_figures(payloads.values()),
            **result.metrics,
            **self._source.take_rejections(),
            **seconds,
            "trainer_idle_seconds": seconds.get("seconds_claim", 0.0),
            "trainer_cpu_seconds": cpu_seconds(),
            "processors": len(os.sched_getaffinity(0)),
            **self._samplers.update(samplers),
            **self._scorers.update(scorers),
        }
        line |= {"replayed": True} if publication is None else asdict(publication)
        self._metrics.add(line)
        write_advantages(self._recipe.folder, result.policy_version, result.advantages)
        self._optimizer_step = result.optimizer_step

    def start_evaluation(self, version: int) -> None:
        """Evaluates the published version in a thread, unless it was evaluated before or there is no file for it."""
        done = {line["version"] for line in self._metrics.evaluations.read()}
        if self._recipe.data.eval_file and version not in done:
            self._evaluation.start(version, _PATIENCE_SECONDS if version else _FIRST_PATIENCE_SECONDS)

    def evaluation(self) -> Literal["waits", "over", "stopped"]:
        """Waits some seconds for the running evaluation, if there is one, and returns its state."""
        with self._doing("waits for the evaluation of the published version"):
            if self._evaluation.over(_RANKS_WAIT_SECONDS):
                return "over"
        return "stopped" if self._stop.is_set() else "waits"

    def commit(self, version: int) -> None:
        """Commits the batches of a written checkpoint to the ledger."""
        self._buffer.commit(self.incarnation, version)

    def finish(self) -> None:
        """Ends the run: drops untrained groups with a reason, and writes the summary."""
        self._buffer.drop_outstanding(self.incarnation, "run_ended")
        wall_seconds = time.time() - self._started_at + self._earlier_seconds
        write_summary(self._recipe, self._buffer.counts(), wall_seconds)

    def close(self) -> None:
        """May be called twice."""
        self._stack.close()

    @contextmanager
    def _doing(self, activity: str) -> Iterator[None]:
        self._activity = activity
        yield
        self._activity = "trains"

    def _trace(self, step: Literal["train", "publish"]) -> None:
        """Adds the step to the traces of the batch's groups; it began when the one before ended."""
        if self._recorded is None:
            return  # the first publication, or that of a replay
        batch, began = self._recorded
        tokens = sum(header.num_loss_tokens for header in batch.headers)
        attributes = {"tandem.version": batch.policy_version, "tandem.batch_tokens": tokens}
        add_spans(step, self._buffer.run_id, batch.group_ids, began, attributes)
        self._recorded = (batch, time.time_ns()) if step == "train" else None

    def _figures(self) -> dict[str, float]:
        since = self._waiting_since
        return {
            "policy_version": self._version,
            "optimizer_step": self._optimizer_step,
            "failed_updates": 0 if self._publisher is None else self._publisher.failed_updates,
            "waiting_seconds": 0.0 if since is None else time.monotonic() - since,
        }

    def _starved_since(self) -> float | None:
        since = self._waiting_since
        return None if since is None else max(since, self._source.last_claim)

    def _service_figures(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """The last heartbeats of the samplers and of the reward services."""
        ids, figures = {sampler.id for sampler in self._buffer.samplers()}, self._buffer.figures()
        samplers = {name: values for name, values in figures.items() if name in ids}
        return samplers, {name: values for name, values in figures.items() if name.startswith("reward")}

    def _note_evaluation(self, evaluation: Evaluation) -> None:
        self._metrics.add_evaluation(asdict(evaluation))
        if evaluation.unscored:
            words = "evaluation of version %d: rows not scored: %s"
            log.warning(words, evaluation.version, dict(evaluation.unscored), extra={"version": evaluation.version})
