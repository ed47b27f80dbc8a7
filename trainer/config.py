"""Configuration of the trainer. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.backend.names import known_backend
from tandem.trainer.models.options import LoraOptions

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class TrainerConfig(AlgorithmConfig):
    """`[trainer]`: how the policy learns."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    backend: Annotated[str, AfterValidator(known_backend)] = "deepspeed"
    """`deepspeed` (ZeRO stages 0 to 3) or `fsdp` (PyTorch's FSDP2, which needs no further package)."""
    num_ranks: Annotated[int, Field(ge=1)] = 1
    """Trainer processes on this machine (one a GPU, or CPU processes)."""
    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Machines the trainer spreads over; past 1, `tandem serve trainer` on each joins torchrun's rendezvous."""
    rendezvous: str = ""
    """`host:port` of torchrun's rendezvous, needed when num_nodes > 1."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 3
    """DeepSpeed's ZeRO stage; `fsdp` partitions as stage 3 does and accepts no other."""
    offload_optimizer: bool = False
    """The optimizer's state lives in host memory and its step is taken there; needs zero_stage ≥ 1, in bfloat16 3. With
    `fsdp` it goes together with offload_parameters, and needs a GPU.
    """
    offload_parameters: bool = False
    """The engine's weights live in host memory between their uses; needs zero_stage = 3."""
    offload_reference: bool = False
    """Likewise for the frozen reference policy, which is partitioned whatever zero_stage says."""
    gradient_checkpointing: bool = False
    """Activations inside a layer are computed again in the backward pass instead of kept."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward pass, and of the engine's weights; the optimizer's state is float32."""
    learning_rate: Annotated[float, Field(ge=0.0)] = 1e-6
    """Peak learning rate of AdamW; 0 is a control run."""
    lora: LoraOptions | None = None
    """Train low-rank adapters alone."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up; cosine falls to a tenth at the last batch."""
    warmup_batches: Annotated[int, Field(ge=0)] = 0
    """Batches over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's moments, each at least 0 and below 1."""
    gradient_clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    optimizer_steps_per_batch: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps a batch is cut into, by group."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 16384
    """Most tokens (padding included) of one forward pass on one rank."""
    packing: Literal["auto", "padded", "flat"] = "auto"
    """Rows of a forward pass padded to the longest, or end to end without padding; `auto` is flat on GPUs whose
    variable-length attention suits model and dtype, else padded.
    """
    max_consecutive_rejections: Annotated[int, Field(ge=1)] = 1000
    """Groups rejected in a row by selection before the run fails with the counts."""
    max_skipped_batches: Annotated[int, Field(ge=1)] = 5
    """Batches in a row that skipped a step, of policy or critic, whose gradient norm is not finite, before the run
    fails.
    """
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Batches between two checkpoints; 0 writes only the last one."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Checkpoints kept on disk."""
    export_every: Annotated[int, Field(ge=0)] = 0
    """Batches between two exports as a Hugging Face folder; the final one is always written."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Batches between two evaluations; 0 evaluates the first and the last version, if there is an evaluation file."""
    collective_timeout_seconds: Annotated[float, Field(gt=0.0)] = 300.0
    """Deadline of every collective between ranks."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port of rank 0; 0 picks a free one."""


class WeightsConfig(BaseModel):
    """`[weights]`: how a new version reaches the samplers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    backend: Literal["gloo", "disk", "nccl", "ipc"] = "gloo"
    """`gloo` on CPUs, `nccl` across GPUs, `ipc` on one shared GPU, `disk` through a folder all can read."""
    bucket_bytes: Annotated[int, Field(ge=1 << 10)] = 64 << 20
    """Size of one broadcast."""
    deadline_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """A sampler that has not acknowledged by then is STALE and claims nothing until it is updated."""
