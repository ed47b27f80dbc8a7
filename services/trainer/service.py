"""One rank of the trainer. Every rank runs the same loop; rank 0 also claims, records, publishes and measures
(`RankZero`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import torch

from tandem.protos.codec import decode_group
from tandem.protos.errors import TrainingError
from tandem.protos.manifest import algorithm_of_backend
from tandem.protos.store_source import StoreSource
from tandem.protos.types import StepResult, TrainBatch
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.buffer.store_source import redis_store
from tandem.services.config import Recipe
from tandem.services.config.eval_sets import EvalSet
from tandem.services.logging_setup import configure_logging
from tandem.services.process import starting, stop_event
from tandem.services.run.best_version import BEST_FOLDER
from tandem.services.run.endpoint import run_buffer
from tandem.services.run.folder import EXPORTS_FOLDER, HF_FOLDER
from tandem.services.run.metrics import PhaseClock
from tandem.services.trainer.batch_source import groups_of_rank, read_groups
from tandem.services.trainer.prefetch import RecordedBatch
from tandem.services.trainer.rank_zero import Order, RankZero
from tandem.services.trainer.recovery import CHECKPOINTS_FOLDER, ResumePoint
from tandem.services.trainer.takeover import TAKEOVER_VARIABLE, Takeover
from tandem.services.trainer.trained_batch import TrainedBatch
from tandem.trainer.batch.prepared import PreparedBatch
from tandem.trainer.batch.record import batch_from_json, read_record
from tandem.trainer.checkpoints.state import checkpoint_folder
from tandem.trainer.learner import Learner
from tandem.trainer.weight_sender import WeightSender
from tandem.trainer.weight_snapshot import WeightSnapshot

log = logging.getLogger(__name__)

_STOPPED = 143  # exit code of SIGTERM: stopped, not finished


def main(recipe: Recipe, redis_url: str) -> NoReturn:
    """Runs this rank until the run ends, then exits with code 0, or 143 if it was stopped before."""
    configure_logging("trainer", run=recipe.run.run_id)
    finished = run_rank(recipe, redis_url, stop_event(), hands_over=os.environ.get(TAKEOVER_VARIABLE) == "1")
    sys.stdout.flush()
    # Not sys.exit: a thread that waits for a late joiner is inside torch's C++ code, which aborts when the interpreter
    # ends, and the supervisor would then report a finished run as a crash.
    os._exit(0 if finished else _STOPPED)


def run_rank(recipe: Recipe, redis_url: str, stop: threading.Event, *, hands_over: bool = False) -> bool:
    """Trains as the rank given by the environment; with `hands_over`, takes the run over from a trainer that is alive.
    Returns False if it was stopped before the end of the run, which may also have been ended by an order.
    """
    with starting():
        learner, sender = make_learner(recipe, redis_store(redis_url, recipe.run.run_id, "weights"))
    if learner.rank == 0:
        log.info("trains with %s", _chosen(recipe, learner))
    with ExitStack() as stack:
        stack.callback(learner.close)
        buffer = run_buffer(recipe, redis_url, stop)
        stack.callback(buffer.close)
        orders = Orders(buffer.connection)
        takeover = None
        if learner.rank == 0:
            takeover = stack.enter_context(Takeover(recipe, buffer, learner.world_size, hands_over=hands_over))
        resume_point = load(learner, takeover.prepare() if takeover else None)
        if learner.broadcast_object(stop.is_set()):
            return orders.ended() != ""
        if hands_over:  # now that nothing keeps this trainer from training
            resume_point = load(learner, takeover.fence() if takeover else None, loaded=resume_point.checkpoint)
        rank_zero = None
        if takeover:
            rank_zero = stack.enter_context(closing(RankZero(recipe, buffer, takeover, learner, stop)))
        finished = Trainer(recipe, buffer, learner, sender, rank_zero, resume_point).run()
        if finished and rank_zero:
            rank_zero.close()  # the other services may end only now
            orders.end_run("finished")
        return finished or orders.ended() != ""


def _chosen(recipe: Recipe, learner: Learner) -> str:
    """What stands for `auto`, for the log."""
    trainer = recipe.trainer
    backend = f"ZeRO stage {trainer.resolved_zero_stage}" if trainer.backend == "deepspeed" else trainer.backend
    threads = f", threads per rank: {torch.get_num_threads()}" if learner.device.type == "cpu" else ""
    packing = " or ".join(learner.packings)
    return f"{backend} in {trainer.dtype} (ranks: {learner.world_size}{threads}, packing: {packing})"


def load(learner: Learner, found: ResumePoint | None, *, loaded: str = "") -> ResumePoint:
    """Loads the checkpoint of rank 0's resume point on every rank, unless it is the one that is loaded."""
    resume_point = ResumePoint(**learner.broadcast_object(asdict(found) if found else None))
    if resume_point.checkpoint != loaded:
        learner.load(Path(resume_point.checkpoint))
    learner.barrier()  # a rank that cannot load it has ended
    return resume_point


