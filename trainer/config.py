"""Configuration of the trainer. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from tandem.protos.error_text import did_you_mean
from tandem.protos.options import Options
from tandem.trainer.algorithm import AlgorithmConfig

_REPLY_SECONDS = 15.0
"""Of pings and replies of samplers, beside the deadlines of a publication."""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _known_backend(name: str) -> str:
    """Refuses a name that is no folder in trainer/backend."""
    names = sorted(file.parent.name for file in Path(__file__).parent.glob("backend/*/engine.py"))
    if name not in names:
        raise ValueError(f"there is no training backend {name!r}{did_you_mean(name, names)}")
    return name


class LoraOptions(Options):
    """Low-rank adapters (LoRA, arXiv 2106.09685): W + (alpha/rank)·B·A, of which only A and B are trained.

    There is no dropout, so that training sees the same policy as sampling.
    """

    rank: Annotated[int, Field(ge=1)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The product B·A is scaled by alpha/rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get adapters, by the end of their names; `all-linear` means all except the output head."""
    broadcast: Literal["adapter", "merged"] = "adapter"
    """What is sent to samplers: `adapter` sends A and B, which each sampler merges into its base weights; `merged`
    sends all weights.
    """


class TrainerConfig(AlgorithmConfig):
    """`[trainer]`: training of the policy."""

    backend: Annotated[str, AfterValidator(_known_backend)] = "deepspeed"
    """`deepspeed` (ZeRO stages 0 to 3) or `fsdp` (PyTorch's FSDP2, which needs no further package)."""
    num_ranks: Annotated[int, Field(ge=1)] = 1
    """Trainer processes on this machine, one per GPU, or CPU processes."""
    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Machines that the trainer runs on. With more than 1, run `tandem serve trainer` on each, with `run.host` set to
    an address of that machine, over which the ranks connect. They find one another in the run's Redis.
    """
    num_threads: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Threads of each rank on CPUs. With `auto`, `tandem run` divides the machine's cores by the ranks; samplers may
    use the same cores, because threads that wait sleep. A model with a hidden size below 256 gets one thread. Sums
    depend on the number, so a run keeps the one that it began with; `tandem run` says if threads then share cores. A
    trainer started by itself has one thread with `auto`.
    """
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """DeepSpeed's ZeRO stage. `auto` is 3 with several ranks or an offload; with one rank, which has nothing to
    partition, it is 0 in float32 and 1 in bfloat16. A run keeps the stage that it began with. `fsdp` partitions like
    stage 3 and accepts no other.
    """
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and take its step there; needs zero_stage ≥ 1, in bfloat16 3. With
    `fsdp` it requires offload_parameters and a GPU.
    """
    offload_parameters: bool = False
    """Keep the engine's weights in host memory between uses; needs zero_stage = 3."""
    offload_reference: bool = False
    """Keep the frozen reference policy's weights in host memory between uses; it is always partitioned, with any
    zero_stage.
    """
    gradient_checkpointing: bool = False
    """Recompute the activations inside a layer in the backward pass instead of storing them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward pass and of the engine's weights; the optimizer's state is float32. On CPUs
    with AMX, bfloat16 is faster from a hidden size of 512 on.
    """
    learning_rate: Annotated[float, Field(ge=0.0)] = 1e-6
    """Peak learning rate of AdamW; 0 makes a control run."""
    lora: LoraOptions | None = None
    """Train only low-rank adapters."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up; `cosine` falls to a tenth of the peak at the last batch."""
    warmup_batches: Annotated[int, Field(ge=0)] = 0
    """Batches over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's moments, each at least 0 and below 1."""
    gradient_clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest global gradient norm; 0 disables clipping."""
    optimizer_steps_per_batch: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per epoch of a batch, which is split by group."""
    epochs_per_batch: Annotated[int, Field(ge=1)] = 1
    """How often a batch is trained before its version is published (verl's ppo_epochs). Every epoch takes the same
    optimizer steps in the same order; advantages and proximal log-probs stay those of the batch's start.
    """
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 16384
    """Maximum number of tokens (padding included) of one forward pass on one rank."""
    packing: Literal["auto", "padded", "flat", "shared"] = "auto"
    """Whether the rows of a forward pass are padded to the longest (`padded`), concatenated without padding (`flat`),
    or concatenated with the prompt of several answers only once (`shared`). `auto` is shared for a batch if that leaves
    at most 0.85 of the tokens and the model's attention allows it, else flat on GPUs whose variable-length attention
    supports the model and dtype, else padded.
    """
    max_consecutive_rejections: Annotated[int, Field(ge=1)] = 1000
    """Consecutive groups that selection may reject before the run fails."""
    max_skipped_batches: Annotated[int, Field(ge=1)] = 5
    """Consecutive batches that may skip a policy or critic step for a non-finite gradient norm before the run fails."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Batches between two checkpoints, which a restarted trainer may have to train again, and which Redis keeps until
    then. 0: a twentieth of run.total_batches, but at least 10 and at most 50. The last version always gets one.
    """
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Number of checkpoints kept on disk."""
    export_every: Annotated[int, Field(ge=0)] = 0
    """Batches between two exports as a Hugging Face folder; the final one is always written."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Batches between two evaluations; 0 evaluates only the first and the last version, if there is an evaluation file.
    """
    collective_timeout_seconds: Annotated[float, Field(gt=0.0)] = 300.0
    """Deadline of every collective between ranks."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port of rank 0; 0 picks a free one."""

    @model_validator(mode="after")
    def _loss_fits_epochs(self) -> TrainerConfig:
        if self.epochs_per_batch > 1 and self.loss.name == "reinforce" and not self.correction.needs_ratio_free_loss:
            raise ValueError(
                f"epochs_per_batch is {self.epochs_per_batch}, but loss reinforce ignores how far the policy has moved "
                "since the batch began: take another loss, a bypassed correction with weights, or 1 epoch"
            )
        return self

    @property
    def resolved_zero_stage(self) -> int:
        """`zero_stage`, or the stage that `auto` stands for (measured by benchmarks/learner.py)."""
        if self.zero_stage != "auto":
            return self.zero_stage
        offloads = self.offload_optimizer or self.offload_parameters
        if self.backend == "fsdp" or self.num_ranks * self.num_nodes > 1 or offloads:
            return 3
        return 0 if self.dtype == "float32" else 1  # in bfloat16, stage 0 sums gradients in bfloat16


