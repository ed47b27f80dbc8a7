"""A controller of a run in Redis whose services are only entries in the registry."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tandem.protos import control_pb2_grpc
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.launcher import StartedByHand
from tandem.services.control.server import control_server
from tandem.services.rpc.client import connect
from tandem.services.rpc.tokens import Role
from tests.support.redis_ring import new_run
from tests.support.run_inputs import recipe_of, small_values
from tests.support.service_wire import token_of


class Served(NamedTuple):
    """A controller with the launcher `none`, its run, and a stub of it."""

    controller: Controller
    buffer: Buffer
    stub: control_pb2_grpc.ControlServiceStub


def recipe_in(folder: Path) -> Recipe:
    return recipe_of(small_values(folder), run={"run_id": f"control-{folder.name}"[:60]})


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return recipe_in(tmp_path)


@pytest.fixture
def buffer(redis_url: str, recipe: Recipe) -> Iterator[Buffer]:
    """A run with the samplers rollout-0, which is LIVE, and rollout-1, and the other services."""
    made = new_run(redis_url, groups_per_batch=2, run_id=recipe.run.run_id)
    made.register_sampler("rollout-1", "127.0.0.1:2", 1)
    for name in ("feed", "reward", "trainer"):
        made.register_service(name, f"127.0.0.1:{len(name)}")
    yield made
    made.close()


@pytest.fixture
def served(recipe: Recipe, buffer: Buffer) -> Iterator[Served]:
    with ExitStack() as stack:
        lease = stack.enter_context(Lease(buffer, "test"))
        controller = stack.enter_context(Controller(recipe, buffer, StartedByHand(buffer), lease))
        address = stack.enter_context(control_server(controller, threading.Event()))
        channel = stack.enter_context(connect(address, token_of(buffer, Role.operate)))
        yield Served(controller, buffer, control_pb2_grpc.ControlServiceStub(channel))


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of `docker compose`. It writes its arguments to the file `calls`, and fails if the file
    `fails` is there.
    """
    program = tmp_path / "docker"
    program.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\nhere = pathlib.Path({str(tmp_path)!r})\n"
        "print(json.dumps(sys.argv[1:]), file=open(here / 'calls', 'a'))\n"
        "if (here / 'fails').exists():\n    sys.exit('starting\\nno such image: tandem')\n"
    )
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("TANDEM_COMPOSE", f"{program} compose --profile cpu")
    return tmp_path


def calls(folder: Path) -> list[list[str]]:
    file = folder / "calls"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
