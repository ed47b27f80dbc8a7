"""Configuration of the samplers. Loads neither torch nor an engine's library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tandem.protos.options import MAX_TOP_K, Options


def engine_names() -> tuple[str, ...]:
    """Returns all engine names: the folders beside this file that hold an `engine.py`."""
    return tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/engine.py")))


class RolloutConfig(Options):
    """`[rollout]`: how answers are sampled, and by how many engines."""

    engine: str = "vllm"
    """Sampling engine: `vllm`, or `transformers`, which runs on machines and models that vLLM does not support. It is
    slower, except for tiny models on CPUs (docs/speed.md).
    """
    num_replicas: Annotated[int, Field(ge=0)] = 1
    """Samplers that `tandem run` starts; 0 if they are started by hand with `tandem serve rollout`."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 8
    """n: trajectories of one group, all sampled by one engine."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature of training samples; log-probs are recorded and recomputed under it. vLLM takes
    0.01 to 2.
    """
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] = 0
    """Samples only from the k most likely tokens; 0: from all. Which ones were left travels with the answer, up to 4·k
    bytes a token, because the trainer's log-probs are over the same tokens.
    """
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: of the top-k tokens only the most likely whose probabilities add up to this. Needs top_k."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Cuts off tokens less likely than this share of the most likely one's probability. Needs top_k."""
    max_response_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest answer, in sampled tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, besides the model's own end token."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs over which a sampler splits its model."""
    num_threads: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Threads of each sampler's worker on CPUs. With `auto`, `tandem run` divides the machine's cores by the workers;
    in a sampler started by itself the engine chooses, or it has one if `num_replicas` share the cores. Samplers that
    join later have as many; `tandem run` says if threads then share cores.
    """
    max_groups_in_flight: Annotated[int, Field(ge=1)] = 16
    """Maximum number of groups that a sampler samples at once. Episodes that wait for their environment for more than
    0.2 s, or have ended before others of their group, do not count, so that other groups use the engine meanwhile.
    """
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Memory of the KV cache on CPUs, or on a GPU shared with the trainer."""
    gpu_memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    """Share of a dedicated GPU that an engine may take."""
    lease_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Lifetime of a sampler's lease on a group without a renewal. It is renewed after a third of it."""
    partial_rollout: bool = True
    """Continue the unfinished answers of a sampler that dies or leaves from the tokens that it saved with its last
    renewal. False: they are sampled anew, which shortens answers if the weights have changed meanwhile.
    """
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port of the first replica; the others use the following ports. 0 picks free ports."""

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, name: str) -> str:
        if name not in engine_names():
            expected = " or ".join(f"'{known}'" for known in engine_names())  # as pydantic words it for a Literal
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name

    @model_validator(mode="after")
    def _bounds_the_sampling_masks(self) -> RolloutConfig:
        if not self.top_k and (self.top_p < 1.0 or self.min_p > 0.0):
            raise ValueError(
                "top_p and min_p need top_k, which bounds how many tokens are recorded for each sampled one; "
                f"set top_k, at most to {MAX_TOP_K}"
            )
        return self
