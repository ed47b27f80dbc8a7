"""What is wrong with a deployment is said by the command: one line with the remedy, and exit code 2.

Further refusals: calls that scale too far, and the warning of a run that is insecure on purpose
(tests/services/launchers/test_run_recipe.py), two controllers on one Redis (tests/services/control/test_controller.py),
values of the chart (tests/deploy/test_helm.py).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tandem.services.commands.certs import write_certificates
from tandem.services.rpc.tokens import Role, add_token
from tandem.services.run.folder import RunLock
from tests.support.certificates import issue
from tests.support.processes import run_tandem
from tests.support.run_inputs import small_values


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(small_values(tmp_path)))
    return file


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.fixture
def expired(tmp_path: Path) -> Path:
    """A folder whose service.crt expired a day ago."""
    folder = tmp_path / "certificates"
    write_certificates(folder, [], 30)
    issue(folder, "service", starts=-timedelta(days=2), ends=-timedelta(days=1))
    return folder


def refused(*command: object, says: str, **environment: str) -> None:
    done = run_tandem(*command, **environment)
    warning = "appendfsync is no"  # of the test's Redis
    lines = [line for line in done.stderr.splitlines() if line.startswith("tandem: ") and warning not in line]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert says in lines[0]


def test_a_port_in_use(recipe: Path, port_in_use: int, redis_url: str) -> None:
    says = f"cannot listen on 127.0.0.1:{port_in_use} (Address already in use); end what uses it, choose another"
    refused("run", recipe, f"trainer.port={port_in_use}", says=f"trainer.port: {says}")
    refused("serve", "reward", recipe, f"reward.port={port_in_use}", says=says, TANDEM_REDIS_URL=redis_url)


def test_a_port_of_a_standalone_service_in_use(port_in_use: int) -> None:
    says = f"cannot listen on 127.0.0.1:{port_in_use}: the port is in use"
    refused("reward", "serve", "--port", port_in_use, says=says)


@pytest.mark.parametrize("command", [("run",), ("serve", "rollout")])
def test_a_registry_that_cannot_be_reached(recipe: Path, command: tuple[str, ...]) -> None:
    """Services find one another in Redis."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    url = f"redis://of:the-test@127.0.0.1:{port}/0"
    refused(*command, recipe, says=f"Redis at redis://127.0.0.1:{port}/0 cannot be reached", TANDEM_REDIS_URL=url)


@pytest.mark.parametrize(
    ("command", "backend"), [(("run",), "ipc"), (("serve", "rollout"), "nccl"), (("serve", "trainer"), "ipc")]
)
def test_no_gpu_where_one_is_asked_for(recipe: Path, command: tuple[str, ...], backend: str, redis_url: str) -> None:
    says = f"weights.backend={backend} needs a GPU and this machine shows none; set weights.backend=gloo or disk"
    refused(*command, recipe, f"weights.backend={backend}", says=says, TANDEM_REDIS_URL=redis_url)


def test_more_replicas_than_memory(recipe: Path) -> None:
    says = "memory: 1000 engine(s) with rollout.kv_cache_bytes=1048576 need about"
    refused("run", recipe, "rollout.num_replicas=1000", says=says)


def test_a_second_controller_of_a_run(recipe: Path, tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"):
        refused("run", recipe, says="another supervisor runs in it; stop that one first")


def test_a_token_file_with_open_permissions(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    add_token(file, "alice", Role.score)
    file.chmod(0o644)
    refused("reward", "serve", "--port", 0, "--token-file", file, says=f"run chmod 600 {file}")


def test_an_expired_certificate(recipe: Path, expired: Path, redis_url: str) -> None:
    says = f"service.crt: certificate has expired; `tandem certs init {expired}"
    refused("run", recipe, f"run.certificates={expired}", says=says)
    refused("serve", "feed", recipe, f"run.certificates={expired}", says=says, TANDEM_REDIS_URL=redis_url)
    refused("reward", "serve", "--port", 0, "--certificates", expired, says=says)


@pytest.mark.parametrize("command", [("run",), ("serve", "feed")])
def test_a_public_address_without_certificates(recipe: Path, command: tuple[str, ...], redis_url: str) -> None:
    says = "0.0.0.0 is not a loopback address, and the service has no certificates: `tandem certs init` makes"
    refused(*command, recipe, "run.host=0.0.0.0", says=says, TANDEM_REDIS_URL=redis_url)
