"""The reward service answers any bytes with a proper status, and keeps working."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.protos import reward_pb2
from tandem.reward.rubric.rubric import MAX_SCORERS
from tandem.services.reward.server import SERVICE_NAME
from tandem.services.reward.undecoded_text import READERS
from tandem.services.reward.wire import MAX_ITEMS, MAX_REQUEST_BYTES
from tandem.services.rpc.limits import MAX_MESSAGE_BYTES
from tests.support.fuzzing import Fuzz
from tests.support.reward_process import running_reward
from tests.support.reward_server import Item, Request, Stub, answers, raw_call, submission, summary

AT_ONCE = 24
CALL_SECONDS = 60.0
SEED = 20_000
CHANNEL = [
    ("grpc.enable_retries", 0),  # failed calls must be visible
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

PROPER = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Statuses of a refusal that blames the caller; any other would be the service's fault."""

METHODS = ("Score", "ScoreStream", "SubmitJob", "WatchJob", "GetJob", "CancelJob", "ListJobs", "ListScorers")
SLOW = ("numeric", "tags", "repetition", "language", "short_answer", "math_boxed")
WIDE = "".join(
    f'[[components]]\nscorer = "{SLOW[n % 6]}"\nname = "n{n}"\noptional = true\n' for n in range(MAX_SCORERS)
)
RUBRICS = (
    "",
    '[[components]]\nscorer = "exact"\nweight = 0.5\n[[components]]\nscorer = "numeric"\noptional = true\nname = "n"\n',
    'clip = [0, 1]\n[[components]]\nscorer = "numeric"\ngate = true\nfrom = [0, 1]\nto = [-1, 1]\n',
    '[[components]]\nscorer = "rubric"\narguments = { name = "a" }\n'
    '[rubrics.a]\n[[rubrics.a.components]]\nscorer = "rubric"\narguments = { name = "a" }\n',
    '[[components]]\nscorer = "exact"\narguments = { ignore_case = 3 }\n',
    """[[components]]\nscorer = "regex"\narguments = { pattern = '(\\d+)$', ignore_case = true }\n""",
    '[[components]]\nscorer = "json_schema"\noptional = true\n[[components]]\nscorer = "format"\noptional = true\n',
)
TEXTS = (
    *("", "1", "1.5e308", "-0", "\x00", "é\u202e\U0001f600", "A" * 3000, "9" * 4400, "#### 1,234", "1/0", "nan"),
    *("\n" * 500, "-" * 2000, "$" * 2000, "1," * 2000, "1e" * 2000, "././." * 500),
)
USUAL_JSONS = (
    *("", "1", '"1"', "null", "true", "[]", "{}", '["a", 1, null]', '{"a": {"b": [1]}}', "NaN", "-Infinity", "1e999"),
    " 1 ",
)
JSONS = (
    *USUAL_JSONS,
    *('"\\ud800"', '{"\\udfff": "\\ud800"}', "[" * 50 + "]" * 50, "[" * 100_000, '{"a":' * 5000),
    *("9" * 4000, "9" * 5000),
    *("[" + "1," * 3000 + "1]", "{", '"', "\ufeff1", "\x00", "'1'", "[1" + "0" * 4000 + "]"),
)


