"""Any bytes to any method of a run, from anybody, get a documented status, and the services keep working."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor

from tandem.protos import control_pb2, control_pb2_grpc, reward_pb2, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import TandemError
from tandem.protos.manifest import encode_manifest
from tandem.protos.types import BucketSpec, TensorSpec, WeightManifest
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.server import control_server
from tandem.services.launchers.local import LocalLauncher
from tandem.services.launchers.process_group import ProcessGroup
from tandem.services.rpc.client import connect
from tandem.services.rpc.limits import ERROR_KEY
from tandem.services.rpc.tokens import ROLES_NEEDED, Role, Tokens, bearer, run_token
from tests.support.fuzzing import PATHS, Fuzz
from tests.support.redis_ring import new_run
from tests.support.reward_server import Stub, answers, serving, submission, summary
from tests.support.run_inputs import recipe_of, small_values
from tests.support.sampler_server import serving_sampler
from tests.support.tiny_model import build_tiny_model

NUMBER = 20_000
AT_ONCE = 16
CALL_SECONDS = 60.0
ENDLESS_SECONDS = 0.2
MAX_GROWTH_BYTES = 512 << 20
SEED = 10
ENDLESS = ("/grpc.health.v1.Health/Watch", "/tandem.v1.ControlService/Watch")
"""Streams of replies that go on until the call's deadline."""

Status = grpc.StatusCode


def _documented() -> set[grpc.StatusCode]:
    classes = [TandemError]
    for one in classes:
        classes += one.__subclasses__()
    of_errors = {getattr(Status, one.grpc_code) for one in classes}
    return (of_errors | {Status.OK, Status.UNIMPLEMENTED}) - {Status.UNKNOWN, Status.INTERNAL}


DOCUMENTED = _documented()


@dataclass(frozen=True)
class Run:
    """Addresses of the services of a run with a sampler, by the full name of the service."""

    addresses: dict[str, str]
    secret: str

    def token(self, role: Role) -> str:
        return run_token(self.secret, role)


@pytest.fixture(scope="module")
def run(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    recipe = recipe_of(small_values(folder))
    model = folder / "tiny"
    build_tiny_model(model)
    buffer = new_run(redis_url)
    tokens = Tokens.of_run(buffer.secret())
    processes = ProcessGroup(report=lambda line: None)
    launcher = LocalLauncher("local", recipe, buffer, processes, lambda scaled: [])
    with ExitStack() as stack:
        lease = stack.enter_context(Lease(buffer, "fuzzed"))
        controller = stack.enter_context(Controller(recipe, buffer, launcher, lease))
        addresses = {
            "tandem.v1.RolloutService": stack.enter_context(serving_sampler(buffer, recipe, model)),
            "tandem.v1.RewardService": stack.enter_context(serving(redis_url, tokens=tokens)).server.address,
            "tandem.v1.ControlService": stack.enter_context(control_server(controller, threading.Event())),
        }
        yield Run(addresses, buffer.secret())


def methods(run: Run) -> list[tuple[str, MethodDescriptor]]:
    """The address and descriptor of every method: each service's own, three times, and those that all have."""
    find = descriptor_pool.Default().FindServiceByName
    common = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "tandem.v1.InfoService")
    return [
        (address, method)
        for service, address in run.addresses.items()
        for name in (service, service, service, *common)
        for method in find(name).methods
    ]


def manifests() -> list[bytes]:
    tensor = TensorSpec("model.norm.weight", "float32", (2,), 0, 8)
    made = [
        WeightManifest(1, version, backend, (BucketSpec(16, (tensor,), "00" * 32),), location)
        for version, backend in ((0, "gloo"), (1, "disk"), (2, "ipc"), (3, "../x"))
        for location in ("", "/etc", *PATHS, "[]", "x" * 5000)
    ]
    made += [WeightManifest(1, version, "gloo", ()) for version in (0, 1, 2)] * 10
    made += [replace(one, digest_algorithm="sums") for one in made[:4]]
    encoded = [encode_manifest(one) for one in made]
    bad = [b'{"schema_version": 9}', b"[" * 100_000, b"9" * 5000, b'{"schema_version": 2}', b"null"]
    for name, value in (("policy_version", 2**70), ("incarnation", "x"), ("buckets", [{}]), ("adapters", {"base": 3})):
        bad.append(json.dumps({**json.loads(encoded[0]), name: value}).encode())
    return encoded + bad


