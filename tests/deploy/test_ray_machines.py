"""A Ray cluster of two machines, which are network namespaces: samplers are spread, services use their addresses."""

from __future__ import annotations

import re
import secrets
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.deploy.test_two_hosts import PASSWORD, ROLLOUT, RUN, two_hosts
from tests.support.programs import needed_package
from tests.support.waiting import eventually
from tests.support.whole_run import WholeRun

pytestmark = pytest.mark.timeout(400)

START = f"{sys.executable} -m ray.scripts.scripts start --block --num-cpus 1 --object-store-memory 80000000"
WAIT = """
import ray, time
ray.init("{address}", log_to_driver=False)
deadline = time.monotonic() + 40
while sum(node["Alive"] for node in ray.nodes()) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.2)
"""


def test_a_run_on_two_machines_of_a_cluster(tmp_path: Path) -> None:
    needed_package("ray")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short, two_hosts(tmp_path) as (first, second):
        address, folder = f"{first.address}:6380", tmp_path / "shared"
        folder.mkdir()
        cluster = f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN={secrets.token_hex(32)} RAY_USAGE_STATS_ENABLED=0"
        redis = f"redis-server --bind {first.address} --port 6379 --requirepass {PASSWORD}"
        first.start(f"{redis} --appendonly yes --appendfsync always --dir {short}")
        head = f"{START} --head --node-ip-address {first.address} --port 6380 --include-dashboard false"
        first.start(cluster, f"{head} --temp-dir {short}/a")
        eventually(lambda: second.reaches(first.address, 6380) and second.reaches(first.address, 6379), 60)
        second.start(cluster, f"{START} --address {address} --node-ip-address {second.address} --temp-dir {short}/b")
        (folder / "wait.py").write_text(WAIT.format(address=address))
        first.do(cluster, f"{sys.executable} {folder}/wait.py")
        first.do(f"tandem certs init {folder}/certs {first.address} {second.address}")
        run = WholeRun(
            folder,
            run={**RUN, "total_batches": 10_000, "folder": str(folder / "run"), "certificates": str(folder / "certs")},
            rollout={**ROLLOUT, "num_replicas": 2},
        )
        urls = f"export RAY_ADDRESS={address} TANDEM_REDIS_URL=redis://:{PASSWORD}@{first.address}:6379/0"
        driver = first.start(cluster, urls, f"tandem run {run.recipe} --launcher ray")

        def both_have_joined() -> bool:
            return run.last_batch().get("samplers_acknowledged") == 2

        eventually(lambda: driver.poll() is not None or both_have_joined(), 240)
        assert driver.poll() is None, first.said() + second.said() + run.logs()
        driver.send_signal(signal.SIGINT)
        assert driver.wait(30) == 130 and " died (" not in first.said()
        logs = [(run.folder / "logs" / f"rollout-{number}.log").read_text() for number in (0, 1)]
        hosts = {host for log in logs for host in re.findall(r"listens on (\S+):\d+", log)}
        assert hosts == {first.address, second.address}, "one sampler on each"
