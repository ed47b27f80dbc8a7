"""The reward client's items, scores and jobs to and from protobuf, and how items are split into requests. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from tandem.protos import reward_pb2
from tandem.protos.contracts import Parameter, Score, ScoreItem, ScorerInfo, Unscored
from tandem.protos.errors import DataError
from tandem.services.reward.wire import score_of

JobState = Literal["open", "running", "done", "cancelled", "expired"]
ItemMessage = reward_pb2.ScoreRequest.Item

_STATES: dict[int, JobState] = {getattr(reward_pb2.Job, state.upper()): state for state in get_args(JobState)}
_FRAME_BYTES = 6  # tag and length of an item in its request
_HEAD_BYTES = 256  # what a request holds besides items and rubric
_TARGET_BYTES = 1 << 20
_MAX_FAULT = 300


@dataclass(frozen=True, slots=True)
class Job:
    """The last known state of a reward job. `num_items` = `num_scored` + all of `num_unscored` + `num_waiting`."""

    job_id: str
    idempotency_key: str
    name: str
    state: JobState
    priority: int
    num_items: int
    num_scored: int
    num_unscored: Mapping[str, int]
    """Unscored items by reason; `cancelled` for items of a cancelled job that were never scored."""
    num_waiting: int
    mean_value: float
    """Mean score of the scored items."""
    created_at: float
    """Unix time in seconds, like the two below."""
    finished_at: float
    """0 until the job has ended."""
    expires_at: float
    """When the job is deleted with its results; 0 until the job has ended."""
    result_bytes: int
    """Bytes the service stores for it: results, the rubric until the job has ended, and an overhead."""

    @property
    def ended(self) -> bool:
        """Whether no more results will come. Those of an `expired` job were deleted to make room for later jobs."""
        return self.state in ("done", "cancelled", "expired")

    @property
    def num_settled(self) -> int:
        """Items that have a score or a reason."""
        return self.num_items - self.num_waiting


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A job's progress and, if requested, the results of the items from `first_item` on."""

    job: Job
    cursor: int
    """Where a later `watch` can continue."""
    first_item: int = 0
    results: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True)
class Scorers:
    """The scorers, limits and default rubric of a service."""

    scorers: tuple[ScorerInfo, ...]
    limits: Mapping[str, float]
    default_rubric: str
    """TOML; used for requests without a rubric."""


def job_from_proto(message: reward_pb2.Job) -> Job:
    """The job of a message. A state that this version does not know becomes `running`."""
    fields = {name: getattr(message, name) for name in Job.__dataclass_fields__}
    state = _STATES.get(message.state, "running")
    return Job(**{**fields, "state": state, "num_unscored": dict(message.num_unscored)})


def scorers_from_proto(message: reward_pb2.ListScorersReply) -> Scorers:
    infos = []
    for one in message.scorers:
        parameters = tuple(Parameter(p.name, p.type, p.default, p.description) for p in one.parameters)
        infos.append(ScorerInfo(one.name, one.version, one.summary, parameters, one.isolation))
    return Scorers(tuple(infos), dict(message.limits), message.default_rubric)


def score_from_proto(message: reward_pb2.ScoreReply.Item) -> Score:
    """The score of a message; `infrastructure` if it has none, because that is the service's fault."""
    return score_of(message) or Unscored("infrastructure", "the service sent neither a score nor a reason")