def send(address: str, method: MethodDescriptor, parts: Sequence[bytes], token: str) -> tuple[grpc.StatusCode, str]:
    """The status and details of one call."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    channel = _channels[address]
    refused = ROLES_NEEDED.get(path) is not None and not token
    seconds = ENDLESS_SECONDS if path in ENDLESS and not refused else CALL_SECONDS
    call = channel.stream_stream(path)(iter(parts), metadata=[bearer(token)] if token else [], timeout=seconds)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    code, details = call.code(), str(call.details())
    if refused:
        assert code == Status.UNAUTHENTICATED, (path, code, details)
    if code == Status.DEADLINE_EXCEEDED and path not in ENDLESS:
        assert ERROR_KEY in dict(call.trailing_metadata() or ()), f"{path} had no answer in {seconds} s"
    assert code in DOCUMENTED, (path, code, details, [part[:300] for part in parts])
    return code, path


_channels: dict[str, grpc.Channel] = {}


@contextmanager
def channels(run: Run) -> Iterator[None]:
    options = [("grpc.enable_retries", 0), ("grpc.max_receive_message_length", 256 << 20)]
    try:
        _channels.update({one: grpc.insecure_channel(one, options) for one in run.addresses.values()})
        yield
    finally:
        for one in _channels.values():
            one.close()
        _channels.clear()


def check_services(run: Run) -> None:
    """Each service does its work."""
    operator = run.token(Role.operate)
    with connect(run.addresses["tandem.v1.RewardService"], run.token(Role.score)) as channel:
        stub = Stub(channel)
        reply = stub.Score(reward_pb2.ScoreRequest(items=answers("1", "2")), timeout=20)
        assert summary(reply.items) == [1.0, 0.0]
        (*_, last) = stub.SubmitJob(submission(answers("1", "2"), priority=100), timeout=20)
        events = list(stub.WatchJob(reward_pb2.WatchJobRequest(job_id=last.job.job_id), timeout=60))
        assert events[-1].job.num_scored == 2
    with connect(run.addresses["tandem.v1.RolloutService"], operator) as channel:
        item = rollout_pb2.GenerateRequest.Item(prompt_ids=np.array([5, 6], "<i4").tobytes(), num_samples=2)
        sampling = rollout_pb2.SamplingParameters(temperature=1.0, max_tokens=4)
        request = rollout_pb2.GenerateRequest(items=[item], sampling=sampling)
        sampled = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request, timeout=60)
        assert [len(one.samples) for one in sampled.items] == [2]
    with connect(run.addresses["tandem.v1.ControlService"], operator) as channel:
        ledger = control_pb2_grpc.ControlServiceStub(channel).GetLedger(control_pb2.GetLedgerRequest(), timeout=20)
        assert list(ledger.violations) == []


@pytest.mark.timeout(900)
def test_no_message_of_anybody_breaks_a_service(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with connect(run.addresses["tandem.v1.RewardService"], run.token(Role.score)) as channel:
        (*_, ended) = Stub(channel).SubmitJob(submission(answers("1", "2")), timeout=20)
        list(Stub(channel).WatchJob(reward_pb2.WatchJobRequest(job_id=ended.job.job_id), timeout=20))
    known: dict[str, Sequence[str | bytes]] = {
        "job_id": [ended.job.job_id, "0" * 32, *PATHS],
        "rubric": ["", '[[components]]\nscorer = "exact"\n', '[[components]]\nscorer = "../x.py:f"\n', "a = [" * 9000],
        "ground_truth": ["", "1", '"1"', "NaN", "[" * 1000, "1e999", '"\\ud800"'],
        "extra_info": ["", "{}", '{"a": 1}', "[]", '{"a":' * 5000],
        "manifest": manifests(),
        "prompt_ids": [b"", np.arange(5, 9, dtype="<i4").tobytes(), b"\xff" * 8, b"\x05", b"\x00" * 400],
        "backend": ["gloo", "nccl", "disk", ""],
        "host": ["127.0.0.1", "", "no.such.host.invalid", "a\x00b"],
    }
    fuzz = Fuzz(SEED, known)
    callers = ["", "wrong", *(run.token(role) for role in Role), *[run.token(Role.internal)] * 9]
    places = methods(run)
    memory = psutil.Process().memory_info
    before = memory().rss
    found: Counter[tuple[str, str]] = Counter()

    def call() -> tuple[str, MethodDescriptor, list[bytes], str]:
        address, method = fuzz.chance.choice(places)
        number = fuzz.chance.choice([0, 1, 3, 5]) if method.client_streaming else fuzz.chance.choice([1, 1, 1, 1, 0, 2])
        parts = fuzz.distorted([fuzz.message(method.input_type) for _ in range(number)])
        return address, method, parts, fuzz.chance.choice(callers)

    with caplog.at_level(logging.WARNING), channels(run), ThreadPoolExecutor(AT_ONCE) as senders:
        for _ in range(20):
            calls = [call() for _ in range(NUMBER // 20)]
            for code, path in senders.map(lambda one: send(*one), calls):
                found[path, code.name] += 1
            check_services(run)
    assert found.total() == NUMBER
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert memory().rss - before < MAX_GROWTH_BYTES
    for name in ("Score", "GetJob", "SubmitJob", "Generate", "Drain", "UpdateWeights", "JoinWeightGroup"):
        # Some get past the checks.
        statuses = {code: number for (path, code), number in found.items() if path.endswith(f"/{name}")}
        assert {"UNAUTHENTICATED", "INVALID_ARGUMENT"} <= statuses.keys() and len(statuses) > 2, (name, statuses)
