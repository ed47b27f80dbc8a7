"""Remote scorer: an HTTP service that scores items, such as a code sandbox or another team's reward server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast, get_args

from pydantic import Field, PrivateAttr

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored, UnscoredReason
from tandem.reward.contracts import Scorer
from tandem.reward.endpoints.http_client import (
    Fault,
    HttpClient,
    check_url,
    open_client,
    read_json,
    read_key,
    wait_in_queue,
    with_retries,
)
from tandem.reward.endpoints.session_portal import CLOSING, ClosedError, SessionPortal
from tandem.reward.scheduling.admission_queue import PrioritySemaphore
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority
from tandem.reward.text.numbers import finite

_ITEM_FIELDS = ("data_source", "solution", "ground_truth", "extra_info", "group")
_REASONS: tuple[UnscoredReason, ...] = get_args(UnscoredReason)
_DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class EndpointSession:
    """What the requests to one service share; lives on one event loop."""

    client: HttpClient
    slots: PrioritySemaphore
    """As many as requests may be under way."""
    priority: Priority = "calls"
    """Of those who ask here."""


class RemoteScorer(Scorer):
    """The score that an HTTP service gives. Items are POSTed as JSON, and results come back as JSON.

    By default it sends and expects this, with one result an item, in order:

        {"items": [{"data_source": …, "solution": …, "ground_truth": …, "extra_info": {…}, "group": …}, …]}
        {"results": [{"score": 0.5, "breakdown": {"style": 1}}, {"reason": "timeout", "detail": "…"}, …]}

    `reason` is one of timeout, crashed, infrastructure, invalid_input, limit; the breakdown may be absent. The names
    can be mapped for other services. A code sandbox like Sandbox Fusion, with one run a request:

        items_key = "", fields = {code = "solution", stdin = "extra_info.stdin"}, constants = {language = "python"},
        score_path = "status", labels = {Success = 1, Failed = 0}

    Failures get a reason as described in `tandem.reward.endpoints.http_client`: no connection, an unreadable reply, 429
    and 5xx are `infrastructure` and are tried again; 4xx is `invalid_input`; the deadline is `timeout`. A batch that
    fails in a way that one of its items may have caused is sent again item by item, so that one bad item does not
    affect the others.

    Example:
        >>> scorer = RemoteScorer(url="http://127.0.0.1:8080/score")
        >>> scorer.judge_batch([])
        []
        >>> scorer.close()
    """

    VERSION = "1"
    ISOLATION = "remote"

    url: str
    """Address that items are POSTed to."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key, sent as bearer token; empty: none is sent."""
    batch_size: Annotated[int, Field(ge=1)] = 1
    """Maximum number of items a request."""
    items_key: str = "items"
    """Key of the request with the list of items; empty: the request is one item, the reply its result."""
    results_key: str = "results"
    """Key of the reply with the list of results; empty: the reply is the list."""
    fields: dict[str, str] = Field(default_factory=dict)
    """How an item is sent: name in the request → `solution`, `ground_truth`, `data_source`, `group`, `extra_info` or
    `extra_info.NAME`. Empty: all five by their own names. An item that lacks a named `extra_info.NAME` is unscored
    (`invalid_input`).
    """
    constants: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Fields that are added to every item unchanged."""
    score_path: Annotated[str, Field(min_length=1)] = "score"
    """Path of a result's score: keys separated by dots. The score is a number, true or false, or one of `labels`."""
    breakdown_path: str = "breakdown"
    """Path of a result's components, an object of numbers; empty: there are none."""
    labels: dict[str, float] = Field(default_factory=dict)
    """Numbers for scores that are words, e.g. `{Success = 1.0, Failed = 0.0}`; other words are not accepted. Empty: the
    score is a number.
    """
    max_concurrent: Annotated[int, Field(ge=1)] = 16
    """Maximum number of concurrent requests."""
    max_attempts: Annotated[int, Field(ge=1)] = 4
    """Maximum number of requests for one batch."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Longest wait for one attempt."""
    deadline_seconds: Annotated[float, Field(gt=0.0)] = 120.0
    """Longest time of one item, including all attempts and pauses, but not the wait for one of the `max_concurrent`
    slots. A batch has half of it, its single items the rest.
    """
    _portal: SessionPortal[EndpointSession] = PrivateAttr()

    def model_post_init(self, context: object, /) -> None:
        check_url("url", self.url)
        if not self.items_key and self.batch_size > 1:
            raise ValueError("batch_size above 1 needs items_key: without it a request is one item")
        for name, source in self.fields.items():
            if source.partition(".")[0] not in _ITEM_FIELDS or ("." in source and not source.startswith("extra_info.")):
                raise ValueError(f"fields.{name}: {source!r} is none of {', '.join(_ITEM_FIELDS)}, extra_info.NAME")
        if both := sorted(set(self.constants) & set(self.fields or _ITEM_FIELDS)):
            raise ValueError(f"constants.{both[0]} is also a field of the item")
        read_key(self.api_key_env)
        self._portal = SessionPortal("remote-scorer", self._open_session)

    def judge_batch(self, items: Sequence[ScoreItem], *, priority: Priority = "calls") -> list[Score]:
        """One result an item, in order. Thread-safe; blocks its caller."""
        scores: list[Score] = [CLOSING] * len(items)
        bodies: dict[int, str] = {}
        for number, item in enumerate(items):
            body = self._written(item)
            if isinstance(body, Unscored):
                scores[number] = body
            else:
                bodies[number] = body
        if bodies:
            with suppress(ClosedError):
                self._portal.run(lambda session: self._judge_all(replace(session, priority=priority), bodies, scores))
        return scores

    def close(self) -> None:
        """Ends what is under way: it comes back unscored (`infrastructure`), and so does all that is asked later."""
        self._portal.close()

    def figures(self) -> dict[str, float]:
        """Requests sent since the start, and those that wait now."""
        session = self._portal.session
        return {
            "remote_requests": 0.0 if session is None else float(session.client.num_requests),
            **{
                f"remote_waiting_{priority}": 0.0 if session is None else float(session.slots.waiting(priority))
                for priority in PRIORITIES
            },
        }

    @asynccontextmanager
    async def _open_session(self) -> AsyncIterator[EndpointSession]:
        async with open_client(
            self.url,
            key=read_key(self.api_key_env),
            max_connections=self.max_concurrent,
            attempt_seconds=self.timeout_seconds,
        ) as client:
            yield EndpointSession(client, PrioritySemaphore(self.max_concurrent))

    async def _judge_all(self, session: EndpointSession, bodies: Mapping[int, str], scores: list[Score]) -> None:
        numbers = list(bodies)
        async with asyncio.TaskGroup() as tasks:
            for start in range(0, len(numbers), self.batch_size):
                tasks.create_task(self._judge_some(session, numbers[start : start + self.batch_size], bodies, scores))

    async def _judge_some(
        self, session: EndpointSession, numbers: Sequence[int], bodies: Mapping[int, str], scores: list[Score]
    ) -> None:
        alone = len(numbers) == 1
        seconds = self.deadline_seconds if alone else self.deadline_seconds / 2
        found = await self._ask(session, [bodies[number] for number in numbers], self.max_attempts, seconds)
        if not isinstance(found, Fault):
            for number, score in zip(numbers, found, strict=True):
                scores[number] = score
        elif alone or not found.by_content:
            for number in numbers:
                scores[number] = found.unscored
        else:
            # A refusal costs the service little. What else failed was tried often enough with all of them.
            attempts = self.max_attempts if found.reason == "invalid_input" else 1
            async with asyncio.TaskGroup() as tasks:
                for number in numbers:
                    tasks.create_task(self._judge_alone(session, number, bodies[number], attempts, scores))

    async def _judge_alone(
        self, session: EndpointSession, number: int, body: str, attempts: int, scores: list[Score]
    ) -> None:
        found = await self._ask(session, [body], attempts, self.deadline_seconds / 2)
        scores[number] = found.unscored if isinstance(found, Fault) else found[0]

    async def _ask(
        self, session: EndpointSession, bodies: Sequence[str], attempts: int, seconds: float
    ) -> list[Score] | Fault:
        """One result an item, after waiting for one of the `max_concurrent` slots."""
        request = f"{{{json.dumps(self.items_key)}: [{', '.join(bodies)}]}}" if self.items_key else bodies[0]

        async def attempt(deadline: float) -> list[Score] | Fault:
            if fault := await session.client.wait_until_open(deadline):
                return fault
            data = await session.client.post(request.encode(), deadline)
            return data if isinstance(data, Fault) else self._results(read_json(data), len(bodies))

        if fault := await wait_in_queue("a place at the remote scorer", session.slots.acquire(session.priority)):
            return fault
        try:
            deadline = asyncio.get_running_loop().time() + seconds
            return await with_retries(attempt, max_attempts=attempts, deadline=deadline)
        finally:
            session.slots.release()

    def _written(self, item: ScoreItem) -> str | Unscored:
        sources = self.fields or {name: name for name in _ITEM_FIELDS}
        values: dict[str, object] = dict(self.constants)
        for name, source in sources.items():
            origin, _, key = source.partition(".")
            value = getattr(item, origin)
            if key and key not in value:
                return Unscored("invalid_input", f"extra_info.{key} is missing, and the remote scorer is to get it")
            values[name] = value[key] if key else (dict(value) if origin == "extra_info" else value)
        try:
            return json.dumps(values, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return Unscored("invalid_input", f"the item is not JSON: {error}")

    def _results(self, reply: object, count: int) -> list[Score] | Fault:
        if not self.items_key:
            results: object = [reply] if isinstance(reply, dict) else None
        else:
            results = reply.get(self.results_key) if self.results_key and isinstance(reply, dict) else reply
        if not isinstance(results, list):
            return Fault("infrastructure", "the endpoint answered what is no list of results", by_content=True)
        if len(results) != count:
            words = f"the endpoint answered {len(results)} results to {count} items"
            return Fault("infrastructure", words, by_content=True)
        return [self._score(result) for result in results]

    def _score(self, result: Any) -> Score:
        found = _at(result, self.score_path)
        if found is None and isinstance(result, dict) and isinstance(result.get("reason"), str):
            detail = str(result.get("detail", ""))[:_DETAIL_CHARACTERS]
            if result["reason"] in _REASONS:
                return Unscored(cast(UnscoredReason, result["reason"]), detail)
            return Unscored("infrastructure", f"the endpoint gave reason {result['reason']!r:.80}: {detail}")
        if self.labels and not isinstance(found, str):
            return Unscored("infrastructure", f"the endpoint's result has no word at {self.score_path}: {found!r:.80}")
        value = self.labels.get(found) if self.labels else finite(found)
        if value is None:
            return Unscored("infrastructure", f"the endpoint's result has no score at {self.score_path}: {found!r:.80}")
        parts = _at(result, self.breakdown_path) if self.breakdown_path else None
        numbers = {str(name): finite(part) for name, part in parts.items()} if isinstance(parts, dict) else {}
        return Scored(float(value), {name: number for name, number in numbers.items() if number is not None})


def _at(value: object, path: str) -> Any:
    """What lies at `a.b.c`; None for nothing."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
