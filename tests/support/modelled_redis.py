"""A run in a real Redis beside its model: every script runs in both, and between any two of them a fault may happen."""

from __future__ import annotations

import pickle
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import pytest

from tandem.protos.errors import TandemError
from tandem.services.buffer import connection
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.buffer.types import LIVE_STATES
from tests.support import redis_ring as ring
from tests.support.buffer_model import LedgerModel
from tests.support.ledger_model import STAGES, Limiter

Fault = Literal["crash", "loss", "lost answer"]
NUM_REMEMBERED = 24
"""How many of the last calls a loss can take."""

_STEP_US = 1000
_START_US = 1_700_000_000_000_000
_CLOCK = f"""
local redis = setmetatable({{ call = function(name, ...)
  if name ~= 'TIME' then return redis.call(name, ...) end
  local now_us = redis.call('INCRBY', 'clock:' .. KEYS[1], {_STEP_US})
  return {{ string.format('%.0f', math.floor(now_us / 1000000)), string.format('%.0f', now_us % 1000000) }}
end }}, {{ __index = redis }})
"""
_META = (
    *("incarnation", "trainer_sequence", "cursor", "committed_version", "published_version", "recorded_version"),
    *("front", "back", "sequence", "token", "consecutive_drops", "feed_done"),
)


class CrashError(Exception):
    """The process that makes the call ends before it."""


def set_clock_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script sees the clock of Redis' host one millisecond later, and it moves by `pass_time` only."""
    original = connection.script_text
    monkeypatch.setattr(connection, "script_text", lambda space, verb: _CLOCK + original(space, verb))


