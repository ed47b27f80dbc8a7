"""Rank 0's work besides learning: it claims, records, publishes, measures, evaluates and serves gRPC."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import psutil

from tandem.protos.types import TrainBatch, WeightManifest
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.config import Recipe
from tandem.services.config.eval_sets import EvalSet
from tandem.services.metrics.page import Sources
from tandem.services.metrics.tracing import Step, add_spans
from tandem.services.metrics.trackers import open_trackers
from tandem.services.process import SerialExecutor
from tandem.services.run.best_version import keep_best, reason_to_stop
from tandem.services.run.endpoint import service_endpoint
from tandem.services.run.json_files import Line
from tandem.services.run.metrics import (
    SAMPLER_FIGURES,
    SCORER_FIGURES,
    MetricsLog,
    ServiceTotals,
    write_summary,
)
from tandem.services.run.watchdog import Watchdog
from tandem.services.service_info import ServiceInfo
from tandem.services.trainer.batch_source import BatchSource
from tandem.services.trainer.evaluation import BackgroundEvaluation, Evaluation
from tandem.services.trainer.notes import write_notes
from tandem.services.trainer.prefetch import Prefetch, RecordedBatch
from tandem.services.trainer.publisher import Publication, Publisher
from tandem.services.trainer.recovery import CHECKPOINTS_FOLDER, STOPPING, check_complete
from tandem.services.trainer.takeover import Takeover
from tandem.services.trainer.trained_batch import TrainedBatch
from tandem.trainer.batch.record import prune_records, write_advantages
from tandem.trainer.batch.rejected import prune_rejected
from tandem.trainer.checkpoints.state import list_checkpoints
from tandem.trainer.learner import Learner
from tandem.trainer.weight_sender import WeightSender
from tandem.trainer.weight_snapshot import WeightSnapshot

log = logging.getLogger(__name__)

Order = dict[str, Any]
"""The next action of every rank: `{"do": "train", "batch": …}`, `checkpoint`, `wait`, `end` or `stop`."""

Work = Literal["steps", "a checkpoint", "an export"]

_FIRST_PATIENCE_SECONDS = 600.0  # engines of large models take minutes to start
_PATIENCE_SECONDS = 30.0
_RANKS_WAIT_SECONDS = 15.0  # meanwhile the other ranks wait in a collective
_PUBLICATION_CHECK_SECONDS = 1.0  # no group may come before a publication returns credits, and it may fail
_CLOSE_SECONDS = 30.0


class RankZero:
    """Connects the trainer to the ledger and the samplers. Only the loop's thread calls its public methods.

    Threads work beside the loop: one claims, records and prepares the next batch (`Prefetch`), one enters the batch
    that trains in the ledger (`record`), and one copies and publishes the version that was trained last and writes its
    line (`publish`). The first optimizer step waits for the ledger and for the copy (`check`).

    The constructor takes the run over: it begins a new incarnation, which fences every earlier trainer.
    """

    def __init__(
        self,
        recipe: Recipe,
        buffer: Buffer,
        takeover: Takeover,
        learner: Learner,
        stop: threading.Event,
    ) -> None:
        self._recipe = recipe
        self._buffer = buffer
        self._orders = Orders(buffer.connection)
        self._stop = stop
        self._started_at = psutil.Process().create_time()
        self._wait_seconds = min(_RANKS_WAIT_SECONDS, recipe.trainer.collective_timeout_seconds / 3)
        self._version = -1
        self._optimizer_step = 0
        self._activity = "starts"
        self._waiting_since: float | None = None
        """Monotonic time at which the loop began to wait for scored groups; None while it works."""
        self._recording: Future[None] | None = None
        self._copying: Future[WeightSnapshot] | None = None
        self._publisher: Publisher | None = None
        self._publishing: Future[None] | None = None
        self._publishing_since = 0.0
        self._step_since = time.monotonic()
        """When the loop, in which all ranks meet, last called this object."""
        self._work: Work = "steps"
        self._longest_seconds: dict[Work, float] = {}
        """Of what was done before, by its kind: how long one takes says nothing about the others."""
        self._num_checks = 0
        self._evaluation_left_out = False
        """Whether an evaluation was due after the stop."""
        with ExitStack() as stack:
            self._ledger_thread, self._publish_thread = SerialExecutor("record"), SerialExecutor("publish")
            prefetch_thread = SerialExecutor("prefetch")
            for thread in (self._ledger_thread, self._publish_thread, prefetch_thread):
                stack.callback(thread.close)
            self._metrics = MetricsLog(recipe.folder, open_trackers(recipe))
            stack.callback(self._metrics.close)
            info = ServiceInfo("trainer", self._figures, self._doing_now, buffer, lambda: self._version)
            more: Sources = {"batch": lambda: self._metrics.last, "evaluation": lambda: self._metrics.last_evaluation}
            stack.enter_context(service_endpoint(info, recipe, stop, port=recipe.trainer.port, more=more))
            self.incarnation = takeover.begin()  # nothing of the above can fail any more
            resume_point = takeover.resume_point
            self._metrics.rewind(resume_point.checkpoint_version, resume_point.last_version)
            self._earlier_seconds = sum(line["seconds_total"] for line in self._metrics.lines.read())
            samplers, scorers = self._service_figures()
            self._samplers = ServiceTotals(SAMPLER_FIGURES, samplers, self._metrics.last)
            self._scorers = ServiceTotals(SCORER_FIGURES, scorers, self._metrics.last)
            self._source = BatchSource(buffer, recipe, self.incarnation, learner.world_size, stop, learner.packings)
            self._prefetch = Prefetch(prefetch_thread, self._source, buffer, recipe, self.incarnation, learner.prepare)
            self._judge_evaluations()  # of a run that goes on
            self._evaluation = BackgroundEvaluation(buffer, recipe, stop, self._note_evaluation)
            stack.enter_context(Watchdog(buffer, recipe))
            self._stack = stack.pop_all()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def next_order(self, version: int) -> tuple[Order, RecordedBatch | None]:
        """The next action of all ranks; `wait` if there is none, so that no rank stays in a collective for long. With
        `train`, also the batch to train.
        """
        self._end_step()
        self._check_publication()
        if self._stop.is_set():
            return {"do": "stop"}, None
        if version >= self._recipe.run.total_batches:
            return {"do": "end"}, None
        if version and self._orders.checkpoint_wanted():
            return {"do": "checkpoint"}, None
        wanted = self._recipe.run.groups_per_batch
        activity = f"waits for scored groups ({len(self._source.survivors)} of {wanted} are there)"
        with self._doing(f"waits until version {version} is published" if self._is_publishing else activity):
            self._waiting_since = self._waiting_since or time.monotonic()
            seconds = _PUBLICATION_CHECK_SECONDS if self._is_publishing else self._wait_seconds
            recorded = self._prefetch.next_batch(version, seconds)
        if recorded is not None:
            self._waiting_since = None
            return {"do": "train", "batch": recorded.as_json}, recorded
        if self._stop.is_set():  # it came meanwhile, and the thread ended for it
            return {"do": "stop"}, None
        return {"do": "end" if self._prefetch.exhausted else "wait"}, None

    def check(self) -> None:
        """Called before every optimizer step. The first one waits until the ledger has the batch as recorded, and the
        weights of the version before are copied. Raises FencedError if another trainer took over, and the errors of
        `record` and of a publication that failed.
        """
        self._end_step()
        self._num_checks += 1
        self._check_publication()
        if self._recording is not None:
            recording, self._recording = self._recording, None
            recording.result()  # it ends, because every call of Redis has a deadline
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()  # it ends, because it waits for nobody: the copy is made within this process
        self._buffer.check_incarnation(self.incarnation)

    def record(self, batch: TrainBatch) -> None:
        """Begins to remove the payloads of a recorded batch from the ledger; `check` waits for the end."""
        arguments = self.incarnation, batch.policy_version, batch.group_ids
        self._recording = self._ledger_thread.submit(self._buffer.record, *arguments)

    def publish(
        self,
        sender: WeightSender,
        manifest: WeightManifest,
        take_snapshot: Callable[[], WeightSnapshot] | None,
        trained: TrainedBatch | None,
    ) -> None:
        """Begins to copy a version and to send it to the samplers, to retire the credits of what was trained for it,
        and to write its line, if it has one; `published` waits for the end. Without `take_snapshot`, which is called in
        a thread, the version is sent when this returns.
        """
        assert self._publishing is None, "versions reach the samplers one after the other"
        if self._publisher is None:
            self._publisher = Publisher(self._buffer, sender, self._recipe, self.incarnation)
            self._stack.callback(self._publisher.close)
            self._stack.callback(self._end_publishing)
        self._publishing_since = time.monotonic()
        sent = copying = None
        if take_snapshot is None:  # all ranks take part
            sent = self._publisher.publish(manifest, group_ids=_group_ids(trained))
        else:
            copying = self._copying = self._publish_thread.submit(take_snapshot)
        arguments = self._publisher, manifest, copying, sent, trained
        self._publishing = self._publish_thread.submit(self._publish, *arguments)

    def published(self) -> bool:
        """Waits some seconds for the version that is being published, if there is one, and returns whether it is over.
        Raises the error that ended it.
        """
        self._end_step()
        with self._doing("waits until the last version is published"):
            if self._publishing is None or not wait([self._publishing], self._wait_seconds).done:
                return self._publishing is None
        ended, self._publishing = self._publishing, None
        self._copying = None  # the snapshot is not needed any more
        ended.result()
        return True

    def write_line(self, trained: TrainedBatch, more: Line) -> None:
        """Writes the batch's line to metrics.jsonl, with the figures of its publication, or that it was retrained."""
        samplers, scorers = self._service_figures()
        result = trained.result
        line = {**trained.line(), **self._samplers.update(samplers), **self._scorers.update(scorers), **more}
        self._metrics.add(line)
        write_advantages(self._recipe.folder, result.policy_version, result.advantages)
        write_notes(self._buffer, self._recipe.folder, result.policy_version, trained.batch.group_ids)
        self._optimizer_step = result.optimizer_step

    def start_evaluation(self, version: int, sets: Sequence[EvalSet]) -> None:
        """Evaluates the published version in a thread on those of the sets that it was not evaluated on before."""
        missing = [one for one in sets if self.lacks_evaluation(version, one.name)]
        if missing and self._stop.is_set():
            self._evaluation_left_out = True
        elif missing:
            self._evaluation.start(version, missing, _PATIENCE_SECONDS if version else _FIRST_PATIENCE_SECONDS)

    def lacks_evaluation(self, version: int, name: str) -> bool:
        """Whether the version was not evaluated on the set of this name, or in vain."""
        lines = [line for line in self._metrics.evaluations.read() if line["version"] == version]
        return all(line["sets"][name]["failed"] for line in lines if name in line.get("sets", {}))

    def evaluation(self) -> Literal["waits", "over", "stopped"]:
        """Waits some seconds for the running evaluation, if there is one, and returns its state: `stopped` also if the
        stop came before it began. Raises FencedError if another trainer took over meanwhile.
        """
        self._end_step()
        if self._evaluation.running is None:
            return "stopped" if self._evaluation_left_out else "over"
        self._buffer.check_incarnation(self.incarnation)
        with self._doing("waits for the evaluation of the published version"):
            if self._evaluation.over(self._wait_seconds):
                return "over"
        return "stopped" if self._stop.is_set() else "waits"

    def commit(self, version: int) -> None:
        """Commits the batches of a written checkpoint to the ledger, and removes records that are not kept. Ends an
        operator's order of a checkpoint.
        """
        committed = self._buffer.committed_version()
        self._buffer.commit(self.incarnation, version)
        if keep := self._recipe.run.keep_batches:
            # What the last commit made superfluous stays until the next one, because Redis may lose its last writes.
            oldest, _, _ = list_checkpoints(self._recipe.folder / CHECKPOINTS_FOLDER)[0]
            last = min(version - keep, oldest, committed)
            prune_records(self._recipe.folder, last)
            prune_rejected(self._recipe.folder, last)
        self._orders.checkpoint_written()

    @contextmanager
    def writing(self, what: Literal["a checkpoint", "an export"]) -> Iterator[None]:
        """Reports that all ranks write it, inside."""
        self._end_step()
        began, self._work = self._step_since, what
        with self._doing(f"writes {what}"):
            yield
        self._end_step()
        self._longest_seconds[what] = max(self._longest_seconds.get(what, 0.0), self._step_since - began)
        self._work = "steps"

    def finish(self) -> None:
        """Ends the run: drops untrained groups with a reason, and writes the summary. Raises RunFolderError if the run
        folder lacks batches.
        """
        run = self._recipe.run
        check_complete(self._buffer.counts(), self._recipe.folder, self._version, run.groups_per_batch)
        self._judge_evaluations()  # the last one may have been skipped
        self._buffer.drop_outstanding(self.incarnation, "run_ended")
        wall_seconds = time.time() - self._started_at + self._earlier_seconds
        write_summary(self._recipe, self._buffer.counts(), self._buffer.set_aside(), wall_seconds)

    def close(self) -> None:
        """May be called twice."""
        if self._recording is not None:  # an error came before the first optimizer step
            wait([self._recording], _CLOSE_SECONDS)
        self._prefetch.close()
        self._stack.close()

    @contextmanager
    def _doing(self, activity: str) -> Iterator[None]:
        self._activity = activity
        yield
        self._activity = "trains"

    def _doing_now(self) -> str:
        return STOPPING if self._stop.is_set() else self._activity

    @property
    def _is_publishing(self) -> bool:
        return self._publishing is not None and not self._publishing.done()

    def _end_step(self) -> None:
        now = time.monotonic()
        if self._work == "steps":
            self._longest_seconds["steps"] = max(self._longest_seconds.get("steps", 0.0), now - self._step_since)
        self._step_since = now

    def _check_publication(self) -> None:
        """Raises the error of a publication that failed, or of the publisher's threads."""
        if self._publishing is not None and self._publishing.done():
            self._publishing.result()
        if self._publisher is not None:
            self._publisher.check()

    def _publish(
        self,
        publisher: Publisher,
        manifest: WeightManifest,
        copying: Future[WeightSnapshot] | None,
        sent: Publication | None,
        trained: TrainedBatch | None,
    ) -> None:
        """Publishes a version, unless it was sent already, and writes its spans and its line."""
        snapshot = copying.result() if copying else None  # over, because one thread makes both calls
        publication = sent or publisher.publish(manifest, snapshot, _group_ids(trained))
        publication = replace(publication, publication_seconds=time.monotonic() - self._publishing_since)
        self._version = manifest.policy_version
        if trained is None:
            return
        ended = time.time_ns()
        tokens = sum(header.num_loss_tokens for header in trained.batch.headers)
        attributes = {"tandem.version": self._version, "tandem.batch_tokens": tokens}
        spans: Mapping[Step, tuple[int, int]] = {
            "train": trained.trained_ns,
            "publish": (ended - int(1e9 * publication.publication_seconds), ended),
        }
        for step, (start, end) in spans.items():
            add_spans(step, self._buffer.run_id, trained.batch.group_ids, start, attributes, end)
        self.write_line(trained, asdict(publication))

    def _end_publishing(self) -> None:
        """At the end of the trainer, which another error may have caused."""
        if self._publishing is not None:
            wait([self._publishing], _CLOSE_SECONDS)

    def _figures(self) -> dict[str, float]:
        since, now = self._waiting_since, time.monotonic()
        starved_since = now if since is None else max(since, self._source.last_claim)
        # Before a whole optimizer step, checkpoint or export, nobody knows how long one takes.
        longest = self._longest_seconds.get(self._work) if self._num_checks > 1 else None
        return {
            "policy_version": self._version,
            "optimizer_step": self._optimizer_step,
            "failed_updates": 0 if self._publisher is None else self._publisher.failed_updates,
            "waiting_seconds": 0.0 if since is None else now - since,
            "starved_seconds": now - starved_since,
            "publishing_seconds": now - self._publishing_since if self._is_publishing else 0.0,
            "step_seconds": 0.0 if longest is None else now - self._step_since,
            "longest_step_seconds": longest or 0.0,
        }

    def _service_figures(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """The last heartbeats of the samplers and of the reward services."""
        ids, figures = {sampler.id for sampler in self._buffer.samplers()}, self._buffer.figures()
        samplers = {name: values for name, values in figures.items() if name in ids}
        return samplers, {name: values for name, values in figures.items() if name.startswith("reward")}

    def _note_evaluation(self, evaluation: Evaluation) -> None:
        self._metrics.add_evaluation(asdict(evaluation))
        self._judge_evaluations()
        for failure in evaluation.failures:
            log.error("version %d: %s", evaluation.version, failure, extra={"version": evaluation.version})
        if evaluation.unscored and not evaluation.failures:
            words = "evaluation of version %d: rows not scored: %s"
            log.warning(words, evaluation.version, dict(evaluation.unscored), extra={"version": evaluation.version})

    def _judge_evaluations(self) -> None:
        """Keeps the best versions' exports only, and begins no further batch if the run has trained long enough."""
        config = self._recipe.eval
        if not config.keep_best:
            return
        lines = self._metrics.evaluations.read()
        keep_best(self._recipe.folder, lines, config.keep_best, config.num_best)
        if (reason := reason_to_stop(lines, config)) and not self._prefetch.is_ending:
            log.info("the run ends early: %s", reason)
            self._prefetch.end()


def _group_ids(trained: TrainedBatch | None) -> Sequence[str]:
    return () if trained is None else trained.batch.group_ids
