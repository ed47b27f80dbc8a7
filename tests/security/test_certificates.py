"""TLS and mutual TLS: what the two sides refuse of one another, what a user reads then, and which hosts need it."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest

from tandem.protos import common_pb2, reward_pb2, reward_pb2_grpc
from tandem.protos.contracts import ScoreItem
from tandem.protos.errors import AuthenticationError, ConfigError, TandemError, UnavailableError
from tandem.services.clients import RewardClient
from tandem.services.commands.certs import write_certificates
from tandem.services.commands.find_controller import controller_of
from tandem.services.commands.status import ask_controller
from tandem.services.rpc import client as rpc_client
from tandem.services.rpc.certificates import channel_credentials, server_credentials
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.server import Security, ServerThread
from tandem.services.rpc.tokens import Role, Tokens, add_token, run_token
from tandem.services.run.folder import running
from tandem.services.run.preflight import check_recipe
from tests.support.certificates import HOUR, issue, unchecked_client, unchecked_server
from tests.support.processes import run_tandem
from tests.support.reward_process import running_reward
from tests.support.run_inputs import recipe_of, small_values
from tests.support.service_wire import ask_info
from tests.support.whole_run import RUN_DEADLINE_SECONDS, WholeRun, kill_tree

SERVICE = "tandem.v1.RewardService"
ANY_HOST = "0.0.0.0"
ITEM = ScoreItem("gsm8k", "#### 1", "1", {}, "")


class Reward(reward_pb2_grpc.RewardServiceServicer):
    async def ListScorers(
        self, request: reward_pb2.ListScorersRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListScorersReply:
        return reward_pb2.ListScorersReply(default_rubric="answered")


@contextmanager
def serving(host: str = "127.0.0.1", **security: object) -> Iterator[str]:
    server = ServerThread(
        host,
        0,
        info=common_pb2.InfoReply,
        register=lambda one: reward_pb2_grpc.add_RewardServiceServicer_to_server(Reward(), one),
        service_names=[SERVICE],
        **Security(**security),  # type: ignore[typeddict-item]
    )
    try:
        yield server.address
    finally:
        server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates of a deployment, and some that are none of `tandem certs init`."""
    made = tmp_path_factory.mktemp("certificates")
    write_certificates(made, [], 30)
    issue(made, "expired", ends=-HOUR / 2)
    issue(made, "elsewhere", host="elsewhere.example.org")
    return made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of another deployment."""
    made = tmp_path_factory.mktemp("other")
    write_certificates(made, [], 30)
    return made


@pytest.fixture(scope="module")
def tls(folder: Path) -> Iterator[str]:
    """The address of a server that asks for no certificate."""
    with serving(credentials=server_credentials(folder, client_certificates=False)) as address:
        yield address


@pytest.fixture(scope="module")
def mutual(folder: Path) -> Iterator[str]:
    """The address of a server that asks for one."""
    with serving(credentials=server_credentials(folder, "127.0.0.1", client_certificates=True)) as address:
        yield address


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC does not repeat a call by itself, for which it takes two seconds."""
    monkeypatch.setattr(rpc_client, "_CLIENT_OPTIONS", [*rpc_client._CLIENT_OPTIONS, ("grpc.enable_retries", 0)])


def answered(addresses: str, certificates: Path | str) -> bool:
    with RewardClient(addresses, certificates=certificates) as client:
        return client.scorers().default_rubric == "answered"


def refusal(addresses: str, certificates: Path | str) -> TandemError:
    """What a user sees: one line, and no words of gRPC."""
    with pytest.raises(TandemError) as caught:
        answered(addresses, certificates)
    said = str(caught.value)
    assert "\n" not in said and addresses.partition(",")[0] in said
    assert not re.search(r"SSL_ERROR|OPENSSL|TSI_|backends|last error", said)
    return caught.value


# ---- who may connect ----


