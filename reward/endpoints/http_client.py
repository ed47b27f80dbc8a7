"""JSON over HTTP to one endpoint, with typed faults, retries with jitter, and a deadline for every request.

A failed request returns a `Fault` with the reason for the unscored item:

| failure | reason | retried |
|---|---|---|
| no connection, connection cut, an unusable answer | infrastructure | yes |
| 408, 425, 429, 5xx | infrastructure | yes, not before `Retry-After` |
| 401, 403, 407 (the credentials), 3xx | infrastructure | no |
| every other 4xx: the endpoint refuses this request | invalid_input | no |
| no answer within the attempt's time | timeout | yes |
| the deadline | the last failure's reason, timeout without one | no |
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar, cast
from urllib.parse import urlsplit

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, wait_exponential, wait_random_exponential

from tandem.protos.contracts import Unscored, UnscoredReason
from tandem.protos.secret_values import without_passwords

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
LARGEST_REPLY_BYTES = 16 << 20
MAX_QUEUE_SECONDS = 3600.0
"""Longest wait for admission to an endpoint. It does not count towards an item's deadline."""
_LONGEST_RETRY_AFTER_SECONDS = 86400.0
_DETAIL_CHARACTERS = 200
_CREDENTIALS = frozenset({401, 403, 407})
_COME_BACK = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request failed."""

    reason: UnscoredReason
    detail: str
    retry: bool = True
    not_before_seconds: float = 0.0
    """Wait that the endpoint requested."""
    perhaps_done: bool = False
    """The request was sent but not answered, so the endpoint may have processed and billed it."""
    by_content: bool = False
    """The content of the request may be the cause, so other requests might succeed."""

    @property
    def unscored(self) -> Unscored:
        return Unscored(self.reason, self.detail)


def check_url(name: str, url: str) -> None:
    """Raises ValueError unless this is an absolute http or https URL without credentials."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} {without_passwords(url)!r:.200} is no http:// or https:// URL")
    if parts.username is not None or parts.password is not None:
        told = "put the key into an environment variable and name that in api_key_env"
        raise ValueError(f"{name} holds credentials; {told}")