class RewardFuzz(Fuzz):
    """Random requests, and mutations of proper ones."""

    def __init__(self, seed: int, job_ids: Sequence[str]) -> None:
        super().__init__(seed)
        self._job_ids = job_ids
        self._kinds: list[Callable[[], Any]] = [self.score, self.score_stream, self.submit, self.other, self.other]

    def call(self) -> tuple[str, list[bytes]]:
        """A method and the bytes of its requests: several if it is a stream, else one."""
        method, messages = self.chance.choice(self._kinds)()
        parts = self.distorted([message.SerializeToString() for message in messages])
        if self.chance.random() > 0.98:
            method = self.chance.choice([*METHODS, "Nothing", "score"])
        return method, parts

    def text(self) -> str:
        if self.chance.random() < 0.3:
            return "".join(self.chance.choices("\n0A€😀", k=self.chance.randrange(40)))
        return self.chance.choice(TEXTS)

    def item(self) -> Item:
        truth, extra = self.chance.choice(USUAL_JSONS), ""
        if self.chance.random() < 0.3:
            truth, extra = self.chance.choice(JSONS), self.chance.choice(JSONS)
        source, solution, group = self.text(), self.text(), self.text()
        return Item(data_source=source, solution=solution, ground_truth=truth, extra_info=extra, group=group)

    def items(self) -> list[Item]:
        if self.chance.random() < 0.002:
            return [Item()] * (MAX_ITEMS + self.chance.randrange(2))
        if self.chance.random() < 0.001:
            return [Item(solution="x" * (MAX_REQUEST_BYTES - 20 + self.chance.randrange(40)))]
        return [self.item() for _ in range(self.chance.choice([0, 1, 1, 2, 5]))]

    def rubric(self) -> str:
        dice = self.chance.random()
        if dice < 0.6:
            return ""
        if dice < 0.61:
            return WIDE
        text = self.chance.choice(RUBRICS)
        if dice < 0.8 and text:
            place = self.chance.randrange(len(text))
            text = text[:place] + self.chance.choice(['"', "[", "=", "\x00", "é", "9", "\n"]) + text[place + 1 :]
        return "a = " + "[" * 20_000 if dice > 0.99 else text

    def score(self) -> tuple[str, list[Any]]:
        return "Score", [reward_pb2.ScoreRequest(items=self.items(), rubric=self.rubric())]

    def score_stream(self) -> tuple[str, list[Any]]:
        requests = [self.score()[1][0] for _ in range(self.chance.randrange(4))]
        stream = reward_pb2.ScoreStreamRequest
        return "ScoreStream", [stream(request_id=self.chance.randrange(2**64), request=one) for one in requests]

    def submit(self) -> tuple[str, list[Any]]:
        key = self.chance.choice(["", "a", "b", "x" * 201, self.text(), str(self.chance.random())])
        header = Request.Header(idempotency_key=key, rubric=self.rubric(), priority=self.chance.randrange(-120, 120))
        parts = [Request(header=header)]
        for index in range(self.chance.randrange(3)):
            index = self.chance.choice([index, index, index, 2**32 - 1])
            parts.append(Request(chunk=Request.Chunk(index=index, items=self.items())))
        if self.chance.random() < 0.7:
            parts.append(Request(seal=Request.Seal(num_chunks=self.chance.choice([len(parts) - 1, 0, 2**32 - 1]))))
        if self.chance.random() < 0.1:
            self.chance.shuffle(parts)
        return "SubmitJob", parts

    def other(self) -> tuple[str, list[Any]]:
        job_id = self.chance.choice([*self._job_ids, "0" * 32, self.text(), "../" * 20, "*"])
        cursor = self.chance.choice([0, 1, 5, 2**64 - 1])
        calls: list[tuple[str, Any]] = [
            ("GetJob", reward_pb2.GetJobRequest(job_id=job_id)),
            ("CancelJob", reward_pb2.CancelJobRequest(job_id=job_id)),
            ("DeleteJob", reward_pb2.DeleteJobRequest(job_id=self.text())),  # never the job that is checked at the end
            ("WatchJob", reward_pb2.WatchJobRequest(job_id=job_id, with_results=True, after_cursor=cursor)),
            ("ListJobs", reward_pb2.ListJobsRequest(limit=self.chance.choice([0, 3, 1001, 2**32 - 1]))),
            ("ListScorers", reward_pb2.ListScorersRequest()),
        ]
        method, request = self.chance.choice(calls)
        return method, [request]