def test_mutual_tls_serves_a_client_with_a_certificate(mutual: str, folder: Path) -> None:
    assert answered(mutual, folder)
    with connect(mutual, credentials=channel_credentials(folder, "service")) as channel, translated():
        assert reward_pb2_grpc.RewardServiceStub(channel).ListScorers(reward_pb2.ListScorersRequest(), timeout=10.0)


def test_tls_serves_a_client_with_the_ca_alone(tls: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(tls, folder / "ca.crt") and answered(tls.replace("127.0.0.1", "localhost"), folder / "ca.crt")
    monkeypatch.setenv("TANDEM_CERTIFICATES", str(folder / "ca.crt"))
    assert answered(tls, "")


def test_several_services_have_to_name_the_first_address(tls: str, mutual: str, folder: Path) -> None:
    assert answered(f"{tls},{mutual}", folder)
    assert answered(f"{mutual.replace('127.0.0.1', 'localhost')},{tls}", folder)
    with serving(credentials=unchecked_server(folder, "elsewhere")) as first:
        assert "is not for this address" in str(refusal(f"{first},{first}", folder))


def test_a_client_refuses_a_service_of_another_ca(tls: str, other: Path) -> None:
    error = refusal(tls, other / "ca.crt")
    assert isinstance(error, AuthenticationError) and "refused: unable to get local issuer certificate" in str(error)


def test_a_client_refuses_an_expired_certificate(folder: Path) -> None:
    with serving(credentials=unchecked_server(folder, "expired")) as address:
        error = refusal(address, folder / "ca.crt")
    assert isinstance(error, AuthenticationError) and "refused: certificate has expired; renew it" in str(error)


def test_a_client_refuses_a_certificate_for_another_host(folder: Path) -> None:
    with serving(credentials=unchecked_server(folder, "elsewhere")) as address:
        error = refusal(address, folder)
    assert isinstance(error, AuthenticationError) and "is not for this address" in str(error)


def test_a_client_with_certificates_refuses_a_service_without_tls(plain: str, folder: Path) -> None:
    error = refusal(plain, folder)
    assert isinstance(error, AuthenticationError) and "the service talks no TLS" in str(error)


def test_a_service_refuses_a_client_without_tls(tls: str, mutual: str) -> None:
    for address in (tls, mutual):
        error = refusal(address, "")
        assert isinstance(error, UnavailableError) and "if it talks TLS, set TANDEM_CERTIFICATES" in str(error)


def test_a_service_refuses_a_client_without_a_certificate(mutual: str, folder: Path) -> None:
    error = refusal(mutual, folder / "ca.crt")
    assert isinstance(error, UnavailableError) and "a folder with client.crt" in str(error)


@pytest.mark.parametrize("owner", ["expired", "foreign"])
def test_a_service_refuses_a_certificate_that_is_expired_or_of_another_ca(
    mutual: str, folder: Path, other: Path, owner: str
) -> None:
    issue(other, "foreign")
    for kind in ("crt", "key"):
        (folder / f"foreign.{kind}").write_bytes((other / f"foreign.{kind}").read_bytes())
    with connect(mutual, credentials=unchecked_client(folder, owner)) as channel:
        ask = reward_pb2_grpc.RewardServiceStub(channel).ListScorers
        with pytest.raises(UnavailableError), translated():
            ask(reward_pb2.ListScorersRequest(), timeout=10.0)


def test_a_submission_does_not_wait_for_a_service_that_it_cannot_trust(tls: str, other: Path) -> None:
    with RewardClient(tls, certificates=other / "ca.crt", retry_seconds=1e9) as client:
        for call in (lambda: client.submit([ITEM], key="one"), lambda: client.wait("a-job")):
            with pytest.raises(AuthenticationError):
                call()


# ---- files that cannot be used ----


def _no_key(folder: Path) -> None:
    (folder / "service.key").unlink()


def _open_key(folder: Path) -> None:
    (folder / "service.key").chmod(0o640)


def _other_key(folder: Path) -> None:
    (folder / "service.key").write_bytes((folder / "client.key").read_bytes())


def _damaged(folder: Path) -> None:
    (folder / "service.crt").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")


def _expired(folder: Path) -> None:
    issue(folder, "service", ends=-HOUR / 2)


def _not_yet_valid(folder: Path) -> None:
    issue(folder, "service", starts=HOUR, ends=2 * HOUR)


def _other_ca(folder: Path) -> None:
    write_certificates(folder / "other", [], 1)
    (folder / "ca.crt").write_bytes((folder / "other" / "ca.crt").read_bytes())


def _of_a_client(folder: Path) -> None:
    for kind in ("crt", "key"):
        (folder / f"service.{kind}").write_bytes((folder / f"client.{kind}").read_bytes())


def _elsewhere(folder: Path) -> None:
    issue(folder, "service", host="elsewhere.example.org")


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (_no_key, r"service\.key: No such file or directory; `tandem certs init .*` writes it"),
    (_open_key, r"service\.key: other users may read or write it; run chmod 600"),
    (_other_key, r"service\.crt and service\.key cannot be used with ca\.crt: key values mismatch"),
    (_damaged, r"service\.crt and service\.key cannot be used with ca\.crt: "),
    (_expired, r"service\.crt: certificate has expired; `tandem certs init .*` renews it"),
    (_not_yet_valid, r"service\.crt: certificate is not yet valid"),
    (_other_ca, r"service\.crt: unable to get local issuer certificate"),
    (_of_a_client, r"service\.crt: unsu.* certificate purpose"),
    (_elsewhere, r"service\.crt: IP address mismatch.*127\.0\.0\.1.*`tandem certs init .* 127\.0\.0\.1`"),
]


