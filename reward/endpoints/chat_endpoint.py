"""An OpenAI-compatible chat endpoint for judges, with rate limits, a spend cap, retries and a deadline per question."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PrivateAttr

from tandem.protos.contracts import Score, ScoreItem, Unscored
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
from tandem.reward.endpoints.rate_limit import RateLimit, RateLimiter, Taken
from tandem.reward.endpoints.session_portal import CLOSING, ClosedError, SessionPortal
from tandem.reward.endpoints.spend import SpendMeter
from tandem.reward.scheduling.admission_queue import PrioritySemaphore
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority
from tandem.reward.text.prompt_text import Message
from tandem.reward.text.verdict import NoVerdictError

T = TypeVar("T")

_LARGEST_PROMPT_BYTES = 4 << 20
_BYTES_PER_TOKEN = 3  # for rate estimates: realistic in most languages, overestimates the tokens of English
_MESSAGE_TOKENS = 32  # upper bound for the tokens that a chat template adds to a message
_OWN_FIELDS = frozenset({"model", "messages", "stream", "n", "temperature", "max_tokens", "max_completion_tokens"})


@dataclass(frozen=True, slots=True)
class EndpointSession:
    """State shared by the questions to one endpoint. Belongs to one event loop."""

    client: HttpClient
    limiter: RateLimiter
    meter: SpendMeter
    slots: PrioritySemaphore
    """One slot per running question."""
    priority: Priority = "calls"
    """Priority of the caller."""

    def of(self, priority: Priority) -> EndpointSession:
        """Returns the same session with another priority."""
        return replace(self, priority=priority)

    def waiting(self, priority: Priority) -> int:
        """Number of questions of one priority that wait for a slot or for the rate limits."""
        return self.slots.waiting(priority) + self.limiter.waiting(priority)


@dataclass(frozen=True, slots=True)
class Quote:
    """Estimated cost of one request, known before it is sent."""

    body: bytes
    tokens: int
    """Expected tokens of prompt plus answer."""
    highest_price: float


class ChatEndpoint(Scorer):
    """Base class of judges behind a chat endpoint: their common parameters and requests.

    The object owns limits, spending and connections, so build it once and share it.
    """

    ISOLATION = "remote"

    base_url: str
    """URL of the API without `/chat/completions`, e.g. `http://127.0.0.1:8000/v1`."""
    model: Annotated[str, Field(min_length=1)]
    """The model's name at the endpoint."""
    api_key_env: str = ""
    """Name of the environment variable that holds the API key, sent as bearer token; empty: none is sent."""
    system: str = ""
    """System message before the question; empty: none."""
    temperature: float = 0.0
    """Sampling temperature of the judge; -1: the endpoint's own (some models accept no other)."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest answer of the judge in tokens, including its reasoning."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Name of that field in the endpoint's API."""
    extra_body: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """More fields of the request, e.g. `{reasoning_effort = "low"}`."""
    max_concurrent: Annotated[int, Field(ge=1)] = 16
    """Maximum number of concurrent requests."""
    requests_per_minute: Annotated[int, Field(ge=0)] = 0
    """Most requests in any minute, every attempt counted; they are spread evenly. 0: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=0)] = 0
    """Most tokens in any minute, of prompts and answers: estimated before a request, corrected after it. 0: no limit.
    """
    max_attempts: Annotated[int, Field(ge=1)] = 4
    """Requests that one question may cost: connection errors, 429, 5xx, time-outs and (above temperature 0) verdicts
    that cannot be read are tried again.
    """
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Longest wait for one attempt."""
    deadline_seconds: Annotated[float, Field(gt=0.0)] = 180.0
    """Longest time of one question, all attempts and pauses included, from the moment it has one of the
    `max_concurrent` places and room in the rates.
    """
    prompt_price: Annotated[float, Field(ge=0.0)] = 0.0
    """Price of a million prompt tokens, in the currency of `max_spend`."""
    completion_price: Annotated[float, Field(ge=0.0)] = 0.0
    """Price of a million answer tokens."""
    max_spend: Annotated[float, Field(ge=0.0)] = 0.0
    """Most that may be spent since the service started; items that do not fit are unscored (`limit`). 0: no cap."""
    _portal: SessionPortal[EndpointSession] = PrivateAttr()

    def model_post_init(self, context: object, /) -> None:
        check_url("base_url", self.base_url)
        if not (0.0 <= self.temperature <= 2.0 or self.temperature == -1.0):
            raise ValueError("temperature must be from 0 to 2, or -1 for the endpoint's own")
        if self.requests_per_minute and 60.0 / self.requests_per_minute >= self.deadline_seconds:
            raise ValueError("requests_per_minute makes a request wait longer than deadline_seconds allows")
        if self.max_spend and not (self.prompt_price or self.completion_price):
            raise ValueError("max_spend needs prompt_price and completion_price")
        if own := sorted(_OWN_FIELDS & set(self.extra_body)):
            raise ValueError(f"extra_body must not hold {own[0]}")
        read_key(self.api_key_env)
        self._portal = SessionPortal("judge", self._open_session)

    def judge_batch(self, items: Sequence[ScoreItem], *, priority: Priority = "calls") -> list[Score]:
        """One result per item, in order. Thread-safe; blocks its caller."""
        scores: list[Score] = [CLOSING] * len(items)
        if not items:
            return scores
        with suppress(ClosedError):
            self._portal.run(lambda session: self._judge_all(session.of(priority), items, scores))
        return scores

    async def _judge_all(self, session: EndpointSession, items: Sequence[ScoreItem], scores: list[Score]) -> None:
        """Stores each item's result in `scores` once it is known. If the portal closes first, the rest is unchanged."""
        raise NotImplementedError("every judge defines this")

    def close(self) -> None:
        """Ends running questions. They and all later ones are unscored (`infrastructure`)."""
        self._portal.close()

    def figures(self) -> dict[str, float]:
        """Returns requests sent and money spent since the start, and the number of waiting questions."""
        session = self._portal.session
        return {
            "judge_requests": 0.0 if session is None else float(session.client.num_requests),
            "judge_spent": 0.0 if session is None else session.meter.spent,
            **{
                f"judge_waiting_{priority}": 0.0 if session is None else float(session.waiting(priority))
                for priority in PRIORITIES
            },
        }

    @asynccontextmanager
    async def _open_session(self) -> AsyncIterator[EndpointSession]:
        limits = [RateLimit(most) for most in (self.requests_per_minute, self.tokens_per_minute) if most]
        async with open_client(
            f"{self.base_url.rstrip('/')}/chat/completions",
            key=read_key(self.api_key_env),
            max_connections=self.max_concurrent,
            attempt_seconds=self.timeout_seconds,
        ) as client:
            meter = SpendMeter(self.max_spend or None)
            yield EndpointSession(client, RateLimiter(limits), meter, PrioritySemaphore(self.max_concurrent))

    async def ask(
        self, session: EndpointSession, messages: Sequence[Message], read: Callable[[str], T]
    ) -> T | Unscored:
        """Returns the endpoint's answer as parsed by `read`, or Unscored. `read` raises NoVerdictError.

        Waits by priority, first for a slot, then for the spend cap and the rate limits.
        """
        if fault := await wait_in_queue("a place at the judge", session.slots.acquire(session.priority)):
            return fault.unscored
        try:
            quote = self._quote(messages)
            outcome: T | Fault | Unscored = (
                quote if isinstance(quote, Unscored) else await self._ask_admitted(session, quote, read)
            )
        finally:
            session.slots.release()
        return outcome.unscored if isinstance(outcome, Fault) else outcome

    def _quote(self, messages: Sequence[Message]) -> Quote | Unscored:
        all_messages = [*([{"role": "system", "content": self.system}] if self.system else []), *messages]
        num_bytes = sum(len(message["content"].encode(errors="surrogatepass")) for message in all_messages)
        if num_bytes > _LARGEST_PROMPT_BYTES:
            return Unscored("limit", f"the judge's prompt has {num_bytes} bytes, more than {_LARGEST_PROMPT_BYTES}")
        around = _MESSAGE_TOKENS * (1 + len(all_messages))
        tokens = num_bytes // _BYTES_PER_TOKEN + around + self.max_tokens
        if 0 < self.tokens_per_minute < tokens:
            return Unscored(
                "limit", f"about {tokens} tokens are needed, more than tokens_per_minute {self.tokens_per_minute}"
            )
        request = {
            "model": self.model,
            "messages": all_messages,
            self.max_tokens_field: self.max_tokens,
            **self.extra_body,
        }
        if self.temperature >= 0.0:
            request["temperature"] = self.temperature
        # A text never has more tokens than bytes.
        return Quote(json.dumps(request).encode(), tokens, self._price(num_bytes + around, self.max_tokens))

    def _price(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6

    async def _ask_admitted(self, session: EndpointSession, quote: Quote, read: Callable[[str], T]) -> T | Fault:
        """Asks until there is an answer. The deadline starts with the first admission."""
        clock = asyncio.get_running_loop().time
        if fault := await session.client.wait_until_open(clock() + self.deadline_seconds):
            return fault
        first = await wait_in_queue("room in the judge's rates", self._admit(session, quote, again=False))
        if isinstance(first, Fault):
            return first
        admitted = [first]

        async def attempt(deadline: float) -> T | Fault:
            taken = admitted.pop() if admitted else await self._admit_again(session, quote, deadline)
            return taken if isinstance(taken, Fault) else await self._send(session, quote, read, taken, deadline)

        deadline = clock() + self.deadline_seconds
        return await with_retries(attempt, max_attempts=self.max_attempts, deadline=deadline)

    async def _admit(self, session: EndpointSession, quote: Quote, *, again: bool) -> list[Taken] | Fault:
        """Reserves the highest price and takes the estimate from the rate limits. `_send` settles both."""
        if not await session.meter.reserve(quote.highest_price, session.priority, again=again):
            spent = f"{session.meter.spent:.6g} of max_spend {self.max_spend:g} is spent"
            return Fault("limit", f"{spent}, and this question may cost {quote.highest_price:.3g}", retry=False)
        try:
            return await session.limiter.take(self._amounts(quote.tokens), session.priority, again=again)
        except BaseException:
            session.meter.charge(quote.highest_price, 0.0)
            raise

    async def _admit_again(self, session: EndpointSession, quote: Quote, deadline: float) -> list[Taken] | Fault:
        if fault := await session.client.wait_until_open(deadline):
            return fault
        try:
            async with asyncio.timeout_at(deadline):
                return await self._admit(session, quote, again=True)
        except TimeoutError:
            return Fault("timeout", "the deadline passed while it waited for room in the rate limit", retry=False)

    async def _send(
        self, session: EndpointSession, quote: Quote, read: Callable[[str], T], taken: Sequence[Taken], deadline: float
    ) -> T | Fault:
        """Sends one admitted request and settles its cost."""
        # Without a reply, e.g. after cancellation, the highest cost counts, because the request may have been billed.
        tokens, price = quote.tokens, quote.highest_price
        try:
            data = await session.client.post(quote.body, deadline)
            if isinstance(data, Fault):
                if not data.perhaps_done:
                    tokens, price = 0, 0.0
                return data
            reply = read_json(data)
            tokens, price = self._used(reply, quote)
            return self._read(reply, read)
        finally:
            session.meter.charge(quote.highest_price, price)
            session.limiter.settle(taken, self._amounts(tokens))

    def _amounts(self, tokens: int) -> list[int]:
        return [*([1] if self.requests_per_minute else []), *([tokens] if self.tokens_per_minute else [])]

    def _used(self, reply: object, quote: Quote) -> tuple[int, float]:
        """Returns tokens and price according to the reply's `usage`, or the estimate without one."""
        usage = reply.get("usage") if isinstance(reply, dict) else None
        counts = [usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")] if isinstance(usage, dict) else []
        numbers = [count for count in counts if isinstance(count, int) and 0 <= count < 1 << 40]
        if len(numbers) < 2:
            return quote.tokens, quote.highest_price
        return sum(numbers), self._price(*numbers)

    def _read(self, reply: Any, read: Callable[[str], T]) -> T | Fault:
        try:
            choice = reply["choices"][0]
            content = choice["message"]["content"]
            ended = choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            return Fault("infrastructure", "the endpoint's answer is not a chat completion")
        again = self.temperature != 0.0  # at temperature 0 the answer would be the same
        if not isinstance(content, str):
            return Fault("crashed", f"the judge gave no text (finish_reason {ended!r:.40})", retry=again)
        try:
            return read(content)
        except NoVerdictError as error:
            cut = f"; it was cut at max_tokens {self.max_tokens}" if ended == "length" else ""
            return Fault("crashed", f"{error}{cut}", retry=again)
