"""The launchers compose and kubernetes: what they run and send, and what they say if that fails."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError, EnvironmentLackError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.commands.certs import write_certificates
from tandem.services.config import Recipe
from tandem.services.control.compose import Compose
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.kubernetes import Kubernetes
from tandem.services.control.launcher import StartedByHand
from tests.services.control.conftest import calls


def test_compose_scales_one_service_and_leaves_the_others(
    compose: Path, recipe: Recipe, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_COMPOSE_SAMPLERS", "rollout-gpu")
    with Lease(buffer, "test") as lease:
        controller = Controller(recipe, buffer, Compose(buffer), lease)
        controller.scale("rollout", 3)
        controller.scale("reward", 2)
        up = ["compose", "--profile", "cpu", "up", "--detach", "--no-recreate", "--no-deps", "--scale"]
        assert calls(compose) == [[*up, "rollout-gpu=3", "rollout-gpu"], [*up, "reward=2", "reward"]]
        assert controller.desired() == {"rollout": 3, "reward": 2}
        with pytest.raises(UserError, match="reward=0: there must be at least 1"):
            controller.scale("reward", 0)
        with pytest.raises(UserError, match="compose chooses which sampler leaves"):
            controller.drain("rollout-0")
        assert controller.desired()["rollout"] == 3


def test_environment_services_are_scaled_where_the_recipe_has_them(
    compose: Path, tmp_path: Path, recipe: Recipe, buffer: Buffer
) -> None:
    with Lease(buffer, "test") as lease:
        controller = Controller(recipe, buffer, Compose(buffer), lease)
        with pytest.raises(UserError, match=r"environment\.service is false: the samplers run the environments"):
            controller.scale("environments", 2)
        served = recipe.environment.model_copy(update={"path": "a:B", "service": True, "num_replicas": 2})
        controller = Controller(recipe.model_copy(update={"environment": served}), buffer, Compose(buffer), lease)
        assert controller.first_replicas("environments", 2) == 2
        with pytest.raises(UserError, match="environments=0: there must be at least 1"):
            controller.scale("environments", 0)
        controller.scale("environments", 3)
        assert [call[-2:] for call in calls(compose)] == [["environments=3", "environments"]]
        assert controller.desired()["environments"] == controller.first_replicas("environments", 2) == 3


@pytest.mark.parametrize("read", ["silences", "services", "samplers"])
def test_services_may_register_while_the_replicas_are_read(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    launcher, whole = StartedByHand(buffer), getattr(buffer, read)

    def read_before_others_register() -> object:
        found = whole()
        buffer.register_sampler("rollout-7", "127.0.0.1:7", 1)
        buffer.register_service("reward-8", "127.0.0.1:8")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(buffer, read, read_before_others_register)
        assert launcher.replicas()["rollout-1"].state == "starting"
    assert {"rollout-1", "rollout-7", "reward-8"} <= set(launcher.replicas())


def test_an_order_that_compose_refuses_does_not_stand(compose: Path, recipe: Recipe, buffer: Buffer) -> None:
    (compose / "fails").touch()
    with Lease(buffer, "test") as lease:
        controller = Controller(recipe, buffer, Compose(buffer), lease)
        refused = r"rollout=3: /.*/docker failed \(exit code 1\): no such image: tandem$"
        with pytest.raises(EnvironmentLackError, match=refused):
            controller.scale("rollout", 3)
        assert controller.desired()["rollout"] == 2
        controller.carry_out()
        assert len(calls(compose)) == 1


def test_an_order_is_carried_out_by_the_controller_that_follows_one_that_was_killed(
    compose: Path, recipe: Recipe, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lease(buffer, "test") as lease:
        killed = Controller(recipe, buffer, Compose(buffer), lease)

        def die(service: str, replicas: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(killed.launcher, "set_replicas", die)
        with pytest.raises(KeyboardInterrupt):
            killed.scale("rollout", 3)
        following = Controller(recipe, buffer, Compose(buffer), lease)
        following.carry_out()
        following.carry_out()
        assert [call[-2:] for call in calls(compose)] == [["rollout=3", "rollout"]]


def test_a_compose_that_is_not_there_is_named(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_COMPOSE", "no-such-program compose")
    with pytest.raises(EnvironmentLackError, match="no-such-program: No such file or directory; set TANDEM_COMPOSE"):
        Compose(buffer).set_replicas("rollout", 2)


class Api(BaseHTTPRequestHandler):
    """Kubernetes' API as far as it matters here: one Deployment that this account may scale."""

    asked: list[tuple[str, str, str, object]]

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = self.headers["Authorization"], self.headers["Content-Type"]
        self.asked.append((self.path, *headers, body))
        allowed = "/deployments/ring-rollout/scale" in self.path
        reply = (
            b"{}" if allowed else json.dumps({"kind": "Status", "message": 'cannot patch "deployments/scale"'}).encode()
        )
        self.send_response(200 if allowed else 403)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@contextmanager
