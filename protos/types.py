"""The types that services exchange, as frozen dataclasses.

Prompt → Trajectory → ScoredTrajectory → TrajectoryGroup → TrainBatch → StepResult → WeightManifest.

Arrays are numpy, one dimension, T = tokens of a segment (prompt and tool tokens included).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.protos.contracts import UnscoredReason as UnscoredReason
from tandem.protos.options import MAX_TOP_K

Role = Literal["policy", "baseline"]
FinishReason = Literal["stop", "length", "abort", "error"]
Packing = Literal["padded", "flat", "shared"]


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Sampling parameters of one group. `max_tokens` counts sampled tokens. `seed` None means unseeded.

    The logits are divided by the temperature, then min-p, top-k and top-p are applied in this order.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    seed: int | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p is applied."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def records_mask(self) -> bool:
        """Whether samplers record the sampling mask. Only top-k bounds its size."""
        return self.temperature > 0 and self.repetition_penalty == 1.0 and 0 < self.top_k <= MAX_TOP_K

    @property
    def trainable(self) -> bool:
        """Whether the trainer can recompute the distribution of the recorded log-probs."""
        return self.records_mask or (self.temperature > 0 and self.repetition_penalty == 1.0 and not self.truncates)

    @property
    def greedy(self) -> SamplingParameters:
        """The same with temperature 0, for a `baseline`."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt instance: row `index` of the dataset in pass `epoch`; `group_id` is `"<epoch>-<index>"`."""

    epoch: int
    index: int
    token_ids: NDArray[np.int32]
    num_samples: int
    sampling: SamplingParameters
    data_source: str = ""
    ability: str = ""
    ground_truth: Any = None
    messages: tuple[Mapping[str, Any], ...] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group_id(self) -> str:
        return f"{self.epoch}-{self.index}"

    def judged_info(self, num_tokens: int) -> Mapping[str, object]:
        """`extra_info` for scorers, and `num_tokens` (sampled) and `prompt` (messages) where it lacks them."""
        prompt = {"prompt": [dict(message) for message in self.messages]} if self.messages else {}
        return {"num_tokens": num_tokens, **prompt, **self.extra_info}


class DataRow(Protocol):
    """What a row of a data set says. Prompts have it, too."""

    @property
    def data_source(self) -> str: ...
    @property
    def messages(self) -> Sequence[Mapping[str, object]]: ...
    @property
    def ability(self) -> str: ...
    @property
    def ground_truth(self) -> object: ...
    @property
    def extra_info(self) -> Mapping[str, object]: ...


