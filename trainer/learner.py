"""The learner: one rank of the policy's training. It turns planned batches into new weights, and knows neither Redis nor gRPC.

N: loss tokens of a micro-batch, flat.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from protos.errors import DataError
from protos.nouns import StepResult, TrainBatch, TrajectoryGroup
from trainer.advantages import batch_advantages, num_zero_variance_groups
from trainer.batch_metrics import TokenSums, finite
from trainer.batch_rows import rank_micro_batches
from trainer.checkpoint import CheckpointState, prune_checkpoints
from trainer.checkpoint_io import load_checkpoint, save_checkpoint
from trainer.config import TrainerConfig
from trainer.corrections import behavior_weights, correction_sums
from trainer.engine import build_engine, leave_process_group, start_process_group, whole_parameters
from trainer.export import ParameterSpec, collect_weights, write_export
from trainer.losses import ClipRange, policy_loss
from trainer.micro_batch import MicroBatch, token_logprobs
from trainer.model import load_model, model_folder
from trainer.planning import padding_fraction
from trainer.schedule import learning_rate


class Learner:
    """One of `world_size` ranks, as torchrun's environment variables say (none set: the only one). All ranks call the same methods.

    `optimizer_step` counts the steps that were taken; skipped ones are not among them.
    """

    def __init__(self, config: TrainerConfig, *, model_path: str, total_batches: int, seed: int) -> None:
        """Joins the process group and loads the model.

        Raises:
            ModelError: there is no such model, or it cannot be loaded.
        """
        self._config = config
        self._total_batches = total_batches
        self._source = model_folder(model_path)
        self.device = start_process_group(config.collective_timeout_seconds)
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        self.optimizer_step = 0
        torch.manual_seed(seed)
        self._model = load_model(self._source, config.dtype)
        self._engine = build_engine(config, self._model)
        self._parameters = dict(self._model.named_parameters())  # tied weights once, under the first of their names
        self._clip = ClipRange(config.clip_low, config.clip_high)

    def train(
        self,
        batch: TrainBatch,
        groups: Mapping[str, TrajectoryGroup],
        *,
        before_step: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Takes the batch's optimizer steps. `groups` holds at least those whose rows this rank trains; `before_step` is called
        before each of them, and what it raises prevents it.

        Raises:
            DataError: on every rank, if any rank's rows cannot be trained; the weights are untouched.
        """
        steps = self._micro_batches(batch, groups)
        rate = self._set_learning_rate(batch.policy_version)
        began = time.monotonic()
        proximal = self._proximal_logprobs(steps)
        forward_proximal_seconds = time.monotonic() - began
        sums = TokenSums(self.device)
        norms: list[float] = []
        for micro_batches, proximal_logprobs in zip(steps, proximal, strict=True):
            for micro_batch, proximal_N in zip(micro_batches, proximal_logprobs, strict=True):
                loss = self._loss(micro_batch, proximal_N, sums)
                # DeepSpeed averages over ranks, the shares are of the whole: times the ranks.
                self._engine.backward(loss * self.world_size, scale_wrt_gas=False)
            before_step()
            self._engine.step()
            if self._engine.was_step_applied():
                norms.append(float(self._engine.get_global_grad_norm()))
        self.optimizer_step += len(norms)
        figures = sums.reduce()
        metrics = {
            **figures,
            "loss": figures["loss"] / len(steps),
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "learning_rate": rate,
            "skipped_steps": len(steps) - len(norms),
            "num_micro_batches": sum(batch.num_micro_batches),
            "padding_fraction": padding_fraction(batch),
            **self._advantage_figures(batch),
            "seconds_forward_proximal": forward_proximal_seconds,
            "seconds_train": time.monotonic() - began - forward_proximal_seconds,
        }
        return StepResult(batch.policy_version, self.optimizer_step, changed=bool(norms), metrics=finite(metrics))

    def _micro_batches(self, batch: TrainBatch, groups: Mapping[str, TrajectoryGroup]) -> list[list[MicroBatch]]:
        failure: DataError | None = None
        steps: list[list[MicroBatch]] = []
        try:
            steps = rank_micro_batches(batch, groups, rank=self.rank, config=self._config, device=self.device)
        except DataError as error:
            failure = error
        if not self.all_agree(failure is None):
            raise failure or DataError(f"batch {batch.policy_version}: the rows of another rank cannot be trained")
        return steps

    def _set_learning_rate(self, policy_version: int) -> float:
        rate = learning_rate(
            policy_version,
            peak=self._config.learning_rate,
            warmup_batches=self._config.warmup_batches,
            total_batches=self._total_batches,
            schedule=self._config.schedule,
        )
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _proximal_logprobs(self, steps: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        """Of every micro-batch, from the weights at the batch's start; None where they are the current ones anyway, or not needed."""
        if len(steps) == 1 or self._config.correction == "none":
            return [[None] * len(micro_batches) for micro_batches in steps]
        with torch.no_grad():
            return [
                [token_logprobs(self._engine, micro_batch) for micro_batch in micro_batches] for micro_batches in steps
            ]

    def _loss(self, batch: MicroBatch, proximal_N: Tensor | None, sums: TokenSums) -> Tensor:
        current_N = token_logprobs(self._engine, batch)
        recomputed_N = current_N.detach() if proximal_N is None else proximal_N
        if self._config.correction == "truncated":
            cap, proximal_N = self._config.behavior_weight_cap, recomputed_N
            weights_N = behavior_weights(recomputed_N, batch.behavior_logprobs_N, cap=cap)
        else:
            cap, proximal_N = math.inf, batch.behavior_logprobs_N
            weights_N = torch.ones_like(recomputed_N)
        loss, loss_sums = policy_loss(
            current_N, proximal_N, batch.advantages_N, weights_N, batch.shares_N, clip=self._clip
        )
        sums.add(
            {**loss_sums, **correction_sums(recomputed_N, batch.behavior_logprobs_N, weights_N, cap=cap)}, weights_N
        )
        return loss

    def _advantage_figures(self, batch: TrainBatch) -> dict[str, float]:
        advantages = batch_advantages(batch.headers, self._config.advantage).values()
        return {
            "advantage_abs_mean": sum(map(abs, advantages)) / max(1, len(advantages)),
            "zero_variance_groups": num_zero_variance_groups(batch.headers),
        }

    def save(self, folder: Path, batch_version: int) -> None:
        """Writes a checkpoint that contains every batch up to `batch_version`, and prunes its elder siblings.

        Raises:
            EnvironmentLackError: the disk is full.
        """
        state = CheckpointState(
            batch_version=batch_version,
            optimizer_step=self.optimizer_step,
            world_size=self.world_size,
            zero_stage=self._config.zero_stage,
            dtype=self._config.dtype,
            trainer=self._config.model_dump(mode="json"),
        )
        save_checkpoint(self._engine, Path(folder), state, rank=self.rank, barrier=self.barrier)
        if self.rank == 0:
            prune_checkpoints(Path(folder).parent, self._config.keep_checkpoints)

    def load(self, folder: Path) -> int:
        """Goes on from a checkpoint, bit for bit as if never stopped, and returns the last batch it contains.

        Raises:
            DataError: there is no finished checkpoint.
            ConfigError: it was written by another number of ranks, ZeRO stage or dtype.
        """
        state = load_checkpoint(
            self._engine,
            Path(folder),
            world_size=self.world_size,
            zero_stage=self._config.zero_stage,
            dtype=self._config.dtype,
            rank=self.rank,
        )
        self.optimizer_step = state.optimizer_step
        return state.batch_version

    def export(self, folder: Path) -> None:
        """Writes the policy as a Hugging Face folder, in place of an earlier one of that name.

        Raises:
            EnvironmentLackError: the disk is full.
        """
        weights = collect_weights(self.parameter_specs(), self.gather, keep=self.rank == 0)
        if self.rank == 0:
            write_export(self._model, weights, self._source, Path(folder))
        self.barrier()

    def parameter_specs(self) -> list[ParameterSpec]:
        """(Hugging Face name, dtype as "float32", shape) of every parameter, tied ones once; the same on all ranks."""
        return [
            (name, str(parameter.dtype).removeprefix("torch."), tuple(getattr(parameter, "ds_shape", parameter.shape)))
            for name, parameter in self._parameters.items()
        ]

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """The whole tensors of these parameters, on every rank, to be read inside the block. All ranks enter with the same names."""
        chosen = {name: self._parameters[name] for name in names}
        with whole_parameters(list(chosen.values()), self._config.zero_stage):
            yield {name: parameter.detach() for name, parameter in chosen.items()}

    def all_agree(self, ok: bool) -> bool:
        """True on every rank if `ok` is on every rank."""
        if self.world_size == 1:
            return ok
        votes = torch.tensor([int(ok)], device=self.device)
        distributed.all_reduce(votes, distributed.ReduceOp.MIN)
        return bool(votes.item())

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank, which must be JSON: nothing on the wire is pickled."""
        if self.world_size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(data)], device=self.device)
        distributed.broadcast(size, 0)
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        distributed.broadcast(content, 0)
        return json.loads(bytes(content.cpu().numpy()))

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.all_agree(True)

    def close(self) -> None:
        """Leaves the process group. The learner is of no use afterwards."""
        self._engine.destroy()
        leave_process_group()
