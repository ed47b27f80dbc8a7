"""The learner: one rank of the policy's training. It turns planned batches into new weights and knows no Redis, no gRPC
and no particular backend.

N: loss tokens, flat: of the batch, or of a micro-batch. R: trajectories.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.protos.manifest import ParameterSpec
from tandem.protos.types import StepResult, TrainBatch, TrajectoryGroup
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.backend.registry import load_backend
from tandem.trainer.batch.columns import compute_columns, needs_every_step, needs_proximal
from tandem.trainer.batch.layout import BatchLayout, TrajectoryKey
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.batch.prepared import BatchStart, MicroBatches, PreparedBatch
from tandem.trainer.batch.ragged import row_means
from tandem.trainer.batch.rewards import learning_targets, reward_components
from tandem.trainer.checkpoints.export import collect_weights, write_export
from tandem.trainer.checkpoints.files import load_checkpoint, save_checkpoint
from tandem.trainer.checkpoints.state import prune_checkpoints
from tandem.trainer.config import TrainerConfig
from tandem.trainer.kl import first_coefficients, next_coefficients
from tandem.trainer.models.critic import Critic
from tandem.trainer.models.flat_rows import RowPacking
from tandem.trainer.models.loading import load_model, model_folder
from tandem.trainer.models.reference import ReferencePolicy
from tandem.trainer.models.token_model import loss_token_statistics, token_logprobs
from tandem.trainer.objective import BatchObjective
from tandem.trainer.rank import Rank

if TYPE_CHECKING:
    from tandem.trainer.models.lora import Adapters

_FINAL_RATE = 0.1
"""Fraction of the peak learning rate at which a cosine schedule ends."""


class Learner(Rank):
    """One of `world_size` ranks as given by environment variables (without them, the only one).

    `optimizer_step` counts the policy's optimizer steps without skipped ones. `packings` are those of new batches; a
    recorded batch is trained with the packing of its plan.
    """

    def __init__(
        self, config: TrainerConfig, *, model_path: str, total_batches: int, seed: int, max_response_tokens: int
    ) -> None:
        """Joins the process group and loads the policy, and the critic and reference policy if the algorithm needs
        them. Raises ModelError if a model does not exist or cannot be loaded, or mixes concatenated rows, and
        ConfigError if the backend's package is missing, or settings do not fit the backend.
        """
        self._config = config
        self._total_batches = total_batches
        self._seed = seed
        self._max_response_tokens = max_response_tokens
        self._source = model_folder(model_path)
        self._backend = load_backend(config)
        super().__init__(self._backend.join_process_group(config.collective_timeout_seconds))
        if config.num_threads != "auto" and self.device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        self.optimizer_step = 0
        torch.manual_seed(seed)
        self._model = load_model(self._source, config.dtype)
        self._adapters: Adapters | None = None
        self._engine = self._build_engine()
        self._critic = self._load_critic()
        self._reference = self._load_reference()
        self._coefficients = first_coefficients(config.kl)
        self._packing = RowPacking(config.packing, self._engines(), self)
        self.packings = self._packing.packings

    def _engines(self) -> list[TrainingEngine]:
        engines = [*self._trained_engines().values(), *([self._reference.engine] if self._reference else [])]
        return list(dict.fromkeys(engines))  # with adapters the reference uses the policy's engine

    def _build_engine(self) -> TrainingEngine:
        """The policy's engine. With LoRA the adapters are inserted into the model first."""
        if self._config.lora is None:
            return self._backend.build_engine(self._config, self._model)
        from tandem.trainer.models.lora import Adapters, insert_adapters  # loads PEFT, which takes 2 s

        adapted = insert_adapters(self._model, self._config.lora, seed=self._seed)
        engine = self._backend.build_engine(self._config, self._model)
        self._adapters = Adapters(adapted, self._config.lora, engine)
        return engine

    def _load_critic(self) -> Critic | None:
        if not self._config.needs_critic:
            return None
        path = self._config.critic.path
        return Critic(self._backend, self._config, model_folder(path) if path else self._source)

    def _load_reference(self) -> ReferencePolicy | None:
        if not self._config.needs_reference:
            return None
        if self._adapters is not None:
            return ReferencePolicy(self._engine, self._adapters.disabled)
        return ReferencePolicy.frozen_copy(self._backend, self._config, self._source)

    def prepare(self, batch: TrainBatch, groups: Mapping[str, TrajectoryGroup]) -> PreparedBatch:
        """The batch in the form that `train` takes. Another thread may call it while a batch is trained."""
        prepared = PreparedBatch.of(batch, groups, rank=self.rank, device=self.device)
        steps, config = prepared.steps, self._config
        if steps is None or self.world_size > 1 or config.needs_reference or config.needs_critic:
            return prepared
        if not needs_proximal(config, len(steps)):
            with suppress(DataError):  # `train` tries again and raises it
                prepared.start = self._start(prepared, steps)
        return prepared

    def train(self, prepared: PreparedBatch, before_step: Callable[[], None] = lambda: None) -> StepResult:
        """Takes the batch's optimizer steps. `before_step` is called before each of them and prevents the step if it
        raises.

        Raises on every rank, before any weight changes:
            DataError: some rank's rows cannot be trained, or their rewards cannot be used.
            ModelError: the plan concatenates rows or shares prompts, and a model mixes such rows.
        """
        batch, layout = prepared.batch, prepared.layout
        self._packing.use(batch.packing)  # that of a recorded batch may be another machine's
        steps = self._micro_batches(prepared)
        rate = _learning_rate(self._config, batch.policy_version, self._total_batches)
        warms_up = self._critic is not None and batch.policy_version <= self._config.critic.warmup_batches
        began = time.monotonic()
        start = prepared.start or self._start(prepared, steps)
        forward_seconds = 0.0 if prepared.start else start.forward_seconds
        objective = start.objective
        norms, critic_norms = self._take_steps(start, layout, steps, None if warms_up else rate, before_step)
        self.optimizer_step += len(norms)
        figures = objective.sums.reduce(self._config.epochs_per_batch)
        losses = {name: value / len(steps) for name, value in figures.items() if name in ("loss", "value_loss")}
        metrics = {
            **figures,
            **objective.targets.figures,
            **losses,
            "grad_norm": _mean(norms),
            "learning_rate": rate,
            "skipped_steps": 0 if warms_up else objective.total_steps - len(norms),
            **prepared.packing,
            **self._adapt_kl(figures, objective.targets.reward_kl, len(layout.trajectories)),
            "seconds_forward_proximal": forward_seconds,
            "seconds_train": time.monotonic() - began - forward_seconds,
        }
        if self._critic is not None:
            skipped = objective.total_steps - len(critic_norms)
            metrics |= {"critic_grad_norm": _mean(critic_norms), "critic_skipped_steps": skipped}
        # JSON holds no other values; `skipped_steps` already reports gradients that are not finite.
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return StepResult(batch.policy_version, self.optimizer_step, bool(norms), metrics, start.mean_advantages)

    def _micro_batches(self, prepared: PreparedBatch) -> MicroBatches:
        steps: MicroBatches = ()
        failure = None
        try:
            steps = prepared.take_micro_batches()
        except DataError as error:
            failure = error
        if not self.all_agree(failure is None):
            other = f"batch {prepared.batch.policy_version}: the rows of another rank cannot be trained"
            raise failure or DataError(other)
        return steps

    def _start(self, prepared: PreparedBatch, steps: MicroBatches) -> BatchStart:
        layout, began = prepared.layout, time.monotonic()
        columns = compute_columns(
            layout,
            steps,
            self._config,
            policy=self._engine,
            reference=self._reference,
            critic=self._critic,
            device=self.device,
        )
        forward_seconds = time.monotonic() - began
        targets = learning_targets(
            layout,
            prepared.batch.headers,
            columns,
            self._config,
            components=self._components(prepared.groups),
            reward_kl_coefficient=self._coefficients.reward,
            max_response_tokens=self._max_response_tokens,
            seed=self._batch_seed(prepared.batch),
        )
        objective = BatchObjective(
            self._config,
            layout,
            columns,
            targets,
            policy_version=prepared.batch.policy_version,
            num_steps=len(steps),
            num_epochs=self._config.epochs_per_batch,
            coefficients=self._coefficients,
            max_response_tokens=self._max_response_tokens,
            seed=self._batch_seed(prepared.batch),
            device=self.device,
            counts_whole_batch=self.rank == 0,
        )
        first_step = None if needs_every_step(self._config) else objective.begin_step(0, None)
        return BatchStart(objective, first_step, _mean_advantages(layout, targets.advantages_N), forward_seconds)

    def _components(self, groups: Mapping[str, TrajectoryGroup]) -> dict[tuple[str, int], dict[str, float]]:
        """Every trajectory's reward components, broadcast from rank 0, which has all groups."""
        if not self._config.needs_components:
            return {}
        own = [[*key, parts] for key, parts in reward_components(groups).items()] if self.rank == 0 else None
        return {(group_id, number): parts for group_id, number, parts in self.broadcast_object(own)}

    def _take_steps(
        self,
        start: BatchStart,
        layout: BatchLayout,
        steps: Sequence[Sequence[MicroBatch]],
        rate: float | None,
        before_step: Callable[[], None],
    ) -> tuple[list[float], list[float]]:
        """Takes the optimizer steps of all epochs, only the critic's without a `rate`. Returns the gradient norms of
        the policy's and of the critic's steps, without skipped ones.
        """
        norms: list[float | None] = []
        critic_norms: list[float | None] = []
        objective, every_step = start.objective, needs_every_step(self._config)
        entropy = self._config.entropy_coefficient > 0
        for taken in range(objective.total_steps):
            step = taken % len(steps)
            micro_batches = steps[step]
            current_N = None
            if every_step:
                with torch.no_grad():
                    logprobs = [token_logprobs(self._engine, one) for one in micro_batches]
                current_N = layout.gather({(step, n): one for n, one in enumerate(logprobs)}, device=self.device)
            first = start.first_step if taken == 0 else None
            plan = first or objective.begin_step(taken, current_N)
            for number, micro_batch in enumerate(micro_batches):
                if rate is not None:
                    outputs = loss_token_statistics(self._engine, micro_batch, entropy=entropy)
                    self._engine.backward(objective.policy_loss(plan, number, micro_batch, outputs))
                if self._critic is not None:
                    loss = objective.value_loss(plan, number, self._critic.values(micro_batch))
                    self._critic.engine.backward(loss)
            before_step()
            if self._critic is not None:
                critic_norms.append(self._critic.engine.step(self._config.critic.learning_rate))
            if rate is not None:
                norms.append(self._engine.step(rate))
        return [norm for norm in norms if norm is not None], [norm for norm in critic_norms if norm is not None]

    def _batch_seed(self, batch: TrainBatch) -> int:
        return (self._seed * 1_000_003 + batch.policy_version * 1_009) % (1 << 31)

    def _adapt_kl(self, figures: Mapping[str, float], reward_kl: float, num_trajectories: int) -> dict[str, float]:
        """Adapts the KL coefficients to their targets and returns the metrics of the active KL penalties."""
        kl, used = self._config.kl, self._coefficients
        # While only the critic is trained, nothing is measured and β stays.
        loss_kl = figures.get("reference_kl", math.nan) if figures["trained_tokens"] > 0 else math.nan
        self._coefficients = next_coefficients(
            used, kl, reward_kl=reward_kl, loss_kl=loss_kl, num_trajectories=num_trajectories
        )
        in_reward = {} if kl.reward is None else {"reward_kl": reward_kl, "reward_kl_coefficient": used.reward}
        return in_reward | ({} if kl.loss is None else {"loss_kl_coefficient": used.loss})

    def save(
        self, folder: Path, batch_version: int, incarnation: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Writes a checkpoint that contains every batch up to `batch_version`, and deletes the oldest ones beyond the
        limit. `check` raises on rank 0 if another trainer took over: see `save_checkpoint`. Raises EnvironmentLackError
        if the disk is full.
        """
        save_checkpoint(
            self._trained_engines(),
            folder,
            self._config,
            self,
            batch_version=batch_version,
            incarnation=incarnation,
            optimizer_step=self.optimizer_step,
            kl_coefficients=asdict(self._coefficients),
            check=check,
        )
        if self.rank == 0:
            prune_checkpoints(folder.parent, self._config.keep_checkpoints)

    def load(self, folder: Path) -> int:
        """Restores a checkpoint bit for bit and returns the last batch it contains. Raises as `load_checkpoint`."""
        state = load_checkpoint(self._trained_engines(), folder, self._config, self)
        self.optimizer_step = state.optimizer_step
        self._coefficients = first_coefficients(self._config.kl, state.kl_coefficients)
        return state.batch_version

    def _trained_engines(self) -> dict[str, TrainingEngine]:
        critic = {} if self._critic is None else {"critic": self._critic.engine}
        return {"engine": self._engine, **critic}

    def export(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Writes the policy as a Hugging Face folder and replaces an existing one. LoRA adapters are merged into it,
        and also written separately to `<folder>-adapter`. With `weights`, which rank 0 has whole and other ranks leave
        empty, the policy is not gathered. Raises EnvironmentLackError if the disk is full.
        """
        if weights is None:
            # Weights that this rank holds whole do not change before this returns.
            copy = not self.gathers_in_threads
            weights = collect_weights(self.parameter_specs(), self.gather, keep=self.rank == 0, copy=copy)
        if self.rank == 0:
            write_export(self._model, weights, self._source, folder)
        if self._adapters is not None:
            beside = folder.with_name(f"{folder.name}-adapter")
            self._adapters.export(self._source, beside, writes=self.rank == 0)
        self.barrier()

    @property
    def broadcast_adapters(self) -> Adapters | None:
        """The adapters if samplers receive only them; None if they receive all weights."""
        lora = self._config.lora
        return self._adapters if lora is not None and lora.broadcast == "adapter" else None

    @property
    def gathers_in_threads(self) -> bool:
        """Whether another thread may `gather` on one rank alone while a batch is trained, up to its first optimizer
        step. On a GPU it would wait for the kernels of the batch.
        """
        return self._engine.holds_whole_weights and self.device.type == "cpu"

    def parameter_specs(self) -> list[ParameterSpec]:
        """Specs of every parameter, tied ones once; the same on all ranks."""
        return list(self._engine.specs) if self._adapters is None else self._adapters.specs()

    def gather(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """The full tensors of these parameters, adapters merged; valid only inside the block. All ranks must call it
        with the same names, unless `gathers_in_threads`.
        """
        return (self._engine if self._adapters is None else self._adapters).gather(names)

    def close(self) -> None:
        """Frees the engines and leaves the process group. The learner cannot be used afterwards."""
        for engine in self._engines():
            engine.close()
        self._backend.leave_process_group()


def _mean_advantages(layout: BatchLayout, advantages_N: Tensor) -> dict[TrajectoryKey, float]:
    """The mean advantage of each trajectory that has loss tokens."""
    means_R = row_means(advantages_N.cpu().double(), layout.lengths_R)
    found = zip(layout.trajectories, means_R.tolist(), layout.lengths_R.tolist(), strict=True)
    return {key: mean for key, mean, length in found if length}


def _mean(norms: Sequence[float]) -> float:
    return sum(norms) / len(norms) if norms else 0.0


def _learning_rate(config: TrainerConfig, policy_version: int, total_batches: int) -> float:
    """The learning rate of the batch that makes `policy_version` (the first is 1).

    A pure function, so that a resumed or replayed run needs no scheduler state. It rises linearly to its peak at batch
    `warmup_batches`. Then it stays constant, or falls along half a cosine to a tenth of the peak at `total_batches` and
    stays there.
    """
    if policy_version < config.warmup_batches:
        return config.learning_rate * policy_version / config.warmup_batches
    if config.schedule == "constant":
        return config.learning_rate
    progress = (policy_version - config.warmup_batches) / max(1, total_batches - config.warmup_batches)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (_FINAL_RATE + (1.0 - _FINAL_RATE) * cosine)