def kubernetes_api(certificates: Path) -> Iterator[HTTPServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "service.crt", certificates / "service.key")
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of a service account, beside an API server with a certificate of its CA."""
    write_certificates(tmp_path / "certs", ["127.0.0.1"], 1)
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("a-token\n")
    (folder / "namespace").write_text("training")
    (folder / "ca.crt").write_bytes((tmp_path / "certs" / "ca.crt").read_bytes())
    Api.asked = []
    with kubernetes_api(tmp_path / "certs") as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
        monkeypatch.setenv("TANDEM_ROLLOUT_DEPLOYMENT", "ring-rollout")
        monkeypatch.setenv("TANDEM_REWARD_DEPLOYMENT", "ring-reward")
        yield folder


def test_kubernetes_patches_the_scale_of_a_deployment(account: Path, recipe: Recipe, buffer: Buffer) -> None:
    with Lease(buffer, "test") as lease:
        controller = Controller(recipe, buffer, Kubernetes(buffer, account), lease)
        controller.scale("rollout", 4)
        (account / "token").write_text("a-newer-token\n")
        controller.scale("rollout", 0)
        path = "/apis/apps/v1/namespaces/training/deployments/ring-rollout/scale"
        kind = "application/merge-patch+json"
        assert Api.asked == [
            (path, "Bearer a-token", kind, {"spec": {"replicas": 4}}),
            (path, "Bearer a-newer-token", kind, {"spec": {"replicas": 0}}),
        ]
        refused = r'refuses to scale the Deployment ring-reward \(403\): cannot patch "deployments/scale"'
        with pytest.raises(EnvironmentLackError, match=refused):
            controller.scale("reward", 2)
        with pytest.raises(UserError, match="helm uninstall"):
            controller.stop()


def test_kubernetes_scales_environment_services_where_the_release_has_them(
    account: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(Kubernetes(buffer, account).scalable) == ["rollout", "reward"]
    monkeypatch.setenv("TANDEM_ENVIRONMENTS_DEPLOYMENT", "ring-environments")
    launcher = Kubernetes(buffer, account)
    assert list(launcher.scalable) == ["rollout", "reward", "environments"]
    with pytest.raises(EnvironmentLackError, match="refuses to scale the Deployment ring-environments"):
        launcher.set_replicas("environments", 2)


def test_another_server_in_place_of_kubernetes_gets_no_token(account: Path, buffer: Buffer, tmp_path: Path) -> None:
    write_certificates(tmp_path / "others", ["127.0.0.1"], 1)
    (account / "ca.crt").write_bytes((tmp_path / "others" / "ca.crt").read_bytes())
    with pytest.raises(EnvironmentLackError, match="CERTIFICATE_VERIFY_FAILED"):
        Kubernetes(buffer, account).set_replicas("rollout", 2)
    assert Api.asked == []


def test_outside_a_pod_it_says_what_is_missing(
    account: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="namespace: No such file or directory; the pod needs a service account"):
        Kubernetes(buffer, tmp_path / "nowhere")
    monkeypatch.delenv("TANDEM_REWARD_DEPLOYMENT")
    with pytest.raises(ConfigError, match="TANDEM_REWARD_DEPLOYMENT is not set"):
        Kubernetes(buffer, account)