def task_of(row: DataRow) -> Mapping[str, object]:
    """The task that an environment gets: the row in verl's columns."""
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.messages],
        "ability": row.ability,
        "ground_truth": row.ground_truth,
        "extra_info": dict(row.extra_info),
    }


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weight version that sampled the tokens of a segment from `first_token` (index into `Segment.ids`) on."""

    first_token: int
    incarnation: int
    policy_version: int


version_span = lru_cache(maxsize=4096)(VersionSpan)
"""Makes a span, or returns an equal one, in a sixth of the time: the rows of a batch have few different ones."""


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The tokens that top-k, top-p and min-p left when each token of a segment was sampled.

    `counts` int32 (T,): how many were left, 0 for a token that was not sampled. `ids` int32 (sum of the counts,): the
    tokens left at the first place, then those at the second, and so on, each time in any order.
    """

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """A token sequence that one forward pass trains.

    All arrays (T,): ids int32, behavior_logprobs float32 (0 where loss_mask is 0), loss_mask uint8.
    """

    ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]
    spans: tuple[VersionSpan, ...]
    sampling_mask: SamplingMask | None = None
    """None if every token was sampled from the whole vocabulary."""

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens before the first loss token; 0 without a loss token."""
        return int(self.loss_mask.argmax()) if len(self.loss_mask) else 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled answer, usually of one segment. An agent that rewrites its history has more segments.

    `text` is the decoded sampled text. `earned_reward` is the sum of what an agent earned during the episode;
    `token_rewards`, if present, assigns it to tokens: one float32 array (T,) per segment.
    """

    trajectory_id: int
    role: Role
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    text: str
    sampling: SamplingParameters
    earned_reward: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    token_rewards: tuple[NDArray[np.float32], ...] | None = None


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A trajectory with either a reward (what it earned plus its score) or the reason why it has none."""

    trajectory: Trajectory
    reward: float | None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    unscored_reason: UnscoredReason | None = None
    unscored_detail: str = ""

    def __post_init__(self) -> None:
        assert (self.reward is None) == (self.unscored_reason is not None), "a row has a reward or a reason"


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """One prompt and its trajectories: none at stage `prompts`, without scores at `generated`, scored at `scored`."""

    prompt: Prompt
    rows: tuple[Trajectory | ScoredTrajectory, ...] = ()

    @property
    def group_id(self) -> str:
        return self.prompt.group_id

    @property
    def scored_rows(self) -> tuple[ScoredTrajectory, ...]:
        return tuple(row for row in self.rows if isinstance(row, ScoredTrajectory))


@dataclass(frozen=True, slots=True)
class RowHeader:
    """The fields of one segment that planning needs, without its payload."""

    group_id: str
    trajectory_id: int
    segment: int
    role: Role
    num_tokens: int
    num_loss_tokens: int
    reward: float | None
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    temperature: float
    num_prompt_tokens: int = 0
    """Tokens before the first loss token."""
    prompt_digest: int = 0
    """Of these tokens: rows with equal ones can share their computation."""

    @property
    def is_scored(self) -> bool:
        """Whether the policy sampled the segment and it has a reward. Only such segments take part in advantages."""
        return self.role == "policy" and self.reward is not None

    @property
    def is_trained(self) -> bool:
        """Whether the segment is scored and has a loss token."""
        return self.is_scored and self.num_loss_tokens > 0


def scored_trajectories(headers: Iterable[RowHeader]) -> dict[tuple[str, int], list[RowHeader]]:
    """(group id, trajectory id) → segments of every scored trajectory."""
    found: dict[tuple[str, int], list[RowHeader]] = {}
    for header in headers:
        if header.is_scored:
            found.setdefault((header.group_id, header.trajectory_id), []).append(header)
    return found


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Optimizer step, rank, micro-batch, and position in the micro-batch at which one segment is trained."""

    group_id: str
    trajectory_id: int
    segment: int
    optimizer_step: int
    rank: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """P groups and the plan of their rows. Training the batch yields `policy_version`."""

    policy_version: int
    incarnation: int
    group_ids: tuple[str, ...]
    headers: tuple[RowHeader, ...]
    plan: tuple[PlannedRow, ...]
    num_micro_batches: tuple[int, ...]
    """Per optimizer step, the same on every rank; ranks with fewer rows pad with zero-weight micro-batches."""
    packing: Packing = "padded"
    """Layout of a micro-batch: one line per row, padded to the longest row, or all rows concatenated in one line, a
    prompt of several rows only once if `shared`.
    """


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of training one batch. `changed` is False if every optimizer step was skipped."""

    policy_version: int
    optimizer_step: int
    changed: bool
    metrics: Mapping[str, float]
    advantages: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """(group id, trajectory id) → mean over the trajectory's loss tokens."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor inside a bucket: `offset` and size in bytes of the flat uint8 bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


DigestAlgorithm = Literal["xxh3", "sums"]


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One broadcast: a flat uint8 tensor that holds `tensors`. `digest`: hex digest of its bytes, "" until sent."""

    num_bytes: int
    tensors: tuple[TensorSpec, ...]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter-only version: buckets of `W.lora_A` (rank, in) and `W.lora_B` (out, rank) of each adapted matrix W.

    The adapted weights are W + scaling·B·A; the other base weights are unchanged.
    """

    rank: int
    scaling: float
    base: tuple[BucketSpec, ...]
    """The base weights with their digests."""
    brings_base: bool = False
    """The base buckets are sent first, for a sampler that lacks the base."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What is broadcast of one version. Without buckets, the version equals the previous one."""

    incarnation: int
    policy_version: int
    backend: str
    buckets: tuple[BucketSpec, ...]
    location: str = ""
    """`disk`: the folder of the safetensors files. `ipc`: the encoded handles. Otherwise empty."""
    adapters: AdapterSpec | None = None
    """None: the buckets hold full weights."""
    encoding: str = "full"
    """`delta`: samplers keep the buckets, and the size of each broadcast is sent before it."""
    base: tuple[int, int] | None = None
    """Incarnation and version from which buckets that are smaller on their way differ. None: all are sent whole."""
    digest_algorithm: DigestAlgorithm = "xxh3"
    """`xxh3` is fast in host memory, `sums` on a GPU."""


@dataclass(frozen=True, slots=True)
class WeightGroupAddress:
    """The sender's host, towards which the ranks of a weight group connect, and the group's name in the run's store."""

    host: str
    group_name: str
    world_size: int
    backend: str