class ModelledRun:
    """One run. The buffers that it opens run each script in Redis and in the model, which must answer the same."""

    def __init__(self, url: str, limiter: Limiter, budgets: dict[str, int]) -> None:
        self._url, self._limits = url, limiter
        self._buffers: list[Buffer] = []
        self._states: deque[tuple[dict[bytes, bytes], bytes]] = deque(maxlen=NUM_REMEMBERED)
        self._faults: list[tuple[int, Fault, int]] = []
        self._num_calls = 0
        self.num_losses = 0
        self.observer = Buffer(url, f"run-{uuid.uuid4().hex[:12]}")
        self._buffers.append(self.observer)
        self._redis, self._key = self.observer.connection.redis, self.observer.connection.key
        self._clock = f"clock:{self._key('meta')}"
        self.now_us = _START_US
        self._redis.set(self._clock, self.now_us - _STEP_US)
        self.observer.create(
            groups_per_batch=limiter.groups_per_batch,
            staleness_budget=limiter.staleness_budget,
            target_groups=limiter.target_groups,
            failure_budget=budgets,
            resume=False,
        )
        self.model = LedgerModel(limiter, budgets)
        self.orders = Orders(self.observer.connection)
        assert self.orders.hold("controller", 3600.0)
        self.now_us += _STEP_US
        self.model.clock = (self.now_us // 1000, 0)
        self._model_calls(self.observer, faulty=False)

    def open(self) -> Buffer:
        """A buffer of a process, between whose calls faults may happen."""
        buffer = Buffer(self._url, self.observer.run_id)
        self._buffers.append(buffer)
        self._model_calls(buffer, faulty=True)
        return buffer

    def close(self) -> None:
        self.observer.delete()
        self._redis.delete(self._clock)
        for buffer in self._buffers:
            buffer.close()

    def pass_time(self, seconds: float) -> None:
        self.now_us = int(self._redis.incrby(self._clock, round(1e6 * seconds)))

    def plan(self, fault: Fault, after: int, depth: int) -> None:
        """The fault happens before the call that follows so many others. A loss takes the `depth` calls before it."""
        self._faults.append((self._num_calls + after, fault, depth))

    def heal(self) -> None:
        """Forgets the faults that are planned."""
        self._faults.clear()

    # ---- calls ----

    def _model_calls(self, buffer: Buffer, *, faulty: bool) -> None:
        original = buffer.connection.run

        def run(verb: str, *arguments: bytes | str | int) -> Any:
            def call() -> Any:
                return self._compare(verb, lambda: original(verb, *arguments), arguments)

            if not faulty:
                return call()
            fault = self._due_fault()
            self._states.append((ring.saved_keys(self.observer), pickle.dumps(self.model)))
            if fault == "lost answer":
                with suppress(TandemError):  # nobody learns of it; the client calls again
                    call()
            return call()

        buffer.connection.run = run  # type: ignore[method-assign]

    def _due_fault(self) -> Fault | None:
        self._num_calls += 1
        due = next((one for one in self._faults if one[0] < self._num_calls), None)
        if due is None:
            return None
        self._faults.remove(due)
        _, fault, depth = due
        if fault == "crash":
            raise CrashError
        if fault == "loss":
            self._lose(depth)
        return fault

    def _lose(self, depth: int) -> None:
        if not self._states:
            return
        for _ in range(min(depth, len(self._states))):
            keys, model = self._states.pop()
        ring.restore_keys(self.observer, keys)
        self.model = pickle.loads(model)  # noqa: S301
        self.num_losses += 1

    def _compare(self, verb: str, call: Callable[[], Any], arguments: tuple[bytes | str | int, ...]) -> Any:
        self.now_us += _STEP_US
        expected, actual = _outcome(lambda: self.model.call(verb, self.now_us, arguments)), _outcome(call)
        if isinstance(actual, TandemError) or isinstance(expected, TandemError):
            assert type(actual) is type(expected), f"{verb} {arguments}: {actual!r}, the model: {expected!r}"
            raise actual
        found, wanted = _as_sent(verb, actual), _as_sent(verb, expected)
        assert found == wanted, f"{verb} {arguments}: {found!r}, the model: {wanted!r}"
        return actual

    # ---- what Redis holds ----

    def check_state(self) -> None:
        """Compares every queue in its order, every counter and mark with the model."""
        model, queues = self.model, (*LIVE_STATES, "trained")
        with self._redis.pipeline() as pipeline:
            pipeline.hgetall(self._key("states"))
            pipeline.hgetall(self._key("counters"))
            pipeline.smembers(self._key("outstanding"))
            pipeline.smembers(self._key("reentered"))
            pipeline.hkeys(self._key("set_aside"))
            pipeline.hmget(self._key("meta"), *_META)
            for stage in (*STAGES, "scored"):
                pipeline.llen(self._key(f"signal:{stage}"))
            for queue in queues:
                pipeline.zrange(self._key(queue), 0, -1, withscores=True)
            states, counters, outstanding, reentered, set_aside, meta, *more = pipeline.execute()
        assert _texts(states) == {group_id: group.state for group_id, group in model.groups.items()}
        known = {name: int(value) for name, value in _texts(counters).items()}
        figures = dict.fromkeys((name for name in known if name.startswith("dropped")), 0) | model.figures()
        assert {name: known.get(name, 0) for name in figures} == figures
        assert {one.decode() for one in outstanding} == model.limiter.outstanding
        assert {one.decode() for one in reentered} == model.reentered
        assert {one.decode() for one in set_aside} == model.set_aside
        for name, value in zip(_META, meta, strict=True):
            assert (value or b"0").decode() == str(getattr(model, name) or 0), name
        for stage, num_signals in zip((*STAGES, "scored"), more[:3], strict=True):
            assert num_signals or not model.queue(f"{stage}_waiting"), f"nobody is told of a group of {stage}"
        for queue, members in zip(queues, more[3:], strict=True):
            assert [(one.decode(), place) for one, place in members] == [
                (one, model.groups[one].place) for one in model.queue(queue)
            ], queue


def _texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except TandemError as error:
        return error


def _as_sent(verb: str, reply: Any) -> Any:
    """A reply as Redis sends it; `counts` in any order and without what is 0."""
    if not isinstance(reply, list):
        return None if reply is None else reply if isinstance(reply, bytes) else str(reply).encode()
    flat = [_as_sent("", one) for one in reply]
    if verb == "counts":
        return {name: value for name, value in zip(flat[::2], flat[1::2], strict=True) if value != b"0"}
    return flat
