"""Remote scorer: an HTTP service that scores items, such as a code sandbox or another team's reward server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, cast, get_args

from pydantic import Field

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored, UnscoredReason
from tandem.reward.endpoints.endpoint import Endpoint, EndpointSession
from tandem.reward.endpoints.http_client import Fault, check_url, read_json, with_retries
from tandem.reward.text.values import finite

_ITEM_FIELDS = ("data_source", "solution", "ground_truth", "extra_info", "group")
_REASONS: tuple[UnscoredReason, ...] = get_args(UnscoredReason)
_DETAIL_CHARACTERS = 300

Question = tuple[int, str]
"""The index of an item and its JSON text."""


class RemoteScorer(Endpoint):
    """The score that an HTTP service gives. Items are POSTed as JSON, and results come back as JSON.

    By default it sends and expects this, with one result an item, in order:

        {"items": [{"data_source": …, "solution": …, "ground_truth": …, "extra_info": {…}, "group": …}, …]}
        {"results": [{"score": 0.5, "breakdown": {"style": 1}}, {"reason": "timeout", "detail": "…"}, …]}

    `reason` is one of timeout, crashed, infrastructure, invalid_input, limit; the breakdown may be absent. The names
    can be mapped for other services. A code sandbox like Sandbox Fusion, with one run a request:

        items_key = "", fields = {code = "solution", stdin = "extra_info.stdin"}, constants = {language = "python"},
        score_path = "status", labels = {Success = 1, Failed = 0}

    Failures get a reason as described in `tandem.reward.endpoints.http_client`. A batch that fails in a way that one of
    its items may have caused is sent again item by item, so that one bad item does not affect the others.

    Example:
        >>> scorer = RemoteScorer(url="http://127.0.0.1:8080/score")
        >>> scorer.judge_batch([])
        []
        >>> scorer.close()
    """

    KIND = "remote"

    url: str
    """Address that items are POSTed to."""
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
    """Numbers for scores that are words, e.g. `{Success = 1.0, Failed = 0.0}`, and no others. Empty: it is a number."""
    deadline_seconds: Annotated[float, Field(gt=0.0)] = 120.0
    """Longest time of one item, all attempts and pauses included, from the moment it has one of the `max_concurrent`
    places. A batch has half of it, its single items the rest.
    """

    def model_post_init(self, context: object, /) -> None:
        check_url("url", self.url)
        if not self.items_key and self.batch_size > 1:
            raise ValueError("batch_size above 1 needs items_key: without it a request is one item")
        for name, source in self.fields.items():
            if source.partition(".")[0] not in _ITEM_FIELDS or ("." in source and not source.startswith("extra_info.")):
                raise ValueError(f"fields.{name}: {source!r} is none of {', '.join(_ITEM_FIELDS)}, extra_info.NAME")
        if both := sorted(set(self.constants) & set(self.fields or _ITEM_FIELDS)):
            raise ValueError(f"constants.{both[0]} is also a field of the item")
        super().model_post_init(context)

    @property
    def _url(self) -> str:
        return self.url

    async def _judge_all(self, session: EndpointSession, items: Sequence[ScoreItem], scores: list[Score]) -> None:
        async with asyncio.TaskGroup() as tasks:
            batch: list[Question] = []
            for number, item in enumerate(items):
                body = self._written(item)
                if isinstance(body, Unscored):
                    scores[number] = body
                else:
                    batch.append((number, body))
                if batch and (len(batch) == self.batch_size or number + 1 == len(items)):
                    seconds = self.deadline_seconds if len(batch) == 1 else self.deadline_seconds / 2
                    tasks.create_task(self._judge_some(session, batch, scores, self.max_attempts, seconds))
                    batch = []

    async def _judge_some(
        self, session: EndpointSession, batch: Sequence[Question], scores: list[Score], attempts: int, seconds: float
    ) -> None:
        found = await self._ask(session, [body for _, body in batch], attempts, seconds)
        if isinstance(found, Fault) and found.by_content and len(batch) > 1:
            # A refusal costs the service little. What else failed was tried often enough with all of them.
            attempts = attempts if found.reason == "invalid_input" else 1
            async with asyncio.TaskGroup() as tasks:
                for one in batch:
                    tasks.create_task(self._judge_some(session, [one], scores, attempts, seconds))
            return
        results = [found.unscored] * len(batch) if isinstance(found, Fault) else found
        for (number, _), score in zip(batch, results, strict=True):
            scores[number] = score

    async def _ask(
        self, session: EndpointSession, bodies: Sequence[str], attempts: int, seconds: float
    ) -> list[Score] | Fault:
        """One result an item. The time begins once there is a slot."""
        request = f"{{{json.dumps(self.items_key)}: [{', '.join(bodies)}]}}" if self.items_key else bodies[0]

        async def attempt(deadline: float) -> list[Score] | Fault:
            if fault := await session.client.wait_until_open(deadline):
                return fault
            data = await session.client.post(request.encode(), deadline)
            return data if isinstance(data, Fault) else self._results(read_json(data), len(bodies))

        async def ask_now() -> list[Score] | Fault:
            deadline = asyncio.get_running_loop().time() + seconds
            return await with_retries(attempt, max_attempts=attempts, deadline=deadline)

        return await self._in_slot(session.priority, ask_now)

    def _written(self, item: ScoreItem) -> str | Unscored:
        values: dict[str, object] = dict(self.constants)
        for name, source in (self.fields or dict(zip(_ITEM_FIELDS, _ITEM_FIELDS, strict=True))).items():
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
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
