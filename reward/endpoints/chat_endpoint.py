"""An OpenAI-compatible chat endpoint for judges, with rate limits, a spend cap, retries and a deadline per question."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.reward.endpoints.endpoint import Endpoint, EndpointSession
from tandem.reward.endpoints.http_client import Fault, check_url, read_json, wait_in_queue, with_retries
from tandem.reward.endpoints.limits import RateLimit, RateLimiter, SpendMeter, Taken
from tandem.reward.scheduling.priority_queue import Priority
from tandem.reward.text.judge_text import NoVerdictError, PromptTemplate, VerdictReader, item_values

_LARGEST_PROMPT_BYTES = 4 << 20
_BYTES_PER_TOKEN = 3  # for rate estimates: realistic in most languages, overestimates the tokens of English
_MESSAGE_TOKENS = 32  # upper bound for the tokens that a chat template adds to a message
_OWN_FIELDS = frozenset({"model", "messages", "stream", "n", "temperature", "max_tokens", "max_completion_tokens"})


@dataclass(frozen=True, slots=True)
class Quote:
    """Estimated cost of one request, known before it is sent."""

    body: bytes
    tokens: int
    """Expected tokens of prompt plus answer."""
    highest_price: float


class ChatEndpoint(Endpoint):
    """Base class of judges behind a chat endpoint: their common parameters and requests."""

    KIND = "judge"

    base_url: str
    """URL of the API without `/chat/completions`, e.g. `http://127.0.0.1:8000/v1`."""
    model: Annotated[str, Field(min_length=1)]
    """The model's name at the endpoint."""
    system: str = ""
    """System message before the question; empty: none."""
    question_field: str = "prompt"
    """Key of `extra_info` with the question: text, or chat messages."""
    temperature: float = 0.0
    """Sampling temperature of the judge; -1: the endpoint's own (some models accept no other)."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest answer of the judge in tokens, including its reasoning."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Name of that field in the endpoint's API."""
    extra_body: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """More fields of the request, e.g. `{reasoning_effort = "low"}`."""
    requests_per_minute: Annotated[int, Field(ge=0)] = 0
    """Most requests in any minute, every attempt counted; they are spread evenly. 0: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=0)] = 0
    """Most tokens of prompts and answers in any minute: estimated before a request, corrected after it. 0: no limit."""
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
    _limiter: RateLimiter = PrivateAttr()
    _meter: SpendMeter = PrivateAttr()
    _prompt: PromptTemplate = PrivateAttr()
    _reader: VerdictReader = PrivateAttr()

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
        super().model_post_init(context)
        limits = (self.requests_per_minute, self.tokens_per_minute)
        self._limiter = RateLimiter([RateLimit(most or math.inf) for most in limits])
        self._meter = SpendMeter(self.max_spend)

    @property
    def _url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def figures(self) -> dict[str, float]:
        return {**super().figures(), "judge_spent": self._meter.spent}

    def _waiting(self, priority: Priority) -> int:
        return super()._waiting(priority) + self._limiter.waiting(priority)

    async def ask(
        self, session: EndpointSession, item: ScoreItem, more: Mapping[str, str] | None = None
    ) -> float | Unscored:
        """The judge's verdict on the template, filled from item and `more`. Waits by priority: slot, money, rates."""
        values = item_values(item, self._prompt.names, self.question_field)
        if isinstance(values, Unscored):
            return values
        question = self._prompt.fill({**values, **(more or {})})
        outcome = await self._in_slot(session.priority, partial(self._ask_now, session, question))
        return outcome.unscored if isinstance(outcome, Fault) else outcome

    async def _ask_now(self, session: EndpointSession, question: str) -> float | Fault:
        """Asks until there is an answer. The deadline starts with the first admission."""
        quote = self._quote(question)
        if isinstance(quote, Fault):
            return quote
        clock = asyncio.get_running_loop().time
        if fault := await session.client.wait_until_open(clock() + self.deadline_seconds):
            return fault
        first = await wait_in_queue("room in the judge's rates", self._admit(session, quote, again=False))
        if isinstance(first, Fault):
            return first
        admitted = [first]

        async def attempt(deadline: float) -> float | Fault:
            taken = admitted.pop() if admitted else await self._admit_again(session, quote, deadline)
            return taken if isinstance(taken, Fault) else await self._send(session, quote, taken, deadline)

        deadline = clock() + self.deadline_seconds
        return await with_retries(attempt, max_attempts=self.max_attempts, deadline=deadline)

    def _quote(self, question: str) -> Quote | Fault:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": question})
        num_bytes = sum(len(message["content"].encode(errors="surrogatepass")) for message in messages)
        if num_bytes > _LARGEST_PROMPT_BYTES:
            return Fault("limit", f"the judge's prompt has {num_bytes} bytes, more than {_LARGEST_PROMPT_BYTES}")
        around = _MESSAGE_TOKENS * (1 + len(messages))
        tokens = num_bytes // _BYTES_PER_TOKEN + around + self.max_tokens
        if 0 < self.tokens_per_minute < tokens:
            words = f"about {tokens} tokens are needed, more than tokens_per_minute {self.tokens_per_minute}"
            return Fault("limit", words)
        own = {"model": self.model, "messages": messages, self.max_tokens_field: self.max_tokens}
        temperature = {"temperature": self.temperature} if self.temperature >= 0.0 else {}
        # A text never has more tokens than bytes.
        price = self._price(num_bytes + around, self.max_tokens)
        return Quote(json.dumps({**own, **self.extra_body, **temperature}).encode(), tokens, price)

    def _price(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6

    async def _admit(self, session: EndpointSession, quote: Quote, *, again: bool) -> list[Taken] | Fault:
        """Reserves the highest price and takes the estimate from the rate limits. `_send` settles both."""
        if not await self._meter.reserve(quote.highest_price, session.priority, again=again):
            spent = f"{self._meter.spent:.6g} of max_spend {self.max_spend:g} is spent"
            return Fault("limit", f"{spent}, and this question may cost {quote.highest_price:.3g}", retry=False)
        try:
            return await self._limiter.take([1, quote.tokens], session.priority, again=again)
        except BaseException:
            self._meter.charge(quote.highest_price, 0.0)
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
        self, session: EndpointSession, quote: Quote, taken: Sequence[Taken], deadline: float
    ) -> float | Fault:
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
            return self._verdict(reply)
        finally:
            self._meter.charge(quote.highest_price, price)
            self._limiter.settle(taken, [1, tokens])

    def _used(self, reply: object, quote: Quote) -> tuple[int, float]:
        """Tokens and price according to the reply's `usage`; the estimate without one."""
        usage = reply.get("usage") if isinstance(reply, dict) else None
        counts = [usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")] if isinstance(usage, dict) else []
        numbers = [count for count in counts if isinstance(count, int) and 0 <= count < 1 << 40]
        if len(numbers) < 2:
            return quote.tokens, quote.highest_price
        return sum(numbers), self._price(*numbers)

    def _verdict(self, reply: Any) -> float | Fault:
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
            return self._reader.read(content)
        except NoVerdictError as error:
            cut = f"; it was cut at max_tokens {self.max_tokens}" if ended == "length" else ""
            return Fault("crashed", f"{error}{cut}", retry=again)