@pytest.mark.parametrize(("spoil", "says"), FAULTS, ids=[spoil.__name__[1:] for spoil, _ in FAULTS])
def test_a_service_with_unusable_files_does_not_start(tmp_path: Path, spoil: Callable[[Path], None], says: str) -> None:
    write_certificates(tmp_path, [], 30)
    server_credentials(tmp_path, "127.0.0.1", client_certificates=True)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=says) as caught:
        server_credentials(tmp_path, "127.0.0.1", client_certificates=True)
    assert "\n" not in str(caught.value)


def test_a_recipe_with_an_expired_certificate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = recipe_of(small_values(tmp_path), run={"certificates": str(tmp_path)})
    write_certificates(tmp_path, [], 30)
    check_recipe(recipe, resume=False)
    _expired(tmp_path)
    with pytest.raises(ConfigError, match="has expired"):
        check_recipe(recipe, resume=False)


def test_a_client_with_unusable_files_does_not_connect(tmp_path: Path) -> None:
    write_certificates(tmp_path, [], 30)
    (tmp_path / "client.key").chmod(0o644)
    (tmp_path / "words.crt").write_text("no certificate")
    for certificates, says in (
        (tmp_path, "client.key: other users may read"),
        (tmp_path / "gone", "gone: No such file or directory"),
        (Path("long" * 100), "File name too long"),
        (tmp_path / "words.crt", "holds no certificate"),
    ):
        with pytest.raises(ConfigError, match=says):
            RewardClient("127.0.0.1:1", certificates=certificates)


# ---- which hosts need certificates and tokens ----


@pytest.mark.parametrize("lacks", ["certificates", "tokens", "certificates and no tokens"])
def test_a_public_address_needs_tls_and_tokens(folder: Path, lacks: str, caplog: pytest.LogCaptureFixture) -> None:
    security: Security = {}
    if "certificates" not in lacks:
        security["credentials"] = server_credentials(folder, client_certificates=True)
    if "tokens" not in lacks:
        security["tokens"] = Tokens.of_run("a secret")
    for host in (ANY_HOST, "::", "192.0.2.1"):
        says = f"^{host} is not a loopback address, and the service has no {lacks}: "
        with pytest.raises(ConfigError, match=says), serving(host, **security):
            pass
    with caplog.at_level(logging.WARNING), serving(ANY_HOST, **security, insecure=True) as address:
        (line,) = caplog.messages
        assert line.startswith(f"listens on {address}: ") and line.endswith(f"the service has no {lacks}")


