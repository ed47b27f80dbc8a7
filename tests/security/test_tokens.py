"""Every method of every service is closed to callers without a token, and to tokens whose role does not include it."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2

from tandem.protos import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    environments_pb2_grpc,
    reward_pb2_grpc,
    rollout_pb2_grpc,
)
from tandem.protos.contracts import ScoreItem
from tandem.protos.errors import AccessError, AuthenticationError, ConfigError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.clients import RewardClient
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.server import ServerThread
from tandem.services.rpc.tokens import ROLES_NEEDED, Role, Tokens, add_token, bearer, read_private, run_token
from tests.support.reward_process import running_reward
from tests.support.service_wire import health_of, listed_services

SECRET = "a secret of the test"
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
METHODS: list[MethodDescriptor] = [
    method
    for service in ("ControlService", "EnvironmentService", "InfoService", "RewardService", "RolloutService")
    for method in descriptor_pool.Default().FindServiceByName(f"tandem.v1.{service}").methods
]


def register(server: grpc.aio.Server) -> None:
    """Registers the generated servicers, whose methods only fail."""
    control_pb2_grpc.add_ControlServiceServicer_to_server(control_pb2_grpc.ControlServiceServicer(), server)
    environments_pb2_grpc.add_EnvironmentServiceServicer_to_server(
        environments_pb2_grpc.EnvironmentServiceServicer(), server
    )
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward_pb2_grpc.RewardServiceServicer(), server)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout_pb2_grpc.RolloutServiceServicer(), server)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    running = ServerThread("127.0.0.1", 0, info=common_pb2.InfoReply, register=register, tokens=Tokens.of_run(SECRET))
    yield running
    running.stop()


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def status_of(address: str, method: MethodDescriptor, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """The status of a call with one empty message. As a stream, because that calls methods of every kind."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path_of(method))(iter([b""]), metadata=metadata, timeout=10.0)
        with suppress(grpc.RpcError):
            list(call)
        code: grpc.StatusCode = call.code()
        return code


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_needs_a_token_of_its_role(server: ServerThread, method: MethodDescriptor) -> None:
    needed = ROLES_NEEDED[path_of(method)]
    assert needed is not None
    token = run_token(SECRET, Role.internal)
    strangers: list[tuple[tuple[str, str], ...]] = [
        (),
        (bearer(run_token("another run's secret", Role.internal)),),
        (bearer(""),),
        (bearer(SECRET),),
        (bearer(token[:-1]),),
        (("authorization", token),),
        (("authorization", f"Basic {token}"),),
    ]
    for metadata in strangers:
        assert status_of(server.address, method, *metadata) == grpc.StatusCode.UNAUTHENTICATED, metadata
    for role in Role:
        status = status_of(server.address, method, bearer(run_token(SECRET, role)))
        if not role.includes(needed):
            assert status == grpc.StatusCode.PERMISSION_DENIED, role
        else:
            assert status not in REFUSALS, role


def test_health_is_open_and_reflection_is_not(server: ServerThread) -> None:
    assert health_of(server.address, "") == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        listed_services(server.address)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_client_says_what_its_token_lacks(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    item = ScoreItem("gsm8k", "#### 1", "1", {}, "")
    monkeypatch.delenv("TANDEM_TOKEN", raising=False)
    with RewardClient(server.address) as client, pytest.raises(AuthenticationError, match="no token; set TANDEM_TOKEN"):
        client.score([item])
    monkeypatch.setenv("TANDEM_TOKEN", run_token(SECRET, Role.read))
    with RewardClient(server.address) as client, pytest.raises(AccessError, match="needs a token with the role score"):
        client.cancel("a-job")
    with connect(server.address, "wrong") as channel, pytest.raises(AuthenticationError, match="known"), translated():
        control_pb2_grpc.ControlServiceStub(channel).Stop(control_pb2.StopRequest(), timeout=5.0)


def test_the_tokens_of_a_run_survive_its_processes(redis_url: str) -> None:
    first, second, other = (Buffer(redis_url, run_id) for run_id in ("tokens", "tokens", "tokens-of-another"))
    assert first.secret() == second.secret() != other.secret()
    assert len(first.secret()) == 64


# ---- the token file of a standalone service ----


def test_a_token_of_the_file_opens_what_its_role_allows(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    tokens = {role: add_token(file, f"one-{role}", role) for role in Role}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(token in file.read_text() for token in tokens.values()), "only digests are stored"
    accepted = Tokens.load(file)
    for role, token in tokens.items():
        for needed in Role:
            with nullcontext() if role.includes(needed) else pytest.raises(AccessError):
                accepted.check([bearer(token)], needed)
    with pytest.raises(AuthenticationError):
        accepted.check([bearer("guessed")], Role.read)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("", 0o644, "other users may read or write it; run chmod 600"),
        ("alice = 1", 0o600, "cannot be read"),
        ('alice = { role = "score" }', 0o600, "cannot be read: 'sha256'"),
        ('alice = { role = "king", sha256 = "00" }', 0o600, "cannot be read: 'king' is not a valid Role"),
        ("alice = {", 0o600, "cannot be read"),
        (None, 0, "No such file or directory"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, mode: int, says: str) -> None:
    file = tmp_path / "tokens.toml"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(says)):
        Tokens.load(file)
    if file.exists():
        with pytest.raises(ConfigError, match=re.escape(says)):
            add_token(file, "bob", Role.score)


@contextmanager
def acting_as(user: int, group: int) -> Iterator[None]:
    """This process without root's rights, as a service in a container: a user who is in one further group."""
    before = os.getgroups()
    os.setgroups([group])
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setgroups(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("owner", "mode", "reads"),
    [(0, 0o440, True), (0, 0o640, True), (0, 0o444, False), (0, 0o460, False), (0, 0o450, False), (1234, 0o440, False)],
)
def test_a_secret_may_be_readable_by_a_group_that_root_chose(owner: int, mode: int, reads: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        file = Path(folder, "service.key")
        file.write_text("secret")
        os.chown(file, owner, 4321)
        file.chmod(mode)
        with pytest.raises(PermissionError):
            read_private(file)  # as root, whose files only root may read
        with acting_as(1234, 4321), nullcontext() if reads else pytest.raises(PermissionError, match="other users may"):
            assert read_private(file) == b"secret"
        with acting_as(1234, 1), pytest.raises(PermissionError):
            read_private(file)


def test_a_token_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone/tokens\.toml: No such file or directory"):
        add_token(tmp_path / "gone" / "tokens.toml", "bob", Role.score)


@pytest.mark.parametrize(("name", "says"), [("alice", "holds a token for alice"), ("a b", "is not a name")])
def test_a_name_gets_one_token(tmp_path: Path, name: str, says: str) -> None:
    add_token(tmp_path / "tokens.toml", "alice", Role.score)
    with pytest.raises(UserError, match=says):
        add_token(tmp_path / "tokens.toml", name, Role.read)


def test_a_standalone_service_scores_for_a_caller_with_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    token = add_token(file, "alice", Role.score)
    item = ScoreItem("gsm8k", "#### 1", "1", {}, "")
    with running_reward(tmp_path, "--token-file", str(file), "reward.num_workers=1", "reward.scorer=gsm8k") as address:
        with RewardClient(address, token=token) as client:
            assert [score.value for score in client.score([item])] == [1.0]
        with RewardClient(address) as client, pytest.raises(AuthenticationError):
            client.score([item])