class WeightsConfig(Options):
    """`[weights]`: distribution of new versions to the samplers."""

    backend: Literal["gloo", "disk", "nccl", "ipc"] = "gloo"
    """`gloo` on CPUs, `nccl` across GPUs, `ipc` on one shared GPU, `disk` through a shared folder."""
    bucket_bytes: Annotated[int, Field(ge=1 << 10)] = 64 << 20
    """Size of one broadcast."""
    encoding: Literal["full", "delta"] = "full"
    """`full` sends every version whole. `delta` sends, over gloo, the lossless difference to the version that all
    samplers hold, compressed; a bucket of which too much changed is sent whole. Each worker of a sampler then keeps one
    more copy of the weights in host memory.
    """
    deadline_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Deadline of an update. A sampler that has not acknowledged it by then is STALE and claims nothing until it is
    updated. With several ranks and `ipc` or `nccl`, all ranks wait for an update, so the deadline (with `nccl` twice
    the deadline) and 15 s must be less than trainer.collective_timeout_seconds.
    """

    @property
    def sends_snapshots(self) -> bool:
        """Whether versions are sent from a copy in host memory, beside training, and not from a GPU's memory."""
        return self.backend in ("gloo", "disk")

    def check_deadline(self, num_ranks: int, collective_timeout_seconds: float) -> None:
        """Raises ValueError if a publication may last longer than the other ranks wait for rank 0. With `nccl`,
        samplers have one deadline to join and another one to receive.
        """
        most = (2 if self.backend == "nccl" else 1) * self.deadline_seconds + _REPLY_SECONDS
        if not self.sends_snapshots and num_ranks > 1 and most >= collective_timeout_seconds:
            raise ValueError(
                f'with weights.backend "{self.backend}" all ranks wait for a publication, which may take {most:g} s; '
                f"lower weights.deadline_seconds ({self.deadline_seconds:g}) or raise "
                f"trainer.collective_timeout_seconds ({collective_timeout_seconds:g})"
            )


class SftConfig(Options):
    """`[sft]`: supervised warm start, used by `tandem sft`."""

    train_file: str = ""
    """Rows with an answer to imitate: `extra_info.answer`, else `reward_model.ground_truth`."""
    output: str = ""
    """Folder for the warm-started model. It must not exist yet."""
    max_steps: Annotated[int, Field(ge=1)] = 1000
    """Maximum number of optimizer steps."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Rows per step."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-3
    """Peak learning rate; linear warm-up over the first twentieth of max_steps, then constant."""
    target_accuracy: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Training stops when the sampled validation accuracy reaches this; 0 trains all steps."""
    validate_every: Annotated[int, Field(ge=1)] = 100
    """Steps between validations on `data.eval_file`."""
    validation_rows: Annotated[int, Field(ge=1)] = 200
    """Rows sampled by a validation."""
