"""The rollout service as a process: real vLLM, Redis, gRPC and a weight group, ended by SIGTERM and by kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest

from tandem.protos import rollout_pb2, rollout_pb2_grpc
from tandem.protos.codec import decode_group
from tandem.protos.errors import DataError, NotAdmittedError
from tandem.protos.manifest import encode_manifest
from tandem.protos.types import Trajectory, VersionSpan
from tandem.rollout.vllm.engine_folder import sweep_engine_folders
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.store_source import redis_store
from tandem.services.config import dump_recipe, load_resolved, parse_recipe
from tandem.services.process import in_thread
from tandem.services.rollout.server import SERVICE_NAME
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role
from tandem.services.trainer import publisher
from tandem.services.trainer.publisher import Publication, Publisher
from tandem.trainer.weight_sender import WeightSender
from tests.services.rollout.test_rollout_service import offer, prompt
from tests.support.paths import ROOT
from tests.support.redis_ring import SAMPLER, new_run
from tests.support.service_wire import ask_info, check_what_it_says, token_of
from tests.support.tiny_model import build_tiny_model
from tests.support.waiting import eventually
from tests.support.weight_ring import Policy

TIMEOUT = 20.0
LONGEST_ANSWER = 900
FIRST_PUBLISHED = 10
"""The first version that is published; those before it are for an answer that two versions sample."""


class Served:
    """The real service as a process, with its log and a temporary folder of its own."""

    def __init__(self, folder: Path, redis_url: str, recipe_file: Path, temporary: Path) -> None:
        self.log = folder / "rollout.log"
        self.temporary = temporary
        self.started_after = time.time()
        command = [sys.executable, "-m", "tandem.services.cli", "serve", "rollout", str(recipe_file)]
        environment = {**os.environ, "TANDEM_REDIS_URL": redis_url, "TMPDIR": str(temporary)}
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)

    def wait_ready(self, buffer: Buffer) -> str:
        def registered() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return buffer.samplers()[0].num_starts == 2  # the first was the test's own

        eventually(registered, 100.0)
        return buffer.samplers()[0].address

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def sockets(self) -> set[Path]:
        """The folders of the Unix sockets that the service and its engine listen on."""
        processes = [psutil.Process(self.process.pid), *self.family()]
        names = [socket.laddr for process in processes for socket in process.net_connections("unix")]
        return {Path(name).parent for name in names if name.startswith("/")}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="served-", dir="/tmp") as folder:  # short, because socket paths are limited
        yield Path(folder)


@pytest.fixture(scope="module")
def ring(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory, temporary: Path
) -> Iterator[tuple[Served, Buffer, str, WeightSender]]:
    folder = tmp_path_factory.mktemp("served")
    model = build_tiny_model(folder / "model", hidden=64, ends=False)
    recipe = parse_recipe(
        {
            "run": {"run_id": "served", "folder": str(folder / "run")},
            "model": {"path": str(model)},
            "data": {"train_file": "none", "max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": LONGEST_ANSWER, "kv_cache_bytes": 64 << 20, "samples_per_prompt": 2},
        }
    )
    (folder / "config.json").write_text(dump_recipe(recipe))
    buffer = new_run(redis_url, run_id="served", groups_per_batch=8, publishes=False)
    served = Served(folder, redis_url, folder / "config.json", temporary)
    try:
        address = served.wait_ready(buffer)
        store = redis_store(redis_url, "served", "weights")
        yield served, buffer, address, WeightSender(Policy(model), bucket_bytes=64 << 10, store=store)
    finally:
        served.process.kill()
        buffer.close()


def test_a_sampler_serves_grpc_and_receives_weights(ring: tuple[Served, Buffer, str, WeightSender]) -> None:
    served, buffer, address, sender = ring
    offer(buffer, *(prompt(index, num_samples=2, max_tokens=20) for index in range(4)))
    with connect(address, token_of(buffer, Role.internal)) as channel, translated():
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        said = {"name": SAMPLER, "service_names": (SERVICE_NAME,), "started_after": served.started_after}
        info = check_what_it_says(address, buffer, **said, incarnation=0)  # it has received no weights yet
        assert info.figures["prompts_waiting"] == 4 and "no version is published" in info.activity

        group = sender.prepare("127.0.0.1", 2, "gloo")
        join = rollout_pb2.JoinWeightGroupRequest(**asdict(group), first_rank=1, timeout_seconds=TIMEOUT)
        joining = stub.JoinWeightGroup.future(join, timeout=TIMEOUT)
        sender.connect(TIMEOUT)
        joining.result()
        manifest = sender.manifest(1, 0, "gloo")
        update = rollout_pb2.UpdateWeightsRequest(
            manifest=encode_manifest(manifest), group_name=group.group_name, timeout_seconds=TIMEOUT
        )
        updating = stub.UpdateWeights.future(update, timeout=TIMEOUT)
        sent = sender.broadcast(manifest, TIMEOUT)
        reply = updating.result()
        assert list(reply.digests) == [bucket.digest for bucket in sent.buckets] and reply.policy_version == 0
        assert 0 < reply.transfer_seconds < TIMEOUT and reply.stall_seconds > 0

        buffer.publish(1, 0, [SAMPLER])
        eventually(lambda: buffer.counts()["generated_waiting"] == 4)
        for claim in buffer.claim("generated", "reward", 4, 30.0, 0.0):
            for row in decode_group(claim.payload).rows:
                assert isinstance(row, Trajectory) and row.segments[0].num_loss_tokens == 20
                assert row.segments[0].spans == (VersionSpan(5, 1, 0),)

        check_generate(stub)
        check_pause(stub, buffer, address, served)

        state = stub.Drain(rollout_pb2.DrainRequest(timeout_seconds=5.0), timeout=TIMEOUT)
        assert (state.paused, state.groups_in_flight, state.policy_version) == (True, 0, 0)
        assert not stub.Resume(rollout_pb2.ResumeRequest(), timeout=5).paused
    assert served.process.poll() is None


@contextmanager
def suspended(processes: Sequence[psutil.Process]) -> Iterator[None]:
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            process.resume()


def check_generate(stub: rollout_pb2_grpc.RolloutServiceStub) -> None:
    ids = np.arange(5, 17, dtype="<i4").tobytes()
    items = [rollout_pb2.GenerateRequest.Item(prompt_ids=ids, num_samples=2)] * 2
    sampling = rollout_pb2.SamplingParameters(temperature=1.0, max_tokens=9, seed=4)
    request = rollout_pb2.GenerateRequest(items=items, sampling=sampling, required_version=0)
    answers = stub.Generate(request, timeout=TIMEOUT)
    samples = [sample for item in answers.items for sample in item.samples]
    assert len({sample.ids for sample in samples}) == 4, "two items of one request draw their own numbers"
    for sample in samples:
        assert len(sample.ids) == len(sample.behavior_logprobs) == 36 and sample.finish_reason == "length"
        assert [(s.first_token, s.incarnation, s.policy_version) for s in sample.spans] == [(0, 1, 0)]
    assert stub.Generate(request, timeout=TIMEOUT) == answers
    with pytest.raises(NotAdmittedError, match="carries 0"), translated():
        stub.Generate(rollout_pb2.GenerateRequest(items=items, sampling=sampling, required_version=1), timeout=TIMEOUT)
    with pytest.raises(DataError), translated():
        bad = rollout_pb2.GenerateRequest.Item(prompt_ids=ids[:-1])
        stub.Generate(rollout_pb2.GenerateRequest(items=[bad], sampling=sampling), timeout=TIMEOUT)


def check_pause(stub: rollout_pb2_grpc.RolloutServiceStub, buffer: Buffer, address: str, served: Served) -> None:
    """A paused service finishes the groups it holds and claims none; after resume it claims again. The engine stands
    still until it is checked what is held, so that the group is not over before.
    """
    with suspended(served.family()):
        offer(buffer, prompt(100, num_samples=2, max_tokens=250))
        # The group is leased, and the sampler has reported it.
        eventually(lambda: ask_info(address, token_of(buffer)).figures["groups_held"] == 1)
        state = stub.Pause(rollout_pb2.PauseRequest(), timeout=5)
        assert (state.paused, state.groups_in_flight, state.policy_version) == (True, 1, 0)
        assert ask_info(address, token_of(buffer)).activity == "sampling 1 group, paused"
    offer(buffer, prompt(101, num_samples=2, max_tokens=20))
    (held,) = buffer.claim("generated", "reward", 2, 30.0, TIMEOUT)
    assert held.group_id == "0-100", "what it had under way is sampled to its end"
    counts = buffer.counts()
    assert (counts["prompts_waiting"], counts["generated_waiting"]) == (1, 0)
    assert ask_info(address, token_of(buffer)).activity == "paused"

    state = stub.Resume(rollout_pb2.ResumeRequest(), timeout=5)
    assert not state.paused
    (resumed,) = buffer.claim("generated", "reward", 2, 30.0, TIMEOUT)
    assert resumed.group_id == "0-101"


def test_an_answer_sampled_by_two_versions_is_refused_where_one_is_required(
    ring: tuple[Served, Buffer, str, WeightSender],
) -> None:
    """An update may come before the first token, or after the last one. Then the next version is tried."""
    _, buffer, address, sender = ring
    said = []
    with connect(address, token_of(buffer, Role.internal)) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        item = rollout_pb2.GenerateRequest.Item(prompt_ids=np.arange(5, 17, dtype="<i4").tobytes(), num_samples=4)
        sampling = rollout_pb2.SamplingParameters(temperature=1.0, max_tokens=LONGEST_ANSWER)
        for version in range(1, FIRST_PUBLISHED):
            busy_seconds = ask_info(address, token_of(buffer)).figures["busy_seconds"]
            asked = stub.Generate.future(
                rollout_pb2.GenerateRequest(items=[item], sampling=sampling, required_version=version - 1), timeout=60.0
            )
            eventually(lambda: ask_info(address, token_of(buffer)).figures["busy_seconds"] > busy_seconds)  # noqa: B023
            unchanged = sender.manifest(1, version, "gloo", changed=False)
            update = rollout_pb2.UpdateWeightsRequest(manifest=encode_manifest(unchanged), timeout_seconds=TIMEOUT)
            stub.UpdateWeights(update, timeout=TIMEOUT)
            try:
                with translated():
                    versions = {span.policy_version for one in asked.result().items[0].samples for span in one.spans}
                assert versions == {version - 1}, "only an answer of the required version is given"
                said.append("over before")
            except NotAdmittedError as error:
                said.append(str(error))
                if f"sampled by [{version - 1}, {version}]" in said[-1]:
                    return
    raise AssertionError(said)


@pytest.mark.system
def test_a_publication_does_not_wait_for_a_sampler_that_is_stopped_and_it_is_caught_up_when_it_goes_on(
    ring: tuple[Served, Buffer, str, WeightSender], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served, buffer, _, sender = ring
    monkeypatch.setattr(publisher, "_HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(buffer, "samplers", lambda: Buffer.samplers(buffer, 2.0))
    recipe = load_resolved(served.log.with_name("config.json"))
    assert recipe.weights.deadline_seconds > 2 * TIMEOUT
    publishing = Publisher(buffer, sender, recipe, 1)
    family = [psutil.Process(served.process.pid), *served.family()]

    def publish(version: int) -> Publication:
        manifest = sender.manifest(1, version, "gloo")
        return publishing.publish(manifest, sender.snapshot(manifest))

    try:
        assert publish(FIRST_PUBLISHED).samplers_acknowledged == 1
        for process in family:
            process.suspend()
        assert in_thread("publish", publish, FIRST_PUBLISHED + 1).result(TIMEOUT).samplers_acknowledged == 0
        assert f"did not take version {FIRST_PUBLISHED + 1}: its heartbeat is silent" in caplog.text
        for process in family:
            process.resume()
        eventually(lambda: (buffer.samplers()[0].state, buffer.samplers()[0].version) == ("LIVE", FIRST_PUBLISHED + 1))
        assert publish(FIRST_PUBLISHED + 2).samplers_acknowledged == 1
    finally:
        for process in family:
            process.resume()
        publishing.close()
    assert served.process.poll() is None, served.log.read_text()


@pytest.mark.system
def test_sigterm_ends_it_within_seconds_and_kill_9_leaves_nothing(
    ring: tuple[Served, Buffer, str, WeightSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, buffer, _, _ = ring
    buffer.publish(1, max(1, buffer.published_version()), [SAMPLER])
    offer(buffer, *(prompt(index, num_samples=2, max_tokens=200) for index in range(4, 12)))
    eventually(lambda: buffer.counts()["prompts_leased"] > 0)
    family = served.family()
    assert family, "the engine is a process of its own"
    (folder,) = served.temporary.iterdir()
    assert served.sockets() == {folder}, "every socket is in the folder that goes with the engine"
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(10.0) == 0, served.log.read_text()
    counts = buffer.counts()
    assert counts["prompts_leased"] == 0 and counts["dropped"] == 0 and buffer.verify() == []
    assert "Traceback" not in served.log.read_text()
    assert not list(served.temporary.iterdir()), "it left something behind"

    recipe_file = served.log.with_name("config.json")
    again = Served(served.log.parent, f"{buffer.place}?db=0", recipe_file, served.temporary)
    eventually(lambda: any(map(is_engine, again.family())), 60.0)  # its engine is just starting, the hardest moment
    family = again.family()
    again.process.kill()
    again.process.wait(5.0)
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert not alive
    assert list(served.temporary.iterdir()), "killed, it could not clear up"
    monkeypatch.setattr(tempfile, "tempdir", str(served.temporary))
    sweep_engine_folders()  # as the supervisor and every starting engine do
    assert not list(served.temporary.iterdir())


def is_engine(child: psutil.Process) -> bool:
    try:
        command = " ".join(child.cmdline())
    except psutil.Error:
        return False
    return "serve rollout" in command or "EngineCore" in command  # a fork before and after it sets its title