def test_no_warning_without_need(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    credentials = server_credentials(folder, client_certificates=False)
    with caplog.at_level(logging.WARNING):
        for host in ("127.0.0.1", "localhost", "127.0.0.2", "[::1]"):
            with serving(host, insecure=True):
                pass
        with serving(ANY_HOST, credentials=credentials, tokens=Tokens.of_run("a secret")) as address:
            port = address.rpartition(":")[2]
            token = run_token("a secret", Role.read)
            with RewardClient(f"127.0.0.1:{port}", certificates=folder / "ca.crt", token=token) as client:
                assert client.scorers()
    assert caplog.messages == []


def test_a_standalone_service_on_a_public_address(folder: Path, tmp_path: Path) -> None:
    serve = ["reward", "serve", "--host", ANY_HOST, "--port", "0", "--folder", str(tmp_path)]
    token = add_token(tmp_path / "tokens.toml", "alice", Role.score)
    tokens = ["--token-file", str(tmp_path / "tokens.toml")]
    done = run_tandem(*serve, *tokens, seconds=60.0)
    assert done.returncode == 2 and "is not a loopback address" in done.stderr and done.stderr.count("\n") == 1
    options = ["--host", ANY_HOST, *tokens, "--certificates", str(folder)]
    with running_reward(tmp_path, *options, "reward.num_workers=1", "reward.scorer=gsm8k") as address:
        here = address.replace(ANY_HOST, "127.0.0.1")
        with RewardClient(here, token=token, certificates=folder / "ca.crt") as client:
            assert [score.value for score in client.score([ITEM])] == [1.0]  # type: ignore[union-attr]


# ---- a run ----


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_run_with_certificates_trains_to_its_end_and_tells_its_status(tmp_path: Path) -> None:
    write_certificates(tmp_path / "certs", [], 1)
    run = WholeRun(
        tmp_path,
        run={"run_id": "certified", "certificates": str(tmp_path / "certs"), "total_batches": 100_000},
        data={"eval_file": str(tmp_path / "few.parquet")},
        rollout={"engine": "transformers", "max_response_tokens": 32},
        trainer={"evaluate_every": 100_000},
    )
    pq.write_table(pq.read_table(tmp_path / "data" / "eval.parquet").slice(0, 70), tmp_path / "few.parquet")
    process = run.start("run", str(run.recipe))
    try:
        run.wait_for(lambda: all_running(run.folder), process)

        def told() -> dict[str, str]:
            """The addresses of services that have told what they do, as the command shows them."""
            status = run.tandem("status", str(run.folder), deadline=60, COLUMNS="200").stdout
            found = [line.split() for line in status.splitlines() if " running " in line and "127.0.0.1" in line]
            return {line[0]: line[5] for line in found if line[5] != "–" and line[6:]}

        run.wait_for(lambda: len(told()) == 4, process)
        services = told()
        assert sorted(services) == ["feed", "reward", "rollout-0", "trainer"]
        for address in services.values():
            with pytest.raises(UnavailableError, match="if it talks TLS"):
                ask_info(address)
        run.wait_for(lambda: bool(run.metrics()), process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, run.logs()
        total = len(run.metrics()) + 12
        process = run.start("run", str(run.recipe), "--resume", f"run.total_batches={total}")
        assert process.wait(RUN_DEADLINE_SECONDS) == 0, run.logs()
    finally:
        if process.poll() is None:
            kill_tree(process)
    assert len(run.metrics()) == total and run.summary()["weight_updates"] >= 12
    evaluations = [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [one["num_scored"] == one["num_rows"] > 0 for one in evaluations] == [True, True]


def all_running(folder: Path) -> bool:
    place = controller_of(folder) if running(folder) else None
    if place is None:
        return False
    services = ask_controller(place).services
    return all(service.state == "running" and service.address for service in services)