def read_key(variable: str) -> str:
    """The secret in the environment variable, "" if none is named. Raises ValueError if a header cannot hold it."""
    key = os.environ.get(variable, "").strip()
    if variable and not key:
        raise ValueError(f"api_key_env: the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"api_key_env: the environment variable {variable} holds what no HTTP header can")
    return key


class HttpClient:
    """Posts JSON to one URL. Used by the coroutines of one event loop; opened by `open_client`."""

    def __init__(self, client: httpx.AsyncClient, url: str, key: str, attempt_seconds: float) -> None:
        self._client = client
        self._url = url
        self._key = key
        self._attempt_seconds = attempt_seconds
        self._closed_until = 0.0  # from Retry-After, on the loop's clock
        self.num_requests = 0

    async def wait_until_open(self, deadline: float) -> Fault | None:
        """Waits as the endpoint's last `Retry-After` requests; a fault if that ends past the deadline."""
        loop = asyncio.get_running_loop()
        while (wait := self._closed_until - loop.time()) > 0.0:
            if self._closed_until >= deadline:
                return Fault("infrastructure", f"the endpoint asked to wait for {wait:.0f} s", retry=False)
            await asyncio.sleep(wait + random.uniform(0.0, min(1.0, 0.1 * wait)))  # spreads the retries
        return None

    async def post(self, body: bytes, deadline: float) -> bytes | Fault:
        """Makes one attempt: the reply's body, or the fault."""
        import httpx

        loop = asyncio.get_running_loop()
        seconds = min(self._attempt_seconds, deadline - loop.time())
        if seconds <= 0.0:
            return Fault("timeout", "the deadline passed before the endpoint could be asked", retry=False)
        self.num_requests += 1
        try:
            async with asyncio.timeout(seconds), self._client.stream("POST", self._url, content=body) as response:
                data = await _body(response)
        except TimeoutError:
            words = f"the endpoint gave no answer within {seconds:.3g} s"
            return Fault("timeout", words, perhaps_done=True, by_content=True)
        except (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
            return Fault("infrastructure", f"the endpoint cannot be reached: {self._clean(str(error))}")
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
            words = f"the connection to the endpoint broke: {self._clean(str(error)) or type(error).__name__}"
            return Fault("infrastructure", words, perhaps_done=True, by_content=True)
        if isinstance(data, Fault) or response.is_success:
            return data
        fault = self._fault(response.status_code, response.headers, data)
        self._closed_until = max(self._closed_until, loop.time() + fault.not_before_seconds)
        return fault

    def _fault(self, status: int, headers: Mapping[str, str], body: bytes) -> Fault:
        said = self._clean(body.decode(errors="replace"))
        detail = f"the endpoint answered {status}" + (f": {said}" if said else "")
        if status in _COME_BACK or status >= 500:
            wait = retry_after(headers.get("retry-after", ""))
            return Fault("infrastructure", detail, not_before_seconds=wait, by_content=status == 500)
        if 400 <= status < 500 and status not in _CREDENTIALS:
            return Fault("invalid_input", detail, retry=False, by_content=True)
        return Fault("infrastructure", detail, retry=False)

    def _clean(self, text: str) -> str:
        line = " ".join(text[: 20 * _DETAIL_CHARACTERS].split())
        return (line.replace(self._key, "***") if self._key else line)[:_DETAIL_CHARACTERS]


@asynccontextmanager
async def open_client(url: str, key: str, max_connections: int, attempt_seconds: float) -> AsyncIterator[HttpClient]:
    """A client whose connections close with the block. It follows no redirects and uses the environment's proxies."""
    import httpx

    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=None) as client:  # callers set timeouts
        yield HttpClient(client, url, key, attempt_seconds)


async def wait_in_queue(what: str, wait: Awaitable[T]) -> T | Fault:
    """The result of `wait`, or a fault after MAX_QUEUE_SECONDS."""
    try:
        async with asyncio.timeout(MAX_QUEUE_SECONDS):
            return await wait
    except TimeoutError:
        return Fault("infrastructure", f"it waited {MAX_QUEUE_SECONDS:g} s for {what}", retry=False)


async def with_retries(
    attempt: Callable[[float], Awaitable[T | Fault]], *, max_attempts: int, deadline: float
) -> T | Fault:
    """Repeats the attempt until one succeeds or fails permanently, `max_attempts` failed, or the deadline is too near.

    Every attempt gets the deadline (on the loop's clock) and must keep it. Pauses double from 0.5 s to 30 s. Half of
    each is random, so that failed requests are not retried together; a longer `Retry-After` replaces the other half.
    """
    clock = asyncio.get_running_loop().time
    fixed = wait_exponential(multiplier=FIRST_PAUSE_SECONDS / 2, max=LONGEST_PAUSE_SECONDS / 2)
    jitter = wait_random_exponential(multiplier=FIRST_PAUSE_SECONDS / 2, max=LONGEST_PAUSE_SECONDS / 2)

    def outcome_of(state: RetryCallState) -> T | Fault:
        assert state.outcome is not None, "asked only after an attempt"
        return cast("T | Fault", state.outcome.result())

    def pause(state: RetryCallState) -> float:
        outcome = outcome_of(state)
        asked_for = outcome.not_before_seconds if isinstance(outcome, Fault) else 0.0
        return max(asked_for, fixed(state)) + jitter(state)

    def is_over(state: RetryCallState) -> bool:
        return state.attempt_number >= max_attempts or clock() + state.upcoming_sleep >= deadline

    again = retry_if_result(lambda outcome: isinstance(outcome, Fault) and outcome.retry)
    retrying = AsyncRetrying(
        retry=again, wait=pause, stop=is_over, sleep=asyncio.sleep, retry_error_callback=outcome_of
    )
    outcome = cast("T | Fault", await retrying(attempt, deadline))
    if not isinstance(outcome, Fault):
        return outcome
    number = retrying.statistics["attempt_number"]
    if outcome.retry and number < max_attempts:
        return replace(outcome, detail=f"{outcome.detail} (attempt {number}; no time for another)")
    return replace(outcome, detail=f"{outcome.detail} (attempt {number})") if number > 1 else outcome


def retry_after(value: str) -> float:
    """The seconds that a `Retry-After` header (a number or a date) requests, at most a day; 0 if invalid."""
    value = value.strip()
    try:
        is_number = value.isascii() and value.isdigit()
        seconds = float(value[:12]) if is_number else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_SECONDS)


def read_json(data: bytes) -> object:
    """The value; None if the bytes are not JSON or too deeply nested."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


async def _body(response: httpx.Response) -> bytes | Fault:
    """The raw body. A compressed one is refused: none was requested, and it may expand without limit."""
    if response.headers.get("content-encoding", "identity") != "identity":
        return Fault("infrastructure", "the endpoint compressed its answer, unasked", retry=False)
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > LARGEST_REPLY_BYTES:
            words = f"the endpoint's answer exceeds {LARGEST_REPLY_BYTES >> 20} MiB"
            return Fault("infrastructure", words, retry=False)
    return bytes(body)
