"""What a client of the reward service says and hears, as values: items and scores ⇄ protobuf, jobs, scorers, and where
a long row of items is cut into messages. Pure: it knows no wire.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.protos import reward_pb2
from tandem.protos.contracts import Parameter, Score, ScoreItem, ScorerInfo, Unscored
from tandem.protos.errors import DataError
from tandem.services.reward.wire import MAX_ITEMS, MAX_REQUEST_BYTES, score_of

JobState = Literal["open", "running", "done", "cancelled", "expired"]
ItemMessage = reward_pb2.ScoreRequest.Item

_STATES: Mapping[int, JobState] = {
    reward_pb2.Job.OPEN: "open",
    reward_pb2.Job.RUNNING: "running",
    reward_pb2.Job.DONE: "done",
    reward_pb2.Job.CANCELLED: "cancelled",
    reward_pb2.Job.EXPIRED: "expired",
}
_FRAME_BYTES = 6  # tag and length of one item within its message
_HEAD_BYTES = 256  # what a message holds beside items and rubric
_MAX_FAULT = 300


@dataclass(frozen=True, slots=True)
class Job:
    """A reward job as the service last told it. `num_items` = `num_scored` + all of `num_unscored` + `num_waiting`."""

    job_id: str
    idempotency_key: str
    name: str
    state: JobState
    priority: int
    num_items: int
    num_scored: int
    num_unscored: Mapping[str, int]
    """By reason; `cancelled` for those of a cancelled job that never ran."""
    num_waiting: int
    mean_value: float
    """Of the scored items."""
    created_at: float
    """Unix time in seconds, as the two below."""
    finished_at: float
    """0 until the job has ended."""
    expires_at: float
    """When it is forgotten with its results; 0 until the job has ended."""
    result_bytes: int
    """Kept of it: its results, its rubric until it has ended, and some for itself."""

    @property
    def ended(self) -> bool:
        """True when no result will come any more. `expired`: those there were have been given up for later jobs."""
        return self.state in ("done", "cancelled", "expired")

    @property
    def num_settled(self) -> int:
        """Items that have a score or a reason."""
        return self.num_items - self.num_waiting


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A job's progress and, where they were asked for, results: those of item `first_item`, the next, …"""

    job: Job
    cursor: int
    """What `watch` goes on from."""
    first_item: int = 0
    results: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True)
class Scorers:
    """What a service offers."""

    scorers: tuple[ScorerInfo, ...]
    limits: Mapping[str, float]
    default_rubric: str
    """TOML; scores what comes without a rubric."""


def job_of(message: reward_pb2.Job) -> Job:
    """The job of a message. A state this version does not know counts as `running`."""
    return Job(
        job_id=message.job_id,
        idempotency_key=message.idempotency_key,
        name=message.name,
        state=_STATES.get(message.state, "running"),
        priority=message.priority,
        num_items=message.num_items,
        num_scored=message.num_scored,
        num_unscored=dict(message.num_unscored),
        num_waiting=message.num_waiting,
        mean_value=message.mean_value,
        created_at=message.created_at,
        finished_at=message.finished_at,
        expires_at=message.expires_at,
        result_bytes=message.result_bytes,
    )


def event_of(message: reward_pb2.JobEvent) -> JobEvent:
    """The event of a message."""
    results = tuple(result_of(item) for item in message.results.items)
    return JobEvent(job_of(message.job), message.cursor, message.results.first_item, results)


def scorers_of(message: reward_pb2.ListScorersReply) -> Scorers:
    """What a service offers, of its message."""
    infos = tuple(
        ScorerInfo(
            name=one.name,
            version=one.version,
            summary=one.summary,
            isolation=one.isolation,
            parameters=tuple(Parameter(p.name, p.type, p.default, p.description) for p in one.parameters),
        )
        for one in message.scorers
    )
    return Scorers(infos, dict(message.limits), message.default_rubric)


def result_of(message: reward_pb2.ScoreReply.Item) -> Score:
    """The score of a message; one without a result is unscored (`infrastructure`): the service is at fault."""
    return score_of(message) or Unscored("infrastructure", "the service sent neither a score nor a reason")


def message_of(item: ScoreItem) -> ItemMessage | Unscored:
    """The item as a message, or why it cannot be one: not text, not JSON, not UTF-8."""
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
            return Unscored("invalid_input", f"{name} holds half a surrogate pair, which is no character")
    return ItemMessage(**fields)


def as_text(name: str, text: str) -> str:
    """The text, which a message can carry. Raises DataError for half a surrogate pair, as Python makes of bytes that
    are no text.
    """
    if not _is_utf8(text):
        raise DataError(f"{name} {text!r:.80} is no text: it holds what UTF-8 cannot")
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def placeholder(fault: Unscored, group: str = "") -> ItemMessage:
    """A message that keeps the place of an item that cannot be judged.

    Its `extra_info` is JSON text where an object is due: every service answers that with `invalid_input` and quotes the
    text.
    """
    text = fault.detail[:_MAX_FAULT].encode(errors="replace").decode()
    return ItemMessage(extra_info=json.dumps(text, ensure_ascii=False), group=group)


