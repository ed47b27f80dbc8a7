"""A run on two hosts, set up by hand with the commands of docs/deploy.md. The hosts are network namespaces with a cable
between them. Each has a folder of its own, as hosts that share no disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tandem.services.buffer.redis_server import find_redis_server
from tests.support.paths import ROOT
from tests.support.programs import lacking, needed
from tests.support.waiting import eventually
from tests.support.whole_run import WholeRun

pytestmark = pytest.mark.timeout(300)

TRAINER_HOST, SAMPLER_HOST = "10.77.0.1", "10.77.0.2"
PASSWORD = "of-the-test"
RUN = {"total_batches": 4, "groups_per_batch": 2, "staleness_budget": 1, "folder": "run"}
ROLLOUT = {"engine": "transformers", "samples_per_prompt": 2, "max_response_tokens": 32}


class Host:
    """A network namespace with an address, and a folder in which its commands run."""

    def __init__(self, namespace: str, address: str, folder: Path, variables: Mapping[str, str]) -> None:
        self.address = address
        self.folder = folder
        self._inside = ["ip", "netns", "exec", namespace]
        self._variables = {**os.environ, **variables}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *lines: str) -> subprocess.Popen[bytes]:
        """Starts the last line in the background, after the others."""
        script = "\n".join(["set -eu", *lines[:-1], f"exec {lines[-1]}"])
        command = [*self._inside, "bash", "-c", script]
        with open(self.folder / "said.log", "ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self._variables, stdout=log, stderr=subprocess.STDOUT
            )
        self._started.append(process)
        return process

    def do(self, *lines: str) -> str:
        """Runs lines to the end of the last one; returns what it printed."""
        script = "\n".join(["set -eu", *lines])
        command = [*self._inside, "bash", "-c", script]
        done = subprocess.run(
            command, cwd=self.folder, env=self._variables, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, script + done.stdout + done.stderr
        return done.stdout

    def reaches(self, address: str, port: int) -> bool:
        command = [*self._inside, "timeout", "2", "bash", "-c", f"</dev/tcp/{address}/{port}"]
        return subprocess.run(command, timeout=10, capture_output=True, check=False).returncode == 0

    def said(self) -> str:
        return f"{self.address}:\n{(self.folder / 'said.log').read_text()}"

    def stop(self) -> None:
        """Stops what still runs, the last one first."""
        for process in reversed(self._started):
            process.terminate()
            process.wait(30)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two network namespaces with a veth pair between them."""
    ip, _ = needed("ip", "nft")
    if os.geteuid() != 0:
        lacking("network namespaces need root")
    variables = {"PATH": f"{_programs(folder / 'bin')}:{os.environ['PATH']}", "PASSWORD": PASSWORD}
    variables |= {"TANDEM_REDIS_URL": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}

    def do(command: str) -> None:
        done = subprocess.run([ip, *command.split()], capture_output=True, text=True, timeout=10, check=False)
        assert done.returncode == 0, f"ip {command}: {done.stderr}"

    first, second = (f"tandem-{os.getpid()}-{number}" for number in (1, 2))
    with ExitStack() as stack:
        for name in (first, second):
            made = subprocess.run([ip, "netns", "add", name], capture_output=True, text=True, timeout=10, check=False)
            if made.returncode != 0:
                lacking(f"this machine makes no network namespaces: {made.stderr.strip()}")
            stack.callback(do, f"netns del {name}")
        do(f"-n {first} link add cable0 type veth peer name cable0 netns {second}")
        hosts = []
        for name, address in ((first, TRAINER_HOST), (second, SAMPLER_HOST)):
            do(f"-n {name} address add {address}/24 dev cable0")
            do(f"-n {name} link set lo up")
            do(f"-n {name} link set cable0 up")
            (folder / address).mkdir()
            hosts.append(Host(name, address, folder / address, variables))
            stack.callback(hosts[-1].stop)
        yield hosts[0], hosts[1]


def _programs(folder: Path) -> Path:
    """A folder for PATH with the commands of the document."""
    folder.mkdir()
    redis, _ = find_redis_server()
    (folder / "redis-server").symlink_to(redis)
    (folder / "tandem").write_text(f'#!/bin/sh\nexec {sys.executable} -m tandem.services.cli "$@"\n')
    (folder / "tandem").chmod(0o755)
    return folder


def lines_of_the_document() -> list[str]:
    """The commands of the example, and of the firewall behind it."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    section = text.partition("\n## Several hosts by hand\n")[2].partition("\n## ")[0].replace("\\\n ", "")
    return [line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]


def test_a_run_on_two_hosts_by_hand(tmp_path: Path) -> None:
    lines = lines_of_the_document()
    (certs,) = [line for line in lines if line.startswith("tandem certs")]
    redis = [line for line in lines if re.match("digest|sed|redis-server", line)]
    (export,) = [line for line in lines if line.startswith("export")]
    services = [line for line in lines if line.startswith("tandem serve")]
    firewall = [line for line in lines if re.match("sysctl|nft", line)]
    assert (len(redis), len(services), len(firewall)) == (3, 5, 6) and len(lines) == 16, lines
    with two_hosts(tmp_path) as (first, second):
        run = WholeRun(
            first.folder, run=RUN, rollout=ROLLOUT, model={"path": "model"}, data={"train_file": "data/train.parquet"}
        )
        _share_files(first, second, certs)
        for host in (first, second):
            host.do(*firewall)
        first.start(*redis)
        first.start("python3 -m http.server --bind 0.0.0.0 8080")
        eventually(lambda: first.reaches(first.address, 8080) and second.reaches(first.address, 6379))
        assert not second.reaches(first.address, 8080), "the firewall lets nothing else in"
        processes = {}
        for line in services:
            (host,) = [host for host in (first, second) if f"run.host={host.address} " in line]
            processes[line.split()[2]] = host.start(export, line)
        eventually(lambda: any(one.poll() is not None for one in processes.values()), 200)
        ended = {name: process.wait(60) for name, process in processes.items()}
        assert set(ended.values()) == {0}, f"{ended}\n{first.said()}{second.said()}"

        assert [line["samplers_acknowledged"] for line in run.metrics()] == [1] * RUN["total_batches"]
        segments = [segment for _, row in run.trained_rows() for segment in row.trajectory.segments]
        sampled_by = {span.policy_version for segment in segments for span in segment.spans}
        assert max(sampled_by) >= 1, "the sampler used weights that it received"
        ledger = json.loads(first.do(export, "tandem ledger run --json"))
        assert ledger["violations"] == [] and ledger["counts"]["outstanding"] == 0
        assert not (second.folder / "run").exists(), "the sampler needs no run folder"


def _share_files(first: Host, second: Host, certs: str) -> None:
    """Gives both hosts what the document says that they need."""
    first.do(certs)
    shutil.copytree(
        first.folder / "certs", second.folder / "certs", ignore=shutil.ignore_patterns("ca.key", "client.*")
    )
    shutil.copytree(first.folder / "model", second.folder / "model")
    shutil.copy(first.folder / "recipe.json", second.folder)
    shutil.copytree(ROOT / "deploy" / "redis", first.folder / "deploy" / "redis")