def make_learner(recipe: Recipe, group_store: StoreSource | None = None) -> tuple[Learner, WeightSender]:
    """The learner of the rank given by the environment, and the sender of its weights, which needs a store to send."""
    learner = Learner(
        recipe.trainer,
        model_path=recipe.model.path,
        total_batches=recipe.run.total_batches,
        seed=recipe.run.seed,
        max_response_tokens=recipe.rollout.max_response_tokens,
    )
    bucket_bytes, adapters = recipe.weights.bucket_bytes, learner.broadcast_adapters
    return learner, WeightSender(
        learner,
        bucket_bytes=bucket_bytes,
        device=learner.device,
        adapters=adapters,
        store=group_store,
        encoding=recipe.weights.encoding,
    )


@dataclass(slots=True)
class Trainer:
    """The training loop. `rank_zero` is None on the other ranks, which follow rank 0's orders."""

    recipe: Recipe
    buffer: Buffer
    learner: Learner
    sender: WeightSender
    rank_zero: RankZero | None
    resume_point: ResumePoint
    """Its checkpoint is loaded."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    incarnation: int = 0
    version: int = 0
    saved_version: int = -1
    skipped_batches: int = 0

    def run(self) -> bool:
        """Trains until the last batch, or until no group is left. Returns False if it was stopped before."""
        if not self.recover():
            return False
        self.publish(changed=True)
        self.wait_until_published()
        # The evaluation of a version that is trained again may have been interrupted.
        self.evaluate(self.recipe.eval_sets if self.version == 0 else self.due_sets())
        if self.version == 0:
            self.wait_for_evaluation()
        self.clock.lap()  # times are measured from here
        do = "wait"
        while do not in ("end", "stop"):
            do, batch, recorded = self.next_order()
            if batch is not None:
                if not self.train(batch, recorded):
                    return False
                self.save_outputs()
            elif do == "checkpoint":
                self.wait_until_published()
                self.save_checkpoint()
        self.wait_until_published()
        return do == "end" and self.finish()

    def recover(self) -> bool:
        """Retrains the batches recorded after the checkpoint, in their order and plan. Returns False if it was stopped
        before the last one.
        """
        self.incarnation = self.learner.broadcast_object(self.rank_zero.incarnation if self.rank_zero else None)
        self.version = self.resume_point.checkpoint_version
        self.saved_version = self.version if self.resume_point.checkpoint else -1
        for version in self.resume_point.recorded:
            if self.learner.broadcast_object(self.rank_zero.is_stopping if self.rank_zero else None):
                return False
            batch, payloads = read_record(self.recipe.folder, version)
            own = groups_of_rank(batch, self.learner.rank)
            groups = {group_id: decode_group(payloads[group_id]) for group_id in own}
            result = self.learn(self.learner.prepare(batch, groups))
            digest = self.sender.digest(algorithm_of_backend(self.recipe.weights.backend))
            trained = TrainedBatch(batch, groups, result, self.clock.lap(), time.time())
            if self.rank_zero:
                self.rank_zero.write_line(trained, {"replayed": True, "weights_digest": digest})
        return True

    def next_order(self) -> tuple[str, TrainBatch | None, RecordedBatch | None]:
        """What all ranks do next, the batch to train, and on rank 0 what was recorded and prepared of it."""
        with self.clock.phase("claim"):
            own, recorded = self.rank_zero.next_order(self.version) if self.rank_zero else (None, None)
            order: Order = self.learner.broadcast_object(own)
        if order["do"] != "train":
            return order["do"], None, None
        return "train", recorded.prepared.batch if recorded else batch_from_json(order["batch"]), recorded

    def train(self, batch: TrainBatch, recorded: RecordedBatch | None) -> bool:
        """Trains a batch, and publishes its version beside the training of the next one. `recorded` is of rank 0.

        Returns False, without publishing, if the run was stopped during the evaluation of the version before, which
        samplers still need. The batch is trained again when the run goes on.
        """
        with self.clock.phase("read"):
            groups = read_groups(self.buffer, batch, self.learner, recorded.prepared.groups if recorded else None)
            prepared = recorded.prepared if recorded else self.learner.prepare(batch, groups)
        with self.clock.phase("record"):
            if self.rank_zero:
                self.rank_zero.record(batch)
        began = time.time_ns()
        result = self.learn(prepared)
        ended = time.time_ns()
        self.wait_until_published()
        if not self.wait_for_evaluation():
            return False
        seconds, now = self.clock.lap(), time.time()
        trained = None
        if recorded:
            trained = TrainedBatch(batch, groups, result, seconds, now, recorded.rejections, (began, ended))
        self.publish(changed=result.changed, trained=trained)
        return True

    def learn(self, prepared: PreparedBatch) -> StepResult:
        """Takes the optimizer steps of a recorded batch. Raises TrainingError if each of the last batches skipped a
        step of the policy or of the critic.
        """
        result = self.learner.train(prepared, before_step=self.before_step)
        self.version = prepared.batch.policy_version
        skipped = any(result.metrics.get(name, 0.0) > 0 for name in ("skipped_steps", "critic_skipped_steps"))
        self.skipped_batches = self.skipped_batches + 1 if skipped else 0
        if self.skipped_batches >= self.recipe.trainer.max_skipped_batches:
            raise TrainingError(
                f"{self.skipped_batches} batches in a row had a gradient that is not finite, the last for version "
                f"{self.version}; lower trainer.learning_rate, or check the rewards and lengths in metrics.jsonl"
            )
        return result

    def before_step(self) -> None:
        """Waits on rank 0 for what comes before a change of the weights. The time is part of the learner's, too."""
        with self.clock.phase("before_step"):
            self.check_incarnation()

    def check_incarnation(self) -> None:
        """Raises on rank 0 if another trainer took over."""
        if self.rank_zero:
            self.rank_zero.check()

    def publish(self, *, changed: bool, trained: TrainedBatch | None = None) -> None:
        """Publishes the version that was trained last from a copy of its weights, while the next one trains. What is
        sent from a GPU's memory is published when this returns. Weights that every rank holds whole, on a CPU, are
        copied in a thread, before the next optimizer step.
        """
        weights = self.recipe.weights
        with self.clock.phase("publish"):
            location = str(self.recipe.weights_folder / f"{self.version:06d}") if weights.backend == "disk" else ""
            manifest = self.sender.manifest(
                self.incarnation, self.version, weights.backend, changed=changed, location=location
            )
            take_snapshot: Callable[[], WeightSnapshot] | None = None
            if weights.sends_snapshots:
                take_snapshot = (
                    partial(self.sender.snapshot, manifest)
                    if self.learner.gathers_in_threads
                    else self.sender.begin_snapshot(manifest)  # all ranks take part, or a GPU is busy
                )
            if self.rank_zero:
                self.rank_zero.publish(self.sender, manifest, take_snapshot, trained)
            elif take_snapshot is None:
                self.sender.broadcast(manifest, weights.deadline_seconds)

    def wait_until_published(self) -> None:
        """Blocks all ranks until every version that was trained is published and its line is written."""
        with self.clock.phase("acknowledge"):
            is_over = False
            while not is_over:
                is_over = self.learner.broadcast_object(self.rank_zero.published() if self.rank_zero else None)

    def wait_for_evaluation(self) -> bool:
        """Blocks all ranks until the running evaluation is over. Returns False if the run was stopped before."""
        with self.clock.phase("evaluate"):
            outcome = "waits"
            while outcome == "waits":
                outcome = self.learner.broadcast_object(self.rank_zero.evaluation() if self.rank_zero else None)
        return outcome == "over"

    def save_outputs(self) -> None:
        """Writes the export that is due, and before it the checkpoint that is due, once the version is published. Then
        starts a due evaluation.
        """
        exports, saves = self._due(self.recipe.trainer.export_every), self._due(self.recipe.checkpoint_every)
        folder = self.recipe.folder / EXPORTS_FOLDER / f"{self.version:06d}"
        if exports and not saves:
            self.export(folder)
        due = self.due_sets()
        if not saves and not due:
            return
        self.wait_until_published()
        if saves:
            self.save_checkpoint()
            if exports:
                self.export(folder)
        self.evaluate(due)

    def export(self, folder: Path) -> None:
        """Writes the policy. Weights that are not whole in this process's host memory are taken from the copy of the
        published version, if it has all weights.
        """
        weights = None
        if self.sender.keeps_whole_weights and not self.learner.gathers_in_threads:
            self.wait_until_published()
            weights = self.sender.kept_weights()
        self.check_incarnation()
        with self.writing("an export"):
            self.learner.export(folder, weights)

    def save_checkpoint(self) -> None:
        if self.saved_version != self.version:
            folder = checkpoint_folder(self.recipe.folder / CHECKPOINTS_FOLDER, self.version, self.incarnation)
            with self.writing("a checkpoint"):
                self.learner.save(folder, self.version, self.incarnation, self.check_incarnation)
            self.saved_version = self.version
        if self.rank_zero:
            self.rank_zero.commit(self.version)

    def writing(self, what: Literal["a checkpoint", "an export"]) -> AbstractContextManager[None]:
        return self.rank_zero.writing(what) if self.rank_zero else nullcontext()

    def due_sets(self) -> list[EvalSet]:
        """The evaluation sets whose interval ends at this version."""
        return [one for one in self.recipe.eval_sets if self._due(one.every)]

    def evaluate(self, sets: Sequence[EvalSet]) -> None:
        """Starts an evaluation, after an export of a version that may be the best one."""
        best = self.recipe.eval.best_set
        if self.version and best in [one.name for one in sets]:
            lacks = self.rank_zero.lacks_evaluation(self.version, best) if self.rank_zero else None
            if self.learner.broadcast_object(lacks):
                self.export(self.recipe.folder / BEST_FOLDER / f"{self.version:06d}")
        if self.rank_zero:
            self.rank_zero.start_evaluation(self.version, sets)

    def finish(self) -> bool:
        """Writes everything that ends a run. Returns False if it was stopped before the last evaluation was over."""
        is_over = self.wait_for_evaluation()
        if is_over:
            self.evaluate(self.recipe.eval_sets)
        self.save_checkpoint()
        self.export(self.recipe.folder / HF_FOLDER)
        if not is_over or not self.wait_for_evaluation():
            return False
        if self.rank_zero:
            self.rank_zero.finish()
        return True

    def _due(self, every: int) -> bool:
        return every > 0 and self.version % every == 0