def item_to_proto(item: ScoreItem) -> ItemMessage | Unscored:
    """The item as a message, or why it cannot be encoded: not text, not JSON, not UTF-8."""
    fields: dict[str, str] = {}
    for name in ("data_source", "solution", "group"):
        value = getattr(item, name)
        if not isinstance(value, str):
            return Unscored("invalid_input", f"{name} is of type {type(value).__name__}, not text")
        fields[name] = value
    try:
        if item.ground_truth is not None:
            fields["ground_truth"] = json.dumps(item.ground_truth, ensure_ascii=False)
        if item.extra_info:
            fields["extra_info"] = json.dumps(dict(item.extra_info), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        return Unscored("invalid_input", f"ground_truth or extra_info holds what JSON cannot: {error}")
    for name, text in fields.items():
        if not _is_utf8(text):
            return Unscored("invalid_input", f"{name} holds half a surrogate pair, which is not a character")
    return ItemMessage(**fields)


def as_text(name: str, text: str) -> str:
    """The text. Raises DataError if UTF-8 cannot encode it."""
    if not _is_utf8(text):
        raise DataError(f"{name} {text!r:.80} cannot be encoded in UTF-8")
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest and the targeted size of a request, without its rubric. A group may be larger than the target."""

    max_items: int
    max_bytes: int
    target_items: int
    target_bytes: int

    @classmethod
    def of(cls, limits: Mapping[str, float], rubric: str, target_items: int) -> Limits:
        """For the items of a request with this rubric to a service with these limits. Raises DataError if no room is
        left.
        """
        max_items = int(limits["max_items_per_request"])
        max_bytes = int(limits["max_request_bytes"]) - _HEAD_BYTES
        left = max_bytes - len(as_text("the rubric", rubric).encode())
        if left <= 0:
            raise DataError(f"the rubric has {len(rubric):,} characters; a whole request may have {max_bytes:,} bytes")
        return cls(max_items, left, min(target_items, max_items), min(_TARGET_BYTES, left))


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item as it is sent: its index among the items given, its message, its bytes in a request."""

    index: int
    message: ItemMessage
    num_bytes: int
    fault: Unscored | None = None
    """Why the item could not be encoded. The message then is one that the service answers with `invalid_input`."""


def encode(index: int, item: ScoreItem | Unscored, limits: Limits) -> EncodedItem:
    """Encodes an item. It has a `fault` if it is an `Unscored`, has invalid fields, or is larger than a request."""
    message = item if isinstance(item, Unscored) else item_to_proto(item)
    if isinstance(message, ItemMessage):
        num_bytes = message.ByteSize() + _FRAME_BYTES
        if num_bytes <= limits.max_bytes:
            return EncodedItem(index, message, num_bytes)
        message = Unscored("limit", f"the item has {num_bytes:,} bytes; a whole request may have {limits.max_bytes:,}")
    group = "" if isinstance(item, Unscored) else item.group
    # The service quotes `extra_info` if it is no JSON object.
    quoted = json.dumps(message.detail[:_MAX_FAULT].encode(errors="replace").decode(), ensure_ascii=False)
    named = group if isinstance(group, str) and _is_utf8(group) else ""
    substitute = ItemMessage(extra_info=quoted, group=named)
    return EncodedItem(index, substitute, substitute.ByteSize() + _FRAME_BYTES, fault=message)


@dataclass(slots=True)
class Batcher:
    """Splits items into batches within limits, never inside a group, and the same items always at the same places. The
    items of a group must be adjacent.
    """

    limits: Limits
    _batch: list[EncodedItem] = field(default_factory=list)
    """The batch being filled, up to the last complete group."""
    _batch_bytes: int = 0
    _group: list[EncodedItem] = field(default_factory=list)
    """A group to which more items may be added."""
    _group_bytes: int = 0
    _complete: set[int] = field(default_factory=set)
    """Hashes of the complete groups."""

    def add(self, item: EncodedItem) -> list[list[EncodedItem]]:
        """Adds the next item; returns the batches that are full now. Raises DataError if a group does not fit into one
        request, or its items are not adjacent.
        """
        group = item.message.group
        if self._group and self._group[0].message.group == group:
            self._extend(item)
            return []
        full = self._close_group()
        if group:
            if hash(group) in self._complete:
                raise DataError(
                    f"item {item.index}: group {group!r:.80} comes back after other items; "
                    "the items of a group must be adjacent"
                )
            self._extend(item)
        else:
            full += self._place([item], item.num_bytes)
        return full

    def flush(self) -> list[EncodedItem]:
        """The batch as far as it is filled, without a group that may grow; may be empty."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        return batch

    def finish(self) -> list[list[EncodedItem]]:
        """The last batches, after the last item."""
        full = self._close_group()
        last = self.flush()
        return [*full, last] if last else full

    def _extend(self, item: EncodedItem) -> None:
        self._group.append(item)
        self._group_bytes += item.num_bytes
        limits = self.limits
        if len(self._group) > limits.max_items or self._group_bytes > limits.max_bytes:
            raise DataError(
                f"item {item.index}: group {item.message.group!r:.80} is larger than a request may be "
                f"({limits.max_items:,} items, {limits.max_bytes:,} bytes), and a group is never split"
            )

    def _close_group(self) -> list[list[EncodedItem]]:
        if not self._group:
            return []
        self._complete.add(hash(self._group[0].message.group))
        unit, num_bytes = self._group, self._group_bytes
        self._group, self._group_bytes = [], 0
        return self._place(unit, num_bytes)

    def _place(self, unit: list[EncodedItem], num_bytes: int) -> list[list[EncodedItem]]:
        limits = self.limits
        num_items, total_bytes = len(self._batch) + len(unit), self._batch_bytes + num_bytes
        overfull = num_items > limits.target_items or total_bytes > limits.target_bytes
        full = [self.flush()] if self._batch and overfull else []
        self._batch += unit
        self._batch_bytes += num_bytes
        if len(self._batch) >= limits.target_items:
            full.append(self.flush())
        return full


def order_by_group(items: Sequence[EncodedItem]) -> list[EncodedItem]:
    """The items with each group adjacent; groups in the order of their first items."""
    units: dict[str | int, list[EncodedItem]] = {}
    for item in items:
        units.setdefault(item.message.group or item.index, []).append(item)
    return [item for unit in units.values() for item in unit]


def split(items: Sequence[EncodedItem], limits: Limits) -> list[list[EncodedItem]]:
    """All batches of items whose groups are adjacent. Raises DataError as `Batcher.add`."""
    batcher = Batcher(limits)
    return [*(batch for item in items for batch in batcher.add(item)), *batcher.finish()]
