"""`tandem dashboard` as a process: its line, TLS, and what it refuses in one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tandem.services.cli import app
from tandem.services.commands.certs import write_certificates
from tests.support.made_up_run import make_run
from tests.support.paths import ROOT
from tests.support.redis_ring import new_run

COMMAND = (sys.executable, "-m", "tandem.services.cli", "dashboard")


def refused(*arguments: str) -> str:
    """The line of a command that is refused."""
    done = CliRunner().invoke(app, ["dashboard", *arguments])
    assert done.exit_code == 2, done.output
    (line,) = done.output.splitlines()
    return line


def test_it_names_its_address_talks_tls_and_ends_with_a_signal(tmp_path: Path, redis_url: str) -> None:
    write_certificates(tmp_path / "certs", [], 1)
    folder = make_run(tmp_path, "secured", redis_url=redis_url)
    with closing(new_run(redis_url, run_id="secured")):
        options = ["--port", "0", "--certificates", str(tmp_path / "certs")]
        process = subprocess.Popen([*COMMAND, str(folder), *options], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("https://127.0.0.1:") and f"tandem token {folder} --role read" in line
        token = CliRunner().invoke(app, ["token", str(folder), "--role", "read"]).output.strip()
        address = line.split()[0].replace("127.0.0.1", "localhost")
        headers = {"Origin": address, "Content-Type": "application/json"}
        with httpx.Client(base_url=address, verify=str(tmp_path / "certs" / "ca.crt"), timeout=20.0) as client:
            reply = client.post("/api/login", json={"token": token}, headers=headers)
        assert reply.status_code == 200 and "Secure" in reply.headers["set-cookie"]
        process.terminate()
        assert process.wait(20) == 0


def test_another_address_needs_tls(tmp_path: Path) -> None:
    folder = str(make_run(tmp_path, "mine"))
    line = refused(folder, "--host", "0.0.0.0", "--port", "0")
    assert "0.0.0.0 is not a loopback address, and the service has no certificates" in line
    assert "tandem certs init" in line


@pytest.mark.parametrize("given", ["missing", "twice"])
def test_runs_exist_and_are_named_once(tmp_path: Path, given: str) -> None:
    folder = str(make_run(tmp_path, "mine"))
    runs = {"missing": [str(tmp_path / "none")], "twice": [folder, folder]}[given]
    assert ("is not a run folder" in refused(*runs)) if given == "missing" else ("named twice" in refused(*runs))


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    folder = str(make_run(tmp_path, "mine"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(folder, "--port", str(port))
