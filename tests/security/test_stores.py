"""The stores in which ranks of a trainer and members of a weight group meet are closed to strangers."""

from __future__ import annotations

import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import redis
import torch
from torch.distributed import DistStoreError, TCPStore

from tandem.protos.errors import WeightTransferError
from tandem.protos.store_source import StoreSource
from tandem.protos.types import WeightGroupAddress
from tandem.protos.weight_group import WeightGroup
from tandem.services.buffer.store_source import redis_store
from tandem.services.buffer.torch_store import RedisStore
from tandem.services.process import in_thread
from tandem.services.trainer.ranks import LocalRanks
from tests.support.locked_redis import LockedRedis, locked_redis
from tests.support.strangers import answering, listening_ports
from tests.support.trainer_node import make_node
from tests.support.waiting import eventually

SECONDS = 90.0
MOST_ATTEMPTS = 20
CPU = torch.device("cpu")
RANK = """
import os, sys, time, torch
from pathlib import Path
from torch import distributed
from tandem.trainer.backend.process_group import join_process_group

join_process_group(60.0)
total = torch.tensor([float(os.environ["RANK"]) + 1])
distributed.all_reduce(total)
distributed.barrier(group=distributed.new_group())
assert total.item() == 3.0
(Path(sys.argv[1]) / f"joined{os.environ['RANK']}").touch()
while not (Path(sys.argv[1]) / "go").exists():
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[LockedRedis]:
    """A server that needs a password, with the user of deploy/redis/users.acl."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, locked_redis(Path(folder), "a-password") as running:
        yield running


@pytest.fixture
def source(server: LockedRedis, request: pytest.FixtureRequest) -> StoreSource:
    return redis_store(server.url(), "closed", request.node.name)


@pytest.fixture
def store(source: StoreSource) -> RedisStore:
    opened = source.open()
    assert isinstance(opened, RedisStore)
    return opened


def test_the_stores_that_are_not_used_would_answer() -> None:
    """What the tests below try is what torch's own store answers, on an address of its own choice."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=SECONDS), wait_for_workers=False)
    port = ("127.0.0.1", store.port)
    assert answering([port]) == {port}


def test_a_stranger_sets_no_key_of_a_weight_group(server: LockedRedis, source: StoreSource) -> None:
    address = WeightGroupAddress("127.0.0.1", "attacked", 2, "gloo")
    first = in_thread("rank 0", WeightGroup, address, 0, CPU, SECONDS, source)
    eventually(lambda: bool(list(server.admin().scan_iter("tandem:{closed}:store:*"))))
    stranger = redis.Redis(unix_socket_path=str(server.socket), protocol=2)
    with pytest.raises(redis.AuthenticationError):
        stranger.set("tandem:{closed}:store:anything", "mine")
    with pytest.raises(redis.AuthenticationError):
        stranger.keys("*")
    ports = listening_ports(psutil.Process())
    assert ports and {host for host, _ in ports} == {"127.0.0.1"}
    assert answering(ports) == set()
    second = WeightGroup(address, 1, CPU, SECONDS, source)
    group = first.result(SECONDS)
    received = torch.zeros(8, dtype=torch.uint8)
    sending = in_thread("send", group.broadcast, torch.arange(8, dtype=torch.uint8), SECONDS)
    second.broadcast(received, SECONDS)
    sending.result(SECONDS)
    assert received.tolist() == list(range(8))
    for each in (group, second):
        each.close()


def test_a_stranger_in_the_place_of_a_member_gets_no_weights(source: StoreSource) -> None:
    """Of two members, gloo lets the one whose address sorts higher connect. Only if that is rank 1, about every second
    time, is rank 0 waiting for a connection that the stranger can take.
    """
    for attempt in range(MOST_ATTEMPTS):
        address = WeightGroupAddress("127.0.0.1", f"joined-{attempt}", 2, "gloo")
        before = listening_ports(psutil.Process())
        first = in_thread("rank 0", WeightGroup, address, 0, CPU, 10.0, source)
        eventually(lambda before=before: bool(listening_ports(psutil.Process()) - before))
        (port,) = listening_ports(psutil.Process()) - before
        with ExitStack() as strangers:
            for number in range(8):
                stranger = strangers.enter_context(socket.create_connection(port, timeout=SECONDS))
                stranger.sendall(struct.pack("<q", number))  # of an expected connection
            try:
                second = WeightGroup(address, 1, CPU, 10.0, source)
            except WeightTransferError:
                with pytest.raises(WeightTransferError):
                    first.result(SECONDS)
                return
        first.result(SECONDS).close()
        second.close()
    pytest.fail(f"the stranger took nobody's place in {MOST_ATTEMPTS} attempts")


def test_ranks_and_launchers_of_several_machines_answer_no_stranger(
    server: LockedRedis, source: StoreSource, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    stop = threading.Event()
    launcher = in_thread("node", make_node(tmp_path, server.url(), "closed", "import time; time.sleep(60)").run, stop)
    machines = [
        LocalRanks(command, source, 1, first_rank=seat, world_size=2, environment=environment) for seat in range(2)
    ]
    with machines[0], machines[1]:
        eventually(lambda: len(list(tmp_path.glob("joined*"))) == 2, SECONDS)
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        ports = {port for process in family for port in listening_ports(process)}
        assert len(ports) >= 2 and {host for host, _ in ports} == {"127.0.0.1"}
        assert answering(ports) == set()
        (tmp_path / "go").touch()
        eventually(lambda: [machine.exit_code() for machine in machines] == [0, 0], SECONDS)
    stop.set()
    launcher.result(SECONDS)


def test_the_store_keeps_what_torch_asks_of_one(store: RedisStore) -> None:
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistStoreError, match="timed out while waiting for the keys one"):
        store.get("one")
    setting = threading.Timer(0.2, store.set, ("one", b"\x00\xff"))
    setting.start()
    store.wait(["one"], timedelta(seconds=SECONDS))
    assert store.get("one") == b"\x00\xff" and store.clone().get("one") == b"\x00\xff"
    assert [store.add("two", 3), store.add("two", 4)] == [3, 7] and store.get("two") == b"7"
    assert store.check(["one", "two"]) and not store.check(["one", "three"])
    assert store.deleteKey("one") and not store.deleteKey("one") and not store.check(["one"])
    with pytest.raises(DistStoreError):
        store.wait(["one", "two"])


def test_keys_expire(server: LockedRedis, store: RedisStore) -> None:
    store.set("one", "1")
    store.add("two", 1)
    with closing(server.admin()) as client:
        keys = list(client.scan_iter("tandem:{closed}:store:test_keys_expire:*"))
        assert len(keys) == 2 and all(0 < client.ttl(key) <= 24 * 3600 for key in keys)