@dataclass(frozen=True, slots=True)
class Limits:
    """Most items and bytes of one message (its rubric not counted), and how many are aimed at: a group may take more
    than that.
    """

    max_items: int
    max_bytes: int
    aim_items: int
    aim_bytes: int

    @classmethod
    def of(cls, limits: Mapping[str, float], *, aim_items: int, aim_bytes: int) -> Limits:
        """From what a service tells of itself."""
        max_items = int(limits.get("max_items_per_request", MAX_ITEMS))
        max_bytes = int(limits.get("max_request_bytes", MAX_REQUEST_BYTES)) - _HEAD_BYTES
        return cls(max_items, max_bytes, min(aim_items, max_items), min(aim_bytes, max_bytes))

    def beside(self, rubric: str) -> Limits:
        """What is left for the items of a message that carries this rubric too.

        Raises:
            DataError: nothing is, or the rubric is no text.
        """
        left = self.max_bytes - len(as_text("the rubric", rubric).encode())
        if left <= 0:
            raise DataError(
                f"the rubric has {len(rubric):,} characters; a whole request may have {self.max_bytes:,} bytes"
            )
        return Limits(self.max_items, left, self.aim_items, min(self.aim_bytes, left))


@dataclass(frozen=True, slots=True)
class Packed:
    """An item on its way: its place among the items given, its message, its bytes in a request."""

    index: int
    message: ItemMessage
    num_bytes: int
    fault: Unscored | None = None
    """Why the message is only a placeholder."""


def pack(index: int, item: ScoreItem | Unscored, limits: Limits) -> Packed:
    """The item as it travels: a placeholder if it is an `Unscored` already, has bad fields or more bytes than a message
    may have.
    """
    message = item if isinstance(item, Unscored) else message_of(item)
    if isinstance(message, ItemMessage):
        num_bytes = message.ByteSize() + _FRAME_BYTES
        if num_bytes <= limits.max_bytes:
            return Packed(index, message, num_bytes)
        message = Unscored("limit", f"the item has {num_bytes:,} bytes; a whole request may have {limits.max_bytes:,}")
    group = (
        "" if isinstance(item, Unscored) or not isinstance(item.group, str) or not _is_utf8(item.group) else item.group
    )
    standing_in = placeholder(message, group)
    return Packed(index, standing_in, standing_in.ByteSize() + _FRAME_BYTES, fault=message)


@dataclass(slots=True)
class Cutter:
    """Cuts a row of items into messages within limits, always at the same places, never inside a group.

    The items of a group must follow one another.
    """

    limits: Limits
    _whole: list[Packed] = field(default_factory=list)
    """Items of the message being filled, up to the last complete group."""
    _open: list[Packed] = field(default_factory=list)
    """Items of a group that may go on."""
    _whole_bytes: int = 0
    _open_bytes: int = 0
    _seen: set[int] = field(default_factory=set)
    """Hashes of the groups that are complete."""

    def add(self, item: Packed) -> list[list[Packed]]:
        """Takes the next item; returns the messages that are full with it.

        Raises:
            DataError: a group does not fit into one message, or comes back after others.
        """
        group = item.message.group
        if self._open and self._open[0].message.group == group:
            self._extend(item)
            return []
        full = self._close_group()
        if group:
            if hash(group) in self._seen:
                raise DataError(
                    f"item {item.index}: group {group!r:.80} comes back after other items; "
                    "items of one group must follow one another"
                )
            self._extend(item)
        else:
            full += self._place([item], item.num_bytes)
        return full

    def take(self) -> list[Packed]:
        """What has come of the message being filled, but for a group that may go on; empty if there is nothing."""
        taken, self._whole, self._whole_bytes = self._whole, [], 0
        return taken

    def finish(self) -> list[list[Packed]]:
        """The last messages: no more items will come."""
        full = self._close_group()
        last = self.take()
        return [*full, last] if last else full

    def _extend(self, item: Packed) -> None:
        self._open.append(item)
        self._open_bytes += item.num_bytes
        limits = self.limits
        if len(self._open) > limits.max_items or self._open_bytes > limits.max_bytes:
            raise DataError(
                f"item {item.index}: group {item.message.group!r:.80} has more than a "
                f"request may have: {limits.max_items:,} items, "
                f"{limits.max_bytes:,} bytes; a group is never split"
            )

    def _close_group(self) -> list[list[Packed]]:
        if not self._open:
            return []
        self._seen.add(hash(self._open[0].message.group))
        unit, num_bytes = self._open, self._open_bytes
        self._open, self._open_bytes = [], 0
        return self._place(unit, num_bytes)

    def _place(self, unit: list[Packed], num_bytes: int) -> list[list[Packed]]:
        limits = self.limits
        fits = len(self._whole) + len(unit) <= limits.aim_items and self._whole_bytes + num_bytes <= limits.aim_bytes
        full = [self.take()] if self._whole and not fits else []
        self._whole += unit
        self._whole_bytes += num_bytes
        if len(self._whole) >= limits.aim_items:
            full.append(self.take())
        return full


def groups_together(items: Sequence[Packed]) -> list[Packed]:
    """The items with those of one group behind one another, groups in the order of their first items."""
    units: dict[str | int, list[Packed]] = {}
    for item in items:
        units.setdefault(item.message.group or item.index, []).append(item)
    return [item for unit in units.values() for item in unit]


def cut(items: Sequence[Packed], limits: Limits) -> list[list[Packed]]:
    """All messages of a row of items whose groups stand together. Raises DataError as `Cutter.add`."""
    cutter = Cutter(limits)
    messages = [message for item in items for message in cutter.add(item)]
    return [*messages, *cutter.finish()]