def send(channel: grpc.Channel, method: str, parts: Sequence[bytes]) -> grpc.StatusCode:
    """The status of one call, which must be a proper one; a reply with OK is checked too."""
    try:
        replies = raw_call(channel, method, parts, CALL_SECONDS)
    except grpc.RpcError as error:
        said = f"{method} ended as {error.code().name}: {error.details()}"
        assert error.code() in PROPER and error.details(), f"{said}: {[part[:300] for part in parts]}"
        return error.code()
    if method == "Score":
        asked: Any = READERS[f"/{SERVICE_NAME}/{method}"](b"".join(parts))
        found = reward_pb2.ScoreReply.FromString(replies[0])
        assert [one.WhichOneof("result") is not None for one in found.items] == [True] * len(asked.items)
    if method == "ScoreStream":
        assert len(replies) == len(parts)
    return grpc.StatusCode.OK


def bombard(channel: grpc.Channel, fuzz: RewardFuzz, number: int) -> Counter[tuple[str, str]]:
    """Sends this many calls, some concurrently; returns how often each method ended with each status."""
    found: Counter[tuple[str, str]] = Counter()
    with ThreadPoolExecutor(AT_ONCE) as senders:
        calls = (fuzz.call() for _ in range(number))
        sent = {senders.submit(send, channel, method, parts): method for method, parts in calls}
        for future, method in sent.items():
            found[method, future.result().name] += 1
    return found


def health_of(channel: grpc.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_SECONDS).status)


@contextmanager
def watched_health(address: str) -> Iterator[Callable[[], int]]:
    """Polls health on a channel of its own; it must always be SERVING. Yields a function that counts the replies so
    far, and raises the error that ended the polls.
    """
    over, replies = threading.Event(), list[int]()

    def watch() -> None:
        with grpc.insecure_channel(address, options=CHANNEL) as channel:
            while not over.wait(0.05):
                replies.append(health_of(channel))
                assert replies[-1] == health_pb2.HealthCheckResponse.SERVING

    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(watch)

        def num_replies() -> int:
            if watching.done():
                watching.result()
            return len(replies)

        try:
            yield num_replies
        finally:
            over.set()
        watching.result()


def throw_garbage(address: str, chance: random.Random) -> None:
    """Sends bytes that are not even HTTP/2."""
    host, _, port = address.rpartition(":")
    for start in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(start + chance.randbytes(chance.choice([1, 100, 5000])))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [1_500, pytest.param(20_000, marks=pytest.mark.deploy)])
def test_no_request_breaks_the_service(tmp_path: Path, number: int) -> None:
    with (
        running_reward(tmp_path) as address,
        grpc.insecure_channel(address, options=CHANNEL) as channel,
        watched_health(address) as num_replies,
    ):
        stub = Stub(channel)
        (*_, ended) = stub.SubmitJob(submission(answers("1", "2"), answers("3")), timeout=20)
        list(stub.WatchJob(reward_pb2.WatchJobRequest(job_id=ended.job.job_id), timeout=20))
        fuzz = RewardFuzz(SEED, [ended.job.job_id])
        found, rounds = Counter[tuple[str, str]](), 0
        while rounds < 20 or num_replies() <= 20:  # health is asked often enough while the requests come
            rounds += 1
            found += bombard(channel, fuzz, number // 20)
            throw_garbage(address, fuzz.chance)
            assert health_of(channel) == health_pb2.HealthCheckResponse.SERVING
        assert found.total() == rounds * (number // 20)
        for method in ("Score", "ScoreStream", "SubmitJob", "GetJob", "WatchJob"):
            least = min(found[method, "OK"], found[method, "INVALID_ARGUMENT"])
            assert least > number // 400, f"{method}: {dict(found)}"
        reply = stub.Score(reward_pb2.ScoreRequest(items=answers("1", "2")), timeout=20)
        assert summary(reply.items) == [1.0, 0.0]
        (*_, last) = stub.SubmitJob(submission(answers("1", "2"), priority=100), timeout=20)
        events = list(stub.WatchJob(reward_pb2.WatchJobRequest(job_id=last.job.job_id), timeout=60))
        assert events[-1].job.num_scored == 2
        job = stub.GetJob(reward_pb2.GetJobRequest(job_id=ended.job.job_id), timeout=20)
        assert dict(job.num_unscored) == {} and job.num_scored == 3
