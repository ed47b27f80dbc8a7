"""A job belongs to the token that submitted it: other tokens cannot see, read, end or guess it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from tandem.protos import reward_pb2
from tandem.protos.errors import ConfigError
from tandem.services.reward.jobs.store import EVERYBODY
from tandem.services.rpc.tokens import Role, Tokens, add_token, run_token
from tests.support.reward_process import STOP_SECONDS, RewardProcess
from tests.support.reward_server import Calls, Service, answers, code_of, serving, submission, summary

NAMES = {"alice": Role.score, "bob": Role.score, "123": Role.score, "carol": Role.read, "root": Role.operate}
BY_ID: list[Callable[[Calls, str], object]] = [
    lambda one, job_id: one.job(job_id),
    lambda one, job_id: one.watch(job_id),
    lambda one, job_id: one.cancel(job_id),
    lambda one, job_id: one.stub.DeleteJob(reward_pb2.DeleteJobRequest(job_id=job_id), timeout=20),
]


class Callers:
    """A service, and a caller for each name."""

    def __init__(self, service: Service, tokens: dict[str, str]) -> None:
        self.service = service
        self._tokens = tokens

    @contextmanager
    def by(self, name: str) -> Iterator[Calls]:
        with Calls(self.service.server.address, self._tokens[name]) as calls:
            yield calls


@pytest.fixture(scope="module")
def callers(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    tokens = {name: add_token(file, name, role) for name, role in NAMES.items()}
    with serving(redis_url, tokens=Tokens.load(file)) as service:
        yield Callers(service, tokens)


def listed(calls: Calls) -> list[str]:
    return [job.job_id for job in calls.stub.ListJobs(reward_pb2.ListJobsRequest(), timeout=20).jobs]


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return code_of(refused.value), str(refused.value.details())


@pytest.mark.parametrize("owner", ["alice", "123"])  # a name may look like a number
def test_a_job_of_another_does_not_exist(callers: Callers, owner: str) -> None:
    with callers.by(owner) as one, callers.by("bob") as bob, callers.by("carol") as carol:
        job_id = one.submit(answers("1", "2"), key="nightly").job.job_id
        assert summary(one.results(job_id)) == [1.0, 0.0]
        assert job_id in listed(one) and job_id not in listed(bob) + listed(carol)
        for call in BY_ID:
            asked, never = (refusal(partial(call, bob, name)) for name in (job_id, "0" * 32))
            assert asked == (never[0], never[1].replace("0" * 32, job_id)), "nothing tells that it exists"
            assert asked[0] == "NOT_FOUND"
        assert one.job(job_id).num_scored == 2, "untouched"


def test_two_owners_use_the_same_key(callers: Callers) -> None:
    with callers.by("alice") as alice, callers.by("bob") as bob:
        first = alice.submit(answers("1"), key="shared").job
        second = bob.submit(answers("2", "1"), key="shared", priority=3).job
        assert first.job_id != second.job_id
        again = alice.open("shared")
        assert again.job.job_id == first.job_id and again.next_chunk == 1
        assert summary(bob.results(second.job_id)) == [0.0, 1.0]
        bob.stub.DeleteJob(reward_pb2.DeleteJobRequest(job_id=second.job_id), timeout=20)
        assert alice.open("shared").job.job_id == first.job_id, "the key of the other is still in use"


def test_the_answer_to_a_repeated_deletion_is_the_owners(callers: Callers) -> None:
    with callers.by("alice") as alice, callers.by("bob") as bob:
        job_id = alice.submit(answers("1")).job.job_id
        alice.watch(job_id)
        request = reward_pb2.DeleteJobRequest(job_id=job_id)
        assert alice.stub.DeleteJob(request, timeout=20) == alice.stub.DeleteJob(request, timeout=20)
        assert refusal(lambda: bob.stub.DeleteJob(request, timeout=20))[0] == "NOT_FOUND"


def test_an_operator_sees_and_ends_all_jobs(callers: Callers) -> None:
    with callers.by("alice") as alice, callers.by("root") as root:
        job_id = alice.open("left open").job.job_id
        assert job_id in listed(root)
        assert root.job(job_id).idempotency_key == "left open"
        assert root.cancel(job_id).state == reward_pb2.Job.CANCELLED
        assert root.open("left open").job.job_id != job_id, "a key of its own all the same"
        root.stub.DeleteJob(reward_pb2.DeleteJobRequest(job_id=job_id), timeout=20)
        assert refusal(lambda: alice.job(job_id))[0] == "NOT_FOUND"


def test_without_tokens_there_is_one_owner(redis_url: str) -> None:
    with serving(redis_url) as service:
        job_id = service.submit(answers("1"), key="mine").job.job_id
        with Calls(service.server.address) as another:
            assert another.open("mine").job.job_id == job_id and listed(another) == [job_id]
            assert summary(another.results(job_id)) == [1.0]


def test_the_callers_of_a_run_share_its_jobs(redis_url: str) -> None:
    with serving(redis_url, tokens=Tokens.of_run("secret")) as service:
        address = service.server.address
        with (
            Calls(address, run_token("secret", Role.score)) as one,
            Calls(address, run_token("secret", Role.read)) as two,
        ):
            job_id = one.submit(answers("1")).job.job_id
            assert summary(two.results(job_id)) == [1.0] and listed(two) == [job_id]


def test_owners_survive_the_death_of_service_and_redis(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    tokens = {name: add_token(file, name, Role.score) for name in ("alice", "bob")}
    arguments = ("--token-file", str(file), "reward.num_workers=1")
    first = RewardProcess(tmp_path / "data", *arguments)
    try:
        with Calls(first.address, tokens["alice"]) as alice:
            header, chunk, *rest = submission(answers("1", "2"), answers("1"), key="nightly")
            job_id = alice.send([header, chunk])[-1].job.job_id
    finally:
        first.kill()
    second = RewardProcess(tmp_path / "data", *arguments)
    try:
        with Calls(second.address, tokens["alice"]) as alice, Calls(second.address, tokens["bob"]) as bob:
            assert refusal(lambda: bob.job(job_id))[0] == "NOT_FOUND" and listed(bob) == []
            assert bob.open("nightly").job.job_id != job_id
            reply = alice.send([header, *rest])[-1]
            assert (reply.job.job_id, reply.next_chunk) == (job_id, 2)
            assert summary(alice.results(job_id)) == [1.0, 0.0, 1.0]
        assert second.terminate() == 0
    finally:
        second.process.kill()
        second.process.wait(STOP_SECONDS)


@pytest.mark.parametrize("name", [EVERYBODY, "a:b", "", "x" * 65])
def test_a_token_file_cannot_name_an_owner_that_stands_for_others(tmp_path: Path, name: str) -> None:
    file = tmp_path / "tokens.toml"
    add_token(file, "alice", Role.score)
    file.write_text(file.read_text().replace("alice", f'"{name}"'))
    with pytest.raises(ConfigError, match="is not a name"):
        Tokens.load(file)
